"""megatron-core's latent attention as a module that is built without CUDA and Transformer Engine too."""

from __future__ import annotations

from typing import Any

from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.paged_layers import PAGED_ATTENTION
from megatron_infer.models.rotary import DeviceAgnosticRotary, DeviceAgnosticYarn


class TorchLatentAttention(PAGED_ATTENTION[mcore.MLASelfAttention]):  # type: ignore[misc]
    """Stock latent attention of exactly the submodules that its spec names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mcore.latent_attention_on_cpu(DeviceAgnosticRotary, DeviceAgnosticYarn):
            super().__init__(*args, **kwargs)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Of 0.19.2, which else puts Transformer Engine's linears with norms inside in the place of plain ones."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
