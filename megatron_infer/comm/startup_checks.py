"""What must be equal on every rank of an engine before the first step."""

from __future__ import annotations

import json

from megatron_infer.comm.lockstep import LocalLockstep, Lockstep
from megatron_infer.config.inference import InferenceConfig
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
