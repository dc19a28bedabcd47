"""Train-inference mismatch in numbers: what is measured, in which units, and the limits of an alarm.

d = log p_train - log p_rollout of a token that the rollout drew; importance ratio = exp(d).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_infer.engine.metrics.definitions import MISMATCH
from megatron_infer.engine.metrics.registry import Registry
from megatron_infer.errors import ConfigError
from megatron_infer.scheduler.request import VersionSpan

BAND = (0.9, 1.1)
"""Clipped objectives treat ratios inside as no change."""
LARGEST = 700.0
"""exp() of more overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """The token with the largest |d|."""

    group_id: str
    sample: int
    """Index in the group."""
    position: int
    """In the whole sequence, prompt included."""
    token_id: int
    rollout_logprob: float
    train_logprob: float
    spans: tuple[VersionSpan, ...]
    """Version spans of its sample: which weights drew what."""

    def __str__(self) -> str:
        return (
            f"request {self.group_id} sample {self.sample} position {self.position} token {self.token_id}: "
            f"rollout {self.rollout_logprob:.5f}, train {self.train_logprob:.5f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchFigures:
    """Figures of the tokens of one window. Units: MISMATCH in `engine.metrics.definitions`."""

    num_tokens: int = 0
    """Drawn tokens that were scored by the trainer's forward."""
    num_samples: int = 0
    """Samples they belong to."""
    num_stale_tokens: int = 0
    """Tokens of chosen samples drawn by, or from keys of, other weights."""
    num_unscored: int = 0
    """Chosen samples without log probabilities to compare with."""
    abs_diff_mean: float = 0.0
    """Mean of |log p_train - log p_rollout|."""
    abs_diff_max: float = 0.0
    kl_k1: float = 0.0
    """KL(rollout || train), estimator k1: mean of -d; noisy, unbiased."""
    kl_k3: float = 0.0
    """KL(rollout || train), estimator k3: mean of exp(d) - 1 - d; never negative."""
    token_mult_prob_error: float = 1.0
    """Mean of exp(|d|); 1 where both agree, as NeMo-RL has it."""
    ratio_mean: float = 1.0
    """Mean of exp(d); 1 for distributions that agree."""
    share_outside: float = 0.0
    """Share of tokens with exp(d) outside BAND."""
    num_processed: int = 0
    """Tokens whose log probability after the sampler was scored too."""
    processed_abs_diff_mean: float = 0.0
    """Mean difference of what the sampler drew from, times the temperature where that is below 1."""
    processed_abs_diff_max: float = 0.0
    sampler_excess_mean: float = 0.0
    """Mean of those differences beyond |d| of the same token."""
    seconds: float = 0.0
    """Spent on scoring."""
    weight_version: int = 0
    """Of the weights on both sides."""
    worst: WorstToken | None = None

    def as_metrics(self, prefix: str = "mismatch/") -> dict[str, float]:
        """Flat names and numbers for a metrics writer (see `WandbSink.write_mismatch`)."""
        names = [entry.name for entry in fields(self) if entry.name != "worst"]
        return {prefix + name: float(getattr(self, name)) for name in names}

    def set_gauges(self, registry: Registry) -> None:
        """Set the gauges MISMATCH. A gauge's name is the figure's, with its unit at the end where that lacks it."""
        for gauge, spec in MISMATCH.items():
            name = gauge.removeprefix("mismatch_")
            value = getattr(self, name if hasattr(self, name) else name.removesuffix(f"_{spec.unit}"))
            registry.gauge(spec.full_name, spec.help).set(float(value))

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: |d| mean {self.abs_diff_mean:.2e} max {self.abs_diff_max:.2e}, "
            f"KL {self.kl_k3:.2e}, token_mult_prob_error {self.token_mult_prob_error:.6g}, "
            f"{100 * self.share_outside:.1f} % outside {BAND[0]} .. {BAND[1]}"
            + (f"; after the sampler |d| mean {self.processed_abs_diff_mean:.2e}" if self.num_processed else "")
            + (f"; worst: {self.worst}" if self.worst is not None else "")
        )


@dataclass(slots=True)
class Tally:
    """Running sums over the tokens of a window."""

    num_tokens: int = 0
    num_samples: int = 0
    num_outside: int = 0
    num_processed: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("abs", "k1", "k3", "mult", "ratio"), 0.0))
    processed_sum: float = 0.0
    processed_max: float = 0.0
    excess_sum: float = 0.0
    excess_max: float = 0.0
    worst: WorstToken | None = None
    worst_diff: float = -1.0
    others: dict[str, int] = field(default_factory=lambda: {"num_stale_tokens": 0, "num_unscored": 0})

    def add(self, diff: float) -> bool:
        """Add one token's d -> whether it is the worst so far. A d that is not finite counts as LARGEST."""
        diff = max(-LARGEST, min(LARGEST, diff)) if math.isfinite(diff) else LARGEST
        ratio, sums = math.exp(diff), self.sums
        self.num_tokens += 1
        self.num_outside += not BAND[0] <= ratio <= BAND[1]
        sums["abs"] += abs(diff)
        sums["k1"] -= diff
        sums["k3"] += math.expm1(diff) - diff
        sums["mult"] += math.exp(abs(diff))
        sums["ratio"] += ratio
        if abs(diff) <= self.worst_diff:
            return False
        self.worst_diff = abs(diff)
        return True

    def add_processed(self, diff: float, raw: float) -> bool:
        """Add a token's difference after sampling parameters; raw: its d -> whether its excess is the worst so far."""
        size, known = (min(abs(x), LARGEST) if math.isfinite(x) else LARGEST for x in (diff, raw))
        excess = max(size - known, 0.0)
        self.num_processed += 1
        self.processed_sum += size
        self.processed_max = max(self.processed_max, size)
        self.excess_sum += excess
        is_worst = excess > self.excess_max
        self.excess_max = max(self.excess_max, excess)
        return is_worst

    def joined(self, other: Tally) -> Tally:
        """The tally of both windows."""
        both = Tally()
        for name in ("num_tokens", "num_samples", "num_outside", "num_processed", "processed_sum", "excess_sum"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        for name in ("processed_max", "excess_max"):
            setattr(both, name, max(getattr(self, name), getattr(other, name)))
        both.sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        both.others = {name: value + other.others[name] for name, value in self.others.items()}
        worse = max(self, other, key=lambda tally: tally.worst_diff)
        both.worst, both.worst_diff = worse.worst, worse.worst_diff
        return both

    def figures(self, *, seconds: float, weight_version: int) -> MismatchFigures:
        count = max(self.num_tokens, 1)
        sums = self.sums if self.num_tokens else self.sums | {"mult": 1.0, "ratio": 1.0}
        return MismatchFigures(
            num_tokens=self.num_tokens,
            num_samples=self.num_samples,
            abs_diff_mean=sums["abs"] / count,
            abs_diff_max=max(self.worst_diff, 0.0),
            kl_k1=sums["k1"] / count,
            kl_k3=sums["k3"] / count,
            token_mult_prob_error=sums["mult"] / count,
            ratio_mean=sums["ratio"] / count,
            share_outside=self.num_outside / count,
            num_processed=self.num_processed,
            processed_abs_diff_mean=self.processed_sum / max(self.num_processed, 1),
            processed_abs_diff_max=self.processed_max,
            sampler_excess_mean=self.excess_sum / max(self.num_processed, 1),
            seconds=seconds,
            weight_version=weight_version,
            worst=self.worst,
            **self.others,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Limits for the figures of a window; None: no limit. The defaults are those of fp32, see `of`."""

    abs_diff_mean: float | None = 1e-3
    abs_diff_max: float | None = 0.05
    kl_k3: float | None = 1e-4
    token_mult_prob_error: float | None = 1.001
    share_outside: float | None = 0.01
    sampler_excess_mean: float | None = 1e-3
    raises: bool = False
    """Raise MismatchAlarm after the alarm was reported."""
    min_tokens: int = 1
    """Windows of fewer tokens never trip."""

    def __post_init__(self) -> None:
        for name in LIMITS:
            limit = getattr(self, name)
            least = 1.0 if name == "token_mult_prob_error" else 0.0
            if limit is not None and not limit >= least:
                raise ConfigError(f"Alarm.{name} is {limit}, it must be at least {least:g}; None never trips")

    @classmethod
    def of(cls, dtype: str, *, experts: bool = False, **changes: Any) -> Alarm:
        """Thresholds that rounding in a model of `dtype` ("float32", "bfloat16", "float16") stays below; "int8",
        "int4": in rollouts whose linears multiply in 8 or 4 bits (weight_dtype), by any model's weights.

        Half precision: single unlikely tokens may be far off; means may not. experts: a mixture-of-experts router near
        a tie may send some tokens to other experts, and those are off by any amount, which dominates a mean of
        exp(|d|).
        """
        if dtype in ("float32", "float64"):
            return replace(cls(), **changes)
        half = cls(
            abs_diff_mean=0.15 if experts else 0.06,
            abs_diff_max=None,
            kl_k3=0.05 if experts else 0.01,
            token_mult_prob_error=2.0 if experts else 1.07,
            share_outside=0.3 if experts else 0.2,
            sampler_excess_mean=0.05,
            min_tokens=32,
        )
        if dtype in _OF_WEIGHTS:
            limits, with_experts = _OF_WEIGHTS[dtype]
            half = replace(half, **limits | (with_experts if experts else {}))
        return replace(half, **changes)

    def tripped(self, figures: MismatchFigures) -> dict[str, tuple[float, float]]:
        """(figure, limit) of each figure above its limit, by name."""
        if figures.num_tokens < self.min_tokens:
            return {}
        pairs = {name: (float(getattr(figures, name)), getattr(self, name)) for name in LIMITS}
        return {name: pair for name, pair in pairs.items() if pair[1] is not None and not pair[0] <= pair[1]}


_OF_WEIGHTS: dict[str, tuple[dict[str, float | None], dict[str, float | None]]] = {
    "int8": (
        {"abs_diff_mean": 0.15, "kl_k3": 0.03, "token_mult_prob_error": 1.18, "share_outside": 0.5},
        {"kl_k3": 0.05, "token_mult_prob_error": 2.0},
    ),
    "int4": ({"abs_diff_mean": 1.5, "kl_k3": 1.0, "token_mult_prob_error": None, "share_outside": None}, {}),
}
"""weight_dtype -> thresholds that its rounding stays below, and those that differ in a model with experts."""
LIMITS = tuple(entry.name for entry in fields(Alarm) if entry.name not in ("raises", "min_tokens"))
"""The figures that an alarm has a limit for."""


def describe_tripped(over: Mapping[str, tuple[float, float]]) -> str:
    return ", ".join(f"{name} {figure:.4g} > {limit:g}" for name, (figure, limit) in over.items())
