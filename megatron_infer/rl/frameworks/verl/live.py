"""verl's Megatron worker, whose live model generates: `actor_rollout_ref.model.external_lib=` this module.

verl imports the module in its workers before they make the trainer. The engine class here is registered for the
machine's device and vendor, which verl prefers to its own class, registered for the device alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry, get_vendor
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from megatron_infer.errors import ConfigError


class LiveWeights:
    """The weights of a live model: `module`, and for receivers elsewhere verl's export of them."""

    def __init__(self, module: Any, export: Iterator[tuple[str, Tensor]]) -> None:
        """module: as verl's trainer has it, the list of its chunks in their wrappers."""
        self.module = module
        self._export = export

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._export


@EngineRegistry.register(
    model_type="language_model",
    backend="megatron",
    device=os.getenv("VERL_ENGINE_DEVICE") or get_device_name(),
    vendor=os.getenv("VERL_ENGINE_VENDOR") or get_vendor(),
)
class LiveMegatronEngine(MegatronEngineWithLMHead):
    def get_per_tensor_param(self, *args: Any, **how: Any) -> tuple[LiveWeights, Any]:
        if self.is_param_offload_enabled:
            raise ConfigError(
                "actor.megatron.param_offload=True takes the weights away from the engine that generates with them; "
                "set it to False, or leave out model.external_lib"
            )
        export, peft_config = super().get_per_tensor_param(*args, **how)
        return LiveWeights(self.module, export), peft_config
