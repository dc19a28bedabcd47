"""Checks whether a model can be adopted: wrappers, configuration, the modules around the decoder, hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_infer.errors import AdoptionError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.bridge_modules import (
    FALCON_H1_MODEL,
    FALCON_H1_STACK,
    TWO_ROPES,
    embedding_scale,
    is_capped_output,
    is_of,
)
from megatron_infer.models.extended_modules import CappedOutput, ScaledEmbedding, ScaledOutput, TwoRopes
from megatron_infer.models.extensions import multipliers_of
from megatron_infer.models.hybrid import TorchHybridStack
from megatron_infer.models.model_chunks import ModelChunks, chunks_of
from megatron_infer.models.module_guard import (
    foreign_hooks,
    global_hooks,
    patched_methods,
    plain_class,
    replaced_methods,
)
from megatron_infer.models.rotary import ROTARY_CLASSES
from megatron_infer.models.sharded_weights import is_dtensor
from megatron_infer.models.te_apex import qualified

REFUSED_SETTINGS: dict[str, str] = {
    "experimental_attention_variant": "this attention is not softmax over keys and values",
    "fp4": "quantised linears are not supported",
    "quant_recipe": "linears with recipes of their own are not supported",
    "inference_fuse_tp_communication": "the fused layers of transformer_impl='inference_optimized' are not known",
    "use_kitchen": "Kitchen's linears are not known",
    "use_mup": "MuP's multipliers are not applied by the paged path",
}
"""Config field -> why no other value than off can be adopted. A field that a version lacks is off."""


def check_config(config: Any) -> None:
    """Raise AdoptionError for a setting that has no effect in the paged path."""
    for field, reason in REFUSED_SETTINGS.items():
        value = getattr(config, field, None)
        if field == "experimental_attention_variant" and value in ("gated_delta_net", "dsa"):
            continue  # layers that are none of megatron-core's are refused by their class
        if not is_off(field, value):
            raise AdoptionError("config", f"{field}={value!r}: {reason}")


def is_off(field: str, value: Any) -> bool:
    """Whether a config field has no effect. A field that a version lacks is None."""
    value = getattr(value, "value", value)
    if isinstance(value, str):
        return value.lower() in ("none", "vanilla")
    return not value or (field.endswith("_size") and value == 1)


def unwrap(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Any:
    """The language model inside DDP and Float16Module, `ModelChunks` of a list of several; raises AdoptionError for
    anything else."""
    if isinstance(model, ModelChunks):
        return model
    if isinstance(model, (list, tuple)):
        if len(model) > 1:
            return ModelChunks([unwrap(chunk) for chunk in model])
        model = model[0]
    while (
        plain_class(model) not in (*_MODELS, mcore.MambaModel)
        and hasattr(model, "module")
        and isinstance(model.module, torch.nn.Module)
    ):
        if plain_class(model) not in mcore.known_wrappers():
            known = "DistributedDataParallel, Float16Module"
            raise AdoptionError("", f"wrapper {qualified(model)} is not known; known are {known}{_within(model)}")
        model = model.module
    if not isinstance(model, _MODELS) and not is_of(model, FALCON_H1_MODEL):
        known = " or ".join(known.__qualname__ for known in _MODELS)
        raise AdoptionError("", f"{qualified(model)} is not a megatron-core {known}{_within(model)}")
    return model


def _within(model: torch.nn.Module) -> str:
    """What to give where the model is around one that can be adopted (torch.compile's, a model with a vision tower)."""
    found = [name for name, module in model.named_modules() if isinstance(module, _MODELS)]
    return f"; give its language model: model.{found[0]}" if found else ""


_MODELS = (mcore.GPTModel, mcore.HybridModel)
_DRIVEN = ("forward", "_preprocess", "_postprocess", "shared_embedding_or_output_weight")


def final_norm_of(model: Any) -> tuple[str, Any]:
    """(name, module or None) of the norm behind the last layer."""
    last = chunks_of(model)[-1]
    name = "final_layernorm" if isinstance(last, mcore.GPTModel) else "final_norm"
    return f"decoder.{name}", getattr(last.decoder, name, None)


def check_model(model: Any) -> None:
    """Raise AdoptionError unless embedding, positions, decoder and output layer are the ones the runner reproduces."""
    base = next((known for known in _MODELS if isinstance(model, known)), type(model))
    sharded = next((name for name, one in model.named_parameters() if is_dtensor(one)), None)
    if sharded is not None:
        raise AdoptionError(
            sharded,
            "is a DTensor, of which this rank holds a part; RolloutSession(model).generating() gathers the weights of "
            "FSDP. Otherwise generate with a model of its own, and give `update_weights` the state dict",
        )
    for method in _DRIVEN:
        if getattr(type(model), method, None) is not getattr(base, method, None):
            raise AdoptionError("", f"{qualified(model)} overrides {method}, which the paged path does not call")
    if global_hooks():
        raise AdoptionError("", "torch has forward hooks of all modules, which the paged path would skip; remove them")
    check_called_by_none(model, "")
    if base is mcore.GPTModel:
        _check_class(model.decoder, "decoder", mcore.TransformerBlock)
    elif not is_of(model.decoder, FALCON_H1_STACK):
        _check_class(model.decoder, "decoder", mcore.HybridStack, TorchHybridStack)
    stages = getattr(model.config, "pipeline_model_parallel_size", 1)
    if stages > 1 and model.pre_process and model.post_process:
        raise AdoptionError(
            "config", f"pipeline_model_parallel_size={stages}, but the model has both embedding and output layer"
        )
    if model.pre_process or hasattr(model, "mtp"):
        check_untouched(model.embedding, "embedding")
        scale_of(model.embedding)
        _check_class(model.embedding.word_embeddings, "embedding.word_embeddings", mcore.VocabParallelEmbedding)
        if model.embedding.num_tokentypes > 0:
            raise AdoptionError("embedding", "token-type embeddings are not supported")
    if model.post_process:
        check_untouched(model.output_layer, "output_layer")
        softcap_of(model.output_layer)
    kind = model.position_embedding_type
    if kind not in (*ROTARY_CLASSES, "learned_absolute", "none"):
        raise AdoptionError(
            "rotary_pos_emb", f"position_embedding_type={kind!r}; rope, yarn, learned_absolute and none are supported"
        )
    if kind in ROTARY_CLASSES and not model.config.multi_latent_attention:  # whose layers have one each
        if "rotary_pos_emb" not in model._modules:
            raise AdoptionError("rotary_pos_emb", f"position_embedding_type={kind!r}, but the model has no such module")
        check_untouched(model.rotary_pos_emb, "rotary_pos_emb")
        if not is_of(model.rotary_pos_emb, *TWO_ROPES):
            _check_class(model.rotary_pos_emb, "rotary_pos_emb", *ROTARY_CLASSES[kind], TwoRopes)
    name, final_norm = final_norm_of(model)
    if final_norm is not None:
        check_untouched(final_norm, name)


def scale_of(embedding: Any) -> float | None:
    """What a model's embeddings are multiplied with; None: nothing. Raises AdoptionError for an unknown class."""
    if type(embedding) is mcore.LanguageModelEmbedding:
        scale = multipliers_of(embedding.config).embedding_multiplier
        return None if scale == 1.0 else scale
    if type(embedding) is ScaledEmbedding:
        return embedding.scale()
    if (scale := embedding_scale(embedding, mcore.LanguageModelEmbedding)) is not None:
        return scale
    raise AdoptionError(
        "embedding",
        f"class {qualified(embedding)} is not megatron-core's LanguageModelEmbedding: what its forward "
        "adds is not computed by the paged path",
    )


def softcap_of(output_layer: Any) -> float | None:
    """See `ModelReading.logit_softcap`. Raises AdoptionError for an unknown class."""
    if type(output_layer) is CappedOutput:
        return output_layer.softcap
    if is_capped_output(output_layer, mcore.ColumnParallelLinear):
        return output_layer.config.final_logit_softcapping or None
    _check_class(output_layer, "output_layer", mcore.ColumnParallelLinear, ScaledOutput)
    return None


def check_untouched(module: torch.nn.Module, name: str) -> None:
    """`check_called_by_none` for a module and all modules in it."""
    for child, part in module.named_modules():
        check_called_by_none(part, f"{name}.{child}" if child else name)


def check_called_by_none(module: torch.nn.Module, name: str, *, runs_hooks: bool = False) -> None:
    """Raise AdoptionError for what has an effect only where the module is called: the paged path reads the weights of
    modules and calls none.

    runs_hooks: a layer of the user's own calls the module, and then its paged forward.
    """
    if not runs_hooks and foreign_hooks(module):
        raise AdoptionError(
            name,
            "has a forward hook, which the paged path would skip (with overlap_param_gather call "
            "ddp.disable_forward_pre_hook() before generating); remove it",
        )
    if patched := patched_methods(module):
        method = patched[0]
        remedy = "; to compile a module in place call its compile()" if method == "forward" else ""
        raise AdoptionError(
            name,
            f"its {method} is set on the instance, and the paged path would not call it; "
            f"delete it (del module.{method}){remedy}",
        )
    if replaced := replaced_methods(type(module)):
        raise AdoptionError(
            name,
            f"{replaced[0]} was replaced by a function of another package, and the paged path would not call it; "
            "put the class's own back",
        )
    if "parametrizations" in module._modules:
        names = ", ".join(module._modules["parametrizations"]._modules)  # type: ignore[union-attr]
        raise AdoptionError(
            name,
            f"{names} is computed by torch.nn.utils.parametrize, which the paged path would skip; make it a parameter "
            "(torch.nn.utils.parametrize.remove_parametrizations)",
        )
    if torch.is_tensor(vars(module).get("weight")):  # Transformer Engine has empty biases of this kind
        raise AdoptionError(name, "its weight is a plain tensor; make it a torch.nn.Parameter")


def _check_class(module: Any, name: str, *known: type) -> None:
    if type(module) not in known:
        raise AdoptionError(name, f"class {qualified(module)} is not megatron-core's {known[0].__qualname__}")
