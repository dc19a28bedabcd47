"""The objects inside an engine, for tests, benchmarks and checks: the only place that reads its private attributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_infer.engine.cost_meter import CostMeter
from megatron_infer.engine.durable.snapshot_manager import SnapshotManager
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.executor import Executor
from megatron_infer.memory.store import CacheStore
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.fused_layers import LayerOps
from megatron_infer.runner.model_runner import Runner
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.drafts import DraftPlanner
from megatron_infer.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInternals:
    """Objects of an engine that are not public. They are live: what is changed in them changes the engine."""

    adopted: AdoptedModel
    context: DynamicInferenceContext
    scheduler: Scheduler
    executor: Executor
    runner: Runner
    store: CacheStore
    snapshots: SnapshotManager
    drafts: DraftPlanner | None
    """None where nothing is drafted."""
    cost_meter: CostMeter | None
    """On the leader of an engine that swaps requests to the host; else None."""


def inspect(engine: DynamicInferenceEngine) -> EngineInternals:
    loop, scheduler, executor = engine.loop, engine._scheduler, engine.loop._executor
    meters = [one for one in loop._observers if isinstance(one, CostMeter)]
    return EngineInternals(
        adopted=engine.replay.model,
        context=scheduler.context,
        scheduler=scheduler,
        executor=executor,
        runner=executor.runner,
        store=executor.runner.store,
        snapshots=engine.controls.snapshots,
        drafts=None if loop._verifier is None else loop._verifier.drafts,
        cost_meter=meters[0] if meters else None,
    )


def run_one_by_one(engine: DynamicInferenceEngine, replaced: dict[int, Any] | None = None) -> None:
    """Call each operation of the layers by itself from now on, so that faults put into one act.

    replaced: objects with `run` in the place of layers, by number.
    """
    adopted = inspect(engine).adopted
    for number, layer in (replaced or {}).items():
        adopted.layers[number] = layer
    norm = adopted._reading.norm
    layers: list[Any] = list(adopted.layers)
    adopted._operations = [LayerOps(*layers, *([] if norm is None else [norm]))]
