"""Whether the host waits for the device inside a step."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from gpu_checks.context import Context
from gpu_checks.engines import answers, make_engine, make_model, workload
from gpu_checks.graphs import graphed, same
from gpu_checks.registry import Comparison, check
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.runner.parallel.stage_runner import StageRunner
from megatron_infer.testing.inspect import inspect

BUSY_CYCLES = 40_000_000
"""Of the device, in each step: about 20 ms, many times what the host needs for a launch."""


def _decoding(engine: Any, count: int, steps: int) -> None:
    """`count` requests in the middle of their answers."""
    for seed in range(count):
        params = SamplingParams(max_tokens=steps + 40, temperature=0.0 if seed % 2 else 0.8, seed=seed, ignore_eos=True)
        engine.add_request([1 + seed, 2, 3], params, stream="final")
    for _ in range(8):
        engine.step()


@check(budget_s=45)
def no_sync(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """A decode step, run as it is or replayed, never waits for the device but for its tokens."""
    compare.require("a wait passed unnoticed", ctx.rehearse or _is_noticed(ctx))
    waits, steps, dtype = {}, ctx.pick(20, 2), ctx.pick(torch.bfloat16, torch.float32)
    kinds = ctx.pick(("attention", "experts", "hybrid", "mamba"), ("attention",))
    for kind, captures in itertools.product(kinds, (False, True)):
        model, label = make_model(kind, dtype, ctx.device), f"{kind}, {'replayed' if captures else 'eager'}"
        engine = graphed(ctx, model, overlap=True) if captures else make_engine(model, ctx.device, overlap=True)
        _decoding(engine, ctx.pick(8, 2), steps)
        before = dict(engine.device.syncs)
        with ctx.no_sync():
            for _ in range(steps):
                engine.step()
        counts = {name: count - before.get(name, 0) for name, count in engine.device.syncs.items()}
        waits[label] = {name: count / steps for name, count in counts.items() if count}
        compare.require(f"{label}: waits {waits[label]}", sum(waits[label].values()) <= 1.0)
    return {"waits_per_step": waits}


def _is_noticed(ctx: Context) -> bool:
    """Whether a wait raises where none may be."""
    try:
        with ctx.no_sync():
            torch.ones(4, device=ctx.device).sum().item()
    except RuntimeError:
        return True
    return False


class LastStage:
    """`StageLink` of the last of two stages, with all layers: nothing comes from the first, nobody hears the result.

    Each step keeps the device busy; noted is whether it still was when the next step had been launched.
    """

    rank, is_first, is_last = 1, False, True
    num_stages, num_chunks = 2, 1

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._ends: list[Any] = []
        self.was_busy: list[bool] = []

    def compare(self, numbers: Any) -> Any:
        return np.array([numbers, numbers])

    def receive(self, num_tokens: int, *, routing_width: int, chunk: int) -> tuple[None, None, None]:
        self._ctx.cuda._sleep(BUSY_CYCLES)
        return None, None, None

    def nothing_received(self, num_tokens: int) -> None:
        return None

    def send(self, hidden_TD: Any, num_tokens: int, **more: Any) -> None:
        assert more["failure"] is None, more["failure"]
        if self._ends:
            self.was_busy.append(not self._ends[-1].query())
        self._ends.append(self._ctx.cuda.Event())
        self._ends[-1].record()

    def send_result(self, message: Any) -> None:
        pass


@check(budget_s=25)
def last_stage_launches(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """The last pipeline stage launches a step while its device is busy with the one before, and draws the same."""
    model = make_model("attention", ctx.pick(torch.bfloat16, torch.float32), ctx.device)
    work = workload(ctx, count=ctx.pick(4, 2), logprobs=1)
    wanted = answers(make_engine(model, ctx.device, overlap=True), work)
    engine, link = make_engine(model, ctx.device, overlap=True), LastStage(ctx)
    executor = inspect(engine).executor
    executor.runner = StageRunner(executor.runner, link)
    same(compare, "last stage", answers(engine, work), wanted)
    share = sum(link.was_busy) / max(1, len(link.was_busy))
    compare.require(f"{share:.0%} of {len(link.was_busy)} steps were launched in time", ctx.rehearse or share >= 0.8)
    compare.require("nothing was launched", bool(link.was_busy))
    return {"share": share}
