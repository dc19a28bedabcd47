"""What every rank of an engine must have alike before the first step: options, and places to plan with."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from megatron_infer.config import InferenceConfig, ResolvedSizes
from megatron_infer.errors import ConfigError
from megatron_infer.parallel.lockstep import Lockstep

PLANNED = (
    "num_blocks",
    "num_usable_blocks",
    "paused_block_limit",
    "max_sequence_length",
    "max_blocks_per_row",
    "max_requests",
    "num_snapshot_slots",
    "num_state_slots",
    "max_tokens",
)
"""Sizes that decisions of the scheduler depend on."""


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


def agree_on_places(places: tuple[int, int], lockstep: Lockstep | None) -> tuple[int, int]:
    """The least of all ranks' host slots, and of their host states."""
    if lockstep is None:
        return places
    everyone = [json.loads(text) for text in lockstep.gather("comparison of host memory", json.dumps(places))]
    return min(slots for slots, _ in everyone), min(states for _, states in everyone)


def agree_on_sizes(sizes: ResolvedSizes, lockstep: Lockstep) -> ResolvedSizes:
    """Sizes that every rank has room for: the least of each that the scheduler plans with.

    Ranks differ where they hold different layers or heads.
    """
    mine = {name: getattr(sizes, name) for name in PLANNED}
    everyone = [json.loads(text) for text in lockstep.gather("comparison of sizes", json.dumps(mine))]
    least = {name: min(theirs[name] for theirs in everyone) for name in PLANNED}
    if all(theirs == mine for theirs in everyone):
        return sizes
    if sizes.state_slot_bytes:  # every row has a state, one slot is for padding, the snapshots follow
        least["num_state_slots"] = least["max_requests"] + 1 + least["num_snapshot_slots"]
    fewer = least["num_blocks"] / sizes.num_blocks
    changed = {
        **least,
        "kv_bytes": int(sizes.kv_bytes * fewer),
        "state_bytes": least["num_state_slots"] * sizes.state_slot_bytes,
        "max_decode_requests": min(sizes.max_decode_requests, least["max_requests"]),
    }
    how = {item.name: sizes.how[item.name] for item in fields(sizes) if item.name in sizes.how}
    how |= {name: "the least of the engine's ranks" for name in least if least[name] != mine[name]}
    return replace(sizes, **changed, how=how)
