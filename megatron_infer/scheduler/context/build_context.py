"""Makes a context of the parts that a model and its configuration need."""

from __future__ import annotations

from megatron_infer.config.inference import InferenceConfig, PrefixCachingEvictionPolicy
from megatron_infer.config.stage_sizes import StageSizes
from megatron_infer.scheduler.context.adapter_slots import AdapterSlots
from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.context.cached_state_slots import CachedStateSlots
from megatron_infer.scheduler.context.copies import Copy
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.context.row_pool import RowPool
from megatron_infer.scheduler.context.state_cache import StateCache
from megatron_infer.scheduler.context.swap import Swap


def build_context(
    *,
    num_blocks: int,
    block_size: int,
    num_rows: int,
    max_blocks_per_row: int,
    prefix_caching: bool = False,
    keep_cached: bool = False,
    num_host_slots: int = 0,
    recurrent: bool = False,
    num_cached_states: int = 0,
    num_host_states: int = 0,
    num_draft_states: int = 0,
    adapters: AdapterSlots | None = None,
) -> DynamicInferenceContext:
    """num_blocks: without the dummy block. keep_cached: published blocks stay findable when no lease holds them.

    num_host_slots, num_host_states: places on the host for blocks and states of evicted sequences. recurrent: rows have
    a recurrent state: slots 0 .. num_rows - 1 are theirs, num_rows is the dummy for padding, then come
    num_cached_states of the prefix cache, and num_draft_states for each row.
    """
    assert recurrent or not (num_cached_states or num_host_states), "states of a model that keeps none"
    copies: list[Copy] = []
    slots = CachedStateSlots(num_rows + 1, num_cached_states if prefix_caching else 0)
    pool = BlockPool(
        num_blocks, keep_cached=prefix_caching and keep_cached, on_forget=slots.forget if slots.count else None
    )
    rows = RowPool(num_rows)
    states = None
    if recurrent:
        states = StateCache(slots, pool, block_size=block_size, journal=copies, num_draft_states=num_draft_states)
    swap = None
    if num_host_slots:
        swap = Swap(
            pool,
            rows,
            num_slots=num_host_slots,
            num_states=num_host_states,
            block_size=block_size,
            recurrent=recurrent,
            journal=copies,
        )
    return DynamicInferenceContext(
        pool,
        rows,
        block_size=block_size,
        max_blocks_per_row=max_blocks_per_row,
        prefix_caching=prefix_caching,
        states=states,
        swap=swap,
        copies=copies,
        adapters=adapters,
    )


def context_for(
    config: InferenceConfig, agreed: StageSizes, *, publishes: bool, num_draft_states: int
) -> DynamicInferenceContext:
    """The context of an engine. publishes: tokens mean something, so blocks of them may be found by other requests.

    num_draft_states: as in `build_context`, for a model with recurrent states.
    """
    sizes, (num_host_slots, num_host_states) = agreed.sizes, agreed.host
    return build_context(
        num_blocks=sizes.num_usable_blocks,
        block_size=config.block_size_tokens,
        num_rows=sizes.max_requests,
        max_blocks_per_row=sizes.max_blocks_per_row,
        prefix_caching=config.enable_prefix_caching and publishes,
        keep_cached=config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU,
        num_host_slots=num_host_slots,
        recurrent=agreed.recurrent,
        num_cached_states=sizes.num_cached_states,
        num_host_states=num_host_states,
        num_draft_states=num_draft_states if agreed.recurrent else 0,
        adapters=None if config.lora is None else AdapterSlots(config.lora.max_loras),
    )
