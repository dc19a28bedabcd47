"""DynamicInferenceEngine: commands in, one step at a time, outputs out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_infer.assembly import assemble
from megatron_infer.config import InferenceConfig
from megatron_infer.errors import DuplicateRequest, InferenceError, InvalidPrompt, UnknownRequest
from megatron_infer.forward.runner import Flight
from megatron_infer.intake import Prompt, TextCodec, is_single_prompt
from megatron_infer.ledger import Ledger
from megatron_infer.outputs import RequestOutput
from megatron_infer.schedule.params import SamplingParams
from megatron_infer.schedule.plan import Plan
from megatron_infer.schedule.request import FinishReason
from megatron_infer.tracking import StreamMode


class Listener(Protocol):
    """Told of every command and step (recording, metrics); must not change the engine."""

    def on_add(self, request_id: str, token_ids: list[int], params: SamplingParams, step: int) -> None: ...

    def on_abort(self, request_id: str, step: int) -> None: ...

    def on_step(self, step: int, outputs: list[RequestOutput]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since construction, and where the engine stands now."""

    num_steps: int
    num_requests: int
    num_waiting: int
    num_running: int
    num_paused: int
    num_free_blocks: int
    num_blocks: int
    weight_version: int
    counters: dict[str, int]


class FailedStep(InferenceError):
    """A step's forward raised, or gave logits that are no numbers; carried by the requests it concerns."""


class DynamicInferenceEngine:
    """Serves requests from a paged cache with a live megatron-core model; one thread drives it.

    The model is adopted in place (parameters, optimizer state and training path untouched). `step()` schedules, runs
    and commits one step; with `InferenceConfig(overlap=True)` a step is committed after the next one is launched.
    Source: continuous batching after Orca (OSDI 2022), paged attention after arXiv:2309.06180.
    """

    def __init__(
        self,
        model: Any,
        config: InferenceConfig | None = None,
        *,
        tokenizer: TextCodec | None = None,
        eos_ids: Sequence[int] | None = None,
        device: str = "auto",
        model_name: str = "model",
    ) -> None:
        """eos_ids: token ids that end a sequence; None takes the tokenizer's. model_name enters the prefix hash."""
        if eos_ids is None:
            eos_ids = () if tokenizer is None else tokenizer.eos_ids
        self.config = config if config is not None else InferenceConfig()
        self.tokenizer = tokenizer
        self.ledger = Ledger(
            tokenizer,
            token_events=self.config.track_generated_token_events,
            pause_events=self.config.track_paused_request_events,
        )
        self.parts = assemble(
            model,
            self.config,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            device=device,
            name=model_name,
            on_event=self.ledger.on_event,
        )
        self.listeners: list[Listener] = []
        self.num_steps = 0
        self._previous: Flight | None = None
        self._backlog: list[RequestOutput] = []
        self._ids = map(str, itertools.count())

    # ------------------------------------------------------------------ commands, effective between steps
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: StreamMode = "cumulative",
    ) -> str:
        """Queue a prompt -> its request id. Raises RequestError (and queues nothing) when it cannot be served.

        stream: what step() reports while it runs: "cumulative" (all text and tokens so far), "delta" (what is new) or
        "final" (only once it has finished; costs nothing per token).
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidPrompt(
                f"params is a {type(params).__name__}, not SamplingParams; see SamplingParams.from_dict"
            )
        if stream not in ("cumulative", "delta", "final"):
            raise InvalidPrompt(f"stream is 'cumulative', 'delta' or 'final', got {stream!r}")
        if request_id is None:
            request_id = self._new_id()
        elif not isinstance(request_id, str) or not request_id:
            raise InvalidPrompt(f"a request id is a non-empty str, got {request_id!r}")
        elif request_id in self.ledger:
            raise DuplicateRequest(
                f"request id {request_id!r} is already in the engine; choose another or abort it first"
            )
        text, ids = self.parts.intake.tokenize(prompt)
        return self._queue(request_id, text, ids, params, stream)

    def _queue(
        self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, stream: StreamMode
    ) -> str:
        members = self.parts.intake.build(request_id, ids, params)
        self.ledger.open(request_id, text, ids, params, stream, members)
        self.parts.scheduler.add(members[0])
        for listener in self.listeners:
            listener.on_add(request_id, ids, params, self.num_steps)
        return request_id

    def abort(self, request_id: str) -> RequestOutput:
        """End a request wherever it stands -> what it has so far. Raises UnknownRequest."""
        group = self.ledger.get(request_id)
        if group is None:
            raise UnknownRequest(f"no request {request_id!r} in the engine: it has finished or was never added")
        for sample in group.samples:
            if sample.request.finish_reason is None:
                self.parts.scheduler.abort(sample.request)  # a token still in flight is dropped
                sample.close()
        for listener in self.listeners:
            listener.on_abort(request_id, self.num_steps)
        return self.ledger.retire(group)

    def has_unfinished(self) -> bool:
        """True while a request is unfinished or an output waits for the next step()."""
        return bool(len(self.ledger) or self._backlog or self._previous is not None)

    # ------------------------------------------------------------------ the loop
    def step(self) -> list[RequestOutput]:
        """One step -> outputs of the requests that have news, finished ones marked."""
        outputs, self._backlog = self._backlog, []
        parts = self.parts
        if not len(self.ledger) and self._previous is None:
            parts.leave_inference()
            return outputs
        started = time.perf_counter()
        parts.enter_inference()
        if parts.weights_differ():
            self._commit_previous(outputs)
            parts.weights_changed()
        plan = parts.scheduler.schedule()
        flight = self._launch(plan, outputs) if plan.num_tokens else None
        self._commit_previous(outputs)
        self._previous = flight
        if not self.config.overlap or not len(
            self.ledger
        ):  # what was launched for requests that ended is let go at once
            self._commit_previous(outputs)
        if self.config.check_invariants:
            parts.context.check()
        self.num_steps += 1
        for listener in self.listeners:
            listener.on_step(self.num_steps, outputs)
        parts.report(plan, time.perf_counter() - started, num_requests=len(self.ledger), step=self.num_steps)
        if not len(self.ledger) and self._previous is None:
            parts.leave_inference()
        return outputs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to the end -> outputs in their order. All are checked before any is queued.

        Requests added before go on meanwhile; their outputs come with the next step(). `on_output` is called as each
        of these finishes.
        """
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        wanted = self._params_for(batch, params)
        checked = [
            self._checked(prompt, one, index, len(batch))
            for index, (prompt, one) in enumerate(zip(batch, wanted, strict=True))
        ]
        place = {
            self._queue(self._new_id(), text, ids, one, "final"): index
            for index, ((text, ids), one) in enumerate(zip(checked, wanted, strict=True))
        }
        results: list[RequestOutput | None] = [None] * len(batch)
        others: list[RequestOutput] = []
        try:
            while place:
                for output in self.step():
                    if output.request_id not in place:
                        others.append(output)
                        continue
                    results[place.pop(output.request_id)] = output
                    if on_output is not None:
                        on_output(output)
        finally:
            self._backlog = others + self._backlog
            for request_id in place:  # only after an interrupt: leave nothing of this call behind
                self.abort(request_id)
        return [output for output in results if output is not None]

    def refresh_weights(self) -> None:
        """Say that weights changed in place: derived copies are rebuilt, KV of earlier weights is never matched again.

        Running requests keep the KV they have. Every step does this on its own when it finds parameters updated in
        place or re-pointed, and the first step after idling when any bit of them changed; call it when weights were
        written through `.data` while requests are running.
        """
        self.drain()
        self.parts.weights_changed()

    def drain(self) -> None:
        """Commit the step in flight, if there is one; its outputs come with the next step()."""
        self._commit_previous(self._backlog)

    def stats(self) -> EngineStats:
        scheduler = self.parts.scheduler
        return EngineStats(
            num_steps=self.num_steps,
            num_requests=len(self.ledger),
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_paused=scheduler.num_paused,
            num_free_blocks=self.parts.context.num_free_blocks,
            num_blocks=self.parts.sizes.num_usable_blocks,
            weight_version=self.parts.weight_version,
            counters=scheduler.stats.as_dict(),
        )

    # ------------------------------------------------------------------ one step's parts
    def _launch(self, plan: Plan, outputs: list[RequestOutput]) -> Flight | None:
        try:
            context = self.parts.context
            flight = self.parts.runner.forward(plan, context.take_table_writes(), context.take_moves())
            self.parts.runner.sample(flight)
            return flight
        except Exception as error:  # whatever a forward raises belongs to the requests of this step, not to the engine
            self._commit_previous(outputs)
            self._fail(
                plan, FailedStep(f"the forward of step {plan.step} raised {type(error).__name__}: {error}"), outputs
            )
            return None
        except BaseException:  # an interrupt: the step is undone, its requests are computed anew later
            self._commit_previous(self._backlog)
            self.parts.scheduler.cancel(plan)
            raise

    def _commit_previous(self, outputs: list[RequestOutput]) -> None:
        """Read the step in flight, apply it, and append what it brought to `outputs`."""
        flight, self._previous = self._previous, None
        if flight is None:
            return
        plan, drawn, scheduler = flight.plan, flight.read(), self.parts.scheduler
        broken = [plan.sampled[index] for index in drawn.bad]
        for request in broken:
            self.ledger.set_error(request, FailedStep("the model's logits are not finite; check its weights and dtype"))
            scheduler.finish(request, FinishReason.ERROR)
        alive = self.ledger.alive(plan)
        ended = scheduler.commit(plan, drawn.result)
        outputs.extend(self.ledger.take(plan, drawn, alive, (*ended, *broken), scheduler))

    def _fail(self, plan: Plan, error: InferenceError, outputs: list[RequestOutput]) -> None:
        """End the requests of a step whose forward raised; everything else goes on."""
        members = {r.id: r for r in (*plan.decode, *(p.request for p in plan.prefill), *plan.sampled)}
        self.parts.scheduler.cancel(plan)
        for request in members.values():
            if request.finish_reason is None:
                self.ledger.set_error(request, error)
                self.parts.scheduler.finish(request, FinishReason.ERROR)
        outputs.extend(self.ledger.close(members.values()))

    def _new_id(self) -> str:
        return next(i for i in self._ids if i not in self.ledger)

    def _checked(self, prompt: Prompt, params: SamplingParams, index: int, count: int) -> tuple[str | None, list[int]]:
        """(text, ids) of a prompt that can be served; an error names its place when there are several."""
        try:
            text, ids = self.parts.intake.tokenize(prompt)
            self.parts.intake.check(ids, params)
            self.parts.intake.check_params(params)
        except InferenceError as error:
            if count > 1:
                error.args = (f"prompt {index}: {error}",)
            raise
        return text, ids

    @staticmethod
    def _params_for(batch: list[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params if params is not None else SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise InvalidPrompt(
                f"{len(batch)} prompts but {len(params)} SamplingParams; pass one, or one for each prompt"
            )
        return list(params)
