"""Host time of a decode step: schedule, batch build, commit. Medians in microseconds, and the budget.

    python tools/bench/scheduler_overhead.py [--rows 512] [--prefix-caching] [--batch-build]

--batch-build runs the engine's batch builder between schedule and commit: all of a step's host work but the forward.
Every row crosses a block border once in `--block-size` steps, the rows spread evenly over them, so that each step pays
its share of block allocations. Nothing is computed: tokens are made up.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels.base import RotaryTable, StepMetadata
from megatron_infer.kernels.step_gather import torch_gather
from megatron_infer.memory.device import Device
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.scheduler.context.build_context import build_context
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan, StepResult

BUDGET_US = {"schedule": 90.0, "commit": 90.0, "total": 300.0}
"""For 512 rows; the total has the batch build in it."""

MAX_SEQUENCE_LENGTH, HEAD_DIM = 2560, 64
"""Sizes of the model that the batch builder is timed with."""

BatchBuild = Callable[[StepPlan, Sequence[tuple[int, int, int]]], Any]


def no_build(plan: StepPlan, writes: Sequence[tuple[int, int, int]]) -> None:
    """Stands where the batch build is not measured."""


class NoAttention:
    """Plans nothing: a backend's own plan is device work."""

    name = "none"

    def supports(self, spec: object, *, dtype: object, block_size: int, kv_dtype: object = None) -> str | None:
        return None

    def plan(self, step: StepMetadata) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("this benchmark runs no attention")


def make_build(context: DynamicInferenceContext, rows: int) -> BatchBuild:
    """The engine's batch builder for up to `rows` requests over a cache of `context`'s shape."""
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
        ops=None, attention=NoAttention(), scan=None, layers=None, lora=None, expanded=None, gather=torch_gather
    )
    rotary = RotaryTable(cos_PR=table, sin_PR=table)
    builder = BatchBuilder(Device("cpu"), sizes, store, kernels, rotary=rotary, dtype=torch.bfloat16)

    @torch.inference_mode()
    def build(plan: StepPlan, writes: Sequence[tuple[int, int, int]]) -> Batch:
        return builder.build(plan, writes)

    return build


def make_decoding(
    rows: int, *, steps: int, block_size: int, prefix_caching: bool
) -> tuple[DynamicInferenceContext, Scheduler]:
    """A scheduler with `rows` requests in mid-decode, their positions spread evenly over the block."""
    blocks_per_row = (2 * block_size + steps) // block_size + 2
    context = build_context(
        num_blocks=rows * blocks_per_row,
        block_size=block_size,
        num_rows=rows,
        max_blocks_per_row=blocks_per_row,
        prefix_caching=prefix_caching,
        keep_cached=prefix_caching,
    )
    scheduler = Scheduler(
        context, max_tokens=rows * 2 * block_size, chunked_prefill=False, paused_block_limit=0, root=b"root"
    )
    params = SamplingParams(max_tokens=None, stop_token_ids=(2,))
    for index in range(rows):
        length = block_size + index % block_size
        request = Request(
            id=str(index),
            tokens=[3 + (index * 7 + i) % 1000 for i in range(length)],
            prompt_len=length,
            params=params,
            max_total=length + steps,
            seed=0,
            stop_ids=frozenset({2}),
        )
        scheduler.add(request)
    while scheduler.num_waiting or scheduler.admitted_requests.prefilling:
        plan = scheduler.schedule()
        scheduler.commit(plan, StepResult([5] * len(plan.sampled)))
    assert len(scheduler.admitted_requests.decoding) == rows
    return context, scheduler


def measure(
    context: DynamicInferenceContext, scheduler: Scheduler, build: BatchBuild, *, rows: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of each phase in each step; every step decodes all rows."""
    clock = time.perf_counter
    seconds: dict[str, list[float]] = {"schedule": [], "build": [], "commit": [], "total": []}
    tokens = [5 + i for i in range(rows)]
    for _ in range(steps):
        start = clock()
        plan = scheduler.schedule()
        scheduled = clock()
        build(plan, context.take_table_writes())
        built = clock()
        committed = scheduler.commit(plan, StepResult(tokens))
        end = clock()
        assert len(plan.decode) == rows and not committed.ended
        for phase, value in (
            ("schedule", scheduled - start),
            ("build", built - scheduled),
            ("commit", end - built),
            ("total", end - start),
        ):
            seconds[phase].append(value)
    return seconds


def report(seconds: dict[str, list[float]], *, rows: int) -> None:
    print(f"{'phase':10}{'median us':>11}{'p10':>8}{'p90':>8}{'ns/row':>9}{'budget us':>11}")
    for phase, values in seconds.items():
        p10, *_, p90 = statistics.quantiles(values, n=10)
        median = statistics.median(values)
        budget = BUDGET_US.get(phase)
        limit = f"{budget * rows / 512:11.0f}" if budget else f"{'':11}"
        print(f"{phase:10}{median * 1e6:11.1f}{p10 * 1e6:8.1f}{p90 * 1e6:8.1f}{median / rows * 1e9:9.0f}{limit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512, help="decoding requests (default 512)")
    parser.add_argument("--steps", type=int, default=400, help="measured steps (default 400)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (default 16)")
    parser.add_argument("--prefix-caching", action="store_true", help="publish full blocks at commit")
    parser.add_argument("--batch-build", action="store_true", help="measure the engine's batch builder too")
    args = parser.parse_args()

    warmup = 3 * args.block_size
    context, scheduler = make_decoding(
        args.rows, steps=args.steps + warmup + 2, block_size=args.block_size, prefix_caching=args.prefix_caching
    )
    build = make_build(context, args.rows) if args.batch_build else no_build
    measure(context, scheduler, build, rows=args.rows, steps=warmup)
    seconds = measure(context, scheduler, build, rows=args.rows, steps=args.steps)
    cached = "on" if args.prefix_caching else "off"
    print(
        f"{args.rows} decoding rows, blocks of {args.block_size}, prefix caching {cached}, {args.steps} steps, "
        f"{platform.python_implementation()} {platform.python_version()}"
    )
    report(seconds, rows=args.rows)


if __name__ == "__main__":
    main()
