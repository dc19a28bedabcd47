"""Makes a scheduler as a configuration asks."""

from __future__ import annotations

from megatron_infer.config.batching import BatchingLimits
from megatron_infer.config.inference import BatchingPolicy, InferenceConfig
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.scheduler.admitted_requests import EventHook
from megatron_infer.scheduler.context.block_digest import root_of
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.drafts import DraftPlanner
from megatron_infer.scheduler.phases import Phased, Phases, PrefillFirst
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.prefill import PrefillRoom
from megatron_infer.scheduler.scheduler import Scheduler


def build_scheduler(
    config: InferenceConfig,
    context: DynamicInferenceContext,
    sizes: ResolvedSizes,
    *,
    model: str,
    num_micro_batches: int,
    prefill_room: PrefillRoom | None,
    costs: CostModel | None,
    drafts: DraftPlanner | None,
    on_event: EventHook,
) -> Scheduler:
    """model: its name, which prefixes are found under. prefill_room: as in `Scheduler`, None: steps of any size.

    costs: prices of evictions; None where requests are never swapped and the unit of the prices does not matter.
    """
    limits = BatchingLimits.of(config, sizes)
    return Scheduler(
        context,
        max_tokens=sizes.max_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        paused_block_limit=sizes.paused_block_limit,
        root=root_of(model=model),
        preemption=config.preemption_mode,
        costs=costs,
        num_micro_batches=num_micro_batches,
        prefill_room=prefill_room,
        limits=limits,
        phases=_phases_of(config, limits),
        drafts=drafts,
        on_event=on_event,
    )


def _phases_of(config: InferenceConfig, limits: BatchingLimits) -> Phases | None:
    if config.batching is BatchingPolicy.PREFILL_FIRST:
        return PrefillFirst()
    if limits.min_decoding is not None:
        first = config.enable_prioritize_first_decode
        return Phased(min_decoding=limits.min_decoding, prioritizes_first_decode=first)
    return None
