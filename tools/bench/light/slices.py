"""Attention of a few queries over long contexts, as after a known prefix, against the keys that it must read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from light.machine import Ceilings, seconds
from light.measures import Row
from megatron_infer.kernels.base import AttendSpec, StepMetadata

BLOCK = 16
KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
"""Llama-3-8B's."""
REPEATS = 4
"""Of a layer's attention in what is timed: the host's launches are not to be seen."""


def long_slices(
    device: torch.device, ceilings: Ceilings, *, batches: Sequence[int], queries: int, keys: int
) -> list[Row]:
    """Milliseconds of one layer's attention of `queries` tokens a row over `keys` keys; nothing without the kernels."""
    from megatron_infer.kernels import backend_candidates

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made, _ = backend_candidates.available(backend_candidates.ATTENTION, device, dtype, forced="triton")
    if not made:
        return []
    rows = []
    for batch in batches:
        step, num_blocks = _step(batch, queries, keys, device)
        spec = AttendSpec(num_kv_heads=KV_HEADS, group_size=GROUP, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
        cache = torch.randn(1, 2, num_blocks, BLOCK, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
        fused = torch.randn(step.num_tokens, KV_HEADS, GROUP + 2, HEAD_DIM, dtype=dtype, device=device)
        repeats = REPEATS if device.type == "cuda" else 1
        attend = _repeated(made[0], step, spec, cache, fused, repeats)
        taken = seconds(attend, device, rounds=10 if repeats > 1 else 1, warm=1) / repeats
        rate = batch * keys * 2 * KV_HEADS * HEAD_DIM * cache.element_size() / taken / 1e9
        rows.append(
            {
                "what": f"attention, {queries} queries over {keys} keys, {batch} rows",
                "rows": batch,
                "ms": taken * 1e3,
                "gb_s": rate,
                "share": rate / ceilings.copy_gb_s,
            }
        )
    return rows


def _step(batch: int, queries: int, keys: int, device: torch.device) -> tuple[StepMetadata, int]:
    """(rows of `queries` last tokens in scattered blocks, blocks of the cache)."""
    blocks = -(-keys // BLOCK)
    table = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0)).view(batch, blocks)
    positions = torch.arange(keys - queries, keys)
    kv_pos = table[:, positions // BLOCK] * BLOCK + positions % BLOCK
    q_len, kv_len = (np.full(batch, number, dtype=np.int32) for number in (queries, keys))
    cu_q, table_row = (np.arange(count, dtype=np.int32) for count in (batch + 1, batch))
    cu_q *= queries

    def there(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    step = StepMetadata(
        num_tokens=batch * queries,
        num_rows=batch,
        num_decode=0,
        q_len=q_len,
        kv_len=kv_len,
        cu_q=cu_q,
        table_row=table_row,
        num_prompt_queries=q_len,
        q_len_R=there(q_len),
        kv_len_R=there(kv_len),
        cu_q_R1=there(cu_q),
        table_row_R=there(table_row),
        block_table=table.to(device, torch.int32),
        positions_T=positions.repeat(batch).to(device),
        kv_pos_T=kv_pos.flatten().to(device),
        cos_TR=None,
        sin_TR=None,
    )
    return step, batch * blocks


def _repeated(
    backend: Any, step: StepMetadata, spec: AttendSpec, cache: Tensor, fused: Tensor, repeats: int
) -> Callable[[], Any]:
    """So many calls as one; on a GPU a captured graph of them."""
    backend.plan(step)

    def attend() -> None:
        for _ in range(repeats):
            backend.run(fused[:, :, :GROUP], fused[:, :, -2], fused[:, :, -1], cache, layer=0, spec=spec)

    if not cache.is_cuda:
        return attend
    attend()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    return graph.replay
