"""An engine's counters and gauges: read at any time, and written to the metrics writer every few steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.engine.metrics.engine_snapshot import GRAPH_STEPS, EngineSnapshot
from megatron_infer.engine.metrics.wandb import WandbSink, check_writer, step_row
from megatron_infer.engine.requests.output_processor import OutputProcessor
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.runner.cuda_graphs.padded_step import StepGraphs
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.drafts import DraftPlanner, SpecDecodeMetrics
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since construction, and gauges as they are now."""

    num_steps: int
    num_requests: int
    num_waiting: int
    num_running: int
    num_paused: int
    num_free_blocks: int
    num_blocks: int
    weight_version: int
    state: str
    counters: dict[str, int]


_FIGURES = frozenset(EngineSnapshot.__dataclass_fields__)
"""Counters of the scheduler that have one of these names are figures of the snapshot."""


class StatLogger:
    """Reads one engine's figures, from any thread: nothing is changed or waited for."""

    def __init__(
        self,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        weights: WeightManager,
        graphs: StepGraphs | None,
        config: InferenceConfig,
        sizes: ResolvedSizes,
        drafts: DraftPlanner | None = None,
    ) -> None:
        """Raises ConfigError for a metrics writer that is none."""
        self._scheduler, self._output_processor, self._weights = scheduler, output_processor, weights
        self._graphs, self._config, self._sizes, self._drafts = graphs, config, sizes, drafts
        check_writer(config.metrics_writer)
        self._sink = WandbSink(config.metrics_writer) if config.logging_step_interval > 0 else None

    def stats(self, *, state: str, num_steps: int) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_steps=num_steps,
            num_requests=len(self._output_processor),
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_paused=scheduler.num_paused,
            num_free_blocks=scheduler.context.num_free_blocks,
            num_blocks=self._sizes.num_usable_blocks,
            weight_version=self._weights.version,
            state=state,
            counters=scheduler.stats.as_dict(),
        )

    def spec_decode_metrics(self) -> SpecDecodeMetrics | None:
        """A copy of what was counted; None where nothing is drafted."""
        if self._drafts is None:
            return None
        found = self._drafts.stats
        lists = ("drafted_per_position", "accepted_per_position", "proposals_per_depth")
        return replace(found, **{name: list(getattr(found, name)) for name in lists})

    def snapshot(self, *, state: str, num_steps: int) -> EngineSnapshot:
        """The engine as it is now. While a step runs, gauges may be of slightly different moments."""
        scheduler, context, stats = self._scheduler, self._scheduler.context, self._scheduler.stats
        pool = context.pool
        paused = _held_blocks(scheduler.paused)
        paused -= _held_blocks(scheduler.running)
        used = max(0, pool.num_blocks - pool.num_free - len(paused))
        return EngineSnapshot(
            state=state,
            weight_version=self._weights.version,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_paused=scheduler.num_paused,
            capacity=self._sizes.max_requests,
            blocks_used=used,
            blocks_cached=pool.num_cached,
            blocks_paused=len(paused),
            blocks_free=pool.num_free - pool.num_cached,
            num_steps=num_steps,
            pauses=stats.paused,
            evictions=stats.evicted,
            swaps_out=stats.swapped_out,
            swaps_in=stats.swapped_in,
            retracted_steps=scheduler.budget.num_retracted,
            **{name: value for name, value in stats.as_dict().items() if name in _FIGURES},
            **_state_slots(context),
            **_draft_figures(self.spec_decode_metrics()),
            **_adapter_figures(context),
            **({} if self._graphs is None else _graph_figures(self._graphs)),
            **self._output_processor.meter.as_figures(),
        )

    def after_step(self, plan: StepPlan, seconds: float, step: int) -> None:
        """Give a step's figures to the metrics writer, every logging_step_interval steps."""
        if self._sink is None or step % self._config.logging_step_interval:
            return
        figures = self.snapshot(state="running", num_steps=step)
        row = step_row(
            figures,
            step=step,
            seconds=seconds,
            num_tokens=plan.num_tokens,
            num_requests=len(self._output_processor),
            num_blocks=self._sizes.num_usable_blocks,
            num_active_blocks=len(_held_blocks(self._scheduler.running)),
            block_size=self._config.block_size_tokens,
        )
        self._sink.write(row, figures)


def _graph_figures(graphs: StepGraphs) -> dict[str, Any]:
    """Captured steps."""
    counts = graphs.pool.counts
    steps = (counts.replays, counts.uncaptured, sum(list(counts.eager.values())))
    return {
        "graphs": len(graphs.pool.captured),
        "graph_bytes": graphs.pool.num_bytes,
        "graph_captures": counts.captures,
        "graph_steps": dict(zip(GRAPH_STEPS, steps, strict=True)),
        "graph_draws_outside": sum(list(graphs.drawn_outside.values())),
    }


def _draft_figures(found: SpecDecodeMetrics | None) -> dict[str, Any]:
    """Drafted tokens, by place from 1."""
    if found is None:
        return {}
    return {
        "drafted": {str(place): count for place, count in enumerate(found.drafted_per_position, 1)},
        "drafts_accepted": {str(place): count for place, count in enumerate(found.accepted_per_position, 1)},
        "draft_depths": {str(depth): count for depth, count in enumerate(found.proposals_per_depth)},
        "verifications": found.num_verifications,
        "drafting_seconds": found.seconds_drafting,
    }


def _held_blocks(requests: Iterable[Request]) -> set[int]:
    """Blocks that these requests hold, a shared one once."""
    leases = [request.lease for request in list(requests)]
    return {block for lease in leases if lease is not None for block in list(lease.blocks)}


def _state_slots(context: DynamicInferenceContext) -> dict[str, int]:
    """Recurrent-state slots of rows and of the prefix cache; nothing for a model without recurrent states."""
    if context.states is None:
        return {}
    free, slots = context.num_free_rows, context.states.slots
    return {
        "state_slots_used": context.num_rows - free,
        "state_slots_cached": slots.num_cached,
        "state_slots_free": free + slots.count - slots.num_cached,
    }


def _adapter_figures(context: DynamicInferenceContext) -> dict[str, int]:
    """LoRA adapters; nothing for an engine without them."""
    if (slots := context.adapters) is None:
        return {}
    resident = len(slots.resident)
    on_host = max(0, len(slots.versions) - resident)
    return {"adapters_on_device": resident, "adapters_on_host": on_host, "adapter_loads": slots.num_loads}
