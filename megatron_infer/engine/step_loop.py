"""The step loop: schedule, launch, commit; what is in flight and what is owed to the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_infer.comm.collective_errors import has_abandoned_collective, is_of_collective
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.build import Assembly
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.requests.output_processor import OutputProcessor
from megatron_infer.runner.in_flight import InFlightStep, RunnerOutput
from megatron_infer.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.request import FinishReason, Request
from megatron_infer.scheduler.step_plan import StepPlan


class Listener(Protocol):
    """Told of every command and step (recording, metrics); must not change the engine."""

    def on_add(self, request_id: str, token_ids: list[int], params: SamplingParams, step: int) -> None: ...

    def on_abort(self, request_id: str, step: int) -> None: ...

    def on_step(self, step: int, outputs: list[RequestOutput]) -> None: ...


POLL_S = 0.0005
"""Between two looks at a device that has not finished its step."""


class FailedStep(InferenceError):
    """A step's forward raised, or gave logits that are no numbers; carried by the requests it concerns."""


class StepLoop:
    """Runs one step at a time. With `overlap` a step is committed after the next one is launched.

    With several pipeline stages as many steps are in flight, or one more with `overlap`; they are committed in order.
    """

    def __init__(
        self, parts: Assembly, output_processor: OutputProcessor, *, overlap: bool, check_invariants: bool
    ) -> None:
        self.parts, self.output_processor = parts, output_processor
        self._ranks = parts.rank_group.lockstep
        self.set_costs: Callable[[CostModel], None] = self.take_costs
        """What becomes of new prices of evictions: taken at once, or sent to all ranks first."""
        self.listeners: list[Listener] = []
        self.num_steps = 0
        self.backlog: list[RequestOutput] = []
        """Outputs that the next step hands out."""
        self.was_idle = True
        """After the last step, or before the first: the same on every rank, which `is_idle` is not while the leader
        has requests that the others have not heard of."""
        self._check_invariants = check_invariants
        self._ahead = parts.scheduler.num_micro_batches - 1 if parts.scheduler.num_micro_batches > 1 else int(overlap)
        """Steps that stay in flight when a step returns."""
        self._flights: list[InFlightStep] = []
        """Launched and not committed, oldest first; one more than `_ahead` only within a step or after an interrupt."""
        self._stopped: StepPlan | None = None
        """Scheduled behind those and not launched: it is taken back when they are committed (see `_take_back`)."""

    @property
    def is_idle(self) -> bool:
        """Nothing to compute and nothing in flight; the backlog may still hold outputs."""
        return not len(self.output_processor) and not self._flights and self._stopped is None

    def take_backlog(self) -> list[RequestOutput]:
        outputs, self.backlog = self.backlog, []
        return outputs

    def step(self, weights_changed: bool | None = None) -> list[RequestOutput]:
        """One step -> outputs of the requests that have news, finished ones marked.

        When it is interrupted, what it would have handed out comes with the next one. weights_changed: what the ranks
        of the engine have agreed on; None: look.
        """
        outputs = self.take_backlog()
        try:
            self._step(outputs, weights_changed)
        except BaseException:
            self.backlog = outputs + self.backlog
            raise
        finally:
            self.was_idle = self.is_idle
        return outputs

    def _step(self, outputs: list[RequestOutput], weights_changed: bool | None) -> None:
        parts = self.parts
        if self.is_idle:
            parts.leave_inference()
            return
        started = time.perf_counter()
        parts.enter_inference()
        self._take_back(outputs)
        self._commit(outputs, leave=max(1, self._ahead))
        if parts.weights_differ() if weights_changed is None else weights_changed:
            self._commit(outputs)
            parts.accept_weights(parts.weight_version + 1)
        plan = parts.scheduler.schedule()
        if self._ranks is not None:
            self._ranks.planned(plan, check=self._check_invariants, shape=parts.runner.shape_of(plan))
        launched = bool(plan.num_tokens) and self._launch(plan, outputs)
        self._commit(outputs, leave=self._ahead if launched else max(0, len(self._flights) - 1))
        if not len(self.output_processor):  # what was launched for requests that ended is let go at once
            self._commit(outputs)
        if self._check_invariants:
            parts.context.check()
        self.num_steps += 1
        for listener in self.listeners:
            listener.on_step(self.num_steps, outputs)
        seconds = time.perf_counter() - started
        if parts.speeds is not None and parts.speeds.take(plan, seconds):
            self.set_costs(parts.speeds.costs)
        parts.report(
            plan,
            seconds,
            num_requests=len(self.output_processor),
            step=self.num_steps,
            meter=self.output_processor.meter,
        )
        if self.is_idle:
            parts.leave_inference()

    def take_costs(self, costs: CostModel) -> None:
        """The next step decides on evictions with these prices."""
        self.parts.scheduler.set_costs(costs)

    def drain(self) -> None:
        """Commit the step in flight, if there is one, and make blocks hold what the books say.

        Outputs come with the next step.
        """
        self._take_back(self.backlog)
        self._commit(self.backlog)
        self.parts.finish_moves()

    def quiesce(self, tick: Callable[[str], None]) -> None:
        """Nothing in flight, and the modules back in the mode they were found in: training may follow.

        tick: called first and while the device is waited for; may raise, and then the step stays in flight.
        """
        with self.parts.rank_group.together("waiting for the step in flight"):
            tick("the step in flight")
            while not all(flight.is_done() for flight in self._flights):
                tick("the step in flight")
                time.sleep(POLL_S)
        self.drain()
        self.parts.leave_inference()

    def end_all(self) -> None:
        """Abort every request, keeping the tokens it has; the outputs come with the next step."""
        for group in self.output_processor.groups:
            self.backlog.append(self.abort(group.id))

    def abort(self, request_id: str) -> RequestOutput:
        """End a request of the ledger wherever it stands -> what it has so far."""
        group = self.output_processor.get(request_id)
        assert group is not None, f"no request {request_id!r}"
        for sample in group.samples:
            if sample.request.finish_reason is None:
                self.parts.scheduler.abort(sample.request)  # a token still in flight is dropped
                sample.close()
        for listener in self.listeners:
            listener.on_abort(request_id, self.num_steps)
        output = self.output_processor.retire(group)
        if self.is_idle:  # nobody has a reason to step again
            self.parts.leave_inference()
        return output

    # ------------------------------------------------------------------ one step's parts

    def _launch(self, plan: StepPlan, outputs: list[RequestOutput]) -> bool:
        """Whether the step is on its way."""
        started = time.perf_counter()
        try:
            flight = self.parts.forward(plan)
            masks = self._masks(plan, outputs) if self.output_processor.num_structured else None
            self.parts.runner.sample(flight, masks)
        except Exception as error:  # whatever a forward raises belongs to the requests of this step, not to the engine
            if self._ranks is not None:
                self._tell(error, started, fatal=is_of_collective(error) or has_abandoned_collective(error))
            self._stopped = plan
            self._commit(outputs)
            if self._stopped is not None:  # else it went with an earlier one that failed
                self._stopped = None
                what = f"the forward of step {plan.step} raised {type(error).__name__}: {error}"
                self._fail(plan, FailedStep(what), outputs)
            return False
        except BaseException:  # an interrupt: the step is undone, its requests are computed anew later
            self._stopped = plan
            self._take_back(outputs)
            raise
        self._flights.append(flight)
        return True

    def _take_back(self, outputs: list[RequestOutput]) -> None:
        """Undo the step that was not launched, if there is one; a second interrupt leaves that to the next call."""
        if self._stopped is not None:
            self._commit(outputs)
            stopped, self._stopped = self._stopped, None
            if stopped is not None:
                self.parts.scheduler.cancel(stopped)

    def _masks(self, plan: StepPlan, outputs: list[RequestOutput]) -> TokenMasks | None:
        """What the rows of structured output may draw; made while the device runs the step's forward.

        A mask needs the tokens before it on the host: where the step before has drawn one of them, it is committed now.
        """
        if needs_host_tokens(plan):
            self._commit(outputs)
        return self.parts.input_processor.grammars.masks(plan.sampled) if self.parts.runner.draws else None

    def _complete(self, took: Sequence[Request]) -> list[Request]:
        """Structured output that took its last token, or that went wrong: it ends -> those."""
        ended: list[Request] = []
        for request in took:
            if request.params.structured is None:
                continue
            reason: FinishReason | None = None
            try:
                if self.parts.input_processor.grammars.advance(request):
                    reason = FinishReason.STOP
            except InferenceError as error:
                self.output_processor.set_error(request, error)
                reason = FinishReason.ERROR
            if reason is None:
                continue
            if request.finish_reason is None:
                self.parts.scheduler.finish(request, reason)
                ended.append(request)
            else:  # the same token also was the last one allowed: that the text is complete decides
                request.finish_reason = reason
        return ended

    def _commit(self, outputs: list[RequestOutput], *, leave: int = 0) -> None:
        """Read the steps in flight but for the last `leave`, apply them, and append what they brought to `outputs`.

        An interrupt of the wait for the device leaves the step in flight.
        """
        while len(self._flights) > leave:
            flight, scheduler = self._flights[0], self.parts.scheduler
            plan, drawn = flight.plan, self._read(flight)
            if drawn.error:
                self._give_up(FailedStep(drawn.error), outputs)
                return
            del self._flights[0]
            broken = [plan.sampled[index] for index in drawn.bad]
            for request in broken:
                self.output_processor.set_error(request, nothing_to_draw(request))
                scheduler.finish(request, FinishReason.ERROR)
            committed = scheduler.commit(plan, drawn.result)
            ended = committed.ended
            if self.output_processor.num_structured:
                ended = [*ended, *self._complete([plan.sampled[index] for index in committed.taken])]
            outputs.extend(self.output_processor.take(plan, drawn, committed.taken, (*ended, *broken), scheduler))

    def _read(self, flight: InFlightStep) -> RunnerOutput:
        """What the step drew. With several ranks a failure is everyone's, or ends the engine."""
        if self._ranks is None:
            return flight.read()
        started = time.perf_counter()
        try:
            drawn = flight.read()
        except Exception as error:
            self._tell(error, started, fatal=True)
            raise
        self.parts.rank_group.check_collectives()
        if drawn.error:
            self._ranks.step_failed(FailedStep(drawn.error), time.perf_counter() - started, cause=drawn.cause)
        return drawn

    def _tell(self, error: Exception, started: float, *, fatal: bool) -> None:
        """The other ranks hear what raised here. Returns if it raised there as well, and all can go on."""
        assert self._ranks is not None
        seconds = time.perf_counter() - started
        self._ranks.step_failed(error, seconds, fatal=fatal, own=not is_of_collective(error))

    def _give_up(self, error: FailedStep, outputs: list[RequestOutput]) -> None:
        """The oldest step in flight failed: its requests end, those of later ones start over."""
        for flight in self._flights:
            self._read(flight)  # so that nothing of it runs on; what it drew from lost keys and values is dropped
        plan, *later = [flight.plan for flight in self._flights]
        later += [] if self._stopped is None else [self._stopped]
        self._flights, self._stopped = [], None
        self._fail(plan, error, outputs, later)

    def _fail(
        self, plan: StepPlan, error: InferenceError, outputs: list[RequestOutput], later: Sequence[StepPlan] = ()
    ) -> None:
        """End the requests of a step whose forward raised; everything else goes on."""
        members = {r.id: r for r in (*plan.decode, *(p.request for p in plan.prefill), *plan.sampled)}
        self.parts.scheduler.cancel(plan, *later)
        for request in members.values():
            if request.finish_reason is None:
                self.output_processor.set_error(request, error)
                self.parts.scheduler.finish(request, FinishReason.ERROR)
        outputs.extend(self.output_processor.close(members.values()))


def needs_host_tokens(plan: StepPlan) -> bool:
    """Whether a request of structured output draws behind a token that only the device knows."""
    for request, start in zip(plan.decode, plan.decode_starts, strict=True):
        if request.params.structured is not None and len(request.tokens) <= start:
            return True
    return False


def nothing_to_draw(request: Request) -> FailedStep:
    """Why a request drew no token."""
    if request.params.structured is None:
        return FailedStep("the model's logits are not finite; check its weights and dtype")
    return FailedStep(
        "structured output has no token to draw: bad_token_ids, allowed_token_ids, stop_token_ids or min_tokens leave "
        "none, its grammar went beyond the limits of a step, or the model's logits are not finite"
    )
