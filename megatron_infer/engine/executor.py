"""Runs planned steps on this rank: the model in eval mode, the cache's copies in order, failures known to all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.distributed.collective_errors import has_abandoned_collective, is_of_collective
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.errors import CapacityError, InferenceError
from megatron_infer.memory.device import is_out_of_memory
from megatron_infer.runner.in_flight import InFlightStep, RunnerOutput
from megatron_infer.runner.model_runner import Runner
from megatron_infer.runner.step_padding import RankSizes
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan

POLL_S = 0.0005
"""Between two checks whether the device has finished a step."""
NO_TOKENS = GraphShape(0, 0, 0)


class FailedStep(InferenceError):
    """A step's forward raised, or gave logits that are not finite; the error of the requests in it."""


class Executor:
    """Runs the scheduler's plans on one rank's model."""

    def __init__(
        self, model: Any, runner: Runner, scheduler: Scheduler, rank_group: RankGroup, *, checks_plans: bool
    ) -> None:
        """model: live. checks_plans: compare each plan with those of the other ranks before it runs."""
        self.runner, self.rank_group = runner, rank_group
        self._model = model
        self._scheduler = scheduler
        self._checks_plans = checks_plans
        self._training: list[Any] = []
        """Modules that were in training mode."""

    def enter_inference(self, *, has_new_modules: bool = False) -> None:
        """Before a step: modules in eval mode, and collectives under the engine's time limit.

        has_new_modules: there may be some in training mode in a model in eval mode.
        """
        self.rank_group.limit_collectives(True)
        if self._model.training or has_new_modules:
            self._training += [module for module in self._model.modules() if module.training]
            self._model.eval()

    def leave_inference(self) -> None:
        """After the last step: modules back in the mode they were in."""
        for module in self._training:
            module.training = True
        self._training = []
        self.rank_group.limit_collectives(False)

    # ------------------------------------------------------------------ a step

    def announce(self, plan: StepPlan, among: Collection[Request] | None = None, *, num_in_flight: int) -> None:
        """Before `forward`, on every rank: this is the step that comes, of requests in `among` (None: of all).

        Raises CapacityError if sequences claimed by hand keep every waiting request out: no step would change it.
        """
        group = self.rank_group
        if group.sharing is not group.lockstep:  # the phase, for the other ranks' errors
            group.lockstep.planned(plan, check=False)
        group.sharing.planned(plan, check=self._checks_plans, shape_of=self.runner.shape_of)
        if plan.num_tokens or num_in_flight:
            return
        scheduler = self._scheduler
        waiting = scheduler.queue.candidates(1, among)
        if waiting and not scheduler.admitted_requests.num_live and self.num_rows_by_hand:
            context = scheduler.context
            raise CapacityError(
                f"request {waiting[0].id!r} cannot start: {self.num_rows_by_hand} of {context.num_rows} rows are held "
                f"by sequences claimed by hand, {context.num_free_blocks} of {context.num_blocks} blocks are free; "
                "release some (kv_manager.release), or give the cache more memory"
            )

    @property
    def num_rows_by_hand(self) -> int:
        """Rows of the cache that sequences outside the scheduler hold; nothing is in flight."""
        context = self._scheduler.context
        return context.num_rows - context.num_free_rows - self._scheduler.admitted_requests.num_live

    def exchange_sizes(self, plan: StepPlan, *, goes_on: bool) -> tuple[RankSizes, bool]:
        """Where expert-parallel ranks have requests of their own -> what they agree on for the step that comes, and
        whether any rank goes on with another step within the same call."""
        graphs = self.runner.graphs
        shape = self.runner.shape_of(plan) if plan.num_tokens else NO_TOKENS
        mine = json.dumps([self.runner.sizes(plan), goes_on, None if shape is None else astuple(shape)])
        each = [json.loads(text) for text in self.rank_group.lockstep.gather("the sizes of a step", mine)]
        of_ranks = self.rank_group.groups.of_expert_ranks([sizes for sizes, *_ in each])
        num_drafting = max(map(len, of_ranks)) - 1
        aligned = [[*sizes[:-1], *[0] * (num_drafting - len(sizes) + 1), sizes[-1]] for sizes in of_ranks]
        forwards = [list(one) for one in zip(*aligned, strict=True)]
        shapes = [None if one is None else GraphShape(*one) for *_, one in each]
        common = None if graphs is None else graphs.common(shapes)
        return RankSizes(forwards=forwards, shape=common), any(more for _, more, _ in each)

    def serve(self, ranks: RankSizes) -> None:
        """A step in which only other ranks have tokens: run this rank's experts for them."""
        started = time.perf_counter()
        try:
            self.runner.serve(ranks)
        except Exception as error:
            self.report_failure(error, started, fatal=True)
            raise

    def forward(self, plan: StepPlan, ranks: RankSizes | None = None) -> InFlightStep:
        """Launch a step: table writes that the context recorded since the last one, the plan's copies, the layers.

        ranks: see `Runner.forward`.
        """
        context = self._scheduler.context
        step = self.runner.forward(plan, context.take_table_writes(), ranks)
        if context.swap is not None:
            blocks, states = context.swap.take_freed()
            if blocks or states:  # after the copies of the steps launched so far
                self.runner.then(partial(self._free_host, blocks, states))
        return step

    def read(self, step: InFlightStep) -> RunnerOutput:
        """Wait for what a step drew. With several ranks a failure is one of all of them, or ends the engine."""
        started = time.perf_counter()
        try:
            output = step.read()
        except Exception as error:
            self.report_failure(error, started, fatal=True)
            raise
        self.rank_group.check_collectives()
        if output.error:
            seconds = time.perf_counter() - started
            self.rank_group.lockstep.step_failed(FailedStep(output.error), seconds, cause=output.cause)
        return output

    def report_failure(self, error: Exception, started: float, *, fatal: bool = False) -> None:
        """This rank raised in a step. Returns if all ranks raised the same and can go on (see `Lockstep.step_failed`).

        fatal: they cannot, whatever the error; those of collectives are fatal anyway.
        """
        seconds, of_collective, cause = time.perf_counter() - started, is_of_collective(error), ""
        fatal = fatal or of_collective or has_abandoned_collective(error)
        if is_out_of_memory(error):  # its text has figures of this rank's device
            error, cause = MemoryError("no memory for the step"), f"{type(error).__name__}: {error}"
        self.rank_group.lockstep.step_failed(error, seconds, fatal=fatal, own=not of_collective, cause=cause)

    def wait(self, steps: Sequence[InFlightStep], tick: Callable[[str], None]) -> None:
        """Until the device has finished these steps, on every rank; `tick` is called meanwhile and may raise."""
        with self.rank_group.together("waiting for the step in flight"):
            tick("the step in flight")
            while not all(step.is_done() for step in steps):
                tick("the step in flight")
                time.sleep(POLL_S)

    # ------------------------------------------------------------------ copies between pool and host

    def finish_copies(self) -> None:
        """Run the copies between pool and host that no step has launched yet. Nothing may be in flight.

        After a failure it is not known what was copied: all requests are recomputed.
        """
        try:
            with self.rank_group.together("moving blocks"):
                self.runner.store.run_copies(self._scheduler.context.take_copies())
        except BaseException:
            self._scheduler.requeue_all()
            raise
        finally:
            self.free_host_slots()

    def free_host_slots(self) -> None:
        """Free host memory of swapped requests that are back in the pool or have ended."""
        swap = self._scheduler.context.swap
        if swap is not None:
            self._free_host(*swap.take_freed())

    def _free_host(self, blocks: Iterable[int], states: Iterable[int]) -> None:
        self.runner.store.free_host_slots(blocks, states)
