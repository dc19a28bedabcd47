"""The engine's batch builder as `scheduler_overhead.py` calls it: everything of a step's host work but the forward.

python tools/bench/scheduler_overhead.py --batch-build tools.bench.batch_build:make
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_infer.context.dynamic_context import DynamicInferenceContext
from megatron_infer.kernels.base import RotaryTable, StepMetadata
from megatron_infer.kernels.step_gather import torch_gather
from megatron_infer.memory.device import Device
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.scheduler.step_plan import StepPlan

MAX_SEQUENCE_LENGTH, HEAD_DIM = 2560, 64


class NoAttention:
    """Plans nothing: a backend's own plan is device work."""

    name = "none"
    plan_on_host = None

    def supports(self, spec: object, *, dtype: object, block_size: int, kv_dtype: object = None) -> str | None:
        return None

    def plan(self, step: StepMetadata) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("this benchmark runs no attention")


def make(context: DynamicInferenceContext, rows: int) -> Callable[[StepPlan, Sequence[tuple[int, int, int]]], Batch]:
    """A builder for up to `rows` requests over a cache of `context`'s shape, rotary tables included."""
    torch.set_num_threads(1)
    cache, table = torch.zeros(1), torch.zeros(MAX_SEQUENCE_LENGTH, HEAD_DIM)
    sizes: Any = SimpleNamespace(
        max_requests=rows,
        max_tokens=rows * 2 * context.block_size,
        max_blocks_per_row=context.max_blocks_per_row,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        block_size=context.block_size,
        graph_shapes=(),
    )
    layout = SimpleNamespace(dummy_block=context.num_blocks)
    store: Any = SimpleNamespace(layout=layout, kv_cache=cache, states=None, pending_restore=lambda: None)
    kernels: Any = SimpleNamespace(
        ops=None, attention=NoAttention(), scan=None, layers=None, lora=None, gather=torch_gather
    )
    rotary = RotaryTable(cos_PR=table, sin_PR=table)
    builder = BatchBuilder(Device("cpu"), sizes, store, kernels, rotary=rotary, dtype=torch.bfloat16)

    @torch.inference_mode()
    def build(plan: StepPlan, writes: Sequence[tuple[int, int, int]]) -> Batch:
        return builder.build(plan, writes)

    return build
