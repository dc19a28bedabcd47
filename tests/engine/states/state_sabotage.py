"""What protects recurrent states, each taken away by itself, and how wrong an engine's answers are.

A scan sees a step through its metadata only, so most faults of other engines are told to it as a lie in there: this
works with every scan backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.base import StepMetadata
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.scheduler.context.copies import Copy, CopyKind
from megatron_infer.testing.inspect import inspect


def finish(engine: DynamicInferenceEngine, *, keep: str | None = None) -> list[RequestOutput]:
    """Run to the end -> what finished; keep: only requests whose id begins so."""
    done = [output for output in run_steps(engine) if output.finished]
    return [output for output in done if keep is None or output.request_id.startswith(keep)]


def run_steps(engine: DynamicInferenceEngine) -> Iterable[RequestOutput]:
    while engine.has_unfinished():
        yield from engine.step()


class LyingScan:
    """A scan backend that is shown other steps than the engine planned."""

    def __init__(self, scan: Any, lie: Callable[[StepMetadata], StepMetadata]) -> None:
        self._scan, self._lie, self._num_tokens = scan, lie, 0

    def plan(self, step: StepMetadata) -> None:
        shown = self._lie(step)
        self._num_tokens, self._num_more = step.num_tokens, shown.num_tokens - step.num_tokens
        self._scan.plan(shown)

    def run(self, xBC_TC: torch.Tensor, dt_TH: torch.Tensor, *args: Any) -> torch.Tensor:
        if self._num_more:
            xBC_TC, dt_TH = (
                torch.cat((part, part.new_ones(self._num_more, part.shape[1]))) for part in (xBC_TC, dt_TH)
            )
        return self._scan.run(xBC_TC, dt_TH, *args)[: self._num_tokens]


def lie_to_scan(engine: DynamicInferenceEngine, lie: Callable[[StepMetadata], StepMetadata]) -> None:
    builder = inspect(engine).runner.builder
    builder._kernels = dataclasses.replace(builder._kernels, scan=LyingScan(builder._kernels.scan, lie))


def never_fresh(step: StepMetadata) -> StepMetadata:
    """Every row is said to have begun earlier, so that none starts from zeros."""
    return dataclasses.replace(step, kv_len=step.kv_len + 1, kv_len_R=step.kv_len_R + 1)


def in_rows_of(places: dict[int, int]) -> Callable[[StepMetadata], StepMetadata]:
    """Rows compute in the state slots of other rows."""

    def lie(step: StepMetadata) -> StepMetadata:
        rows = np.array([places.get(int(row), int(row)) for row in step.table_row], dtype=step.table_row.dtype)
        return dataclasses.replace(step, table_row=rows, table_row_R=torch.from_numpy(rows).to(step.table_row_R))

    return lie


def padded_with(state_slot: int, *, count: int = 3) -> Callable[[StepMetadata], StepMetadata]:
    """`count` rows of one token behind the others, as a step of fixed size has them, all in one state slot."""

    def lie(step: StepMetadata) -> StepMetadata:
        changed: dict[str, Any] = {}
        for name, value in (("q_len", 1), ("kv_len", 9), ("table_row", state_slot), ("num_prompt_queries", 0)):
            changed[name] = np.append(getattr(step, name), np.full(count, value, np.int32)).astype(np.int32)
        changed["cu_q"] = np.append(step.cu_q, step.num_tokens + 1 + np.arange(count)).astype(np.int32)
        for name in ("q_len", "kv_len", "table_row"):
            changed[f"{name}_R"] = torch.from_numpy(changed[name]).to(step.q_len_R)
        changed["cu_q_R1"] = torch.from_numpy(changed["cu_q"]).to(step.cu_q_R1)
        return dataclasses.replace(step, num_tokens=step.num_tokens + count, num_rows=step.num_rows + count, **changed)

    return lie


def lose_copies(engine: DynamicInferenceEngine, kind: CopyKind) -> None:
    """Copies of this kind are planned and never happen."""
    store = inspect(engine).store
    run_copies = store.run_copies
    store.run_copies = lambda copies: run_copies([copy for copy in copies if copy.kind is not kind])


def change_plans(engine: DynamicInferenceEngine, change: Callable[[Any], Any]) -> None:
    """The runner carries out other plans than the scheduler made."""
    runner = inspect(engine).runner
    forward = runner.forward
    runner.forward = lambda plan, *args: forward(change(plan), *args)


def without_state_copies(plan: Any) -> Any:
    return dataclasses.replace(plan, copies_after=[copy for copy in plan.copies_after if copy.kind is CopyKind.BLOCK])


def captured_at_the_end(plan: Any) -> Any:
    """States inside of slices are taken at the slices' ends."""
    late = [Copy(CopyKind.STATE, one.request.lease.row, slot) for one in plan.prefill for _, slot in one.captures]
    pieces = tuple(dataclasses.replace(piece, captures=()) for piece in plan.prefill)
    return dataclasses.replace(plan, prefill=pieces, copies_after=(*plan.copies_after, *late))


def forget_offloaded(engine: DynamicInferenceEngine, is_lost: Callable[[int], bool]) -> None:
    """Suspends do not carry the state slots that `is_lost` says."""
    context = inspect(engine).context
    held = context.held_state_slots
    context.held_state_slots = lambda: [slot for slot in held() if not is_lost(slot)]
