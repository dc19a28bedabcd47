"""The sizes of a live model whose layers are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_infer.config.mamba_state import MambaInferenceStateConfig, layer_symbols
from megatron_infer.config.model_shape import DTYPE_BYTES, ExpertShape, ModelShape, StateShape
from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec
from megatron_infer.models.latent_attention import FusedLatentAttention
from megatron_infer.models.layer_adoption import LayerAdoption


def model_shape(
    model: Any,
    layers: Sequence[LayerAdoption],
    vocab_size: int | None,
    state_config: MambaInferenceStateConfig | None,
) -> ModelShape:
    """Raises AdoptionError where one cache cannot hold all layers, and for unsupported dtypes."""
    attends = _same_heads(layers)
    dtype = _dtype(layers, model.config.params_dtype)
    padded = model.vocab_size
    if vocab_size is not None and not 0 < vocab_size <= padded:
        raise AdoptionError("", f"vocab_size={vocab_size}, but the model's embedding has {padded} rows; lower it")
    learned = getattr(getattr(model, "embedding", None), "position_embeddings", None)
    name = str(dtype).removeprefix("torch.")
    return ModelShape(
        num_layers=len(layers),
        num_attention_layers=sum(layer.attention is not None for layer in layers),
        # Without attention layers: one head of width 1; no key is ever stored.
        num_query_heads=1 if attends is None else attends.num_kv_heads * attends.group_size,
        num_kv_heads=1 if attends is None else attends.num_kv_heads,
        head_dim=1 if attends is None else attends.head_dim,
        latent=next((one.attention.shape for one in layers if isinstance(one.attention, FusedLatentAttention)), None),
        hidden_size=model.config.hidden_size,
        vocab_size=padded if vocab_size is None else vocab_size,
        padded_vocab_size=padded,
        # Rotary angles exist for any position, but the model was trained for max_sequence_length positions.
        max_position=learned.weight.shape[0] if learned is not None else model.max_sequence_length,
        kv_dtype_bytes=dtype.itemsize,
        dtype=name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        state=_state(model, layers, state_config, default_dtype=name),
        experts=ExpertShape.of(
            lambda name: getattr(model.config, name, None), model.config.expert_tensor_parallel_size or 1
        ),
        is_stage=_is_stage(model),
        num_mtp_layers=len(model.mtp.layers) if hasattr(model, "mtp") else 0,
    )


def _is_stage(model: Any) -> bool:
    return not (model.pre_process and model.post_process)


def _same_heads(layers: Sequence[LayerAdoption]) -> AttendSpec | None:
    first: AttendSpec | None = None
    for layer in layers:
        if layer.attention is None:
            continue
        spec = layer.attention.attend.spec
        first = spec if first is None else first
        if (spec.num_kv_heads, spec.group_size, spec.head_dim, spec.value_start) != (
            first.num_kv_heads,
            first.group_size,
            first.head_dim,
            first.value_start,
        ):
            raise AdoptionError(f"{layer.name}.self_attention", "heads differ between layers: one cache holds them all")
    return first


def _dtype(layers: Sequence[LayerAdoption], default: torch.dtype) -> torch.dtype:
    """The dtype of the layers; `default` in a pipeline stage without layers."""
    dtypes = {weight.dtype for layer in layers for weight in layer.weights()} or {default}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise AdoptionError("decoder", f"weights are {names}; supported are float32, bfloat16 or float16, one for all")
    return dtypes.pop()


def _state(
    model: Any, layers: Sequence[LayerAdoption], config: MambaInferenceStateConfig | None, *, default_dtype: str
) -> StateShape | None:
    mixers = [(layer.mixer.name, layer.mixer.spec) for layer in layers if layer.mixer is not None]
    if not mixers:
        if config is not None and not _is_stage(model):
            raise AdoptionError("", "a state config was given, but no layer of the model keeps a recurrent state")
        return None
    first = mixers[0][1]
    conv, ssm = (first.num_channels, first.conv_width), (first.num_heads, first.head_dim, first.state_dim)
    for name, spec in mixers:
        if (spec.num_channels, spec.conv_width, spec.num_heads, spec.head_dim, spec.state_dim) != (*conv, *ssm):
            raise AdoptionError(name, "state shapes differ between recurrent layers: one slot holds them all")
        if spec.is_delta != first.is_delta:
            raise AdoptionError(name, "Mamba layers and gated delta nets in one model are not supported")
    if config is not None:
        given = (tuple(config.mamba_conv_states_shape), tuple(config.mamba_ssm_states_shape))
        if given != (conv, ssm):
            raise AdoptionError(mixers[0][0], f"keeps states of {conv} and {ssm}, the state config says {given}")
        kinds = list(getattr(model.decoder, "layer_type_list", config.layer_type_list))
        kinds = layer_symbols(kinds, model.decoder.layers)
        if kinds != list(config.layer_type_list):
            raise AdoptionError(
                "decoder", f"layers are {''.join(kinds)!r}, the state config says {''.join(config.layer_type_list)!r}"
            )
    return StateShape(
        num_layers=len(mixers),
        conv_shape=conv,
        ssm_shape=ssm,
        conv_dtype=_state_dtype(config, "conv_states_dtype", default_dtype),
        ssm_dtype=_state_dtype(config, "ssm_states_dtype", "float32"),
        is_delta=first.is_delta,
    )


def _state_dtype(config: MambaInferenceStateConfig | None, field: str, default: str) -> str:
    found = (None if config is None else getattr(config, field)) or default
    if found not in DTYPE_BYTES:
        raise AdoptionError("", f"{field}={found!r}; known are {', '.join(DTYPE_BYTES)}")
    return found
