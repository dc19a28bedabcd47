"""Where rollout and trainer part: one suspicious sequence through both forwards, layer by layer.

    trainer      stock modules, hooks on every part                              -> inputs and outputs of each part
    cached       the engine's path with the prefix that is cached now            -> are cached keys and values those?
    fresh        the engine's path, cache bypassed                               -> does computing anew agree?
    apart        the engine's path, each part given the trainer's input          -> which part computes something else

A part's error is its own: its predecessors' are not among what it was given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.sequence_replay import MOST_DECODED, NoRoom, Replayed, SequenceReplay
from megatron_infer.errors import InferenceError, ModelError
from megatron_infer.models.layer_probes import MOE, Part, Trace, parts_of, trace
from megatron_infer.rl.mismatch_replay import Forced, Kept, Watched
from megatron_infer.rl.session import RolloutSession

TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""Largest relative difference of a part's output that rounding explains, by the model's dtype."""
NOISE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 0.2, "float16": 0.1}
"""Mean |d| of a replay that is a fault whatever the rollout shows, in nats."""
SAMPLER_TOLERANCE = 1e-3
"""Nats; the sampler computes in fp32 whatever the model does."""
EXPLAINS = 0.5
"""A replay reproduces a mismatch if it shows this share of it."""
JUMP = 8.0
"""The residual stream parts at a layer behind which it is so many times further off than before."""
MOST_TOKENS = 8192
"""A longer sequence is not looked into: all that passes through a model's layers is kept meanwhile."""
BEHIND = 8
"""Tokens behind the worst one that are replayed with it."""


class Verdict(Enum):
    """What is wrong, as far as replays can tell."""

    LAYER = "a layer computes something else"
    STREAM = "parts agree one by one, the residual stream between layers does not"
    ROUTING = "a router that is undecided: given the same it chooses the same, after rounding it does not"
    STALE_PREFIX = "stale prefix: what is cached disagrees, computing it anew agrees"
    SAMPLER = "the sampler: logits agree, log probabilities do not"
    STATE = "passing state: computed anew and alone it agrees; it was cached, or computed among others, otherwise"
    UNKNOWN = "not placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartError:
    """How far off one part is by itself."""

    name: str
    kind: str
    layer: int | None
    error: float
    """Relative: norm of the difference / norm of the trainer's output, over all positions or the worst token's."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, off by {self.error:.2g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the forwards part."""

    verdict: Verdict
    kind: str = ""
    """embedding, norm, attention, mamba, mlp, moe or output of a LAYER; layer of a STREAM; sampler; prefix; state."""
    layer: int | None = None
    """Decoder layer, from 0."""
    name: str = ""
    """Of the module."""
    error: float = 0.0
    tolerance: float = 0.0
    others: tuple[PartError, ...] = ()
    """Later parts that are off by themselves, too."""
    routed_elsewhere: float | None = None
    """Share of positions that a mixture-of-experts layer sends to other experts."""
    stale_copies: str = ""
    """Copies derived from the weights that are not those of the weights as they are now."""
    note: str = ""

    def __str__(self) -> str:
        text = self.verdict.value
        if self.name:
            text += f": {self.name} ({self.kind}), relative difference {self.error:.2g} (rounding: {self.tolerance:g})"
        if self.routed_elsewhere is not None:
            text += f", {100 * self.routed_elsewhere:.0f} % of positions routed to other experts"
        if self.others:
            text += f"; also {', '.join(map(str, self.others[:3]))}"
        return text + "".join(f"; {extra}" for extra in (self.note, self.stale_copies) if extra)


def unplaced(reason: str) -> Place:
    return Place(verdict=Verdict.UNKNOWN, note=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """The sequence to look at."""

    ids: list[int]
    prompt_len: int
    position: int
    """Of the worst token."""
    rollout: Mapping[int, float]
    """Position -> what the rollout said of its token (raw), where it is comparable."""
    train: Mapping[int, float]
    """The same of the trainer."""
    params: SamplingParams | None
    of_sampler: bool
    """The model's own log probabilities are within limits: only those behind the sampler are not."""


class LayerSearch:
    """Places a mismatch; every rank of the engine calls it alike. Not over pipeline stages."""

    def __init__(self, session: RolloutSession) -> None:
        self._session = session

    def place(self, suspect: Suspect) -> Place:
        """Within generating(), or anywhere else, where the engine wakes for it and goes back to what it was."""
        try:
            engine = self._session.engine
            if engine.rank_group.groups.pp is not None:
                return unplaced("over pipeline stages no sequence is replayed; try it with one stage")
            with self._session.generating():
                engine.drain()
                with engine.replay.inference(engine.loop):
                    return replace(self._search(engine.replay, suspect), stale_copies=stale_copies(engine))
        except (NoRoom, ModelError, NotImplementedError) as error:
            return unplaced(str(error))

    def _search(self, replay: SequenceReplay, suspect: Suspect) -> Place:
        end = min(len(suspect.ids), suspect.position + 1 + BEHIND)
        if end > MOST_TOKENS:
            return unplaced(f"its worst token is at position {suspect.position}, replays end at {MOST_TOKENS}")
        ids = suspect.ids[:end]
        how = {"prompt_len": min(suspect.prompt_len, end - 1), "params": suspect.params}
        # First: computing anew may take the blocks of what is cached.
        cached = replay.run(ids, use_cache=True, **how)  # type: ignore[arg-type]
        watched = Watched(replay.model, len(ids))
        fresh = replay.run(ids, model=watched, **how)  # type: ignore[arg-type]
        sampler = max(cached.sampler_error, fresh.sampler_error)
        if suspect.of_sampler:
            if sampler > SAMPLER_TOLERANCE:
                return _of_sampler(sampler)
            return unplaced("behind the sampler only, and its log probabilities are right when it is asked again")
        off, own = _mean(suspect.rollout, suspect.train, fresh), _mean(_logprobs(fresh), suspect.train, fresh)
        if own >= EXPLAINS * off or own > NOISE[replay.model.shape.dtype]:
            return self._in_layers(replay, suspect, ids, watched, sampler, how)
        if sampler > SAMPLER_TOLERANCE:
            return _of_sampler(sampler)
        if cached.num_cached and _mean(_logprobs(cached), suspect.train, cached) >= EXPLAINS * off:
            note = f"{cached.num_cached} tokens were found cached"
            return Place(verdict=Verdict.STALE_PREFIX, kind="prefix", note=note)
        return Place(verdict=Verdict.STATE, kind="state")

    def _in_layers(
        self,
        replay: SequenceReplay,
        suspect: Suspect,
        ids: list[int],
        watched: Watched,
        sampler: float,
        how: dict[str, object],
    ) -> Place:
        """Computing anew disagrees: which part does."""
        adopted, tolerance = replay.model, TOLERANCE[replay.model.shape.dtype]
        groups, parts = self._session.engine.rank_group.groups, parts_of(adopted)
        with self._session.scoring() as model:
            logits_from = max(0, len(ids) - MOST_DECODED)
            found = trace(model, parts, ids, tp=groups.tp, logits_from=logits_from)
        forced = Forced(adopted, parts, found)
        replay.run(ids, model=forced, **how)  # type: ignore[arg-type]
        at = suspect.position - 1  # the query that gives the worst token
        errors = [_error_of(forced.outputs[part.name], found.outputs[part.name], at) for part in parts]
        over = [
            PartError(name=part.name, kind=part.kind, layer=part.layer, error=error)
            for part, error in zip(parts, _largest(errors, groups.engine, adopted.device), strict=True)
            if error > tolerance
        ]
        if over:
            first = over[0]
            elsewhere = None
            if first.name in forced.experts:
                elsewhere = _rerouted(forced.experts[first.name], found.experts[first.name])
            return Place(
                verdict=Verdict.LAYER,
                kind=first.kind,
                layer=first.layer,
                name=first.name,
                error=first.error,
                tolerance=tolerance,
                others=tuple(over[1:]),
                routed_elsewhere=elsewhere,
            )
        if sampler > SAMPLER_TOLERANCE:
            return _of_sampler(sampler)
        return _in_stream(parts, watched, found, tolerance)


def _of_sampler(error: float) -> Place:
    return Place(
        verdict=Verdict.SAMPLER,
        kind="sampler",
        name="sampler",
        error=error,
        tolerance=SAMPLER_TOLERANCE,
        note="in nats",
    )


def _in_stream(parts: Sequence[Part], watched: Watched, found: Trace, tolerance: float) -> Place:
    """The first layer behind which the residual stream is off by more than that before it explains."""
    before = 0.0
    for number, (ours, its) in enumerate(zip(watched.layers, found.layers, strict=True)):
        error = _relative(*ours.beside(its))
        if error <= max(tolerance, JUMP * before):
            before = error
            continue
        place = Place(
            verdict=Verdict.STREAM,
            kind="layer",
            layer=number,
            name=f"decoder.layers.{number}",
            error=error,
            tolerance=tolerance,
        )
        for part in parts:
            if part.layer == number and part.moe is not None:
                share = _rerouted(watched.experts[part.moe], found.experts[part.name])
                if share > 0:
                    return replace(place, verdict=Verdict.ROUTING, kind=MOE, name=part.name, routed_elsewhere=share)
        return place
    return unplaced(
        f"every part and the residual stream agree within {tolerance:g}: rounding, larger than usual, or an unlikely "
        "token"
    )


def _logprobs(run: Replayed) -> dict[int, float]:
    return dict(enumerate(run.logprobs, start=run.first))


def _mean(these: Mapping[int, float], those: Mapping[int, float], run: Replayed) -> float:
    """Mean difference over tokens that the replay scored and both know."""
    at = [place for place in _logprobs(run) if place in these and place in those]
    diffs = [abs(these[place] - those[place]) for place in at]
    return sum(diff if math.isfinite(diff) else 700.0 for diff in diffs) / max(len(diffs), 1)


def _error_of(ours: Kept, its_SX: Tensor, at: int) -> float:
    """Over all positions, or at the one that matters if that is more. NaN is larger than anything."""
    whole = _relative(*ours.beside(its_SX))
    one = _relative(*ours.beside(its_SX, at)) if bool(ours.seen_S[at]) else 0.0
    return max(whole, one) if math.isfinite(whole) and math.isfinite(one) else math.inf


def _largest(errors: list[float], group: Any, device: torch.device) -> list[float]:
    """Over the ranks, each of which sees a part of the logits: all come to the same place."""
    found = torch.tensor(errors, device=device)
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    largest: list[float] = found.tolist()
    return largest


def _relative(ours: Tensor, its: Tensor) -> float:
    return float((ours - its).norm() / its.norm().clamp_min(1e-12))


def _rerouted(kept: Kept, its_SK: Tensor) -> float:
    """Share of positions that went to other experts."""
    ours, its = kept.beside(its_SK)
    return float((ours != its).any(-1).float().mean())


def stale_copies(engine: DynamicInferenceEngine) -> str:
    """In words; "" where all copies derived from the weights are those of the weights as they are."""
    try:
        engine.weights.verify()
    except InferenceError as error:
        return str(error)
    return ""
