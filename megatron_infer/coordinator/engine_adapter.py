"""An engine as a replica sees it: what it is, how a request gets in (halfway, too), its outputs as they travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.context.prefix_events import PrefixEvents
from megatron_infer.coordinator import protocol
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.requests.drawn_sequence import DrawnSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the coordinator is told of an engine."""

    block_size: int
    capacity: int
    """Requests it computes at once."""
    root: bytes
    weight_version: int
    state: str
    model: str
    policy: str
    alpha: float
    num_requests: int
    """Unfinished, whoever sent them."""
    limits: dict[str, int] = field(default_factory=dict)
    """max_sequence_length (prompt and answer), vocab_size, num_blocks, num_ranks (processes of the engine)."""
    dtype: str = "float32"
    """Of the weights."""


class EngineAdapter(Protocol):
    """What a replica needs of an engine; `DynamicInferenceEngine` has it.

    Beside these it may have the controls (pause, suspend, ...), and, unless it is a DynamicInferenceEngine,
    `replica_facts() -> EngineFacts`.
    """

    def add_request(
        self, prompt: Any, params: SamplingParams | None = None, *, request_id: str | None = None, stream: Any = "delta"
    ) -> str: ...

    def abort(self, request_id: str) -> RequestOutput: ...

    def has_unfinished(self) -> bool: ...

    def can_step(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def continue_request(
        self, request_id: str, ids: list[int], params: SamplingParams, drawn: Sequence[DrawnSequence], *, salt: str = ""
    ) -> bool: ...

    def prefix_events(self) -> PrefixEvents | None: ...


def facts_of(engine: Any) -> EngineFacts:
    """Facts of an engine, as it stands now."""
    if hasattr(engine, "replica_facts"):
        facts: EngineFacts = engine.replica_facts()
        return facts
    config = engine.config
    return EngineFacts(
        block_size=config.block_size_tokens,
        capacity=engine.sizes.max_requests,
        root=engine.weights.root,
        weight_version=engine.weight_version,
        state=engine.state.value,
        model=engine.weights.model_name,
        policy=config.prefix_caching_coordinator_policy.value,
        alpha=float(config.prefix_caching_routing_alpha),
        num_requests=len(engine.output_processor),
        limits=_limits_of(engine.input_processor.limits, engine.rank_group.size),
        dtype=engine.shape.dtype,
    )


def can_step(engine: Any) -> bool:
    """Whether the engine has a step to do. With weights that are half written it has none: its requests wait."""
    lifecycle = getattr(engine, "lifecycle", None)
    return bool(engine.can_step()) and (lifecycle is None or lifecycle.torn is None)


def _limits_of(limits: Any, num_ranks: int) -> dict[str, int]:
    capacity = limits.num_usable_blocks * limits.block_size + 1
    return {
        "max_sequence_length": min(limits.max_sequence_length, capacity),
        "vocab_size": limits.vocab_size,
        "num_blocks": limits.num_usable_blocks,
        "num_ranks": num_ranks,
    }


def stats_of(engine: Any) -> dict[str, Any]:
    """The engine's own figures as plain values; {} for one that keeps none."""
    stats = engine.stats() if hasattr(engine, "stats") else {}
    values: dict[str, Any] = dict(stats) if isinstance(stats, dict) else dataclasses.asdict(stats)
    if hasattr(engine, "figures"):
        values["figures"] = engine.figures().to_dict()
    return values


class _Sample:
    """How much of a sample has been sent, or had been before it came here."""

    def __init__(self, kept: protocol.Kept | None) -> None:
        self.num_tokens = 0 if kept is None else len(kept.tokens) // 4
        self.closed = kept is not None and kept.finish_reason is not None
        self.skip_tokens: list[int] = []
        """Drawn elsewhere and still to be drawn here once more."""
        self.skip_chars = 0


class ServedRequest:
    """One request on its way through an engine: engine outputs in, wire outputs out."""

    def __init__(self, run: protocol.Run, params: SamplingParams) -> None:
        self.run, self.params = run, params
        self._samples = [_Sample(run.kept[i] if run.kept else None) for i in range(params.n)]
        self._told_prompt = run.prompt is not None
        self._told_prompt_logprobs = params.prompt_logprobs is None
        self.held: protocol.Output | None = None
        """News that waits for more, of a client that does not stream."""

    @property
    def id(self) -> str:
        return f"{self.run.incarnation}.{self.run.number}"

    def prepare(self, engine: Any) -> Future[Any] | None:
        """What the engine would wait for at `begin`, if it is not done; None: nothing."""
        prepare = getattr(engine, "prepare", None)
        future: Future[Any] | None = None if prepare is None else prepare(self.params)
        return None if future is None or future.done() else future

    def begin(self, engine: EngineAdapter) -> None:
        """Put it into the engine. Raises what the engine refuses it with."""
        run, params = self.run, self.params
        ids = None if run.prompt is None else protocol.bytes_to_ids(run.prompt)
        if run.kept:
            assert ids is not None, "a request that goes on has its token ids"
            if engine.continue_request(self.id, ids, params, [_drawn(one) for one in run.kept], salt=run.salt):
                return
            for sample, kept in zip(self._samples, run.kept, strict=True):  # drawn again, and not sent again
                sample.skip_tokens = protocol.bytes_to_ids(kept.tokens)
                sample.skip_chars = kept.num_chars
        prompt: dict[str, Any] = {"prompt": run.text} if ids is None else {"prompt_token_ids": ids}
        if run.salt:
            prompt["cache_salt"] = run.salt
        engine.add_request(prompt, params, request_id=self.id, stream="delta")

    def news(self, output: RequestOutput) -> protocol.Output | None:
        """What an engine's delta output says to the client; None: nothing yet."""
        pieces = []
        for one in output.outputs:
            piece = self._piece(one)
            if piece is not None:
                pieces.append(piece)
        if not pieces and not output.finished:
            return None
        run, prompt, prompt_logprobs = self.run, None, None
        if not self._told_prompt:
            prompt, self._told_prompt = protocol.ids_to_bytes(output.prompt_token_ids), True
        if not self._told_prompt_logprobs and output.prompt_logprobs is not None:
            prompt_logprobs, self._told_prompt_logprobs = [_packed(one) for one in output.prompt_logprobs], True
        return protocol.Output(
            run.number,
            run.incarnation,
            pieces,
            output.finished,
            None,
            None if output.error is None else protocol.failure_of(output.error),
            prompt,
            output.num_cached_tokens,
            prompt_logprobs,
            protocol.floats_to_bytes(output.pooled) if output.finished else None,
        )

    def hold(self, news: protocol.Output) -> protocol.Output:
        """Everything held so far with `news`, as one."""
        self.held = news if self.held is None else _merged(self.held, news)
        return self.held

    def _piece(self, one: CompletionOutput) -> protocol.Piece | None:
        sample = self._samples[one.index]
        if sample.closed:
            return None
        tokens, text, logprobs, first = one.token_ids, one.text, one.logprobs, 0
        if sample.skip_tokens or sample.skip_chars:
            count = min(len(tokens), len(sample.skip_tokens))
            if tokens[:count] != sample.skip_tokens[:count]:
                raise DrawnAnew(
                    f"drew tokens {tokens[:count]} where another replica drew {sample.skip_tokens[:count]}: do both "
                    "have the same weights, and a model that computes the same in every batch?"
                )
            tokens, sample.skip_tokens, first = tokens[count:], sample.skip_tokens[count:], count
            text, sample.skip_chars = text[sample.skip_chars :], max(0, sample.skip_chars - len(text))
            logprobs = None if logprobs is None else logprobs[count:]
        if not tokens and not text and one.finish_reason is None:
            return None
        offset, sample.num_tokens = sample.num_tokens, sample.num_tokens + len(tokens)
        sample.closed = one.finish_reason is not None
        return protocol.Piece(
            one.index,
            offset,
            protocol.ids_to_bytes(tokens),
            text,
            one.finish_reason,
            one.stop_reason,
            one.cumulative_logprob,
            None if logprobs is None else [_packed(entry) or [] for entry in logprobs],
            [(*span,) for span in one.spans],
            *_carried(one, first),
        )


class DrawnAnew(InferenceError):
    """A request that was moved drew other tokens than those its client already has."""


def params_of(run: protocol.Run) -> SamplingParams:
    """Raises RequestError, as SamplingParams does."""
    return dataclasses.replace(SamplingParams.from_dict(run.params), seed=run.seed)


def _drawn(kept: protocol.Kept) -> DrawnSequence:
    return DrawnSequence(
        token_ids=protocol.bytes_to_ids(kept.tokens),
        num_chars=kept.num_chars,
        cumulative_logprob=kept.cumulative_logprob,
        finish_reason=kept.finish_reason,
        stop_reason=kept.stop_reason,
    )


def _carried(one: CompletionOutput, first: int) -> tuple[Any, Any, Any, Any]:
    """The last four fields of a Piece, without the first `first` tokens."""
    raw, processed, support, routing = one.raw_logprobs, one.processed_logprobs, one.support, one.routing
    among = None
    if support is not None:
        import numpy as np

        lengths, words = np.diff(support.offsets[first:]), support.ids[support.offsets[first] :]
        among = (support.vocab_size, lengths.tobytes(), words.tobytes())
    return (
        protocol.floats_to_bytes(None if raw is None else raw[first:]),
        protocol.floats_to_bytes(None if processed is None else processed[first:]),
        among,
        None if routing is None else (routing.dtype.name, list(routing.shape), routing.tobytes()),
    )


def _packed(entry: dict[int, Logprob] | None) -> list[tuple[int, float, int | None, str | None]] | None:
    if entry is None:
        return None
    return [(token, one.logprob, one.rank, one.decoded_token) for token, one in entry.items()]


def _merged(first: protocol.Output, second: protocol.Output) -> protocol.Output:
    """Two outputs of a request as one."""
    pieces = {piece.index: piece for piece in first.pieces}
    for piece in second.pieces:
        before = pieces.get(piece.index)
        pieces[piece.index] = piece if before is None else _joined(before, piece)
    return protocol.Output(
        first.number,
        first.incarnation,
        list(pieces.values()),
        second.finished,
        second.refused,
        second.error,
        first.prompt if second.prompt is None else second.prompt,
        max(first.num_cached, second.num_cached),
        first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        second.pooled,
    )


def _joined(first: protocol.Piece, second: protocol.Piece) -> protocol.Piece:
    logprobs = None if second.logprobs is None else [*(first.logprobs or []), *second.logprobs]
    support = second.support
    if first.support is not None and support is not None:
        support = (support[0] or first.support[0], first.support[1] + support[1], first.support[2] + support[2])
    return protocol.Piece(
        first.index,
        first.offset,
        first.tokens + second.tokens,
        first.text + second.text,
        second.finish_reason,
        second.stop_reason,
        second.cumulative_logprob,
        logprobs,
        second.spans,
        None if second.raw_logprobs is None else (first.raw_logprobs or b"") + second.raw_logprobs,
        None if second.processed_logprobs is None else (first.processed_logprobs or b"") + second.processed_logprobs,
        support,
        second.routing,
    )
