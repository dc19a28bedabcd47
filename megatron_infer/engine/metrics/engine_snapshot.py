"""Snapshots of an engine's figures, which wandb, Prometheus and a coordinator's report are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_infer.engine.metrics.registry import Family, Histogram, families_of, plain_of

STATES = ("running", "paused", "suspended", "changing")
GRAPH_STEPS = ("replayed", "padded", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """An engine's state, and what it has counted since it was built."""

    born: float
    """Unix time at which it was built; another value means that the counts have started again at zero."""
    state: str
    weight_version: int
    num_waiting: int = 0
    num_running: int = 0
    num_paused: int = 0
    capacity: int = 0
    """Most requests in one step."""
    blocks_used: int = 0
    """Held by requests that are not paused; a shared block counts once."""
    blocks_cached: int = 0
    """Free, and kept for the prefix cache."""
    blocks_paused: int = 0
    """Held by paused requests alone."""
    blocks_free: int = 0
    """Free without cached content."""
    state_slots_used: int = 0
    """Recurrent-state slots of rows that requests hold. All three are 0 for models without recurrent state."""
    state_slots_cached: int = 0
    """Slots that keep a state for the prefix cache."""
    state_slots_free: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that have sampled a token."""
    cached_prompt_tokens: int = 0
    """Those of `prompt_tokens` that the prefix cache served."""
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    pauses: int = 0
    evictions: int = 0
    """Preemptions that took a request's memory, swaps to the host included."""
    swaps_out: int = 0
    swaps_in: int = 0
    retracted_steps: int = 0
    recomputed_tokens: int = 0
    drafted: Mapping[str, int] = field(default_factory=dict)
    """Tokens drafted by place among the drafts of a step, from "1"; this and the next four are empty or 0 where
    nothing is drafted."""
    drafts_accepted: Mapping[str, int] = field(default_factory=dict)
    """Those of them that became tokens of their request."""
    draft_depths: Mapping[str, int] = field(default_factory=dict)
    """Proposals by how many of their tokens a step verified, from "0"."""
    verifications: int = 0
    drafting_seconds: float = 0.0
    adapters_on_device: int = 0
    """LoRA adapters that have a slot, and those that are loaded on the host alone."""
    adapters_on_host: int = 0
    adapter_loads: int = 0
    """Times that an adapter was written into a slot."""
    adapter_requests: Mapping[str, int] = field(default_factory=dict)
    """Requests that ended, by adapter, and their output tokens."""
    adapter_tokens: Mapping[str, int] = field(default_factory=dict)
    graphs: int = 0
    """CUDA graphs that exist now; this and the next four are 0 where steps are not captured."""
    graph_bytes: int = 0
    graph_captures: int = 0
    graph_steps: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(GRAPH_STEPS, 0))
    """Steps by GRAPH_STEPS: replayed from a graph, padded to a shape without a graph, or eager."""
    graph_draws_outside: int = 0
    """Replayed and padded steps with a row that the captured draw cannot serve: see `CapturedDraw.drawn_outside`."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Requests by outcome: stop, length, abort, error."""
    transitions: Mapping[str, int] = field(default_factory=dict)
    """Number of suspends and resumes."""
    transition_seconds: Mapping[str, float] = field(default_factory=dict)
    ttft: Histogram | None = None
    itl: Histogram | None = None
    e2e: Histogram | None = None
    beside: tuple[Family, ...] = ()
    """Metrics that others keep in `EngineMeter.registry`, such as the mismatch meter's."""

    @property
    def states(self) -> dict[str, float]:
        """1 for the one of STATES that the engine is in, 0 for the others."""
        current = self.state if self.state in STATES else "changing"
        return {state: float(state == current) for state in STATES}

    def to_dict(self) -> dict[str, Any]:
        """Plain values to send; `from_dict` is the inverse."""
        return asdict(replace(self, beside=())) | {"beside": plain_of(self.beside)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineSnapshot:
        """Ignores unknown names: a replica may be newer."""
        known = {name: values[name] for name in cls.__slots__ if name in values}
        for name in ("ttft", "itl", "e2e"):
            if known.get(name) is not None:
                known[name] = Histogram(**known[name])
        known["beside"] = tuple(families_of(known.get("beside", ())))
        return cls(**known)
