"""What every rank of an engine must have alike before the first step: options, and places to plan with."""

from __future__ import annotations

import json

from megatron_infer.config import InferenceConfig, ModelShape, ResolvedSizes
from megatron_infer.context.stages import StageSizes, agree, stage_limits
from megatron_infer.errors import ConfigError
from megatron_infer.parallel.lockstep import Lockstep


def agree_on_config(config: InferenceConfig, lockstep: Lockstep) -> None:
    """Raise ConfigError, on every rank and naming the option, when ranks were configured differently."""
    values = config.to_dict()
    mine = {name: str(values[name]) for name in values if name != "logging_step_interval"}  # metrics: as each likes
    everyone = [json.loads(text) for text in lockstep.gather("comparison of options", json.dumps(mine))]
    for name, value in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{name} is {value} on rank 0 and {theirs.get(name)} on rank {rank}; give all the same"
                )


def agree_on_memory(available_bytes: int, lockstep: Lockstep) -> int:
    """What the rank with the least memory has."""
    return min(map(int, lockstep.gather("comparison of free memory", str(available_bytes))))


def agree_on_sizes(
    shape: ModelShape, sizes: ResolvedSizes, host_places: tuple[int, int], lockstep: Lockstep
) -> StageSizes:
    """Sizes that every rank has room for: the least of each that the scheduler plans with.

    Ranks differ where they hold different layers or heads.
    """
    mine = stage_limits(shape, sizes, host_places)
    everyone = [json.loads(text) for text in lockstep.gather("comparison of sizes", json.dumps(mine))]
    return agree(shape, sizes, [min(column) for column in zip(*everyone, strict=True)])
