"""Random paged-attention steps, and the comparison of a backend with the reference on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from step_rows import CPU, Row, moved, step_of
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

    def on(self, device: torch.device) -> Case:
        """The same there."""
        sinks_N = None if self.spec.sinks_N is None else self.spec.sinks_N.to(device)
        spec = replace(self.spec, sinks=None if sinks_N is None else lambda: sinks_N)
        return moved(replace(self, spec=spec, meta=moved(self.meta, device)), device)

    def run(self, backend: AttentionBackend) -> tuple[Tensor, Tensor]:
        """(out, cache afterwards) on private copies of the inputs."""
        cache = self.kv_cache.clone()
        backend.plan(self.meta)
        return backend.run(*self.parts(self.fused.clone()), cache, layer=self.layer, spec=self.spec), cache

    def parts(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of such a projection."""
        spec = self.spec
        heads = fused.view(fused.shape[0], spec.num_kv_heads, spec.group_size + 2, spec.head_dim)
        key = heads[:, :, -2]
        value = heads[:, :, -1] if spec.value_start is None else key[..., spec.value_start :]
        return heads[:, :, : spec.group_size], key, value


def make_case(
    rows: Sequence[Row],
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
    padding_rows: tuple[int, int] = (0, 0),
    sinks: bool = False,
    softcap: float | None = None,
    rotary_at: int = 0,
    value_start: int | None = None,
    seed: int = 0,
    device: torch.device = CPU,
) -> Case:
    """rows: decode rows first. Blocks are scattered; the last block of the cache is the dummy, large and finite.

    rotary_at: columns of cos and sin before those of the layer, which are another rope's.
    Every other slice, from the first on, is of a prompt; the last query of the others is of the output. Padding: see
    `step_of`.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-kv_len // block_size) for _, kv_len in rows]
    num_blocks, dummy_row = sum(counts) + 3, len(rows) + 3
    dummy = num_blocks - 1
    order = torch.randperm(dummy, generator=generator).to(torch.int32).split([*counts, dummy - sum(counts)])
    table = torch.full((dummy_row + 1, max(counts) + 2), dummy, dtype=torch.int32)
    table_row = torch.randperm(dummy_row, generator=generator)[: len(rows)].numpy()
    for place, blocks in zip(table_row, order, strict=False):
        table[place, : len(blocks)] = blocks
    meta = step_of(
        rows,
        num_decode=num_decode,
        table_row=table_row,
        dummy_row=dummy_row,
        block_table=table,
        block_size=block_size,
        dummy_block=dummy,
        num_padding=num_padding,
        padding_rows=padding_rows,
        device=device,
    )
    meta.num_prompt_queries = prompt_queries(meta.q_len, meta.num_decode)
    if rotary_dim:
        angle = torch.rand(meta.num_tokens, rotary_at + rotary_dim, generator=generator) * 6.28
        meta.cos_TR, meta.sin_TR = (part.to(device, dtype) for part in (angle.cos(), angle.sin()))
    sinks_N = torch.linspace(-4, 6, num_kv_heads * group_size, device=device)
    spec = AttendSpec(
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        rotary_dim=rotary_dim,
        rotary_interleaved=interleaved,
        rotary_at=rotary_at,
        softcap=softcap,
        sinks=(lambda: sinks_N) if sinks else None,
        value_start=value_start,
    )
    fused = randn(meta.num_tokens, num_kv_heads * (group_size + 2) * head_dim)
    cache = randn(2, spec.planes, num_blocks, block_size, num_kv_heads, head_dim)
    cache[:, :, dummy] = 1e3
    return Case(spec, meta, fused.to(device), cache.to(device), layer=1)


def prompt_queries(q_len: np.ndarray, num_decode: int) -> np.ndarray:
    rows = np.arange(len(q_len)) - num_decode
    return np.where(rows < 0, 0, np.where(rows % 2, np.maximum(q_len - 1, 0), q_len)).astype(np.int32)


def check_case(
    backend: AttentionBackend,
    case: Case,
    *,
    device: torch.device = CPU,
    tolerances: Mapping[torch.dtype, float] = TOLERANCE,
    holds_dummy: bool = True,
) -> Tensor:
    """Output and the whole cache agree with the reference, and nothing else of the cache changed -> the output.

    holds_dummy: the dummy block too, which otherwise has what the last of its writers wrote.
    """
    out, cache = (part.cpu() for part in case.on(device).run(backend))
    want, want_cache = case.run(ReferenceAttention())
    tolerance, last = tolerances[out.dtype], cache.shape[2] - (not holds_dummy)
    assert out.is_contiguous() and out.shape == want.shape
    torch.testing.assert_close(out.float(), want.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        cache[:, :, :last].float(), want_cache[:, :, :last].float(), rtol=tolerance, atol=tolerance
    )
    touched = torch.zeros(cache.shape[2] * cache.shape[3], dtype=torch.bool)
    touched[case.meta.kv_pos_T] = True
    before = case.kv_cache.flatten(2, 3)
    after = cache.flatten(2, 3)
    assert torch.equal(after[:, :, ~touched], before[:, :, ~touched]), "a cache position outside this step changed"
    assert torch.equal(after[0], before[0]), "another layer's cache changed"
    return out
