"""A step of inference made by hand: toy paged cache, dense attention per sequence, the scan's oracle, plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from step_rows import step_of
from torch import Tensor

from megatron_infer.kernels.base import IndexSpec
from megatron_infer.kernels.ssm import LayerStates
from megatron_infer.kernels.torch.ssm_ref import ReferenceScan

NUM_SLOTS = 6


class PlainOps:
    """The norms and linears of the contract, in place where the contract allows it."""

    name = "plain"
    experts = None
    norms = None
    route = None
    embedding = staticmethod(F.embedding)

    def into_latent(self, q, weight):
        width = weight.shape[1]
        return torch.cat((q[..., width:], torch.einsum("tnh,nhl->tnl", q[..., :width], weight)), -1)

    def out_of_latent(self, x, weight):
        return torch.einsum("tnl,nvl->tnv", x, weight).flatten(1)

    def linear(self, x, weight, bias=None):
        assert x.is_contiguous() and x.ndim == 2
        return F.linear(x, weight, bias)

    def fp32_linear(self, x, weight, bias, rows):
        return F.linear(x.float(), weight[:rows].float(), None if bias is None else bias[:rows].float())

    def rms_norm(self, x, weight, eps, *, zero_centered=False):
        assert x.is_contiguous() and x.ndim == 2
        return F.rms_norm(x, weight.shape, weight + 1 if zero_centered else weight, eps)

    def add_rms_norm(self, x, residual, weight, eps, *, zero_centered=False):
        residual.add_(x)
        return self.rms_norm(residual.to(x.dtype), weight, eps, zero_centered=zero_centered), residual

    def softcap(self, x, cap):
        return cap * torch.tanh(x / cap)

    def layer_norm(self, x, weight, bias, eps):
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def silu_mul(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def rowwise(self, function, x):
        return function(x)

    def sigmoid_mul(self, x, gate):
        return x * torch.sigmoid(gate)

    def gated_rms_norm(self, y, gate, weight, eps, *, group_size):
        assert y.is_contiguous() and y.ndim == 2 and gate.shape == y.shape
        out = y.float() * F.silu(gate.float())
        if weight is not None:
            out = F.rms_norm(out.unflatten(-1, (-1, group_size)), (group_size,), None, eps).flatten(-2) * weight
        return out.to(y.dtype)


@dataclass
class Cache:
    """Blocks of `block` tokens handed out in a shuffled order, one table per sequence."""

    adopted: Any
    block: int = 4
    num_blocks: int = 96
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        shape = self.adopted.shape
        places = (self.num_blocks, self.block, shape.num_kv_heads, shape.head_dim)
        size = (shape.num_attention_layers, shape.kv_planes, *places)
        self.kv = torch.full(size, float("nan"), dtype=getattr(torch, shape.dtype))
        self.free = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        table = self.adopted.rotary_table(256)
        self.cos = None if table is None else table.cos_PR.to(self.kv.dtype)
        self.sin = None if table is None else table.sin_PR.to(self.kv.dtype)
        self.states = [] if shape.state is None else [self._states(shape.state) for _ in self.adopted.ssm_specs]
        self.slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(2)).tolist()

    @staticmethod
    def _states(state):
        conv = torch.full((NUM_SLOTS, *state.conv_shape), float("nan"), dtype=getattr(torch, state.conv_dtype))
        ssm = torch.full((NUM_SLOTS, *state.ssm_shape), float("nan"), dtype=getattr(torch, state.ssm_dtype))
        return LayerStates(conv, ssm)

    def step(self, work: list[tuple[int, list[int]]]) -> Step:
        """work: (sequence, its next tokens), decode and prompt pieces in any order."""
        ids, positions, pieces = [], [], []
        slots = [self.slots[sequence] for sequence, _ in work]
        for sequence, tokens in work:
            start, table = self.lengths.get(sequence, 0), self.tables.setdefault(sequence, [])
            while len(table) * self.block < start + len(tokens):
                table.append(self.free.pop())
            pieces.append((len(ids), len(ids) + len(tokens), start, table))
            ids += tokens
            positions += range(start, start + len(tokens))
            self.lengths[sequence] = start + len(tokens)
        return Step(self, torch.tensor(ids), torch.tensor(positions), pieces, slots)


class Step:
    """StepInputs, and what GPTModel.forward asks of a context."""

    use_flashinfer_fused_rope = False
    materialize_only_last_token_logits = True
    num_speculative_tokens = 0
    max_sequence_length = 256
    routing_TLK = absorbed_S = None
    tokens_of_ranks = None
    lora = None
    is_padded = False
    padding_T1 = None

    def __init__(
        self,
        cache: Cache,
        ids: Tensor,
        positions: Tensor,
        pieces: list[tuple[int, int, int, list[int]]],
        slots: list[int],
    ):
        self.cache, self.token_ids_T, self.positions_T, self.pieces = cache, ids, positions, pieces
        self.num_tokens, self.ops = len(ids), PlainOps()
        self.last = torch.tensor([end - 1 for _, end, _, _ in pieces])
        self.scan = ReferenceScan()
        rows = [(end - first, start + end - first) for first, end, start, _ in pieces]
        self.scan.plan(step_of(rows, table_row=slots))

    def run_program(self, program, x, residual):
        return None

    def ssm(self, layer, xBC, dt, weights, spec):
        assert xBC.shape == (self.num_tokens, spec.num_channels) and dt.shape == (self.num_tokens, spec.num_steps)
        assert xBC.stride(-1) == dt.stride(-1) == 1
        for tensor in (weights.conv_CW, weights.conv_bias_C, weights.decay_H, weights.skip_H, weights.dt_bias_H):
            assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        return self.scan.run(xBC, dt, self.cache.states[layer], weights, spec)

    def attend(self, layer, q, k, v, spec):
        assert q.shape[1:] == (spec.num_kv_heads, spec.group_size, spec.head_dim)
        assert k.shape[1:] == (spec.num_kv_heads, spec.head_dim) and v.shape[1:] == (spec.num_kv_heads, spec.value_dim)
        if spec.rotary_dim:
            q, k = self._rotate(q, spec), self._rotate(k, spec)
        out = q.new_empty(*q.shape[:3], spec.value_dim)
        for first, end, start, table in self.pieces:
            length = start + end - first
            for token in range(first, end):
                block, offset = divmod(start + token - first, self.cache.block)
                self.cache.kv[layer, 0, table[block], offset] = k[token]
                if spec.value_start is None:
                    self.cache.kv[layer, 1, table[block], offset] = v[token]
            planes = self.cache.kv[layer][:, table].flatten(1, 2)[:, :length]
            keys, values = planes[0], planes[-1][..., spec.value_start or 0 :]
            query, key = torch.arange(start, length)[:, None], torch.arange(length)[None]
            mask = key <= query
            if spec.window is not None:
                mask &= key > query - spec.window
            scores = torch.einsum("qkgh,pkh->kgqp", q[first:end], keys) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            scores = scores.masked_fill(~mask, float("-inf"))
            if spec.sinks_N is not None:
                sinks = spec.sinks_N.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, sinks), -1)
            probs = scores.softmax(-1)[..., :length]
            out[first:end] = torch.einsum("kgqp,pkh->qkgh", probs, values)
        return out.flatten(1)

    def attend_to_chosen(self, layer, q, k, spec, index):
        indexer = spec.index
        assert q.shape[1:] == (1, spec.group_size, spec.query_dim) and k.shape[1:] == (1, spec.head_dim)
        q, main, index_k = self._rotate(q, spec), self._rotate(k[..., : -indexer.dim], spec), k[..., -indexer.dim :]
        if index is not None:
            assert index.q_TIH.shape == (len(q), indexer.num_heads, indexer.dim)
            index_q, index_k = self._rotate(index.q_TIH, indexer), self._rotate(index_k, indexer)
            self.chosen = []
        out = q.new_empty(len(q), spec.group_size, spec.value_dim)
        for piece, (first, end, start, table) in enumerate(self.pieces):
            length = start + end - first
            for token in range(first, end):
                block, offset = divmod(start + token - first, self.cache.block)
                self.cache.kv[layer, 0, table[block], offset] = torch.cat((main[token], index_k[token]), -1)
            keys = self.cache.kv[layer, 0, table].flatten(0, 1)[:length, 0]
            if index is not None:
                heads = torch.einsum("qih,ph->qip", index_q[first:end], keys[:, -indexer.dim :])
                heads = heads.relu() if indexer.relu else heads
                scores = torch.einsum("qip,qi->qp", heads, index.weights_TI[first:end])
                seen = torch.arange(length)[None] <= torch.arange(start, length)[:, None]
                scores = scores.masked_fill(~seen, float("-inf"))
                best = scores.topk(min(indexer.top_k, length), -1).indices
                self.chosen.append(torch.zeros_like(seen).scatter_(1, best, True) & seen)
            keys = keys[:, : -indexer.dim]
            scores = torch.einsum("qgh,ph->qgp", q[first:end, 0], keys) * spec.scale
            probs = scores.masked_fill(~self.chosen[piece][:, None], float("-inf")).softmax(-1)
            out[first:end] = torch.einsum("qgp,ph->qgh", probs, keys[:, spec.value_start :])
        return out.flatten(1)

    def _rotate(self, x, spec):
        lead = (len(x),) + (1,) * (x.ndim - 2) + (spec.rotary_dim,)
        at = getattr(spec, "rotary_at", 0)  # an indexer turns by the layer's own columns
        cos, sin = (part[self.positions_T, at : at + spec.rotary_dim] for part in (self.cache.cos, self.cache.sin))
        if isinstance(spec, IndexSpec) and not spec.rotary_interleaved:
            cos, sin = (torch.cat((part[:, ::2],) * 2, -1) for part in (cos, sin))
        cos, sin = cos.view(lead), sin.view(lead)
        turn, rest = x[..., : spec.rotary_dim], x[..., spec.rotary_dim :]
        if spec.rotary_interleaved:
            other = torch.stack((-turn[..., 1::2], turn[..., 0::2]), -1).flatten(-2)
        else:
            low, high = turn.chunk(2, -1)
            other = torch.cat((-high, low), -1)
        return torch.cat((turn * cos + other * sin, rest), -1)

    @property
    def config(self):
        return self

    def is_static_batching(self):
        return False

    def is_dynamic_batching(self):
        return True

    def is_decode_only(self):
        return all(end - first == 1 for first, end, _, _ in self.pieces)

    def using_cuda_graph_this_step(self):
        return False

    def last_token_logits(self, hidden):
        return hidden.squeeze(0)[self.last]


SCHEDULE = [  # (sequence, number of tokens): chunked prompts beside decodes, rows in changing order
    [(0, 5), (1, 3)],
    [(1, 1), (0, 6), (2, 7)],
    [(2, 1), (0, 1), (1, 1)],
    [(3, 13), (1, 1), (2, 2)],
    [(1, 1), (3, 1), (0, 1), (2, 1)],
]


def prompts(vocab_size: int = 128) -> dict[int, list[int]]:
    """Tokens enough for SCHEDULE, for four sequences."""
    generator = torch.Generator().manual_seed(3)
    return {i: torch.randint(0, vocab_size, (16,), generator=generator).tolist() for i in range(4)}


@torch.inference_mode()
def full_logits(model, tokens: list[int]) -> Tensor:
    """Logits of every position by the training path, in eval mode: [P, V]."""
    ids = torch.tensor([tokens])
    return model(ids, torch.arange(len(tokens))[None], None)[0]


@torch.inference_mode()
def worst_difference(model, adopted, *, forward=None) -> float:
    """Largest |paged - full| over all logits of SCHEDULE's steps; `forward(step)` replaces the runner's way through."""
    cache, tokens, worst = Cache(adopted), prompts(), 0.0
    full = {sequence: full_logits(model, ids) for sequence, ids in tokens.items()}
    for plan in SCHEDULE:
        starts = {i: cache.lengths.get(i, 0) for i, _ in plan}
        step = cache.step([(i, tokens[i][starts[i] : starts[i] + n]) for i, n in plan])
        hidden = adopted.hidden(step) if forward is None else forward(step)
        logits = adopted.logits(hidden, step.ops)
        expected = torch.cat([full[i][starts[i] : starts[i] + n] for i, n in plan])
        assert logits.shape == expected.shape
        assert torch.isfinite(logits).all()
        worst = max(worst, (logits - expected).abs().max().item())
    return worst
