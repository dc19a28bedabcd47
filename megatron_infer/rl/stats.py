"""Figures of a rollout call: tokens drawn, speed, staleness of the weights, and why sequences ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_infer.rl.samples import RolloutGroup

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Figures of the groups that one call delivered; groups that it dropped count in `num_tokens` only."""

    num_groups: int
    num_samples: int
    num_rejected: int = 0
    """Groups that the filter refused."""
    num_aborted: int = 0
    """Groups that were in flight when the call had enough."""
    num_failed: int = 0
    num_carried: int = 0
    """Groups that an earlier call had begun."""
    num_tokens: int = 0
    """Tokens drawn during the call."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    seconds: float = 0.0
    weight_version: int = 0
    lag: int = 0
    """The queue's limit of training steps between the begin of a group and its consumption."""
    lag_mean: float = 0.0
    lag_max: int = 0
    """These steps of the groups delivered."""
    finished: dict[str, int] = field(default_factory=dict)
    """Samples by finish reason."""
    length_mean: float = 0.0
    length_max: int = 0
    length_percentiles: dict[int, int] = field(default_factory=dict)
    """Tokens drawn in a sample, by percentile."""
    staleness_min: int = 0
    """Versions between the weights that drew a token and the present weights, over all drawn tokens."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    last_token_staleness_mean: float = 0.0
    kv_staleness_max: int = 0
    """The same for the oldest keys and values that a token attended to."""

    @property
    def groups_per_s(self) -> float:
        return self.num_groups / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def as_metrics(self, prefix: str = "rollout/") -> dict[str, float]:
        """Flat names and numbers for a metrics writer (see `WandbSink.write_rollout`)."""
        mappings = ("finished", "length_percentiles")
        values = {name: float(getattr(self, name)) for name in self.__dataclass_fields__ if name not in mappings}
        values |= {"groups_per_s": self.groups_per_s, "tokens_per_s": self.tokens_per_s}
        values |= {f"finished_{reason}": float(count) for reason, count in self.finished.items()}
        values |= {f"length_p{share}": float(length) for share, length in self.length_percentiles.items()}
        return {prefix + name: value for name, value in values.items()}


def percentile(ordered: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` percent of the values do not exceed; 0 for no values."""
    if not ordered:
        return 0
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def stats_of(
    groups: Iterable[RolloutGroup],
    *,
    version: int,
    seconds: float,
    num_tokens: int | None = None,
    lags_used: Sequence[int] = (),
    **counts: int,
) -> RolloutStats:
    """version: weights that staleness is counted from. num_tokens: drawn in all; None: those of these groups.
    lags_used: the training steps between begin and consumption of each group. counts: further fields."""
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    lengths = sorted(sample.num_drawn for sample in samples)
    stale = [sample.staleness(version) for sample in samples]
    ages = [age for sample in stale for age in sample]
    last = [sample[-1] for sample in stale if sample]
    return RolloutStats(
        num_groups=len(groups),
        num_samples=len(samples),
        num_failed=sum(group.error is not None for group in groups),
        num_tokens=sum(lengths) if num_tokens is None else num_tokens,
        num_prompt_tokens=sum(len(group.prompt_ids) for group in groups),
        num_cached_tokens=sum(group.num_cached_tokens for group in groups),
        seconds=seconds,
        weight_version=version,
        lag_mean=sum(lags_used) / len(lags_used) if lags_used else 0.0,
        lag_max=max(lags_used, default=0),
        finished=dict(Counter(sample.finish_reason for sample in samples)),
        length_mean=sum(lengths) / len(lengths) if lengths else 0.0,
        length_max=lengths[-1] if lengths else 0,
        length_percentiles={share: percentile(lengths, share) for share in PERCENTILES},
        staleness_min=min(ages, default=0),
        staleness_mean=sum(ages) / len(ages) if ages else 0.0,
        staleness_max=max(ages, default=0),
        last_token_staleness_mean=sum(last) / len(last) if last else 0.0,
        kv_staleness_max=max((age for sample in samples for age in sample.kv_staleness(version)), default=0),
        **counts,
    )
