"""Paged-attention steps of tests/kernels for Triton's kernels: padded as a graph's are, or one row alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from paged_case import Case, check_case, prompt_queries
from step_rows import padded_step, spread, step_of

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""fp16 and bf16: weights are rounded to the cache's dtype before they meet the values, outputs once more."""
CHUNK = 32
"""Keys of a split here, so that short rows have several."""
check = partial(check_case, tolerances=TOLERANCE, holds_dummy=False)


def make_backend(**settings: Any) -> Any:
    from megatron_infer.kernels.triton.attention import TritonPagedAttention

    return TritonPagedAttention(**{"num_cores": 2, "shared_kib": 227, "chunk": CHUNK, **settings})


def run(backend: Any, case: Case, device: torch.device) -> torch.Tensor:
    return case.on(device).run(backend)[0].cpu()


def _blocks_of(case: Case) -> dict[str, Any]:
    return {"block_table": case.meta.block_table, "block_size": case.kv_cache.shape[3]}


def padded(case: Case, *, num_decode: int, num_prefill: int, num_tokens: int, max_kv_len: int) -> Case:
    """The same step in a larger shape: decode rows of the dummy block, rows without tokens, padding tokens."""
    meta, dummy = case.meta, case.kv_cache.shape[2] - 1
    more = num_decode - meta.num_decode, num_prefill - (meta.num_rows - meta.num_decode)
    dummies = {"dummy_row": len(meta.block_table) - 1, "dummy_block": dummy}
    shape = {"padding_rows": more, "num_padding": num_tokens - meta.num_tokens - more[0]}
    wide, own = padded_step(meta, **shape, **dummies, **_blocks_of(case))
    wide.num_prompt_queries = prompt_queries(wide.q_len, num_decode)
    wide.max_q_len, wide.max_kv_len = num_tokens, max_kv_len
    if meta.cos_TR is not None and meta.sin_TR is not None:
        wide.cos_TR, wide.sin_TR = spread(meta.cos_TR, own, num_tokens, 1), spread(meta.sin_TR, own, num_tokens, 0)
    return replace(case, meta=wide, fused=spread(case.fused, own, num_tokens, 0.5))


def one_row(case: Case, row: int) -> Case:
    meta, tokens = case.meta, slice(case.meta.cu_q[row], case.meta.cu_q[row + 1])
    alone = step_of(
        [(int(meta.q_len[row]), int(meta.kv_len[row]))],
        num_decode=int(row < meta.num_decode),
        table_row=meta.table_row[row : row + 1],
        **_blocks_of(case),
        cos_TR=None if meta.cos_TR is None else meta.cos_TR[tokens],
        sin_TR=None if meta.sin_TR is None else meta.sin_TR[tokens],
    )
    return replace(case, meta=alone, fused=case.fused[tokens])
