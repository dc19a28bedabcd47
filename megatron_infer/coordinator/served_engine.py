"""Adapts an engine to a replica: its description, adding requests (also continued ones), outputs as messages."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import msgspec

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import refuse_synthetic
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.protocol import EngineInfo, EngineNow
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.outputs.embeddings import flattened
from megatron_infer.outputs.request_output import CompletionOutput, RequestMetrics, RequestOutput
from megatron_infer.outputs.schema import (
    Piece,
    aged,
    bytes_to_ids,
    failure_of,
    floats_to_bytes,
    ids_to_bytes,
    piece_of,
    prompt_record,
)
from megatron_infer.scheduler.context.prefix_events import PrefixEvents

if TYPE_CHECKING:
    from megatron_infer.engine.durable.parcel import Parcel

log = logging.getLogger("megatron_infer.coordinator")


class ServedEngine(Protocol):
    """The engine that a replica serves; DynamicInferenceEngine is one.

    It may also have the controls (pause, suspend, ...), and, unless it is a DynamicInferenceEngine,
    `replica_info() -> EngineInfo`.
    """

    def add_request(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: Any = "delta",
        caller: int = 0,
    ) -> str: ...

    def abort(self, request_id: str) -> RequestOutput: ...

    def has_unfinished(self) -> bool: ...

    def can_step(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def continue_request(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        drawn: Sequence[DrawnSequence],
        *,
        salt: str = "",
        caller: int = 0,
    ) -> None: ...

    def prefix_events(self) -> PrefixEvents | None: ...


class MovingEngine(ServedEngine, Protocol):
    """An engine that hands requests out with what is computed of them."""

    def hand_out(self, request_id: str, *, whole: bool = False) -> Parcel: ...

    @property
    def is_short_of_blocks(self) -> bool: ...

    def next_to_move(self, transfer_s_per_byte: float) -> Iterator[str]: ...


def moves_memory(engine: Any) -> TypeGuard[MovingEngine]:
    """Whether an engine hands requests out with what is computed of them, and takes them in so."""
    return hasattr(engine, "hand_out") and not serves_others(engine)


def meet_ranks(engine: Any, before: str, *, deadline: float = math.inf) -> bool:
    """Before what all ranks of an engine do at once -> whether each of them is a replica of its own (`dp_attention`),
    which has the command at a time of its own: this one serves the steps of the others until all have it. deadline:
    on time.monotonic's clock. Raises TransitionTimeout past it."""
    if not serves_others(engine):
        return False
    engine.serve_others(before, deadline=deadline)
    return True


class OneOfSeveral(ServedEngine, Protocol):
    """An engine over several ranks that are replicas of their own (`dp_attention`)."""

    def serve_step(self, before: str = "") -> bool: ...

    def serve_others(self, before: str, *, deadline: float = math.inf) -> None: ...


def serves_others(engine: Any) -> TypeGuard[OneOfSeveral]:
    """Whether its rank is one of several of an engine that are replicas of their own: in every state it takes part in
    the rounds of the others (`serve_step`), one of which may have a command."""
    relay = getattr(engine, "relay", None)
    return relay is not None and bool(relay.own_requests)


def max_parcel_bytes(engine: Any) -> int:
    """Most bytes of a parcel that an engine can use: the caches of its ranks, and room for the record."""
    num_ranks: int = engine.rank_group.size
    own = int(engine.sizes.kv_bytes + engine.sizes.state_bytes)
    if num_ranks > 1:  # the stage of the leader may keep less than another one
        own = max(own, int(engine.config.buffer_size_gb * 2**30))
    return num_ranks * own + (64 << 20)


def num_published(engine: Any, run: protocol.Run) -> int:
    """How many leading tokens of a request the engine's prefix cache holds: of several sequences, of their prompt."""
    ids = bytes_to_ids((run.prompt or b"") + (bytes(run.kept[0].tokens) if len(run.kept) == 1 else b""))
    adapter = run.params.get("adapter")
    if adapter is not None and adapter not in (engine.input_processor.adapters or {}):
        return 0
    return int(engine.num_published(ids, adapter=adapter, salt=run.salt))


def info_of(engine: Any) -> EngineInfo:
    """The description of an engine now. Raises ConfigError for one whose tokens mean nothing."""
    if hasattr(engine, "replica_info"):
        info: EngineInfo = engine.replica_info()
        return info
    config = engine.config
    refuse_synthetic(config.speculative, "a server")
    if config.lora is not None:
        engine.relay.require_shared("a replica or server with adapters, which ranks would load in another order,")
    return EngineInfo(
        block_size=config.block_size_tokens,
        capacity=engine.sizes.max_requests,
        model=engine.weights.model_name,
        policy=config.prefix_caching_coordinator_policy.value,
        alpha=float(config.prefix_caching_routing_alpha),
        num_requests=len(engine.output_processor),
        limits=_limits_of(engine)
        | ({} if config.lora is None else {"max_loras": config.lora.max_loras, "max_lora_rank": config.lora.max_rank}),
        dtype=engine.shape.dtype,
        now=EngineNow(
            root=engine.weights.root,
            weight_version=engine.weight_version,
            state=engine.state.value,
            adapters={name: digest for name, (_, digest) in (engine.input_processor.adapters or {}).items()},
        ),
    )


def can_step(engine: Any) -> bool:
    """Whether the engine has a step to run; not while its weights are partly written."""
    lifecycle = getattr(engine, "lifecycle", None)
    return bool(engine.can_step()) and (lifecycle is None or lifecycle.incomplete_reason is None)


def _limits_of(engine: Any) -> dict[str, int]:
    shape, sizes = engine.shape, engine.sizes
    top_k = 0 if shape.experts is None else shape.experts.top_k
    return {
        "max_sequence_length": min(sizes.max_sequence_length, engine.input_processor.capacity),
        "vocab_size": shape.vocab_size,
        "num_blocks": sizes.num_usable_blocks,
        "num_ranks": engine.rank_group.size,
        "hidden_size": shape.hidden_size,
        "num_routed": shape.num_layers * engine.rank_group.groups.pp_size * top_k,
    }


def stats_of(engine: Any) -> dict[str, Any]:
    """The engine's own figures as plain values; {} if it has none."""
    stats = engine.stats() if hasattr(engine, "stats") else {}
    values: dict[str, Any] = dict(stats) if isinstance(stats, dict) else dataclasses.asdict(stats)
    if hasattr(engine, "figures"):
        values["figures"] = engine.figures().to_dict()
    return values


class _SentSequence:
    """How much of a sequence has been sent, by this replica or one before."""

    def __init__(self, kept: protocol.Kept | None) -> None:
        self.num_tokens = 0 if kept is None else len(kept.tokens) // 4
        self.has_ended = kept is not None and kept.finish_reason is not None


class ServedRequest:
    """One request at the engine: turns its outputs into messages."""

    def __init__(self, run: protocol.Run, params: SamplingParams) -> None:
        self.run, self.params = run, params
        self._sequences = [_SentSequence(run.kept[i] if run.kept else None) for i in range(params.n)]
        self._sent_prompt = run.prompt is not None
        self._sent_prompt_logprobs = params.prompt_logprobs is None
        self._sent_times = False
        self._metrics: RequestMetrics | None = None
        self.parcel: Future[Parcel | None] | None = None
        """The request with its memory, as it comes from another replica."""
        self._turn: int | None = None
        """How many requests the engine has admitted when this one may have rows; None until its memory is there."""
        self.preparing: list[Future[Any]] = []
        """What `begin` would wait for, such as a grammar and the parcel."""
        self.held: protocol.Output | None = None
        """Output held back to be sent with more, for a client that does not stream."""

    @property
    def id(self) -> str:
        return f"{self.run.incarnation}.{self.run.number}"

    def prepare(self, engine: Any, parcel: Future[Parcel | None] | None) -> None:
        """Begin what `begin` and `take_in` would wait for. parcel: it is being fetched."""
        prepare = getattr(engine, "prepare", None)
        self.parcel = parcel
        grammar = None if prepare is None else prepare(self.params, self.run.caller)
        self.preparing = [one for one in (parcel, grammar) if one is not None]

    def awaited(self) -> Future[Any] | None:
        """One of what is not prepared yet."""
        return next((one for one in self.preparing if not one.done()), None)

    def give_up(self) -> None:
        for one in self.preparing:
            one.cancel()

    @property
    def memory(self) -> Parcel | None:
        """What has come from another replica; None: nothing has, or it is lost."""
        return self.parcel.result() if self.parcel is not None and self.parcel.done() else None

    def drop_memory(self) -> None:
        """It goes on from its tokens."""
        self.parcel = None
        self.preparing = []

    def has_rows(self, engine: Any) -> bool:
        """Whether there are rows for its memory, after the requests that waited for rows when the memory came. A
        request without memory waits for its rows in the engine."""
        if self.memory is None:
            return True
        stats = engine.stats()
        if self._turn is None:
            self._turn = stats.counters["admitted"] + stats.num_waiting
        num_taken = stats.num_running + stats.num_paused
        is_its_turn = not stats.num_waiting or stats.counters["admitted"] >= self._turn
        return not num_taken or (is_its_turn and num_taken + self.params.n <= engine.sizes.max_requests)

    def take_in(self, engine: Any, parcel: Parcel) -> None:
        """Go on with the memory that another replica has handed out. Raises SnapshotError, after which it can begin."""
        kept = self.run.kept or [protocol.Kept() for _ in range(self.params.n)]
        drawn = [_drawn(one) for one in kept]
        report = engine.take_in(parcel, request_id=self.id, drawn=drawn, caller=self.run.caller, whole=True)
        for why in report.recomputed.values():
            log.info("request %s is computed again: %s", self.id, why)

    def begin(self, engine: ServedEngine) -> None:
        """Add it to the engine. Raises what the engine refuses it with."""
        run, params = self.run, self.params
        ids = None if run.prompt is None else bytes_to_ids(run.prompt)
        if run.kept:
            assert ids is not None, "a continued request has token ids"
            drawn = [_drawn(one) for one in run.kept]
            engine.continue_request(self.id, ids, params, drawn, salt=run.salt, caller=run.caller)
            return
        prompt: dict[str, Any] = {"prompt": run.text} if ids is None else {"prompt_token_ids": ids}
        if run.salt:
            prompt["cache_salt"] = run.salt
        engine.add_request(prompt, params, request_id=self.id, stream="delta", caller=run.caller)

    def aborted(self) -> protocol.Output:
        """The last message of a request that ends before it has begun."""
        sequences = enumerate(self._sequences)
        pieces = [Piece(i, s.num_tokens, b"", "", "abort") for i, s in sequences if not s.has_ended]
        return protocol.Output(self.run.number, self.run.incarnation, pieces, True)

    def message(self, output: RequestOutput) -> protocol.Output | None:
        """The message of an engine's delta output; None: it has nothing to send."""
        pieces = [piece for one in output.outputs if (piece := self._piece(one)) is not None]
        if not pieces and not output.finished:
            return None
        run, prompt, prompt_logprobs, times = self.run, None, None, None
        self._metrics = output.metrics
        if output.finished or not self._sent_times:
            times, self._sent_times = stage_times(output.metrics), True
        if not self._sent_prompt:
            prompt, self._sent_prompt = ids_to_bytes(output.prompt_token_ids), True
        if not self._sent_prompt_logprobs and output.prompt_logprobs is not None:
            prompt_logprobs, self._sent_prompt_logprobs = prompt_record(output.prompt_logprobs), True
        return protocol.Output(
            run.number,
            run.incarnation,
            pieces,
            output.finished,
            None,
            None if output.error is None else failure_of(output.error),
            prompt,
            output.num_cached_tokens,
            prompt_logprobs,
            floats_to_bytes(flattened(output.pooled)) if output.finished else None,
            times=times,
        )

    def hold(self, output: protocol.Output) -> protocol.Output:
        """Hold an output back -> everything held, as one output."""
        self.held = output if self.held is None else _merged(self.held, output)
        return self.held

    def take_held(self) -> protocol.Output | None:
        """The output held back, to be sent now."""
        held, self.held = self.held, None
        if held is not None and held.times is not None and self._metrics is not None:
            held.times = stage_times(self._metrics)
        return held

    def _piece(self, one: CompletionOutput) -> Piece | None:
        sequence = self._sequences[one.index]
        if sequence.has_ended:
            return None
        if not one.token_ids and not one.text and one.finish_reason is None:
            return None
        piece = piece_of(one, offset=sequence.num_tokens)
        sequence.num_tokens += len(one.token_ids)
        sequence.has_ended = one.finish_reason is not None
        return piece


def params_of(run: protocol.Run) -> SamplingParams:
    """Raises RequestError, as SamplingParams does."""
    read = SamplingParams.from_saved if run.kept else SamplingParams.from_dict  # an engine has accepted a continued one
    return dataclasses.replace(read(run.params), seed=run.seed)


def stage_times(metrics: RequestMetrics) -> protocol.StageTimes:
    """For a message that is sent now."""
    ages = aged(metrics, time.monotonic())
    return protocol.StageTimes(
        ages.arrival_time,
        ages.first_scheduled_time,
        ages.first_token_time,
        ages.finished_time,
        ages.num_pauses,
        ages.num_evictions,
    )


def _drawn(kept: protocol.Kept) -> DrawnSequence:
    return DrawnSequence(
        token_ids=bytes_to_ids(bytes(kept.tokens)),
        num_chars=kept.num_chars,
        cumulative_logprob=kept.cumulative_logprob,
        finish_reason=kept.finish_reason,
        stop_reason=kept.stop_reason,
    )


def _merged(first: protocol.Output, second: protocol.Output) -> protocol.Output:
    """Two outputs of a request as one."""
    pieces = {piece.index: piece for piece in first.pieces}
    for piece in second.pieces:
        before = pieces.get(piece.index)
        pieces[piece.index] = piece if before is None else before.joined(piece)
    return msgspec.structs.replace(
        second,
        pieces=list(pieces.values()),
        prompt=first.prompt if second.prompt is None else second.prompt,
        num_cached=max(first.num_cached, second.num_cached),
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        times=first.times if second.times is None else second.times,
    )
