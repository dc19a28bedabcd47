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
from megatron_infer.models.exact_forward import ExactForward, exact_math


class LiveWeights:
    """The weights of a live model: `module`, and for receivers elsewhere verl's export of them."""

    def __init__(self, trainer: LiveMegatronEngine, export: Iterator[tuple[str, Tensor]]) -> None:
        self.module = trainer.module
        """As verl's trainer has it, the list of its chunks in their wrappers."""
        self._trainer = trainer
        self._export = export

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._export

    def score_exactly(self) -> None:
        """The trainer's log probabilities have the bits of an engine with batch_invariant=True from now on."""
        config = self._trainer.engine_config
        if len(self.module) > 1 or config.pipeline_model_parallel_size > 1:
            raise ConfigError(
                "batch_invariant=True with actor.megatron.pipeline_model_parallel_size above 1: verl's stages send "
                "pipeline_dtype, exact stages send fp32; use one stage, or leave batch_invariant out"
            )
        if config.sequence_parallel:
            raise ConfigError(
                "batch_invariant=True with actor.megatron.sequence_parallel=True: each tensor-parallel rank has all "
                "tokens in an exact forward; set sequence_parallel to False, or leave batch_invariant out"
            )
        if config.use_fused_kernels:
            raise ConfigError(
                "batch_invariant=True with actor_rollout_ref.model.use_fused_kernels=True: fused kernels have no exact "
                "forward; set use_fused_kernels to False, or leave batch_invariant out"
            )
        self._trainer.is_exact = True


@EngineRegistry.register(
    model_type="language_model",
    backend="megatron",
    device=os.getenv("VERL_ENGINE_DEVICE") or get_device_name(),
    vendor=os.getenv("VERL_ENGINE_VENDOR") or get_vendor(),
)
class LiveMegatronEngine(MegatronEngineWithLMHead):
    is_exact = False
    _exact: ExactForward | None = None
    """In a forward of exact mode."""

    def get_per_tensor_param(self, *args: Any, **how: Any) -> tuple[LiveWeights, Any]:
        if self.is_param_offload_enabled:
            raise ConfigError(
                "actor.megatron.param_offload=True takes the weights away from the engine that generates with them; "
                "set it to False, or leave out model.external_lib"
            )
        export, peft_config = super().get_per_tensor_param(*args, **how)
        return LiveWeights(self, export), peft_config

    def forward_step(self, batch_iter: Any, model: Any, *args: Any, **how: Any) -> Any:
        if not self.is_exact:
            return super().forward_step(batch_iter, model, *args, **how)
        with exact_math(model) as self._exact:
            return super().forward_step(batch_iter, model, *args, **how)

    def _lm_head_logits_processor(self, logits: Tensor, label: Tensor, temperature: Tensor, **how: Any) -> Any:
        """verl's entropies and sums, and in exact mode the engine's log probabilities."""
        if self._exact is None or how["distillation_only"]:
            return super()._lm_head_logits_processor(logits, label, temperature, **how)
        warm = logits / temperature.clamp(min=1e-8)[..., None]
        found = super()._lm_head_logits_processor(
            logits.clone(), label, temperature, **how | {"distillation_only": True}
        )
        return found | {"log_probs": self._exact.token_logprobs(warm, label)}
