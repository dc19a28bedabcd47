"""An engine's figures at a moment: the one place that wandb, Prometheus and a coordinator's report are fed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_infer.metrics.core import Histogram, Labels, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCounts:
    """A histogram's content: counts[i] observations in bounds[i-1] < x <= bounds[i], the last one beyond all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    """Sum of what was observed."""

    @classmethod
    def of(cls, histogram: Histogram) -> BucketCounts:
        return cls(bounds=histogram.bounds, counts=tuple(histogram.counts), total=histogram.total)

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A counter or gauge that somebody beside the engine keeps, as the mismatch meter does."""

    name: str
    """In full."""
    kind: str
    help: str
    value: float
    labels: Labels = ()

    @classmethod
    def all_of(cls, registry: Registry) -> tuple[Reading, ...]:
        """Every counter and gauge of a registry, as it stands; histograms are left out."""
        return tuple(
            cls(name=family.name, kind=family.kind, help=family.help, value=metric.value, labels=labels)
            for family in list(registry.collect())
            for labels, metric in list(family.series.items())
            if not isinstance(metric, Histogram)
        )


GRAPH_STEPS = ("replayed", "padded", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Where an engine stands, and what it has counted since it was built (`born`)."""

    born: float
    """Unix time at which it was built: another one means that counts began anew."""
    state: str
    weight_version: int
    num_waiting: int
    num_running: int
    num_paused: int
    capacity: int
    """Requests it computes at once."""
    blocks_used: int
    """Held by requests that are not paused; a shared one once."""
    blocks_cached: int
    """Free, and kept for the prefix cache."""
    blocks_paused: int
    """Held by paused requests alone."""
    blocks_free: int
    """Blank."""
    state_slots_used: int = 0
    """Recurrent state: slots of rows that requests hold. All three are 0 for models without recurrent state."""
    state_slots_cached: int = 0
    """Slots that keep a state for the prefix cache."""
    state_slots_free: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    """Of requests that have drawn a token."""
    cached_prompt_tokens: int = 0
    """Of these, served from the prefix cache."""
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    pauses: int = 0
    evictions: int = 0
    """Preemptions that took a request's memory; those to the host included."""
    swaps_out: int = 0
    swaps_in: int = 0
    recomputed_tokens: int = 0
    graphs: int = 0
    """CUDA graphs captured now; this and the next four are 0 where no steps are captured."""
    graph_bytes: int = 0
    graph_captures: int = 0
    graph_steps: Mapping[str, int] = field(default_factory=dict)
    """By GRAPH_STEPS: replayed from a graph, padded to a shape without one, or run as they are."""
    graph_draws_outside: int = 0
    """Steps of the first two kinds that had a row no captured draw serves: see `CapturedDraw.drawn_outside`."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Requests by outcome: stop, length, abort, error."""
    transitions: Mapping[str, int] = field(default_factory=dict)
    """How often memory was given back and taken: suspend, resume."""
    transition_seconds: Mapping[str, float] = field(default_factory=dict)
    ttft: BucketCounts | None = None
    itl: BucketCounts | None = None
    e2e: BucketCounts | None = None
    beside: tuple[Reading, ...] = ()
    """What others keep in `EngineMeter.registry`: figures of mismatch."""

    @property
    def num_blocks(self) -> int:
        return self.blocks_used + self.blocks_cached + self.blocks_paused + self.blocks_free

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a wire; `from_dict` takes them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineSnapshot:
        """Names that this version does not know are left out, as a replica may be newer."""
        known = {name: values[name] for name in cls.__slots__ if name in values}
        for name in ("ttft", "itl", "e2e"):
            one = known.get(name)
            if one is not None:
                known[name] = BucketCounts(bounds=tuple(one["bounds"]), counts=tuple(one["counts"]), total=one["total"])
        known["beside"] = tuple(
            Reading(**{**one, "labels": tuple((name, value) for name, value in one["labels"])})
            for one in known.get("beside", ())
        )
        return cls(**known)
