"""Locates a mismatch: one suspect sequence through both forwards, layer by layer.

    trainer          stock modules, hooks on every part                          -> inputs and outputs of each part
    cached           the engine's path with the prefix that is cached now        -> are cached keys and values right?
    fresh            the engine's path, cache bypassed                           -> does recomputing agree?
    teacher-forced   the engine's path, each part given the trainer's input      -> which part computes something else

In the last run the error of a part does not include errors of the parts before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.teacher_forcing import (
    MOST_DECODED,
    NoRoomForTeacherForcing,
    TeacherForcing,
    TeacherForcingResult,
)
from megatron_infer.errors import InferenceError, ModelError
from megatron_infer.models.layer_probes import MOE, ForwardTrace, ModuleProbe, module_probes, trace_forward
from megatron_infer.rl.mismatch_models import RecordingModel, RowsByPosition, TeacherForcedModel

TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""Largest relative difference of a part's output that rounding explains, by the model's dtype."""
NOISE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.2, "float16": 0.1}
"""A replay whose mean |d| is above this (nats) shows a fault, whatever the rollout shows."""
SAMPLER_TOLERANCE = 1e-3
"""Nats; the sampler computes in fp32 whatever the model's dtype."""
EXPLAINS = 0.5
"""A replay reproduces a mismatch if it shows this share of it."""
JUMP = 8.0
"""The residual stream diverges at the first layer whose error is this many times that of the layer before."""
MOST_TOKENS = 8192
"""A longer sequence is not searched: all inputs and outputs of the model's layers are kept for it."""
BEHIND = 8
"""Tokens after the worst one that are replayed with it."""


class MismatchCause(Enum):
    """What is wrong, as far as replays show it."""

    LAYER = "a layer computes something else"
    STREAM = "parts agree one by one, the residual stream between layers does not"
    ROUTING = "a router near a tie: on the same input it chooses the same experts, after rounding others"
    STALE_PREFIX = "stale prefix: cached keys and values disagree, recomputing them agrees"
    SAMPLER = "the sampler: logits agree, log probabilities do not"
    STATE = "transient state: recomputed alone it agrees; as cached, or in its batch, it was computed differently"
    UNKNOWN = "not located"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartError:
    """The error of one part on the trainer's input."""

    name: str
    kind: str
    layer: int | None
    error: float
    """Relative: norm of the difference / norm of the trainer's output, over all positions or at the worst token's."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, off by {self.error:.2g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchPlace:
    """Where the forwards diverge."""

    cause: MismatchCause
    kind: str = ""
    """LAYER: embedding, norm, attention, mamba, mlp, moe or output; STREAM: layer; else sampler, prefix or state."""
    layer: int | None = None
    """Decoder layer, from 0."""
    name: str = ""
    """Name of the module."""
    error: float = 0.0
    tolerance: float = 0.0
    others: tuple[PartError, ...] = ()
    """Later parts whose own error is above the tolerance."""
    routed_elsewhere: float | None = None
    """Share of positions that a mixture-of-experts layer sends to other experts."""
    stale_copies: str = ""
    """Copies derived from the weights that do not match the present weights."""
    note: str = ""

    def __str__(self) -> str:
        text = self.cause.value
        if self.name:
            text += f": {self.name} ({self.kind}), relative difference {self.error:.2g} (rounding: {self.tolerance:g})"
        if self.routed_elsewhere is not None:
            text += f", {100 * self.routed_elsewhere:.0f} % of positions routed to other experts"
        if self.others:
            text += f"; also {', '.join(map(str, self.others[:3]))}"
        return text + "".join(f"; {extra}" for extra in (self.note, self.stale_copies) if extra)


def not_located(reason: str) -> MismatchPlace:
    return MismatchPlace(cause=MismatchCause.UNKNOWN, note=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectSequence:
    ids: list[int]
    prompt_len: int
    position: int
    """Position of the worst token."""
    rollout: Mapping[int, float]
    """Position -> the rollout's log probability of its token (raw), where it is comparable."""
    train: Mapping[int, float]
    """The same from the trainer."""
    params: SamplingParams | None
    of_sampler: bool
    """The raw log probabilities are within limits, only those after sampling parameters are not."""

    def to_dict(self) -> dict[str, Any]:
        """Every field as a JSON value."""
        plain = {name: getattr(self, name) for name in ("ids", "prompt_len", "position", "of_sampler")}
        params = None if self.params is None else self.params.to_dict()
        return plain | {"rollout": [*self.rollout.items()], "train": [*self.train.items()], "params": params}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SuspectSequence:
        params = None if given["params"] is None else SamplingParams.from_dict(given["params"])
        logprobs = {name: {int(at): value for at, value in given[name]} for name in ("rollout", "train")}
        return cls(**{**given, **logprobs, "params": params})


class MeteredSession(Protocol):
    """What the meter asks of a `RolloutSession`."""

    @property
    def engine(self) -> DynamicInferenceEngine: ...

    @property
    def ranks(self) -> RankGroup: ...

    @property
    def weight_version(self) -> int: ...

    def generating(self) -> AbstractContextManager[Any]: ...

    def scoring(self) -> AbstractContextManager[torch.nn.Module]: ...

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float = ...,
        micro_batch_tokens: int = ...,
        start: int | Sequence[int] = ...,
    ) -> list[Tensor]: ...


class LayerSearch:
    """Locates a mismatch; every rank of the engine makes the same calls. Not over pipeline stages."""

    def __init__(self, session: MeteredSession) -> None:
        self._session = session

    def locate(self, suspect: SuspectSequence) -> MismatchPlace:
        """Allowed in any block and outside; a suspended engine is resumed for it and suspended again."""
        try:
            engine = self._session.engine
            if engine.rank_group.groups.pp is not None:
                return not_located("sequences are not replayed over pipeline stages; try it with one stage")
            if engine.model is not self._session.model:
                return not_located("generation_model has layers of another layout than those that are scored")
            if engine.relay.own_requests:
                return not_located("with dp_attention=True each rank has a cache of its own; try it without")
            if engine.rank_group.groups.cp is not None:
                return not_located("sequences are not replayed over context-parallel ranks; try it with one")
            with self._session.generating():
                engine.drain()
                with engine.replay.inference(engine.loop):
                    return replace(self._search(engine.replay, suspect), stale_copies=stale_copies(engine))
        except (NoRoomForTeacherForcing, ModelError, NotImplementedError, torch.OutOfMemoryError) as error:
            return not_located(str(error))

    def _search(self, replay: TeacherForcing, suspect: SuspectSequence) -> MismatchPlace:
        end = min(len(suspect.ids), suspect.position + 1 + BEHIND)
        if end > MOST_TOKENS:
            return not_located(f"its worst token is at position {suspect.position}, replays end at {MOST_TOKENS}")
        ids = suspect.ids[:end]
        options: dict[str, Any] = {"prompt_len": min(suspect.prompt_len, end - 1), "params": suspect.params}
        # First: recomputing may evict cached blocks.
        cached = replay.run(ids, use_cache=True, **options)
        recording = RecordingModel(replay.model, len(ids))
        fresh = replay.run(ids, model=recording, **options)
        sampler = max(cached.sampler_error, fresh.sampler_error)
        if suspect.of_sampler:
            if sampler > SAMPLER_TOLERANCE:
                return _sampler_place(sampler)
            return not_located("only after sampling parameters, and replayed the sampler's log probabilities are right")
        # of all ranks: where their copies of weights differ, they still go on together
        observed, replayed, sampler = _largest(
            [
                _mean_diff(suspect.rollout, suspect.train, fresh),
                _mean_diff(_logprobs(fresh), suspect.train, fresh),
                sampler,
            ],
            self._session.engine.rank_group.groups.engine,
            replay.model.device,
        )
        if replayed >= EXPLAINS * observed or replayed > NOISE[replay.model.shape.dtype]:
            return self._search_layers(replay, suspect, ids, recording, sampler, options)
        if sampler > SAMPLER_TOLERANCE:
            return _sampler_place(sampler)
        if cached.num_cached and _mean_diff(_logprobs(cached), suspect.train, cached) >= EXPLAINS * observed:
            note = f"{cached.num_cached} tokens were found cached"
            return MismatchPlace(cause=MismatchCause.STALE_PREFIX, kind="prefix", note=note)
        return MismatchPlace(cause=MismatchCause.STATE, kind="state")

    def _search_layers(
        self,
        replay: TeacherForcing,
        suspect: SuspectSequence,
        ids: list[int],
        recording: RecordingModel,
        sampler: float,
        options: dict[str, Any],
    ) -> MismatchPlace:
        """The recomputed sequence disagrees: find the part that does."""
        adopted, tolerance = replay.model, TOLERANCE[replay.model.shape.dtype]
        groups, probes = self._session.engine.rank_group.groups, module_probes(adopted)
        with self._session.scoring() as model:
            logits_from = max(0, len(ids) - MOST_DECODED)
            traced = trace_forward(model, probes, ids, tp=groups.tp, logits_from=logits_from)
        forced = TeacherForcedModel(adopted, probes, traced)
        replay.run(ids, model=forced, **options)
        at = suspect.position - 1  # the query that gives the worst token
        errors = [_error_of(forced.outputs[probe.name], traced.outputs[probe.name], at) for probe in probes]
        over = [
            PartError(name=probe.name, kind=probe.kind, layer=probe.layer, error=error)
            for probe, error in zip(probes, _largest(errors, groups.engine, adopted.device), strict=True)
            if error > tolerance
        ]
        if over:
            first = over[0]
            routed_elsewhere = None
            if first.name in forced.experts:
                routed_elsewhere = _rerouted(forced.experts[first.name], traced.experts[first.name])
            return MismatchPlace(
                cause=MismatchCause.LAYER,
                kind=first.kind,
                layer=first.layer,
                name=first.name,
                error=first.error,
                tolerance=tolerance,
                others=tuple(over[1:]),
                routed_elsewhere=routed_elsewhere,
            )
        if sampler > SAMPLER_TOLERANCE:
            return _sampler_place(sampler)
        return _search_stream(probes, recording, traced, tolerance)


def _sampler_place(error: float) -> MismatchPlace:
    return MismatchPlace(
        cause=MismatchCause.SAMPLER,
        kind="sampler",
        name="sampler",
        error=error,
        tolerance=SAMPLER_TOLERANCE,
        note="in nats",
    )


def _search_stream(
    probes: Sequence[ModuleProbe], recording: RecordingModel, traced: ForwardTrace, tolerance: float
) -> MismatchPlace:
    """The first layer after which the residual stream's error is more than the error before the layer explains."""
    before = 0.0
    for number, (ours, trainers) in enumerate(zip(recording.layers, traced.layers, strict=True)):
        error = _relative(*ours.paired_with(trainers))
        if error <= max(tolerance, JUMP * before):
            before = error
            continue
        place = MismatchPlace(
            cause=MismatchCause.STREAM,
            kind="layer",
            layer=number,
            name=f"decoder.layers.{number}",
            error=error,
            tolerance=tolerance,
        )
        for probe in probes:
            if probe.layer == number and probe.moe is not None:
                share = _rerouted(recording.experts[probe.moe], traced.experts[probe.name])
                if share > 0:
                    return replace(
                        place, cause=MismatchCause.ROUTING, kind=MOE, name=probe.name, routed_elsewhere=share
                    )
        return place
    return not_located(
        f"every part and the residual stream agree within {tolerance:g}: unusually large rounding, or an unlikely token"
    )


def _logprobs(run: TeacherForcingResult) -> dict[int, float]:
    return dict(enumerate(run.logprobs, start=run.first))


def _mean_diff(these: Mapping[int, float], those: Mapping[int, float], run: TeacherForcingResult) -> float:
    """Mean absolute difference over the tokens that the replay scored and that are in both mappings."""
    both = [position for position in _logprobs(run) if position in these and position in those]
    diffs = [abs(these[position] - those[position]) for position in both]
    return sum(diff if math.isfinite(diff) else 700.0 for diff in diffs) / max(len(diffs), 1)


def _error_of(ours: RowsByPosition, trainers_SX: Tensor, at: int) -> float:
    """The larger relative error of all positions together and of position `at`; inf for NaN."""
    whole = _relative(*ours.paired_with(trainers_SX))
    one = _relative(*ours.paired_with(trainers_SX, at)) if bool(ours.seen_S[at]) else 0.0
    return max(whole, one) if math.isfinite(whole) and math.isfinite(one) else math.inf


def _largest(errors: list[float], group: Any, device: torch.device) -> list[float]:
    """Maximum over the ranks, each of which has a part of the logits; all ranks then find the same place."""
    found = torch.tensor(errors, device=device)
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    largest: list[float] = found.tolist()
    return largest


def _relative(ours: Tensor, trainers: Tensor) -> float:
    return float((ours - trainers).norm() / trainers.norm().clamp_min(1e-12))


def _rerouted(rows: RowsByPosition, trainers_SK: Tensor) -> float:
    """Share of positions that went to other experts."""
    ours, trainers = rows.paired_with(trainers_SK)
    return float((ours != trainers).any(-1).float().mean())


def stale_copies(engine: DynamicInferenceEngine) -> str:
    """Description of copies derived from the weights that do not match the present weights; "" if all match."""
    try:
        engine.weights.verify()
    except InferenceError as error:
        return str(error)
    return ""
