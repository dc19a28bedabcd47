"""The step loop: schedule, launch, read and commit; the steps in flight and the outputs that wait for the caller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.executor import Executor, FailedStep
from megatron_infer.engine.metrics.engine_meter import MOVED
from megatron_infer.engine.requests.output_processor import OutputProcessor
from megatron_infer.engine.requests.request_state import RequestState
from megatron_infer.errors import InferenceError
from megatron_infer.memory.device import is_out_of_memory
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.runner.in_flight import InFlightStep, RunnerOutput
from megatron_infer.runner.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.request import FinishReason, Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from megatron_infer.runner.sampling.grammar_matchers import Grammars
    from megatron_infer.runner.speculative.verify import Verifier
    from megatron_infer.runner.step_padding import RankSizes

log = logging.getLogger("megatron_infer")


class Listener(Protocol):
    """Is called with every command and step (to record them, for metrics); must not change the engine."""

    def on_add(self, request_id: str, token_ids: list[int], params: SamplingParams, step: int) -> None: ...

    def on_abort(self, request_id: str, step: int) -> None: ...

    def on_step(self, step: int, outputs: list[RequestOutput]) -> None: ...


class StepObserver(Protocol):
    """Is called after each step with its plan, its seconds and its number."""

    def after_step(self, plan: StepPlan, seconds: float, step: int) -> None: ...


class StepLoop:
    """Runs one step at a time. With `overlap` a step is committed after the next one is launched, with
    `max_steps_in_flight` = n after n - 1 further ones.

    With p pipeline stages p steps are in flight, or p + 1 with `overlap`; they are committed in order.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        weights: WeightManager,
        output_processor: OutputProcessor,
        grammars: Grammars,
        config: InferenceConfig,
        observers: Sequence[StepObserver] = (),
        verifier: Verifier | None = None,
    ) -> None:
        """verifier: None where nothing is drafted."""
        self.output_processor = output_processor
        self.listeners: list[Listener] = []
        self.num_steps = 0
        self.backlog: list[RequestOutput] = []
        """Outputs that the next step hands out."""
        self.was_idle = True
        """Whether all was idle after the last step; True before the first. Equal on every rank, unlike `is_idle`: the
        leader may have requests that the other ranks do not have yet."""
        self._scheduler, self._executor, self._weights, self.grammars = scheduler, executor, weights, grammars
        self._observers, self._check_invariants, self._verifier = tuple(observers), config.check_invariants, verifier
        one_stage = config.max_steps_in_flight + bool(config.overlap) - 1
        self._ahead = scheduler.num_micro_batches - 1 if scheduler.num_micro_batches > 1 else one_stage
        """Steps that stay in flight when a step returns."""
        self._in_flight: list[InFlightStep] = []
        """Launched and not committed, oldest first; one more than `_ahead` only within a step or after an interrupt."""
        self._ranks_have_work: bool | None = None
        """See `step`."""
        self._ranks_go_on: bool | None = None
        """Whether a rank takes another step within the same call; None: this rank decides."""
        self._unlaunched: StepPlan | None = None
        """Scheduled after those and not launched: cancelled once they are committed (see `_cancel_unlaunched`)."""

    @property
    def num_in_flight(self) -> int:
        """Steps whose outputs have not been read."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Nothing to compute and nothing in flight; the backlog may still hold outputs."""
        return not len(self.output_processor) and not self._in_flight and self._unlaunched is None

    def take_backlog(self) -> list[RequestOutput]:
        outputs, self.backlog = self.backlog, []
        return outputs

    def step(
        self,
        weights_changed: bool | None = None,
        among: Collection[str] | None = None,
        *,
        ranks_have_work: bool | None = None,
    ) -> list[RequestOutput]:
        """One step -> outputs of the requests that have news, finished ones marked.

        among: the ids of requests that it may compute; None: all. ranks_have_work: where each rank has requests of its
        own, whether any has something to compute: then all take part, with or without tokens. None: this rank decides.

        Several steps where a request would never come to its next token otherwise, see `RecomputeProgress`. After an
        interrupt, its outputs come with the next step. weights_changed: what the ranks of the engine have agreed on;
        None: check.
        """
        outputs = self.take_backlog()
        self._ranks_have_work, self._ranks_go_on = ranks_have_work, None
        try:
            self._step(outputs, weights_changed, among)
            num_left, before = self._scheduler.recompute_progress.num_left, 0
            while (num_left and num_left != before) if self._ranks_go_on is None else self._ranks_go_on:
                self._step_more(outputs, among)
                num_left, before = self._scheduler.recompute_progress.num_left, num_left
        except BaseException:
            self.backlog = outputs + self.backlog
            raise
        finally:
            self.was_idle = self.is_idle if ranks_have_work is None else not ranks_have_work
        return outputs

    def _step_more(self, outputs: list[RequestOutput], among: Collection[str] | None) -> None:
        """Another step within the same call."""
        news: list[RequestOutput] = []
        try:
            self._step(news, False, among)
        finally:
            outputs += news

    def _step(self, outputs: list[RequestOutput], weights_changed: bool | None, among: Collection[str] | None) -> None:
        executor, scheduler = self._executor, self._scheduler
        if self.is_idle if self._ranks_have_work is None else not self._ranks_have_work:
            executor.leave_inference()
            return
        num_left = scheduler.recompute_progress.num_left
        started = time.perf_counter()
        executor.enter_inference()
        self._cancel_unlaunched(outputs)
        self._finish_steps(outputs, leave=max(1, self._ahead))
        if self.weights_differ() if weights_changed is None else weights_changed:
            self._finish_steps(outputs)
            self._accept_weights()
        named = None if among is None else self.output_processor.sequences_of(among)
        plan = scheduler.schedule(named)
        executor.announce(plan, named, num_in_flight=len(self._in_flight))
        ranks: RankSizes | None = None
        if self._ranks_have_work is not None:
            left = scheduler.recompute_progress.num_left
            ranks, self._ranks_go_on = executor.exchange_sizes(plan, goes_on=left not in (0, num_left))
            if not plan.num_tokens and any(ranks.forwards[-1]):
                executor.serve(ranks)
        launched = bool(plan.num_tokens) and self._launch(plan, outputs, ranks)
        self._finish_steps(outputs, leave=self._ahead if launched else max(0, len(self._in_flight) - 1))
        if not len(self.output_processor):  # a step launched for requests that have ended is finished at once
            self._finish_steps(outputs)
        if self._check_invariants:
            scheduler.context.check()
        self.num_steps += 1
        for listener in tuple(self.listeners):
            listener.on_step(self.num_steps, outputs)
        seconds = time.perf_counter() - started
        for observer in self._observers:
            observer.after_step(plan, seconds, self.num_steps)
        if self.is_idle:
            executor.leave_inference()

    def weights_differ(self, *, reads: bool = True) -> bool:
        """Whether this rank's weights or modules changed since they were accepted; the content of weights is read only
        while no request runs. reads: False: it is not read."""
        runs = self._scheduler.num_running or self._scheduler.num_paused
        return self._weights.differ(read_all=reads and not runs)

    def _accept_weights(self) -> None:
        """The next version. Modules that cannot be adopted are refused: requests wait, the model is as it was found."""
        try:
            self._weights.accept(self._weights.version + 1)
        except InferenceError:
            self._executor.leave_inference()
            raise
        self._executor.enter_inference(has_new_modules=True)

    def drain(self) -> None:
        """Finish the steps in flight and run the cache's outstanding copies. Outputs come with the next step."""
        self._cancel_unlaunched(self.backlog)
        self._finish_steps(self.backlog)
        self._executor.finish_copies()

    def quiesce(self, tick: Callable[[str], None]) -> None:
        """Nothing in flight, and the modules back in the mode they were in: training may follow.

        tick: called first and while the device is waited for; if it raises, the step stays in flight.
        """
        self._executor.wait(self._in_flight, tick)
        self.drain()
        self._executor.leave_inference()

    def abort_all(self) -> None:
        """Abort every request, keeping the tokens it has; the outputs come with the next step."""
        for state in self.output_processor.requests:
            self.backlog.append(self.abort(state.id))

    def end_requests(self, requests: Collection[Request], error: InferenceError) -> list[RequestOutput]:
        """End those that have not finished, by an error -> outputs of all; none of them is in flight."""
        for request in requests:
            if request.finish_reason is None:
                self.output_processor.set_error(request, error)
                self._scheduler.finish(request, FinishReason.ERROR)
        return self.output_processor.outputs_of(requests, self._scheduler.finish_by_text)

    def abort(self, request_id: str) -> RequestOutput:
        """End an open request in any state -> what it has so far."""
        state = self.output_processor.get(request_id)
        assert state is not None, f"no request {request_id!r}"
        for sequence in state.sequences:
            self._scheduler.abort(sequence.request)  # a token still in flight is dropped
        self.output_processor.end_texts(state, self._scheduler.finish_by_text)
        for listener in self.listeners:
            listener.on_abort(request_id, self.num_steps)
        output = self.output_processor.close(state)
        if self.is_idle:  # there may be no further step
            self._executor.leave_inference()
        return output

    def let_go(self, state: RequestState) -> None:
        """Forget an open request, of which nothing is in flight, and its outputs that wait: another engine has both."""
        for sequence in state.sequences:
            self._scheduler.abort(sequence.request)
        for listener in self.listeners:
            listener.on_abort(state.id, self.num_steps)
        self.output_processor.remove(state, MOVED)
        self.backlog = [output for output in self.backlog if output.request_id != state.id]
        if self.is_idle:
            self._executor.leave_inference()

    # ------------------------------------------------------------------ parts of a step

    def _launch(self, plan: StepPlan, outputs: list[RequestOutput], ranks: RankSizes | None) -> bool:
        """Whether the step is in flight now."""
        started = time.perf_counter()
        try:
            step = self._executor.forward(plan, ranks)
            masks = self._masks(plan, outputs) if self.output_processor.num_structured else None
            self._executor.runner.sample(step, masks)
        except Exception as error:  # an error of a forward belongs to the requests of this step, not to the engine
            self._executor.report_failure(error, started)
            self._unlaunched = plan
            self._finish_steps(outputs)
            if self._unlaunched is not None:  # else it was cancelled with an earlier step that failed
                self._unlaunched = None
                if is_out_of_memory(error) and self._retract(plan, error):
                    return False
                what = f"the forward of step {plan.step} raised {type(error).__name__}: {error}"
                self._fail(plan, FailedStep(what), outputs)
            return False
        except BaseException:  # an interrupt: the step is undone, its requests are recomputed later
            self._unlaunched = plan
            self._cancel_unlaunched(outputs)
            raise
        self._in_flight.append(step)
        return True

    def _cancel_unlaunched(self, outputs: list[RequestOutput]) -> None:
        """Undo the step that was not launched, if there is one; a second interrupt leaves that to the next call."""
        if self._unlaunched is not None:
            self._finish_steps(outputs)
            plan, self._unlaunched = self._unlaunched, None
            if plan is not None:
                self._scheduler.cancel(plan)

    def _masks(self, plan: StepPlan, outputs: list[RequestOutput]) -> TokenMasks | None:
        """Which tokens the rows of structured output may draw; made while the device runs the step's forward.

        A mask needs the tokens before it on the host: if the step before has drawn one of them, it is finished now.
        """
        if needs_host_tokens(plan):
            self._finish_steps(outputs)
        return self.grammars.masks(plan.sampled, plan.prefill) if self._executor.runner.draws else None

    def _finish_steps(self, outputs: list[RequestOutput], *, leave: int = 0) -> None:
        """Read the steps in flight except the last `leave`, commit what they drew, and append to `outputs`.

        An interrupt while waiting for the device leaves the step in flight.
        """
        while len(self._in_flight) > leave:
            step = self._in_flight[0]
            output = self._executor.read(step)
            if output.error:
                self._fail_oldest(output, outputs)
                return
            del self._in_flight[0]
            parts = ((step.plan, output, True),) if self._verifier is None else self._verifier.parts(step.plan, output)
            ended: list[Request] = []
            touched: dict[str, RequestState] = {}
            for plan, part, is_last in parts:
                ended += self._commit(plan, part, touched, last=is_last)
            outputs.extend(self.output_processor.outputs_of(ended, self._scheduler.finish_by_text, touched))

    def _commit(self, plan: StepPlan, out: RunnerOutput, touched: dict[str, RequestState], last: bool) -> list[Request]:
        """Commit a step, or a part of one -> requests that have ended. Requests with news are put into `touched`."""
        scheduler, processor = self._scheduler, self.output_processor
        broken = [request for request in map(plan.sampled.__getitem__, out.bad) if request.finish_reason is None]
        for request in broken:
            processor.set_error(request, self._why_nothing(request))
            scheduler.finish(request, FinishReason.ERROR)
        taken, ended = scheduler.commit(plan, out.result, is_last=last)
        if processor.num_structured:
            ended = [*ended, *self._advance_grammars([plan.sampled[index] for index in taken])]
        processor.process(plan, out, taken, touched, scheduler.finish_by_text)
        return [*ended, *broken]

    def _why_nothing(self, request: Request) -> InferenceError:
        """Why a request drew no token."""
        try:
            refusal = None if request.params.structured is None else self.grammars.refusal(request)
        except InferenceError as error:  # its grammar was dropped from the cache and no longer compiles
            return error
        return refusal or FailedStep("the model's logits are not finite; check its weights and dtype")

    def _advance_grammars(self, requests: Sequence[Request]) -> list[Request]:
        """End structured output that its last token completed or that failed -> requests that it ended."""
        ended: list[Request] = []
        for request in requests:
            if request.params.structured is None:
                continue
            try:
                reason = FinishReason.STOP if self.grammars.advance(request) else None
            except InferenceError as error:
                self.output_processor.set_error(request, error)
                reason = FinishReason.ERROR
            if reason is not None:
                if request.finish_reason is None:
                    ended.append(request)
                self._scheduler.finish_by_text(request, reason, request.stop_reason)
        return ended

    def _fail_oldest(self, output: RunnerOutput, outputs: list[RequestOutput]) -> None:
        """The oldest step in flight failed: its requests end, or start over with those of later steps."""
        for step in self._in_flight:
            self._executor.read(step)  # so that nothing of it still runs; what it drew is dropped
        plan, *later = [step.plan for step in self._in_flight]
        later += [] if self._unlaunched is None else [self._unlaunched]
        self._in_flight, self._unlaunched = [], None
        error = FailedStep(output.error)
        if not output.is_out_of_memory or not self._retract(plan, error, later):
            self._fail(plan, error, outputs, later)

    def _retract(self, plan: StepPlan, error: Exception, later: Sequence[StepPlan] = ()) -> bool:
        """Try a step that ran out of memory again with fewer tokens. False: it had one token only."""
        if not self._scheduler.retract(plan, *later):
            return False
        log.warning(
            "step %d of %d tokens ran out of memory and is tried again with at most %d: %s",
            plan.step,
            plan.num_tokens,
            self._scheduler.budget.tokens,
            error,
        )
        return True

    def _fail(
        self, plan: StepPlan, error: InferenceError, outputs: list[RequestOutput], later: Sequence[StepPlan] = ()
    ) -> None:
        """End the requests of a step that failed; all other requests go on."""
        requests = {r.id: r for r in (*plan.decode, *(p.request for p in plan.prefill), *plan.sampled)}
        self._scheduler.cancel(plan, *later)
        outputs.extend(self.end_requests(requests.values(), error))


def needs_host_tokens(plan: StepPlan) -> bool:
    """Whether a request of structured output draws after a token that only the device has."""
    for request, start in zip(plan.decode, plan.decode_starts, strict=True):
        if request.params.structured is not None and len(request.tokens) <= start:
            return True
    return False
