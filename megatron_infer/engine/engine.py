"""DynamicInferenceEngine: commands in, one step at a time, outputs out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.durable.snapshot import LoadReport
from megatron_infer.durable.snapshot_manager import SnapshotManager
from megatron_infer.engine.build import assemble
from megatron_infer.engine.command_relay import CommandRelay
from megatron_infer.engine.controls import EngineControls
from megatron_infer.engine.states import EngineState
from megatron_infer.engine.stats import figures_of
from megatron_infer.engine.step_loop import Listener, StepLoop
from megatron_infer.errors import (
    DuplicateRequest,
    InferenceError,
    InvalidPrompt,
    UnknownRequest,
)
from megatron_infer.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.requests.input_processor import Prompt, TextCodec, is_single_prompt, salt_of
from megatron_infer.requests.output_processor import OutputProcessor
from megatron_infer.requests.request_state import StreamMode


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
    state: str
    counters: dict[str, int]

    @classmethod
    def of(cls, engine: DynamicInferenceEngine) -> EngineStats:
        scheduler = engine.parts.scheduler
        return cls(
            num_steps=engine.num_steps,
            num_requests=len(engine.output_processor),
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_paused=scheduler.num_paused,
            num_free_blocks=engine.parts.context.num_free_blocks,
            num_blocks=engine.parts.sizes.num_usable_blocks,
            weight_version=engine.parts.weight_version,
            state=engine.state.value,
            counters=scheduler.stats.as_dict(),
        )


class DynamicInferenceEngine(EngineControls):
    """Serves requests from a paged cache with a live megatron-core model; one thread drives it.

    A model over several ranks has an engine on each, and they work as one: requests are added on the first (the
    leader), everything else is called on every rank, by the script or by `follow()`. Only what is marked so is the
    leader's alone. A rank that dies or stalls ends the others with RankFailure, see collective_timeout_s.

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
        owns_weights: bool = False,
    ) -> None:
        """eos_ids: token ids that end a sequence; None takes the tokenizer's. model_name enters the prefix hash.

        owns_weights: nobody else uses the model, so that a suspend may move its parameters off a device. A model that
        is being trained belongs to its trainer: its parameters stay, and only copies derived from them go.
        """
        if eos_ids is None:
            eos_ids = () if tokenizer is None else tokenizer.eos_ids
        self.config = config if config is not None else InferenceConfig()
        self.tokenizer = tokenizer
        self.output_processor = OutputProcessor(
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
            owns_weights=owns_weights,
            on_event=self.output_processor.on_event,
        )
        self.loop = StepLoop(
            self.parts,
            self.output_processor,
            overlap=self.config.overlap,
            check_invariants=self.config.check_invariants,
        )
        super().__init__(self.parts, self.loop)
        self.snapshot_manager = SnapshotManager(self.parts, self.output_processor)
        if self.parts.rank_group.lockstep is not None:
            self.relay = CommandRelay(self.parts.rank_group.lockstep, self.loop, self._queue)
            self.loop.set_costs = self.relay.price

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
        "final" (only once it has finished; costs nothing per token). With several ranks: on the leader.
        """
        if self.relay is not None:
            self.relay.require_leader("add_request()")
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
        elif self._taken(request_id):
            remedy = "abort it" if request_id in self.output_processor else "acknowledge its output"
            raise DuplicateRequest(
                f"request id {request_id!r} is already in the engine; choose another or {remedy} first"
            )
        text, ids = self.parts.input_processor.tokenize(prompt)
        return self._queue(request_id, text, ids, params, stream, salt_of(prompt))

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Begin what `add_request` would wait for, a grammar to compile; from any thread. None: nothing."""
        return (
            None if params.structured is None else self.parts.input_processor.grammars.cache.compile(params.structured)
        )

    def _queue(
        self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, stream: StreamMode, salt: str
    ) -> str:
        members = self.parts.input_processor.build(request_id, ids, params, salt=salt)
        self.output_processor.open(request_id, text, ids, params, stream, members)
        self.parts.scheduler.add(members[0])
        if self.snapshot_manager.journal is not None:
            self.snapshot_manager.accepted(request_id)
        if self.relay is not None and self.relay.lockstep.is_leader:
            self.relay.add(request_id, text, ids, params, stream=stream, salt=salt)
        for listener in self.listeners:
            listener.on_add(request_id, ids, params, self.num_steps)
        return request_id

    def abort(self, request_id: str) -> RequestOutput:
        """End a request wherever it stands -> what it has so far. Raises UnknownRequest. On the leader."""
        if self.relay is not None:
            self.relay.require_leader("abort()")
        if request_id not in self.output_processor:
            raise UnknownRequest(f"no request {request_id!r} in the engine: it has finished or was never added")
        output = self.loop.abort(request_id)
        if self.relay is not None:
            self.relay.pass_on("abort", id=request_id)
        if self.snapshot_manager.journal is not None:
            self.snapshot_manager.flush()
        return output

    def has_unfinished(self) -> bool:
        """True while a request is unfinished or an output waits for the next step(). Called on every rank."""
        self._meet("has_unfinished()")
        return bool(self.loop.backlog) or not self.loop.is_idle

    def can_step(self) -> bool:
        """True when step() has something to do: an output to hand out, or work in the RUNNING state. On the leader."""
        if self.relay is not None:
            self.relay.require_leader("can_step()")
        return bool(self.loop.backlog) or (self.state is EngineState.RUNNING and not self.loop.is_idle)

    @property
    def num_steps(self) -> int:
        return self.loop.num_steps

    @property
    def listeners(self) -> list[Listener]:
        return self.loop.listeners

    # ------------------------------------------------------------------ the loop
    def step(self) -> list[RequestOutput]:
        """One step -> outputs of the requests that have news, finished ones marked.

        While paused or suspended it hands out what waits (aborts, a step committed on the way) and raises WrongState
        when nothing does.
        """
        self.lifecycle.require_whole_weights("step()")
        changed = None if self.relay is None else self.relay.begin_step(running=self.state is EngineState.RUNNING)
        if self.state is not EngineState.RUNNING:
            if not self.loop.backlog:
                self.lifecycle.require("step()", EngineState.RUNNING)
            return self._handed_out(self.loop.take_backlog())
        return self._handed_out(self.loop.step(changed))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to the end -> outputs in their order. All are checked before any is queued.

        Requests added before go on meanwhile; their outputs come with the next step(). `on_output` is called as each
        of these finishes. With several ranks every rank calls it and has the outputs; the leader's prompts count.
        """
        self.lifecycle.require_able("generate()")
        take_in = partial(self._take_in, prompts, params)
        ids = take_in() if self.relay is None else self.relay.take_in(take_in)
        place = {request_id: index for index, request_id in enumerate(ids)}
        results: list[RequestOutput | None] = [None] * len(place)
        others: list[RequestOutput] = []
        try:
            while place:
                outputs = self.step()
                others += [output for output in outputs if output.request_id not in place]
                for output in outputs:
                    if output.request_id in place:
                        results[place.pop(output.request_id)] = output
                        if on_output is not None:
                            on_output(output)
        finally:
            # After an interrupt nothing of this call is left behind, neither requests nor their outputs.
            self.loop.backlog = [out for out in others + self.loop.backlog if out.request_id not in place]
            for request_id in place:
                if request_id in self.output_processor and (self.relay is None or self.relay.lockstep.is_leader):
                    self.abort(request_id)
        return [output for output in results if output is not None]

    def _take_in(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[str]:
        """Queue all prompts or, when one cannot be served, none -> their ids."""
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        wanted = _params_for(batch, params)
        checked = [
            self._checked(prompt, one, index, len(batch))
            for index, (prompt, one) in enumerate(zip(batch, wanted, strict=True))
        ]
        return [
            self._queue(self._new_id(), text, ids, one, "final", salt_of(prompt))
            for (text, ids), one, prompt in zip(checked, wanted, batch, strict=True)
        ]

    def drain(self) -> None:
        """Commit the step in flight, if there is one; its outputs come with the next step(). Called on every rank."""
        self._meet("drain()")
        self.loop.drain()

    def followed(self) -> dict[str, Callable[[Any], Any]]:
        return super().followed() | {
            "step()": lambda given: self.step(),
            "generate()": lambda given: self.generate([]),
            "has_unfinished()": lambda given: self.has_unfinished(),
            "drain()": lambda given: self.drain(),
            "save_requests()": lambda given: self.save_requests(**given),
            "load_requests()": lambda given: self.load_requests(**given),
        }

    # ------------------------------------------------------------------ requests that outlive the process
    def save_requests(self, path: str | os.PathLike[str], *, kv: bool = False) -> None:
        """Write every unfinished request to a file, with its keys and values if `kv`; the engine goes on.

        With several ranks: on the leader, or with kv on every rank, each of which writes its part beside `path`.
        """
        if kv:
            self._meet("save_requests()", path=os.fspath(path), kv=True)
            self.lifecycle.require("save_requests(kv=True)", EngineState.RUNNING, EngineState.PAUSED)
            self.loop.drain()
        elif self.relay is not None:
            self.relay.require_leader("save_requests() without kv")
        self.snapshot_manager.save(path, self.loop.backlog, kv=kv)

    def load_requests(self, path: str | os.PathLike[str]) -> LoadReport:
        """Take in a file's requests, which go on with the tokens they would have drawn; after SnapshotError none is.

        Called on every rank, each of which reads the file. Keys and values come back where the same layout saved them;
        elsewhere the requests' tokens are computed again, see `LoadReport.recomputed`.
        """
        self._meet("load_requests()", path=os.fspath(path))
        self.lifecycle.require("load_requests()", EngineState.RUNNING, EngineState.PAUSED)
        with self.parts.rank_group.together("reading saved requests"):
            content = self.snapshot_manager.read(path)
        self.loop.drain()
        return self.snapshot_manager.put_back(content, self.loop.backlog)

    def keep_snapshots(
        self, path: str | os.PathLike[str] | None, *, every_steps: int = 64, fsync: bool = False
    ) -> None:
        """Keep requests in `path` and a journal so that SIGKILL loses none (see `SnapshotManager.keep`); None ends it.

        With several ranks: on the leader.
        """
        if self.relay is not None:
            self.relay.require_leader("keep_snapshots()")
        self.snapshot_manager.keep(path, self.loop.backlog, every_steps=every_steps, fsync=fsync)

    def acknowledge(self, request_ids: Sequence[str] | None = None) -> int:
        """Say that finished outputs (None: all) are stored, so that kept files drop them -> how many."""
        return self.snapshot_manager.acknowledge(request_ids)

    def stats(self) -> EngineStats:
        return EngineStats.of(self)

    def figures(self) -> EngineSnapshot:
        """What metrics are made of; from any thread."""
        return figures_of(self.parts, self.output_processor.meter, state=self.state.value, num_steps=self.num_steps)

    def _new_id(self) -> str:
        return self.parts.input_processor.new_id(self._taken)

    def _taken(self, request_id: str) -> bool:
        return request_id in self.output_processor or request_id in self.snapshot_manager.owed

    def _handed_out(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Outputs as they leave step(): what is kept knows of them first, or the next step() brings them."""
        if self.snapshot_manager.journal is not None:
            try:
                self.snapshot_manager.stepped([*outputs, *self.loop.backlog])
            except BaseException:
                self.loop.backlog = outputs + self.loop.backlog
                raise
        return outputs

    def _checked(self, prompt: Prompt, params: SamplingParams, index: int, count: int) -> tuple[str | None, list[int]]:
        """(text, ids) of a prompt that can be served; an error names its place when there are several."""
        try:
            text, ids = self.parts.input_processor.tokenize(prompt)
            self.parts.input_processor.check(ids, params)
            self.parts.input_processor.check_params(params)
        except InferenceError as error:
            if count > 1:
                error.args = (f"prompt {index}: {error}",)
            raise
        return text, ids


def _params_for(batch: list[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params if params is not None else SamplingParams()] * len(batch)
    if len(params) != len(batch):
        raise InvalidPrompt(f"{len(batch)} prompts but {len(params)} SamplingParams; pass one, or one for each prompt")
    return list(params)
