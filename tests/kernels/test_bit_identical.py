"""Native attention gives a position the same bits however its sequence is cut into steps, whatever else is in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, StepMetadata
from megatron_infer.kernels.cpu_native import NativePagedAttention

BLOCK = 16
PROMPT, TOTAL = 300, 620
Cut = tuple[int, int]
"""(start, number of tokens) of a row."""


class Sequences:
    """Two sequences with fixed queries, keys and values; only the first is looked at, the second is company."""

    def __init__(self, dtype: torch.dtype, spec: AttendSpec) -> None:
        generator = torch.Generator().manual_seed(1)
        self.dtype, self.spec = dtype, spec
        heads = (spec.num_kv_heads, spec.group_size + 2, spec.head_dim)
        self.fused = torch.randn(2, TOTAL, *heads, generator=generator).to(dtype)
        self.fused[:, :, 0, -1, :16] = 0  # dims in which a masked value could show, however small its weight
        self.fused[:, PROMPT - 1 :, 0, -1, :8] = 1
        angle = torch.rand(TOTAL, spec.rotary_dim, generator=generator) * 6.28
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        blocks = -(-TOTAL // BLOCK)
        self.table = torch.randperm(2 * blocks, generator=generator).to(torch.int32).view(2, blocks)
        self.cache = torch.full((1, 2, 2 * blocks, BLOCK, spec.num_kv_heads, spec.head_dim), 3.0, dtype=dtype)

    def attend(self, backend: NativePagedAttention, *, decode: list[int], slices: list[tuple[int, int, int]]) -> Tensor:
        """One step: `decode` holds sequences' positions in order, `slices` (sequence, start, n) -> out of the step."""
        rows = [(i, start, 1) for i, start in enumerate(decode)] + slices
        q_len = np.array([n for _, _, n in rows], np.int32)
        which = torch.tensor([row for row, _, n in rows for _ in range(n)])
        positions = torch.tensor([start + j for _, start, n in rows for j in range(n)])
        prompt = [0 if i < len(decode) else min(max(PROMPT - s, 0), n) for i, (_, s, n) in enumerate(rows)]
        kv_len = np.array([start + n for _, start, n in rows], np.int32)
        cu_q = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
        table_row = np.array([row for row, _, _ in rows], np.int32)
        backend.plan(
            StepMetadata(
                num_tokens=len(positions),
                num_rows=len(rows),
                num_decode=len(decode),
                q_len=q_len,
                kv_len=kv_len,
                cu_q=cu_q,
                table_row=table_row,
                num_prompt_queries=np.array(prompt, np.int32),
                q_len_R=torch.from_numpy(q_len),
                kv_len_R=torch.from_numpy(kv_len),
                cu_q_R1=torch.from_numpy(cu_q),
                table_row_R=torch.from_numpy(table_row),
                block_table=self.table,
                positions_T=positions,
                kv_pos_T=self.table[which, positions // BLOCK].long() * BLOCK + positions % BLOCK,
                cos_TR=self.cos[positions],
                sin_TR=self.sin[positions],
            )
        )
        fused = self.fused[which, positions]
        group = self.spec.group_size
        return backend.run(fused[:, :, :group], fused[:, :, -2], fused[:, :, -1], self.cache, layer=0, spec=self.spec)


def compute(
    sequences: Sequences, library, slices: list[Cut], *, decode_from: int = TOTAL, company: bool = False
) -> Tensor:
    """The first sequence in these slices, then one token a step from `decode_from` on -> [TOTAL, N*H]."""
    backend = NativePagedAttention(library, sequences.dtype)
    outs = []
    for i, (start, n) in enumerate(slices):
        more = [(1, 37 * i, 37)] if company and 37 * (i + 1) <= TOTAL else []
        outs.append(sequences.attend(backend, decode=[], slices=[(0, start, n), *more])[:n])
    for position in range(decode_from, TOTAL):
        outs.append(sequences.attend(backend, decode=[position], slices=[])[:1])
    return torch.cat(outs)


def cut(total: int, *sizes: int) -> list[Cut]:
    """0 .. total in slices of these sizes, the last one as often as it takes."""
    cuts: list[Cut] = []
    start = 0
    while start < total:
        n = min(sizes[min(len(cuts), len(sizes) - 1)], total - start)
        cuts.append((start, n))
        start += n
    return cuts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 150, 300])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 3), (1, 20), (2, 1)])
def test_a_position_has_the_same_bits_however_its_sequence_is_cut(native_library, dtype, window, kv_heads, group):
    spec = AttendSpec(num_kv_heads=kv_heads, group_size=group, head_dim=64, scale=0.125, window=window, rotary_dim=32)
    plain = Sequences(dtype, spec)
    want = compute(plain, native_library, [(0, PROMPT)], decode_from=PROMPT)
    ways = {
        "odd chunks": (cut(PROMPT, 7, 1, 1, 131, 1, 53), PROMPT),
        "one token a slice": (cut(PROMPT, 1), PROMPT),
        "all but the last prompt token cached": ([(0, PROMPT - 1), (PROMPT - 1, 1)], PROMPT),
        "recomputed in one slice": ([(0, TOTAL)], TOTAL),
        "recomputed up to a token, then decoded": ([(0, 517)], 517),
        "recomputed in chunks across the prompt's end": (cut(TOTAL, 97), TOTAL),
        "recomputed in slices of 1": (cut(TOTAL, 1), TOTAL),
    }
    for threads, company in ((1, False), (2, True)):
        torch.set_num_threads(threads)
        for name, (slices, decode_from) in ways.items():
            again = Sequences(dtype, spec)
            got = compute(again, native_library, slices, decode_from=decode_from, company=company)
            differing = (got != want).any(1).nonzero().flatten().tolist()
            assert not differing, f"{name}: other bits at positions {differing[:8]}"
            blocks = again.table[0].long()
            assert torch.equal(again.cache[:, :, blocks], plain.cache[:, :, blocks]), f"{name}: other keys or values"
