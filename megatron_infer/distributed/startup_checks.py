"""What must be equal on every rank of an engine before the first step."""

from __future__ import annotations

import json
from dataclasses import replace

from megatron_infer.config.capacity import GIB, host_places
from megatron_infer.config.inference import InferenceConfig, PreemptionMode
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.config.sizing import add_graphs
from megatron_infer.config.stage_sizes import StageSizes, agree, stage_limits
from megatron_infer.distributed.lockstep import LocalLockstep, Lockstep
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.errors import ConfigError


def agree_on_config(config: InferenceConfig, lockstep: Lockstep | LocalLockstep) -> None:
    """Raise ConfigError, on every rank and naming the option, when ranks were configured differently."""
    values = config.to_dict()
    mine = {name: str(values[name]) for name in values if name != "logging_step_interval"}  # logging may differ
    configs = [json.loads(text) for text in lockstep.gather("comparison of options", json.dumps(mine))]
    for name, value in configs[0].items():
        for rank, theirs in enumerate(configs):
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{name} is {value} on rank 0 and {theirs.get(name)} on rank {rank}; give all the same"
                )


def agree_on_sizes(
    config: InferenceConfig, shape: ModelShape, rank_group: RankGroup, *, available_bytes: int, draft: ModelShape | None
) -> StageSizes:
    """Sizes that every rank of the engine can hold, equal on all of them.

    available_bytes: free on this rank's device. draft: a draft model with layers of its own in the cache.
    """
    lockstep, size = rank_group.lockstep, rank_group.groups.tp_size
    available = min(lockstep.least("comparison of free memory", [available_bytes]))
    with rank_group.together("sizing the cache"):
        sizes = config.resolve(shape, tensor_parallel_size=size, available_bytes=available, draft=draft)
    limits = stage_limits(shape, sizes, _host_places_of(config, sizes))
    agreed = agree(sizes, lockstep.least("comparison of sizes", limits))
    return replace(agreed, sizes=add_graphs(config, agreed.sizes, shape, tensor_parallel_size=size))


def _host_places_of(config: InferenceConfig, sizes: ResolvedSizes) -> tuple[int, int]:
    """(blocks, recurrent states) of swapped requests that the host holds."""
    if config.preemption_mode is PreemptionMode.RECOMPUTE:
        return 0, 0
    return host_places(
        int(config.swap_buffer_size_gb * GIB),
        block_bytes=sizes.block_bytes,
        slot_bytes=sizes.state_slot_bytes,
        max_requests=sizes.max_requests,
        max_blocks_per_row=sizes.max_blocks_per_row,
    )
