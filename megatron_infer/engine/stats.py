"""Reads an engine's figures; from any thread, as nothing is changed or waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_infer.metrics.engine_snapshot import GRAPH_STEPS, EngineSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_infer.context.dynamic_context import DynamicInferenceContext
    from megatron_infer.engine.build import Assembly
    from megatron_infer.metrics.engine_meter import EngineMeter
    from megatron_infer.scheduler.request import Request


def figures_of(parts: Assembly, meter: EngineMeter, *, state: str, num_steps: int) -> EngineSnapshot:
    """The engine as it stands. Read while a step runs, gauges may be a moment apart from each other."""
    scheduler, context, stats = parts.scheduler, parts.context, parts.scheduler.stats
    pool = context.pool
    paused = held_blocks(scheduler.paused)
    paused -= held_blocks(scheduler.running)
    used = max(0, pool.num_blocks - pool.num_free - len(paused))
    return EngineSnapshot(
        state=state,
        weight_version=parts.weight_version,
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_paused=scheduler.num_paused,
        capacity=parts.sizes.max_requests,
        blocks_used=used,
        blocks_cached=pool.num_cached,
        blocks_paused=len(paused),
        blocks_free=pool.num_free - pool.num_cached,
        num_steps=num_steps,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        pauses=stats.paused,
        evictions=stats.evicted,
        swaps_out=stats.swapped_out,
        swaps_in=stats.swapped_in,
        recomputed_tokens=stats.recomputed_tokens,
        **state_slots(context),
        **graph_figures(parts),
        **meter.as_figures(),
    )


def graph_figures(parts: Assembly) -> dict[str, Any]:
    """Captured steps; nothing where none are."""
    if parts.graphs is None:
        return {}
    pool = parts.graphs.pool
    counts = pool.counts
    steps = (counts.replays, counts.uncaptured, sum(list(counts.eager.values())))
    return {
        "graphs": len(pool.captured),
        "graph_bytes": pool.num_bytes,
        "graph_captures": counts.captures,
        "graph_steps": dict(zip(GRAPH_STEPS, steps, strict=True)),
        "graph_draws_outside": sum(list(parts.graphs.drawn_outside.values())),
    }


def held_blocks(requests: Iterable[Request]) -> set[int]:
    """Blocks that these requests hold, a shared one once."""
    leases = [request.lease for request in list(requests)]
    return {block for lease in leases if lease is not None for block in list(lease.blocks)}


def state_slots(context: DynamicInferenceContext) -> dict[str, int]:
    """Recurrent-state slots: of rows, and of the prefix cache; all 0 for a model that keeps no state."""
    if context.states is None:
        return {}
    free, slots = context.num_free_rows, context.states.slots
    return {
        "state_slots_used": context.num_rows - free,
        "state_slots_cached": slots.num_cached,
        "state_slots_free": free + slots.count - slots.num_cached,
    }
