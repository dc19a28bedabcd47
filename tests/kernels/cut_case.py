"""Two sequences whose attention can be computed in any cuts, in the same steps, for comparisons of bits."""

from __future__ import annotations

import numpy as np
import torch
from step_rows import step_of
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.native.cpu_native import NativePagedAttention

BLOCK = 16
PROMPT, TOTAL = 300, 620


def cut(total: int, *sizes: int) -> list[tuple[int, int]]:
    """0 .. total as (start, stop) of slices of these sizes, the last one as often as it takes."""
    cuts: list[tuple[int, int]] = []
    while not cuts or cuts[-1][1] < total:
        start = cuts[-1][1] if cuts else 0
        cuts.append((start, min(start + sizes[min(len(cuts), len(sizes) - 1)], total)))
    return cuts


class Sequences:
    """Two sequences with fixed queries, keys and values; only the first is compared, the second runs beside it."""

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
        which = torch.tensor([row for row, _, n in rows for _ in range(n)])
        prompt = [0 if i < len(decode) else min(max(PROMPT - s, 0), n) for i, (_, s, n) in enumerate(rows)]
        step = step_of(
            [(n, start + n) for _, start, n in rows],
            num_decode=len(decode),
            table_row=[row for row, _, _ in rows],
            block_table=self.table,
            block_size=BLOCK,
            num_prompt_queries=np.array(prompt, np.int32),
        )
        positions = step.positions_T
        step.cos_TR, step.sin_TR = self.cos[positions], self.sin[positions]
        backend.plan(step)
        fused = self.fused[which, positions]
        group = self.spec.group_size
        return backend.run(fused[:, :, :group], fused[:, :, -2], fused[:, :, -1], self.cache, layer=0, spec=self.spec)
