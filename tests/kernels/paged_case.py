"""Random paged-attention steps, and the comparison of a backend with the reference on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, AttentionBackend, StepMetadata
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """One step with its own cache; `q`, `k`, `v` are views of one fused projection, as in a model."""

    spec: AttendSpec
    meta: StepMetadata
    fused: Tensor
    kv_cache: Tensor
    layer: int

    def run(self, backend: AttentionBackend) -> tuple[Tensor, Tensor]:
        """(out, cache afterwards) on private copies of the inputs."""
        spec, fused, cache = self.spec, self.fused.clone(), self.kv_cache.clone()
        heads = fused.view(fused.shape[0], spec.num_kv_heads, spec.group_size + 2, spec.head_dim)
        backend.plan(self.meta)
        q, k, v = heads[:, :, : spec.group_size], heads[:, :, -2], heads[:, :, -1]
        return backend.run(q, k, v, cache, layer=self.layer, spec=spec), cache


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    num_decode: int,
    dtype: torch.dtype,
    num_kv_heads: int = 2,
    group_size: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
    num_padding: int = 0,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    """rows: (q_len, kv_len), decode rows first. Blocks are scattered; the last block of the cache is the dummy.

    Every other slice, from the first on, is of a prompt; the last query of the others is of the output.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-kv_len // block_size) for _, kv_len in rows]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks - 1, generator=generator).tolist()
    max_rows, max_blocks = len(rows) + 3, max(counts) + 2
    table = torch.full((max_rows + 1, max_blocks), num_blocks - 1, dtype=torch.int32)
    table_row = torch.randperm(max_rows, generator=generator)[: len(rows)].numpy().astype(np.int32)
    positions, kv_pos = [], []
    for row, (q_len, kv_len) in enumerate(rows):
        blocks = [order.pop() for _ in range(counts[row])]
        table[int(table_row[row]), : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(kv_len - q_len, kv_len):
            positions.append(position)
            kv_pos.append(blocks[position // block_size] * block_size + position % block_size)
    positions += [0] * num_padding
    kv_pos += [(num_blocks - 1) * block_size] * num_padding

    q_len = np.array([q for q, _ in rows], dtype=np.int32)
    kv_len = np.array([n for _, n in rows], dtype=np.int32)
    cu_q = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    num_tokens = len(positions)
    cos = sin = None
    if rotary_dim:
        angle = torch.rand(num_tokens, rotary_dim, generator=generator) * 6.28
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    meta = StepMetadata(
        num_tokens=num_tokens,
        num_rows=len(rows),
        num_decode=num_decode,
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=table_row,
        num_prompt_queries=prompt_queries(q_len, num_decode),
        q_len_R=torch.from_numpy(q_len),
        kv_len_R=torch.from_numpy(kv_len),
        cu_q_R1=torch.from_numpy(cu_q),
        table_row_R=torch.from_numpy(table_row),
        block_table=table,
        positions_T=torch.tensor(positions, dtype=torch.int64),
        kv_pos_T=torch.tensor(kv_pos, dtype=torch.int64),
        cos_TR=cos,
        sin_TR=sin,
    )
    spec = AttendSpec(
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        rotary_dim=rotary_dim,
        rotary_interleaved=interleaved,
        sinks_N=torch.linspace(-4, 6, num_kv_heads * group_size) if sinks else None,
    )
    fused = randn(num_tokens, num_kv_heads * (group_size + 2) * head_dim)
    return Case(spec, meta, fused, randn(2, 2, num_blocks, block_size, num_kv_heads, head_dim), layer=1)


def prompt_queries(q_len: np.ndarray, num_decode: int) -> np.ndarray:
    rows = np.arange(len(q_len)) - num_decode
    return np.where(rows < 0, 0, np.where(rows % 2, q_len - 1, q_len)).astype(np.int32)


def check_case(backend: AttentionBackend, case: Case) -> None:
    """Output and the whole cache (other layer, other blocks and dummy block included) agree with the reference."""
    out, cache = case.run(backend)
    want, want_cache = case.run(ReferenceAttention())
    tolerance = TOLERANCE[out.dtype]
    assert out.is_contiguous() and out.shape == want.shape
    torch.testing.assert_close(out.float(), want.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache.float(), want_cache.float(), rtol=tolerance, atol=tolerance)
    touched = torch.zeros(cache.shape[2] * cache.shape[3], dtype=torch.bool)
    touched[case.meta.kv_pos_T] = True
    before = case.kv_cache.flatten(2, 3)
    after = cache.flatten(2, 3)
    assert torch.equal(after[:, :, ~touched], before[:, :, ~touched]), "a cache position outside this step changed"
    assert torch.equal(after[0], before[0]), "another layer's cache changed"
