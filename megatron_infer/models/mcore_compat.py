"""Everything that depends on which megatron-core is installed, and the quiet import of it.

Works with 0.16.1 and 0.19.2 from one source. Importing this module imports megatron-core without the notices it prints
about optional packages; the filters are scoped to the import, so a user's own settings are as before afterwards.
Import classes of megatron-core from here or after this module.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("NO_VCS_VERSION", "1")  # 0.19 would run `git rev-parse` in whatever directory we are in

with warnings.catch_warnings():
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
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import L2Norm
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.transformer.utils import is_layer_window_attention, openai_gelu

_NOISY_LOGGERS = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.transformer.transformer_layer",
)
_NOISE = ("GPTModel IS DEPRECATED", "Rewrapping ModuleSpec")


class _DropDeprecations(logging.Filter):
    """Drops notices about our use of classes that megatron-core still supports; every other record passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_NOISE)


for _name in _NOISY_LOGGERS:
    logging.getLogger(_name).addFilter(_DropDeprecations())


def version() -> tuple[int, ...]:
    """(major, minor, patch) of the installed megatron-core."""
    from packaging.version import Version

    return Version(megatron.core.__version__).release


def submodules_of(spec: Any) -> Any:
    """The submodules of a spec slot: a ModuleSpec, or in 0.19 a partial of a builder. They can be written to."""
    if isinstance(spec, functools.partial):
        return spec.keywords["submodules"]
    return spec.submodules


def spec_module(spec: Any) -> Any:
    """The class a spec slot builds: of a ModuleSpec, of a partial (0.19), or the class itself."""
    if isinstance(spec, functools.partial):
        return spec.func
    return getattr(spec, "module", spec)


def known_wrappers() -> tuple[type, ...]:
    """Wrappers around a model that change neither its parameters' shapes nor its forward."""
    from megatron.core.distributed import DistributedDataParallel

    return (DistributedDataParallel, Float16Module, torch.nn.parallel.DistributedDataParallel)


def layer_offset(config: TransformerConfig) -> int:
    """Layers of the pipeline stages before this rank's."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return get_transformer_layer_offset(config)


def config_fields() -> set[str]:
    """Names that TransformerConfig accepts in this version."""
    return {field.name for field in dataclasses.fields(TransformerConfig)}


def topk_routing() -> Callable[..., Any]:
    """megatron-core's top-k routing function (the same one `TopKRouter.routing` calls)."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return topk_routing_with_score_function


def group_size(group: Any) -> int:
    """Ranks in a process group; 1 for None."""
    return 1 if group is None else group.size()


def cuda_available() -> bool:
    return torch.cuda.is_available()


__all__ = [
    "MLP",
    "AttnMaskType",
    "ColumnParallelLinear",
    "DotProductAttention",
    "Float16Module",
    "GPTModel",
    "IdentityFuncOp",
    "IdentityOp",
    "L2Norm",
    "LanguageModelEmbedding",
    "MegatronModule",
    "MoELayer",
    "ModuleSpec",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SelfAttention",
    "SequentialMLP",
    "SharedExpertMLP",
    "TopKRouter",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "fast_gelu",
    "get_bias_dropout_add",
    "get_gpt_layer_local_spec",
    "get_num_layers_to_build",
    "is_layer_window_attention",
    "openai_gelu",
    "parallel_state",
    "quick_gelu",
    "squared_relu",
]
