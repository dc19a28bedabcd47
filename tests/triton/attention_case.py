"""Paged-attention steps of tests/kernels on the device of the kernels, padded as a graph's are, and the comparison."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from paged_case import Case
from torch import Tensor

from megatron_infer.kernels.base import AttentionBackend
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""fp16 and bf16: weights are rounded to the cache's dtype before they meet the values, outputs once more."""


def on_device(case: Case, device: torch.device) -> Case:
    """The case with its tensors there."""

    def moved(value):
        return value.to(device) if isinstance(value, Tensor) else value

    meta = dataclasses.replace(
        case.meta, **{f.name: moved(getattr(case.meta, f.name)) for f in dataclasses.fields(case.meta)}
    )
    sinks_N = moved(case.spec.sinks_N)
    spec = dataclasses.replace(case.spec, sinks=(lambda: sinks_N) if sinks_N is not None else None)
    return Case(spec, meta, case.fused.to(device), case.kv_cache.to(device), case.layer)


def padded(case: Case, *, num_decode: int, num_prefill: int, num_tokens: int, max_kv_len: int) -> Case:
    """The same step in a larger shape: decode rows of the dummy block, rows without tokens, padding tokens."""
    meta = case.meta
    dummy, size = case.kv_cache.shape[2] - 1, case.kv_cache.shape[3]
    more_decode, more_rows = num_decode - meta.num_decode, num_prefill - (meta.num_rows - meta.num_decode)
    more_tokens = num_tokens - meta.num_tokens - more_decode
    assert min(more_decode, more_rows, more_tokens) >= 0
    dummy_row = len(meta.block_table) - 1
    assert bool((meta.block_table[dummy_row] == dummy).all())

    def rows(values: np.ndarray, of_decode: int, of_others: int) -> np.ndarray:
        ends = [of_decode] * more_decode, [of_others] * more_rows
        return np.concatenate([values[: meta.num_decode], ends[0], values[meta.num_decode :], ends[1]]).astype(np.int32)

    def tokens(values: Tensor | None, fill: float) -> Tensor | None:
        if values is None:
            return None
        extra = (values[:1].expand(more_decode, *values.shape[1:]), values[:1].expand(more_tokens, *values.shape[1:]))
        extra = tuple(torch.full_like(part, fill) for part in extra)
        return torch.cat([values[: meta.num_decode], extra[0], values[meta.num_decode :], extra[1]])

    q_len, kv_len = rows(meta.q_len, 1, 0), rows(meta.kv_len, 1, 0)
    table_row = rows(meta.table_row, dummy_row, dummy_row)
    cu_q = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    new = dataclasses.replace(
        meta,
        num_tokens=num_tokens,
        num_rows=num_decode + num_prefill,
        num_decode=num_decode,
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=table_row,
        num_prompt_queries=rows(meta.num_prompt_queries, 0, 0),
        q_len_R=torch.from_numpy(q_len),
        kv_len_R=torch.from_numpy(kv_len),
        cu_q_R1=torch.from_numpy(cu_q),
        table_row_R=torch.from_numpy(table_row),
        positions_T=tokens(meta.positions_T, 0),
        kv_pos_T=tokens(meta.kv_pos_T, dummy * size),
        cos_TR=tokens(meta.cos_TR, 1),
        sin_TR=tokens(meta.sin_TR, 0),
        max_q_len=num_tokens,
        max_kv_len=max_kv_len,
    )
    return Case(case.spec, new, tokens(case.fused, 0.5), case.kv_cache, case.layer)


def check(backend: AttentionBackend, case: Case, device: torch.device) -> Tensor:
    """Output and whole cache agree with the reference, and nothing else of the cache changed -> the output."""
    want, want_cache = case.run(ReferenceAttention())
    out, cache = (x.cpu() for x in on_device(case, device).run(backend))
    tolerance = TOLERANCE[out.dtype]
    assert out.shape == want.shape
    torch.testing.assert_close(out.float(), want.float(), rtol=tolerance, atol=tolerance)
    dummy = cache.shape[2] - 1  # whichever of its writers was last
    torch.testing.assert_close(
        cache[:, :, :dummy].float(), want_cache[:, :, :dummy].float(), rtol=tolerance, atol=tolerance
    )
    touched = torch.zeros(cache.shape[2] * cache.shape[3], dtype=torch.bool)
    touched[case.meta.kv_pos_T] = True
    before, after = case.kv_cache.flatten(2, 3), cache.flatten(2, 3)
    assert torch.equal(after[:, :, ~touched], before[:, :, ~touched]), "a cache position outside this step changed"
    assert torch.equal(after[0], before[0]), "another layer's cache changed"
    return out
