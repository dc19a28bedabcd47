"""What depends on the installed version of megatron-core, and its import without notices.

Works with 0.16.0 to 0.19.2. Importing this module imports megatron-core without its notices about optional packages;
the filters are scoped to the import, so that a user's own settings do not change. Import classes of megatron-core from
here or after this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_infer.distributed.backends import group_size
from megatron_infer.errors import ModelError
from megatron_infer.models.late_compile import compiling_late
from megatron_infer.models.module_guard import megatron_fsdp_classes
from megatron_infer.utils.attributes import replaced
from megatron_infer.utils.gc_pause import is_program, no_collection


@contextlib.contextmanager
def _unused_packages_left_out() -> Iterator[None]:
    """In a program of this package, megatron-core does not find what only a trainer or a GPU uses: a quarter of a
    second and 20 MiB for wandb, the same and 50 MiB for triton. In another process it finds all that is installed."""
    unused = ("wandb",) if is_program() and torch.cuda.is_available() else ("wandb", "triton")
    hidden = [name for name in unused if is_program() and name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


os.environ.setdefault("NO_VCS_VERSION", "1")  # else 0.19 runs `git rev-parse` in the current directory

with warnings.catch_warnings(), no_collection(), compiling_late(), _unused_packages_left_out():
    warnings.filterwarnings(
        "ignore",
        message=r"(Transformer Engine and Apex are not installed|Apex is not installed|absl\.logging is not installed)",
        category=UserWarning,
    )
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(megatron\.core|torch\.jit)")
    for _category in (DeprecationWarning, SyntaxWarning):  # the latter from Python 3.12 on
        warnings.filterwarnings("ignore", message="invalid escape sequence", category=_category)
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.activations import fast_gelu, squared_relu
    from megatron.core.activations import quick_gelu as unfused_quick_gelu
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as _yarn
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import attention as _attention
    from megatron.core.transformer import multi_latent_attention as _latent
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.torch_norm import L2Norm
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.utils import (
        ensure_metadata_has_dp_cp_group,
        is_layer_window_attention,
        make_sharded_tensors_for_checkpoint,
        openai_gelu,
        sharded_state_dict_default,
    )

    try:  # 0.19 has renamed Mamba to hybrid
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel
        from megatron.core.ssm.mamba_block import MambaStack as HybridStack
        from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules
    from megatron.core.models.mamba import MambaModel

    try:  # from 0.19 on, of models with sparse attention
        from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
    except ImportError:
        AbsorbedMLASelfAttention = None

LATENT_ATTENTIONS: tuple[type, ...] = (
    (MLASelfAttention,) if AbsorbedMLASelfAttention is None else (MLASelfAttention, AbsorbedMLASelfAttention)
)
"""megatron-core's classes of attention over latents."""

_NOISY_LOGGERS = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.models.mamba.mamba_model",
    "megatron.core.transformer.transformer_layer",
)
_NOISE = ("GPTModel IS DEPRECATED", "Rewrapping ModuleSpec", "MambaModel has been deprecated")


class _DropDeprecations(logging.Filter):
    """Drops notices that classes used here, which megatron-core supports, are deprecated; other records pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_NOISE)


for _name in _NOISY_LOGGERS:
    logging.getLogger(_name).addFilter(_DropDeprecations())


def version() -> tuple[int, ...]:
    """(major, minor, patch) of the installed megatron-core."""
    from packaging.version import Version

    return Version(megatron.core.__version__).release


def submodules_of(spec: Any) -> Any:
    """The submodules of a spec slot, writable. The slot holds a ModuleSpec, or in 0.19 a partial of a builder."""
    if isinstance(spec, functools.partial):
        return spec.keywords["submodules"]
    return spec.submodules


def spec_module(spec: Any) -> Any:
    """The class that a spec slot builds; the slot holds a ModuleSpec, a partial (0.19) or the class."""
    if isinstance(spec, functools.partial):
        return spec.func
    return getattr(spec, "module", spec)


def with_module(spec: Any, module: type) -> Any:
    """The spec of a slot (see `spec_module`) with another class, and its submodules."""
    if isinstance(spec, functools.partial):
        return functools.partial(module, *spec.args, **spec.keywords)
    spec.module = module
    return spec


def latent_projections_of(linear: type) -> contextlib.AbstractContextManager[None]:
    """Inside, a mixture of experts is built with latent projections of this class, not Transformer Engine's."""
    from megatron.core.transformer.moe import moe_layer

    return replaced(moe_layer, HAVE_TE=True, TELinear=linear)


def megatron_fsdp_wrapper(adapter: Any) -> type:
    """The class that wraps `MegatronFSDP`. adapter: megatron-core's module with that name, from 0.20 on of a function,
    which makes objects of this class or of another one, where weights are sharded in another way."""
    found: type = getattr(adapter, "FullyShardedDataParallelV1", None) or adapter.FullyShardedDataParallel
    return found


def known_wrappers() -> tuple[type, ...]:
    """Wrappers that change neither the shapes of a model's parameters nor its forward."""
    from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel

    own = [DistributedDataParallel, Float16Module, TorchFullyShardedDataParallel, *megatron_fsdp_classes()]
    if (adapter := sys.modules.get("megatron.core.distributed.fsdp.mcore_fsdp_adapter")) is not None:
        own.append(megatron_fsdp_wrapper(adapter))
    return (*own, torch.nn.parallel.DistributedDataParallel)


def inference_mode() -> Any:
    """The class whose process-wide flag says that an engine uses the model; None before 0.19."""
    from megatron.core.inference import utils

    return getattr(utils, "InferenceMode", None)


def layer_offset(config: TransformerConfig, pp_rank: int | None = None, vp_stage: int | None = None) -> int:
    """Layers of the pipeline stages before this one; None takes the stage from the global state. vp_stage: the chunk of
    the stage, where it has several."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return get_transformer_layer_offset(config, vp_stage, pp_rank)


def config_class(settings: Mapping[str, Any]) -> type[TransformerConfig]:
    """The class of a model's config with these fields."""
    return MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig


def config_fields() -> set[str]:
    """The fields of TransformerConfig in this version, and those that it has with latent attention."""
    return {field.name for field in dataclasses.fields(MLATransformerConfig)}


def latent_attention_on_cpu(rotary: type, yarn: type) -> contextlib.AbstractContextManager[None]:
    """Inside, latent attention is built with these rotary embeddings where CUDA is missing, and without Transformer
    Engine, of which 0.16 asks for a class that is then none."""
    named: dict[str, Any] = {} if isinstance(_latent.TELinear, type) else {"TELinear": ()}
    if not cuda_available():
        on_cpu = {"RotaryEmbedding": rotary, "YarnRotaryEmbedding": yarn}
        named |= {name: functools.partial(made, use_cpu_initialization=True) for name, made in on_cpu.items()}
    return replaced(_latent, **named)


def yarn_frequencies(rotary: YarnRotaryEmbedding) -> torch.Tensor:
    """The inverse frequencies [dim / 2] that a yarn embedding computes in every call, fp32."""
    low, high = _yarn._yarn_find_correction_range(
        rotary.beta_fast,
        rotary.beta_slow,
        rotary.dim,
        rotary.rotary_base,
        rotary.original_max_position_embeddings,
        rotary.correction_range_round_to_int,
    )
    plain, divided = rotary.inv_freq_extra, rotary.inv_freq_inter
    kept = 1.0 - _yarn._yarn_linear_ramp_mask(low, high, rotary.dim // 2, device=plain.device).to(torch.float32)
    return divided * (1 - kept) + plain * kept


def yarn_concentration(rotary: YarnRotaryEmbedding) -> float:
    """What a yarn embedding returns next to its angles. `rotary_factor` is what attention multiplies."""
    return float(_yarn._yarn_get_concentration_factor(rotary.scaling_factor, rotary.mscale, rotary.mscale_all_dim))


def rotary_factor(attention: Any) -> float:
    """What an attention module multiplies cosines and sines by, whatever its rotary embedding: yarn's mscale.

    Bridge replaces megatron-core's function, so that it is looked up where attention finds it.
    """
    known = getattr(attention, "_yarn_concentration_factor", None)  # from 0.18 on
    return rotary_factor_of(attention.config) if known is None else float(known)


def rotary_factor_of(config: Any) -> float:
    """`rotary_factor` of attention with this config."""
    return float(_attention._yarn_get_concentration_factor_from_config(config))


def topk_routing() -> Callable[..., Any]:
    """megatron-core's top-k routing function, which `TopKRouter.routing` calls."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return topk_routing_with_score_function


def sequence_parts(router: Any) -> tuple[int, int]:
    """(number of parts that positions are divided in over ranks, index of this rank's part)."""
    group = getattr(router, "tp_group", None)
    if not router.config.sequence_parallel or group is None or group_size(group) == 1:
        return 1, 0
    return group_size(group), group.rank()


def replay_forward() -> Any:
    """The action of megatron-core's RouterReplay to take the experts that it was given; not in every version."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    return RouterReplayAction.REPLAY_FORWARD


@functools.cache
def rounds_router_scores() -> bool:
    """Whether a router in half precision rounds its scores before it chooses, as 0.16 does; later versions do not."""
    logits = torch.tensor([[0.0, 2.0**-9]], dtype=torch.bfloat16)
    bias = torch.tensor([1e-4, 0.0])  # less than the scores differ by, unless they are rounded to the same
    _, chosen = topk_routing()(logits, 1, score_function="sigmoid", expert_bias=bias)
    return bool(chosen[0, 0])


def auxiliary_losses() -> dict[str, tuple[torch.Tensor, Any]]:
    """megatron-core's record of auxiliary losses, by name: (live sums by layer, group to add them up over or None)."""
    if version() >= (0, 18):
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        return {name: (entry.values, entry.reduce_group) for name, entry in get_moe_metrics_tracker().metrics.items()}
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    found = get_moe_layer_wise_logging_tracker()
    return {name: (entry["values"], entry.get("reduce_group")) for name, entry in found.items()}


def conv_parameters(mixer: Any) -> tuple[dict[str, Any], str, str]:
    """(live mapping, name of the weight, name of the bias) of a Mamba mixer's convolution.

    In 0.19 the parameters are the mixer's own, before that those of a module.
    """
    if "conv1d_weight" in mixer._parameters:
        return mixer._parameters, "conv1d_weight", "conv1d_bias"
    return mixer.conv1d._parameters, "weight", "bias"


def moe_layer_classes() -> tuple[type, ...]:
    """Stock layer classes that differ from TransformerLayer only in their capture in CUDA graphs."""
    from megatron.core.transformer import transformer_layer

    found = getattr(transformer_layer, "MoETransformerLayer", None)
    return () if found is None else (found,)


def sharded_tensors(
    module: torch.nn.Module,
    prefix: str,
    axes: dict[str, int],
    sharded_offsets: Any,
    metadata: dict[str, Any] | None,
    tp_group: Any,
    *,
    recurse: bool = True,
) -> dict[str, Any]:
    """A module's parameters for a distributed checkpoint; axes: name -> axis split over tensor-parallel ranks."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    state: dict[str, Any] = {}
    if recurse:
        state = module.state_dict(prefix="", keep_vars=True)
    else:
        module._save_to_state_dict(state, "", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(
        state, prefix, axes, sharded_offsets, tp_group=tp_group, dp_cp_group=metadata["dp_cp_group"]
    )


def packed_lengths(packed: Any, *, length: int, batch: int) -> list[int]:
    """Lengths of the packed sequences in `length` tokens, end to end, each with the padding after it.

    packed: megatron-core's PackedSeqParams. Tokens after the last sequence are one more sequence, as in megatron-core.
    Raises ModelError unless `batch` is 1.
    """
    if batch != 1:
        raise ModelError(f"packed sequences lie in one batch entry, got {batch}")
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    starts = [*(packed.cu_seqlens_q if padded is None else padded).tolist(), length]
    return [end - start for start, end in itertools.pairwise(starts) if end > start]


def cuda_available() -> bool:
    return torch.cuda.is_available()
