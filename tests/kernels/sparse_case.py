"""Sequences of sparse attention in steps, and their answer by definition."""

from __future__ import annotations

import torch
from step_rows import CPU, step_of

from megatron_infer.kernels.base import AttendSpec, IndexQueries, IndexSpec
from megatron_infer.kernels.torch.torch_ref import rotate

ROTARY, LATENT, INDEX, HEADS, INDEX_HEADS, TOP_K, BLOCK = 16, 32, 32, 3, 8, 11, 4
WIDTH = ROTARY + LATENT + INDEX
LENGTHS = (40, 9, 23)
WHOLE = [LENGTHS]
CHUNKS = [(7, 9, 0), (9, 0, 11), (1, 0, 1), (20, 0, 1), (1, 0, 8), (1, 0, 1), (1, 0, 1)]


def sparse_spec(**index) -> AttendSpec:
    indexer = {"num_heads": INDEX_HEADS, "dim": INDEX, "top_k": TOP_K, "rotary_dim": ROTARY, "rotary_interleaved": True}
    return AttendSpec(
        num_kv_heads=1,
        group_size=HEADS,
        head_dim=WIDTH,
        scale=0.2,
        rotary_dim=ROTARY,
        rotary_interleaved=True,
        value_start=ROTARY,
        index=IndexSpec(**indexer | index),
    )


class Sequences:
    """Queries, keys and index queries of whole sequences, and their answer by definition."""

    def __init__(self, spec: AttendSpec) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return [torch.randn(length, *shape, generator=generator) for length in LENGTHS]

        self.spec = spec
        self.q, self.k, self.index_q = randn(1, HEADS, WIDTH - INDEX), randn(1, WIDTH), randn(INDEX_HEADS, INDEX)
        self.weights = randn(INDEX_HEADS)
        angle = torch.rand(max(LENGTHS), ROTARY // 2, generator=generator).mul(6.28).repeat_interleave(2, 1)
        self.cos, self.sin = angle.cos(), angle.sin()

    def wanted(self, which: int, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [P, N * V], bool [P, P]: the keys chosen) of a sequence; chosen: by another layer."""
        spec, indexer, length = self.spec, self.spec.index, LENGTHS[which]
        cos, sin = self.cos[:length].double(), self.sin[:length].double()
        q, k = (x[which].double() for x in (self.q, self.k))
        turned_q, turned_k = (rotate(x, cos, sin, dim=ROTARY, interleaved=True) for x in (q, k[..., :-INDEX]))
        if chosen is None:
            if not indexer.rotary_interleaved:
                cos, sin = (torch.cat((part[:, ::2],) * 2, 1) for part in (cos, sin))
            turn = {"dim": ROTARY, "interleaved": indexer.rotary_interleaved}
            index_q, index_k = (
                rotate(x, cos, sin, **turn) for x in (self.index_q[which].double(), k[:, 0, None, -INDEX:])
            )
            scores = torch.einsum("tih,ph->tip", index_q, index_k[:, 0])
            scores = scores.relu() if indexer.relu else scores
            scores = torch.einsum("tip,ti->tp", scores, self.weights[which].double())
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
            order = scores.topk(min(indexer.top_k, length), -1).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True).tril()
        scores = torch.einsum("tkgh,pkh->tgp", turned_q, turned_k) * spec.scale
        weights = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("tgp,ph->tgh", weights, turned_k[:, 0, ROTARY:]).flatten(1), chosen


def run_steps(
    backend,
    sequences: Sequences,
    cuts,
    *,
    shared: bool = False,
    kv_dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Outputs [P, N * V] of each sequence; cuts: the steps, each the tokens of every sequence. shared: of a second
    layer, which attends to the first one's choice."""
    generator = torch.Generator().manual_seed(1)
    widest = -(-max(LENGTHS) // BLOCK)
    table = torch.randperm(len(LENGTHS) * widest, generator=generator).to(torch.int32).view(len(LENGTHS), widest)
    cache = torch.full((2, 1, table.numel() + 1, BLOCK, 1, WIDTH), float("nan")).to(device, kv_dtype)
    done, outs = [0] * len(LENGTHS), [[] for _ in LENGTHS]
    for counts in cuts:
        rows = sorted((count != 1, which) for which, count in enumerate(counts) if count)
        order = [which for _, which in rows]
        own = [(counts[which], done[which] + counts[which]) for which in order]
        places = [slice(done[which], done[which] + counts[which]) for which in order]
        meta = step_of(
            own,
            num_decode=sum(not is_slice for is_slice, _ in rows),
            table_row=order,
            block_table=table,
            block_size=BLOCK,
            dummy_block=table.numel(),
            num_padding=2,
            device=device,
        )
        meta.cos_TR, meta.sin_TR = (part.to(device)[meta.positions_T] for part in (sequences.cos, sequences.sin))
        backend.plan(meta)

        def joined(parts, order=order, places=places):
            found = torch.cat([parts[which][place] for which, place in zip(order, places, strict=True)])
            return torch.cat((found, torch.zeros(2, *found.shape[1:]))).to(device)

        index = IndexQueries(joined(sequences.index_q), joined(sequences.weights))
        spec = sequences.spec
        for layer in range(1 + shared):
            given = joined(sequences.q), joined(sequences.k)
            chooses = index if layer == 0 else None
            out = backend.run_sparse(*given, cache, layer=layer, spec=spec, index=chooses)
        assert not out[-2:].any(), "padding tokens carry nothing on"
        for which, part in zip(order, out[:-2].split([count for count, _ in own]), strict=True):
            outs[which].append(part.cpu())
            done[which] += counts[which]
    assert tuple(done) == LENGTHS
    return [torch.cat(parts) for parts in outs]
