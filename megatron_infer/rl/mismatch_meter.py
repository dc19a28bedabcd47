"""The mismatch meter: the engine's log probabilities of drawn tokens against those of the trainer's forward.

    groups --share--> samples --stale tokens out--> session.score --d--> figures --limits--> alarm --place--> report
                                                                            |
                                                                  wandb, a metrics registry

Both forwards use the same weights, so every difference beyond rounding is a fault.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.metrics.registry import Registry
from megatron_infer.engine.teacher_forcing import only_temperature
from megatron_infer.errors import ConfigError, LockstepError, MismatchAlarm, RankFailure, unknown_name
from megatron_infer.rl.mismatch_figures import Alarm, MismatchFigures, Tally, WorstToken, describe_tripped
from megatron_infer.rl.mismatch_layers import LayerSearch, MeteredSession, MismatchPlace, SuspectSequence
from megatron_infer.rl.sample_codec import decode_sample, encode_sample
from megatron_infer.rl.samples import RolloutGroup, RolloutSample

AUTO = "auto"
SESSION_SHARE = 0.02
"""Share of finished samples that the meter of a session measures by default."""
SESSION_TOKENS = 1024
"""Such a meter compares no more of a sample, the last ones: it is not to need more memory than a step."""
SESSION_SAMPLES = 64
"""And no more of a window, the last ones."""
SESSION_WINDOW = 8
"""Its windows go on until they have so many times the tokens that its alarm wants: it is not to trip by chance."""
PROCESSED_EVERY = 4
"""One chosen sample in so many is also scored at its temperature (at temperature 1 that costs nothing)."""
log = logging.getLogger("megatron_infer")


class MismatchSink(Protocol):
    """Writes a window's numbers; `engine.metrics.wandb.WandbSink` is one."""

    def write_mismatch(self, values: Mapping[str, float]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    figures: MismatchFigures
    over: dict[str, tuple[float, float]]
    """Figures above their limits: name -> (figure, limit)."""
    place: MismatchPlace | None = None
    """Where the forwards diverge, if a figure is above its limit."""

    @property
    def is_alarm(self) -> bool:
        return bool(self.over)

    def __str__(self) -> str:
        text = f"rollout and trainer, weights {self.figures.weight_version}: {self.figures}"
        if self.over:
            text += f"; over the limit: {describe_tripped(self.over)}"
        return text if self.place is None else f"{text}; place: {self.place}"


@dataclass(slots=True)
class _ChosenSample:
    group_id: str
    number: int
    sample: RolloutSample
    params: SamplingParams | None
    comparable: list[int] = field(default_factory=list)
    """Indices into its token_ids: tokens drawn by the present weights, from keys and values of the present weights."""
    train: dict[int, float] = field(default_factory=dict)
    """Position in the sequence -> the trainer's log probability."""

    @property
    def raw(self) -> list[float]:
        return self.sample.raw_logprobs or []


class MismatchMeter:
    """Re-scores a share of finished samples; reports how much rollout and trainer differ, and where they diverge.

        meter = MismatchMeter(session)
        with session.generating() as roll:
            groups = roll.generate(prompts, params)
            meter.observe(groups, params)

    Call it before the weights change: tokens that other weights drew cannot be compared and are counted as stale.
    """

    def __init__(
        self,
        session: MeteredSession,
        *,
        share: float = 0.05,
        alarm: Alarm | str | None = AUTO,
        sinks: Sequence[MismatchSink] = (),
        registry: Registry | None = None,
        on_alarm: Callable[[MismatchReport], None] | None = None,
        attribute: bool = True,
        seed: int = 0,
    ) -> None:
        """share: of finished samples, chosen by a hash of request id, sample and `seed`: the same on all ranks.

        alarm: "auto": `Alarm.of` the model; None: no alarm. registry: gets a gauge for every figure; None: the
        one that is exported with the engine's own figures. on_alarm: called before MismatchAlarm is raised, if the
        alarm raises. attribute: search for the place of an alarm, which runs one sequence four times.
        """
        if not 0 < share <= 1:
            raise ConfigError(f"share is {share}, it must be above 0 and at most 1 (all finished samples)")
        engine = session.engine
        if isinstance(alarm, str):
            if alarm != AUTO:
                raise ConfigError(f"alarm: {unknown_name('value', alarm, [AUTO])}; 'auto', an Alarm, or None")
            weights = engine.config.weight_dtype.value
            alarm = Alarm.of(
                engine.shape.dtype if weights == AUTO else weights,
                experts="return_routing" not in engine.input_processor.unavailable,
            )
        self.share, self.alarm = share, alarm
        self.last: MismatchReport | None = None
        """Report of the latest window that had tokens to compare."""
        self.num_windows = self.num_tokens = self.num_alarms = 0
        """Totals since construction; tokens that were compared."""
        self.seconds = 0.0
        """Total time spent on scoring."""
        self._session, self._sinks = session, tuple(sinks)
        self._registry = session.engine.output_processor.meter.registry if registry is None else registry
        self._on_alarm, self._seed = on_alarm, seed
        self._search = LayerSearch(session) if attribute else None
        self._num_chosen = 0
        self._kept: deque[list[Any]] = deque(maxlen=SESSION_SAMPLES)
        """See `keep`."""
        self._window = Tally()
        """What the calls of `measure` since its last report have found."""
        self._why_off = ""
        """Why `measure` does nothing any more."""

    def observe(
        self, groups: Sequence[RolloutGroup], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> MismatchReport | None:
        """Measure finished groups, one window -> its report; None if no chosen token can be compared.

        params: what they were drawn with (one, or one for each prompt of their call): then the distribution after
        sampling parameters is compared too, if temperature is the only one that changes it. With several ranks all call
        it with the groups that the rollout gave them, and measure the chosen ones of all. Allowed in any block and
        outside. Raises MismatchAlarm if the alarm raises.
        """
        chosen = list(self._choose(groups, params))
        if (ranks := self._session.ranks).size > 1:
            groups = self._session.engine.rank_group.groups
            place = groups.dp_rank if groups.own_requests else 0  # ranks of one place share groups
            own = [((place, *one[:2]), one) for one in map(_encoded, chosen)]
            texts = ranks.lockstep.gather("what the mismatch meter observes", json.dumps(own))
            every = [one for text in texts for one in json.loads(text)]
            chosen = list({tuple(key): _chosen_of(one) for key, one in every}.values())
        return self._observe(chosen) if chosen else None

    def keep(self, groups: Iterable[RolloutGroup]) -> None:
        """Keep the chosen samples of this rank's groups, except failed ones, for the next `measure`."""
        chosen = self._choose([group for group in groups if group.error is None], None)
        self._kept.extend(map(_encoded, chosen))

    def discard(self) -> None:
        """Forget the kept samples: other weights drew them."""
        self._kept.clear()

    def measure(self, *, skip: bool = False) -> MismatchReport | None:
        """Measure the samples that all ranks have kept since the last call, as `observe` does. Of several engines of
        one replica, those of the first rank.

        None until the calls since the last report have enough tokens for one. On every rank, within generating(); skip:
        on any rank, nothing is measured on any. Of a sample the last SESSION_TOKENS tokens are compared. Where the
        model cannot be scored the log says so once, and later calls do nothing.
        """
        kept = list(self._kept)
        self._kept.clear()
        if self._why_off:
            return None
        engine, ranks = self._session.engine, self._session.ranks
        lockstep = ranks.lockstep
        met = lockstep.meet("the mismatch meter", text=json.dumps(kept), flag=skip)
        texts = met.texts if ranks is engine.rank_group else met.texts[:1]  # each engine has the groups of all
        found = [each for text in texts if (each := json.loads(text))]
        if met.flag or not found:
            return None
        most = max(1, SESSION_SAMPLES // len(found))
        report, failure, device = None, "", engine.device.torch
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                chosen = [_chosen_of(one) for each in found for one in each[-most:]]
                report = self._observe(chosen, most_tokens=SESSION_TOKENS)
        except (MismatchAlarm, LockstepError, RankFailure):
            raise
        except Exception as error:  # training goes on without a meter
            failure = f"{type(error).__name__}: {error}"
        failures = lockstep.gather("the outcome of the mismatch meter", failure)
        self._why_off = next(filter(None, failures), "")
        if self._why_off:
            log.warning(
                "no mismatch meter for this session from here on: scoring a sample raised %s; meter=None says that "
                "none is wanted",
                self._why_off,
            )
        return report

    def _observe(self, chosen: Sequence[_ChosenSample], most_tokens: int | None = None) -> MismatchReport | None:
        tally, started = Tally(), time.perf_counter()
        worst = self._compare(chosen, tally, most_tokens)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        if not tally.num_tokens:
            log.info(
                "mismatch meter: %d tokens were drawn by other weights, %d samples have no log probabilities, "
                "none compared",
                tally.others["num_stale_tokens"],
                tally.others["num_unscored"],
            )
            return None
        window = tally
        if most_tokens is not None:
            window = self._window = self._window.joined(tally)
            if window.num_tokens < SESSION_WINDOW * (1 if self.alarm is None else self.alarm.min_tokens):
                return None
            self._window = Tally()
        figures = window.figures(seconds=seconds, weight_version=self._session.weight_version)
        tripped = {} if self.alarm is None else self.alarm.tripped(figures)
        of_sampler = set(tripped) <= {"sampler_excess_mean"}
        suspect = _suspect_of(worst[of_sampler], tally.worst, of_sampler=of_sampler) if tripped else None
        # Copies of weights may have drifted apart, and with them the ranks' figures: all follow the leader's.
        leaders = [tripped, None if suspect is None else suspect.to_dict()]
        over, given = self._session.ranks.from_leader("the alarm of the mismatch meter", leaders)
        report = MismatchReport(figures=figures, over=over)
        if over and most_tokens is not None and self.last is not None and self.last.is_alarm:
            report = replace(report, place=self.last.place)  # the mismatch goes on: it is searched for once
        elif over and self._search is not None:
            report = replace(report, place=self._search.locate(SuspectSequence.from_dict(given)))
        self._export(report)
        return report

    # ------------------------------------------------------------------ choosing

    def _choose(
        self, groups: Sequence[RolloutGroup], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[_ChosenSample]:
        for group in groups:
            how = params if params is None or isinstance(params, SamplingParams) else params[group.index]
            for number, sample in enumerate(group.samples):
                if sample.num_drawn and self._is_chosen(group.group_id, number):
                    yield _ChosenSample(group.group_id, number, sample, how)

    def _is_chosen(self, group_id: str, number: int) -> bool:
        name = repr((group_id, number, self._seed)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") < self.share * 2**64

    # ------------------------------------------------------------------ comparing

    def _compare(
        self, chosen: Sequence[_ChosenSample], tally: Tally, most_tokens: int | None
    ) -> tuple[_ChosenSample | None, _ChosenSample | None]:
        """-> the samples with the worst token of the raw distribution and of that after sampling parameters."""
        changed = self._session.engine.weights.changed()
        scored = []
        for one in chosen:
            if len(one.raw) != len(one.sample.token_ids):
                tally.others["num_unscored"] += 1
                continue
            one.comparable = [] if changed else _comparable(one.sample, self._session.weight_version)
            tally.others["num_stale_tokens"] += one.sample.num_drawn - len(one.comparable)
            one.comparable = one.comparable if most_tokens is None else one.comparable[-most_tokens:]
            if one.comparable:
                scored.append(one)
        tally.num_samples = len(scored)
        worst = worst_processed = None
        for one, train in zip(scored, self._scores(scored), strict=True):
            begin = len(one.sample.prompt_ids)
            one.train = {begin + index: train[index] for index in one.comparable}
            for index in one.comparable:
                if tally.add(one.train[begin + index] - one.raw[index]):
                    worst, tally.worst = one, _worst(one, index)
            if one.params is not None and only_temperature(one.params) and self._add_processed(one, train, tally):
                worst_processed = one
        return worst, worst_processed

    def _scores(self, scored: Sequence[_ChosenSample], *, temperature: float = 1.0) -> list[dict[int, float]]:
        """The trainer's log probabilities of each sample, from its first comparable token on, by index in token_ids."""
        if not scored:
            return []
        sequences, firsts = [one.sample.ids for one in scored], [one.comparable[0] for one in scored]
        starts = [len(one.sample.prompt_ids) + first for one, first in zip(scored, firsts, strict=True)]
        scores = self._session.score(
            sequences, temperature=temperature, micro_batch_tokens=2 * SESSION_TOKENS, start=starts
        )
        return [dict(enumerate(score.tolist(), start=first)) for score, first in zip(scores, firsts, strict=True)]

    def _add_processed(self, one: _ChosenSample, train: Mapping[int, float], tally: Tally) -> bool:
        """Compare the distribution that the sampler drew from -> whether the sample has the worst token so far."""
        assert one.params is not None
        temperature, begin = one.params.temperature, len(one.sample.prompt_ids)
        if temperature != 1.0:
            self._num_chosen += 1
            if self._num_chosen % PROCESSED_EVERY != 1:
                return False
            [train] = self._scores([one], temperature=temperature)
        is_worst = False
        for index in one.comparable:
            diff, raw = train[index] - one.sample.logprobs[index], one.train[begin + index] - one.raw[index]
            is_worst |= tally.add_processed(diff * min(temperature, 1.0), raw)  # dividing by it magnifies rounding, too
        return is_worst

    # ------------------------------------------------------------------ reporting

    def _export(self, report: MismatchReport) -> None:
        self.last = report
        self.num_windows += 1
        self.num_tokens += report.figures.num_tokens
        report.figures.set_gauges(self._registry)
        for sink in self._sinks:
            sink.write_mismatch(report.figures.as_metrics())
        if not report.is_alarm:
            return
        self.num_alarms += 1
        log.warning("%s", report)
        if self._on_alarm is not None:
            self._on_alarm(report)
        if self.alarm is not None and self.alarm.raises:
            raise MismatchAlarm(str(report), report=report)


def meter_of(session: MeteredSession, option: Mapping[str, Any] | str | None) -> MismatchMeter | None:
    """The meter of a session. option: None: none; "auto"; or some arguments of MismatchMeter."""
    if option is None:
        return None
    if isinstance(option, str):
        if option != AUTO:
            raise ConfigError(
                f"meter: {unknown_name('value', option, [AUTO])}; 'auto', None, or arguments of MismatchMeter by name"
            )
        option = {}
    known = [*inspect.signature(MismatchMeter).parameters][1:]
    for name in option:
        if name not in known:
            raise ConfigError(f"meter: {unknown_name('argument', name, known)}; MismatchMeter takes {', '.join(known)}")
    return MismatchMeter(session, **{"share": SESSION_SHARE, **option})


def _encoded(one: _ChosenSample) -> list[Any]:
    """What is compared, as JSON for other ranks."""
    sample = one.sample
    compared = RolloutSample(
        prompt_ids=sample.prompt_ids,
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        spans=sample.spans,
        logprobs=sample.logprobs,
        raw_logprobs=sample.raw_logprobs,
    )
    params = None if one.params is None else one.params.to_dict()
    return [one.group_id, one.number, base64.b85encode(encode_sample(compared)).decode(), params]


def _chosen_of(given: Sequence[Any]) -> _ChosenSample:
    """The sample from what `_encoded` gave."""
    group_id, number, encoded, params = given
    how = None if params is None else SamplingParams.from_dict(params)
    return _ChosenSample(group_id, number, decode_sample(base64.b85decode(encoded)), how)


def _comparable(sample: RolloutSample, version: int) -> list[int]:
    """Indices of tokens that `version` drew from keys and values of its own. Without spans: of all drawn tokens."""
    drawn = [index for index, mask in enumerate(sample.loss_mask) if mask]
    if not sample.spans:
        return drawn
    ages = zip(drawn, sample.staleness(version), sample.kv_staleness(version), strict=True)
    return [index for index, age, kv_age in ages if age == kv_age == 0]


def _worst(one: _ChosenSample, index: int) -> WorstToken:
    position = len(one.sample.prompt_ids) + index
    return WorstToken(
        group_id=one.group_id,
        sample=one.number,
        position=position,
        token_id=one.sample.token_ids[index],
        rollout_logprob=one.raw[index],
        train_logprob=one.train[position],
        spans=tuple(one.sample.spans),
    )


def _suspect_of(one: _ChosenSample | None, worst: WorstToken | None, *, of_sampler: bool) -> SuspectSequence:
    assert one is not None, "an alarm without a token"
    begin = len(one.sample.prompt_ids)
    at = begin + one.comparable[0] if of_sampler or worst is None else worst.position
    return SuspectSequence(
        ids=one.sample.ids,
        prompt_len=begin,
        position=at,
        rollout={begin + index: one.raw[index] for index in one.comparable},
        train=one.train,
        params=one.params,
        of_sampler=of_sampler,
    )
