"""DynamicInferenceEngine: commands in, one step at a time, outputs out."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.config.request_metadata import Scalar
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.adapters import AdapterInfo, AdapterSource
from megatron_infer.engine.build_engine import build_engine
from megatron_infer.engine.chosen_config import ConfigOrOptions
from megatron_infer.engine.command_relay import DISMISS, PROMPTS, ROLLOUT, SERVE, StepStart
from megatron_infer.engine.durable.parcel import Parcel
from megatron_infer.engine.durable.snapshot import LoadReport
from megatron_infer.engine.lifecycle_commands import COMMANDS, EngineCommands, Group
from megatron_infer.engine.logits_hooks import LogitsHook
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.engine.requests.input_processor import Prompt, TextCodec, is_single_prompt
from megatron_infer.engine.requests.request_state import StreamMode
from megatron_infer.engine.states import EngineState
from megatron_infer.engine.stats import EngineStats
from megatron_infer.engine.suspend import MemoryReport
from megatron_infer.errors import LockstepError, RankFailure, RequestError, TransitionTimeout, WrongState
from megatron_infer.models.lora.reader import PeftFields
from megatron_infer.outputs.request_output import OnError, RequestOutput, check_on_error, checked_outputs
from megatron_infer.scheduler.context.prefix_events import PrefixEvents
from megatron_infer.scheduler.drafts import SpecDecodeMetrics

StrPath = str | os.PathLike[str]
Drawn = Sequence[DrawnSequence]


class DynamicInferenceEngine(EngineCommands[None, MemoryReport, int]):
    """Serves requests from a paged cache with a live megatron-core model; one thread drives it.

    A model over several ranks has an engine on each, and they work as one: requests are added on rank 0 (the leader);
    all other calls are made on every rank, by the script or by `follow()`, unless they say that they are the leader's.
    A rank that dies or stalls ends the others with RankFailure, see collective_timeout_s.
    The model is adopted in place (parameters, optimizer state and training path untouched). `step()` schedules, runs
    and commits one step; with `InferenceConfig(overlap=True)` a step is committed after the next one is launched.
    Source: continuous batching after Orca (OSDI 2022), paged attention after arXiv:2309.06180.
    """

    def __init__(
        self,
        model: Any,
        config: ConfigOrOptions = None,
        *,
        tokenizer: TextCodec | None = None,
        eos_ids: Sequence[int] = (),
        device: str = "auto",
        model_name: str = "model",
        owns_weights: bool = False,
    ) -> None:
        """config: as `LLM` has it. eos_ids: ids that end a sequence, besides the tokenizer's. model_name enters the
        prefix hash. owns_weights: only the engine uses the model: a suspend may move its parameters, no step reads them
        for changes, on a CPU those that linears pack are freed (`weights.unpack()` and state dicts bring them back)."""
        eos_ids = tuple(dict.fromkeys((*getattr(tokenizer, "eos_ids", ()), *eos_ids)))
        named = {"device": device, "name": model_name}
        built = build_engine(model, config, tokenizer=tokenizer, eos_ids=eos_ids, owns=owns_weights, **named)
        setup = built.setup
        self.config, self.tokenizer = setup.config, tokenizer
        """`config` has decided what the caller left to the device."""
        self.model, self.shape = setup.adopted.live, setup.adopted.shape
        """The live model, adopted in place, and its sizes on this rank."""
        self.device, self.kernels, self.rank_group = setup.device, setup.kernels, setup.rank_group
        """`kernels.table()` says which backend runs what, and why not the others."""
        self.sizes = setup.agreed.sizes
        self.weights, self.loop, self.replay = built.weights, built.loop, built.replay
        self.input_processor, self.output_processor = built.input_processor, built.output_processor
        self.lifecycle, self.relay, self.suspension = built.lifecycle, built.relay, built.controls.suspension
        """`suspension.tags`: what is suspended. `suspension.arrived_s`: how long the latest resume's copies took."""
        self._scheduler, self._stat_logger = built.scheduler, built.stat_logger
        self._intake, self.controls = built.intake, built.controls

    @property
    def state(self) -> EngineState:
        return self.lifecycle.state

    @property
    def weight_version(self) -> int:
        """Version of the weights that steps compute with, see `set_weight_version`; 0 at first."""
        return self.weights.version

    @property
    def num_steps(self) -> int:
        return self.loop.num_steps

    def stats(self) -> EngineStats:
        """Counters since construction and gauges as they are now; from any thread."""
        return self._stat_logger.stats(state=self.state.value, num_steps=self.num_steps)

    def figures(self) -> EngineSnapshot:
        """Counters and gauges as the metrics export them; from any thread."""
        return self._stat_logger.snapshot(state=self.state.value, num_steps=self.num_steps)

    def spec_decode_metrics(self) -> SpecDecodeMetrics | None:
        """What was drafted and kept; None without `speculative`. From any thread."""
        return self._stat_logger.spec_decode_metrics()

    def prefix_events(self) -> PrefixEvents | None:
        """A reader of what the prefix cache publishes and forgets from now on; None without a prefix cache."""
        return PrefixEvents(self._scheduler.context.pool) if self.config.enable_prefix_caching else None

    # ------------------------------------------------------------------ commands, effective between steps
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: StreamMode = "cumulative",
        metadata: Mapping[str, Scalar] | None = None,
        caller: int = 0,
    ) -> str:
        """Queue a prompt -> its request id. Raises RequestError (and queues nothing) when it cannot be served.

        stream: what step() reports: "cumulative" (all text and tokens so far), "delta" (what is new) or "final" (once
        it has finished). metadata: instead of that of `params`. caller: see `CallerShares`. On the leader.
        """
        self.relay.require_leader("add_request()")
        return self._intake.add(prompt, params, request_id=request_id, stream=stream, metadata=metadata, caller=caller)

    def on_logits(self, hook: LogitsHook) -> Callable[[], None]:
        """Call `hook(logits, metadata)` in each step before tokens are drawn -> what removes it again.
        logits: a row of the padded vocabulary for each token to draw, which it may change or replace; log probabilities
        follow. metadata: see request_metadata_types. On every rank, with a hook that does the same on each.
        """
        return self.controls.on_logits(hook)

    def prepare(self, params: SamplingParams, caller: int = 0) -> Future[Any] | None:
        """Begin what `add_request` would wait for, a grammar, in the caller's turn; from any thread. None: nothing."""
        return self.input_processor.grammars.prepare(params.structured, caller)

    def continue_request(
        self, request_id: str, ids: list[int], params: SamplingParams, drawn: Drawn, *, salt: str = "", caller: int = 0
    ) -> None:
        """Go on with a request that another engine began, on the leader.
        Its delta outputs begin after `drawn`; all else is as if it had not moved. RequestError: it does not fit.
        """
        self.relay.require_leader("continue_request()")
        self._intake.continue_from(request_id, ids, params, drawn, salt=salt, caller=caller)

    def hand_out(self, request_id: str, *, whole: bool = False) -> Parcel:
        """Take an unfinished request out of the engine, in any state -> the request with all that is computed of it,
        for `take_in` of another engine. Outputs that step() has not returned go with it. Raises UnknownRequest.
        Called on every rank, each of which has the part with its own memory. whole: the leader has all parts as one.
        """
        return self.controls.hand_out(request_id, whole=whole)

    def take_in(
        self,
        parcel: Parcel | bytes | None,
        *,
        request_id: str | None = None,
        drawn: Drawn | None = None,
        caller: int = 0,
        whole: bool = False,
    ) -> LoadReport:
        """Go on with a request that another engine has handed out, as if it had not moved; bytes: `Parcel.to_bytes`.
        Where its memory cannot be used, its tokens are computed again: `LoadReport.recomputed` says why.
        request_id: its id here, None: the one it had. drawn: what its caller has, None: what was handed out; deltas
        begin after that. SnapshotError: nothing was taken in. Called on every rank with the part of that rank; whole:
        with one that was handed out so on the leader, and None on the others.
        """
        return self.controls.take_in(parcel, request_id, drawn, caller, whole=whole)

    @property
    def is_short_of_blocks(self) -> bool:
        """Whether a request may be evicted soon. On the leader."""
        return self._scheduler.preemption.is_short

    def next_to_move(self, transfer_s_per_byte: float) -> Iterator[str]:
        """Requests that can be evicted, the one that is evicted next if blocks run out first: those with which another
        engine goes on, with their memory, for less than that next eviction costs. On the leader."""
        victims, evict_s = self._scheduler.preemption.next_victims()
        states = {state.id: state for state in map(self.output_processor.state_of, victims)}
        for state in states.values():
            leases = [one.request.lease for one in state.sequences if one.request.lease is not None]
            num_blocks = len({block for lease in leases for block in lease.blocks})
            own_bytes = num_blocks * self.sizes.block_bytes + len(leases) * self.sizes.state_slot_bytes
            if self.relay.size * own_bytes * transfer_s_per_byte < evict_s:
                yield state.id

    def num_published(self, token_ids: Sequence[int], *, adapter: str | None = None, salt: str = "") -> int:
        """How many leading tokens the prefix cache holds now, for `Parcel.without`. On the leader."""
        return self._scheduler.num_published(token_ids, adapter=adapter, salt=salt)

    def abort(self, request_id: str) -> RequestOutput:
        """End a request in any state -> what it has so far. Raises UnknownRequest. On the leader."""
        self.relay.require_leader("abort()")
        return self._intake.abort(request_id)

    def has_unfinished(self) -> bool:
        """True while a request is unfinished or an output waits for the next step(). Called on every rank."""
        mine = bool(self.loop.backlog) or not self.loop.is_idle
        met = self.relay.meet("has_unfinished()", flag=mine and self.relay.own_requests)
        return met.flag or bool(self.loop.backlog) or not self.loop.is_idle

    def can_step(self) -> bool:
        """Whether step() has something to do: an output to hand out, or work while RUNNING. On the leader.

        With `dp_attention` always while RUNNING: other ranks may have work, and their steps wait for this rank.
        """
        self.relay.require_leader("can_step()")
        has_work = self.relay.own_requests or not self.loop.is_idle
        return bool(self.loop.backlog) or (self.state is EngineState.RUNNING and has_work)

    # ------------------------------------------------------------------ the loop
    def step(self, among: Collection[str] | None = None) -> list[RequestOutput]:
        """One step -> outputs of the requests that have news, finished ones marked.
        among: ids of requests that may run (None: all), the leader's; others keep their memory unless these lack it.
        While paused or suspended it hands out outputs that wait, and raises WrongState when there are none.
        """
        self.lifecycle.require_whole_weights("step()")
        start = self.relay.begin_step(among, running=self.state is EngineState.RUNNING)
        if not self.loop.backlog:
            self.lifecycle.require("step()", EngineState.RUNNING)
        is_running = self.state is EngineState.RUNNING
        return self.controls.kept(self._step(start) if is_running else self.loop.take_backlog())

    def _step(self, start: StepStart) -> list[RequestOutput]:
        return self.loop.step(start.weights_changed, start.among, ranks_have_work=start.ranks_have_work)

    def serve_others(self, before: str = "the end of a call", *, deadline: float = math.inf) -> None:
        """With `dp_attention`, at the end of a call that stepped: this rank's experts serve the steps of the other
        ranks until all ranks have called it with the same `before`. Its own requests wait. Without, it does nothing.

        In any state. deadline: on time.monotonic's clock. Raises TransitionTimeout past it, after which this rank has
        to step on, or to call `serve_step` where it cannot.
        """
        while self.relay.own_requests and not self.serve_step(before):
            if time.monotonic() > deadline:
                raise TransitionTimeout(f"{before}: not all ranks of the engine came to it in time")

    def serve_step(self, before: str = "") -> bool:
        """One round of `serve_others` -> whether it was the last one. Without `before` no round is the last one."""
        is_running = self.state is EngineState.RUNNING and self.lifecycle.incomplete_reason is None
        start = self.relay.begin_serving(before, running=is_running)
        if is_running and not start.has_ended:
            self.loop.backlog[:0] = self._step(start)
        return start.has_ended

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Run prompts to the end -> outputs in their order; all are checked before any is queued, and requests added
        before go on meanwhile. `on_output` is called as each of these finishes. If any fail, GenerationError has all
        outputs; on_error "return": theirs have `error`. On every rank, which has the outputs of its own prompts; ranks
        with equal prompts share them. A refusal of one rank's prompts is raised there once the others are done.
        """
        check_on_error(on_error)
        self.lifecycle.require_able("generate()")
        try:
            return checked_outputs(self._generate(prompts, params, on_output), on_error)
        finally:
            self.serve_others()

    def _generate(
        self, prompts: Any, params: Any, on_output: Callable[[RequestOutput], None] | None
    ) -> list[RequestOutput]:
        try:
            sources, prompts = self.relay.exchange(partial(_read, prompts), params)
        except (LockstepError, RankFailure):
            raise
        except Exception:  # these prompts cannot be read, and the other ranks generate
            self._take_in_and_run(None, [], None, None)
            raise
        return self._take_in_and_run(sources[self.relay.rank], prompts, params, on_output)

    def _take_in_and_run(
        self, source: int | None, prompts: Any, params: Any, on_output: Callable[[RequestOutput], None] | None
    ) -> list[RequestOutput]:
        """The second round of `generate`, and its steps. source: None on a rank that only steps along."""
        add_all = partial(self._intake.add_all, [] if prompts is None else prompts, params)
        given, refusal = self.relay.take_in(add_all, source)
        own = {} if source is None else given[source]
        every = [name for one in given for name in one.get("ids", ())]
        outputs = _run_to_end(self, every, own.get("ids", ()), on_output)
        if refusal is not None:
            raise refusal
        if "refused" in own:
            raise RequestError(f"rank {source} refused the prompts: {own['refused']}")
        return outputs

    def profile(self, path: StrPath | None, *, steps: int = 16) -> None:
        """Trace this rank's next `steps` steps with torch.profiler, and write `path`. None: now, with those so far."""
        self.controls.profile(path, steps)

    def drain(self) -> None:
        """Commit the step in flight, if there is one; its outputs come with the next step(). Called on every rank."""
        self.relay.meet("drain()")
        self.loop.drain()

    # ------------------------------------------------------------------ memory and weights
    # `EngineCommands` has pause, unpause, suspend, resume, set_weight_version and reset_prefix_cache.

    def _command(self, name: str, **args: Any) -> Any:
        return getattr(self.controls, name)(**args)

    def suspended(
        self, mode: str | KVCacheManagementMode | None = None, tags: Iterable[str] | None = None
    ) -> AbstractContextManager[MemoryReport]:
        """`with engine.suspended(): train()`: resumes whatever the body raises; a failed resume is raised with it."""
        return self.controls.suspended(mode, tags)

    def refresh_weights(self) -> None:
        """set_weight_version(the next number): call it when weights were written through `.data` while requests run.
        Other updates in place every step sees, and any the first after idling, unless the engine owns the weights.
        """
        self.set_weight_version(self.weight_version + 1)

    def verify_weights(self) -> None:
        """Compute every copy in `weights.derived` again; raise StaleCache if one or a module differs."""
        self.relay.meet("verify_weights()")
        self.weights.verify()

    def load_adapter(
        self,
        name: str,
        source: AdapterSource,
        *,
        config: PeftFields | None = None,
        replace: bool = False,
        running: str = "keep",
    ) -> AdapterInfo:
        """Load a LoRA adapter from a PEFT directory, tensors with adapter_config.json's fields as `config`, or what
        `controls.adapters` reads. replace: a loaded name may get another content; then running "keep" lets its requests
        go on with the KV they have, "recompute" recomputes it. In any state; called on every rank.
        """
        return self.controls.adapters.load(name, source, config=config, replace=replace, running=running)

    def unload_adapter(self, name: str, *, abort: bool = False) -> None:
        """Forget an adapter: `EngineAdapters.unload`. Called on every rank."""
        self.controls.adapters.unload(name, abort=abort)

    def adapters(self) -> list[AdapterInfo]:
        """The loaded adapters, in the order in which they were loaded."""
        return self.controls.adapters.loaded()

    # ------------------------------------------------------------------ several ranks
    def follow(self, also: Mapping[str, Callable[[Any], Any]] | None = None) -> None:
        """On every rank but the leader, for scripts that only it runs: take part in its calls until it calls dismiss().

        also: further calls of the leader's, by the name that they pass to `relay.meet`. Outputs are the leader's.
        """
        if self.relay.is_leader:
            raise WrongState("follow() is for the ranks beside the leader of an engine", state=self.state.value)
        self.relay.follow(self.followed() | dict(also or {}))

    def dismiss(self) -> None:
        """On the leader: the other ranks' follow() returns. Without other ranks it does nothing."""
        self.relay.require_leader(DISMISS)
        self.relay.meet(DISMISS)

    def followed(self) -> dict[str, Callable[[Any], Any]]:
        """The leader's calls, by name, as this rank makes them with the leader's arguments."""
        return _calls_of(self)

    # ------------------------------------------------------------------ requests that outlive the process
    def save_requests(self, path: StrPath, *, kv: bool = False) -> None:
        """Write every unfinished request to a file, with its keys and values if `kv`; the engine goes on.
        Called on the leader, with kv on every rank: each writes its part beside `path`.
        Context-parallel engines are given one path; from the second on each has a file next to it (`rank_files`).
        """
        self.controls.save_requests(path, kv=kv)

    def load_requests(self, path: StrPath, *, changed_adapters: str = "refuse") -> LoadReport:
        """Take in a file's requests, which go on with the tokens they would have drawn; after SnapshotError none is.
        Called on every rank, each of which reads the file. Keys and values come back where the same layout saved them,
        see `LoadReport.recomputed`. changed_adapters: "refuse", or "recompute" requests whose adapter has changed.
        """
        return self.controls.load_requests(path, changed_adapters)

    def keep_snapshots(self, path: StrPath | None, *, every_steps: int = 64, fsync: bool = False) -> None:
        """On the leader: keep requests in `path` and a journal: `SnapshotManager.keep`. None ends it."""
        self.relay.require_leader("keep_snapshots()")
        self.controls.snapshots.keep(path, self.loop.backlog, every_steps=every_steps, fsync=fsync)

    def acknowledge(self, request_ids: Sequence[str] | None = None) -> int:
        """Finished outputs (None: all) are stored by the caller, so that kept files drop them -> how many."""
        return self.controls.snapshots.acknowledge(request_ids)


def _read(prompts: Any) -> Any:
    """Prompts that can be read more than once."""
    return prompts if prompts is None or is_single_prompt(prompts) else list(prompts)


def _run_to_end(
    engine: DynamicInferenceEngine,
    ids: Sequence[str],
    own: Sequence[str],
    on_output: Callable[[RequestOutput], None] | None,
) -> list[RequestOutput]:
    """Step until these requests of all ranks have finished -> the outputs of `own`, in order.

    After an error they are aborted.
    """
    place = {request_id: index for index, request_id in enumerate(own)}
    results: list[RequestOutput | None] = [None] * len(place)
    unfinished, others = set(ids), []
    try:
        while unfinished:
            outputs = engine.step()
            others += [output for output in outputs if output.request_id not in unfinished]
            for output in outputs:
                unfinished.discard(output.request_id)
                if output.request_id in place:
                    results[place[output.request_id]] = output
                    if on_output is not None:
                        on_output(output)
    finally:
        # After an interrupt nothing of this call is left behind, neither requests nor their outputs.
        engine.loop.backlog = [out for out in others + engine.loop.backlog if out.request_id not in unfinished]
        for request_id in ids:
            if request_id in unfinished and request_id in engine.output_processor and engine.relay.is_leader:
                engine.abort(request_id)
    return [output for output in results if output is not None]


def _follow(method: Callable[..., Any], given: Mapping[str, Any] | None) -> Any:
    return method(**(given or {}))


def _follow_parcel(engine: DynamicInferenceEngine, given: Mapping[str, Any]) -> LoadReport:
    drawn = None if given["drawn"] is None else [DrawnSequence(**one) for one in given["drawn"]]
    return engine.take_in(None, **{**given, "drawn": drawn})


def _calls_of(engine: DynamicInferenceEngine) -> dict[str, Callable[[Any], Any]]:
    adapters = engine.controls.adapters
    methods = {row.call: getattr(engine, row.name) for row in COMMANDS.values() if row.group is Group.ENGINE}
    for name in ("has_unfinished", "drain", "verify_weights", "save_requests", "load_requests", "hand_out"):
        methods[f"{name}()"] = getattr(engine, name)
    for name in ("read", "load", "unload", "undo", "settle"):
        methods[f"{name}_adapter()"] = getattr(adapters, name)
    methods["forget_reading()"] = adapters.forget
    return {call: partial(_follow, method) for call, method in methods.items()} | {
        "step()": engine.step,
        SERVE: engine.serve_step,
        "take_in()": partial(_follow_parcel, engine),
        "generate()": lambda given: engine._take_in_and_run(None, [], None, None),
        ROLLOUT: lambda given: engine.relay.meet(ROLLOUT),
        PROMPTS: lambda given: engine.relay.meet(PROMPTS),
    }
