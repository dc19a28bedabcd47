"""The sizes of a model from its description, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_infer.config.model_shape import DTYPE_BYTES, ExpertShape, ModelShape, StateShape, heads_per_rank
from megatron_infer.config.step_work import LayerParameters, StepCounter
from megatron_infer.errors import ConfigError
from megatron_infer.models.loading.head_padding import divisible
from megatron_infer.models.loading.model_description import HybridDescription, ModelDescription
from megatron_infer.models.stage_layers import stage_span


def shape_of(
    description: ModelDescription,
    *,
    dtype: str,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    stage: int = 0,
) -> ModelShape:
    """One rank's share of a model that has not been built; parameters are those of its whole pipeline stage, without
    what `build_model` adds where kv groups do not divide over the ranks."""
    parameters = num_parameters(description, num_stages=pipeline_parallel_size, stage=stage)
    description = divisible(description, tensor_parallel_size)
    begin, end = stage_span(description.transformer["num_layers"], pipeline_parallel_size, stage)
    layers = description.transformer
    heads = layers["num_attention_heads"]
    kv_heads = layers.get("num_query_groups") or heads
    padded = -(-description.vocab_size // tensor_parallel_size) * tensor_parallel_size
    attends = _pattern(description)[begin:end].count("*") if description.hybrid is not None else end - begin
    if attends and heads % tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size is {tensor_parallel_size}, it must divide the {heads} attention heads of the model"
        )
    # Without attention layers: one head of width 1, as for a live model; no key is ever stored.
    per_rank = (heads // tensor_parallel_size, heads_per_rank(kv_heads, tensor_parallel_size), layers["kv_channels"])
    query, kv, width = per_rank if attends else (1, 1, 1)
    return ModelShape(
        num_layers=end - begin,
        num_attention_layers=attends,
        num_query_heads=query,
        num_kv_heads=kv,
        head_dim=width,
        hidden_size=layers["hidden_size"],
        vocab_size=description.vocab_size,
        padded_vocab_size=padded,
        max_position=description.max_sequence_length,
        kv_dtype_bytes=DTYPE_BYTES[dtype],
        dtype=dtype,
        num_parameters=parameters,
        state=_state_of(
            description,
            _pattern(description)[begin:end].count("M"),
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
        ),
        experts=ExpertShape.of(layers.get, tensor_parallel_size),
        is_stage=pipeline_parallel_size > 1,
        num_mtp_layers=layers.get("mtp_num_layers") or 0,
    )


def _pattern(description: ModelDescription) -> str:
    return description.hybrid.pattern if description.hybrid is not None else ""


def _state_of(
    description: ModelDescription, num_mixers: int, *, dtype: str, tensor_parallel_size: int
) -> StateShape | None:
    """The state of one request in the Mamba layers of one rank."""
    layers = description.transformer
    if description.hybrid is None or not num_mixers:
        return None
    heads, groups = layers["mamba_num_heads"], layers["mamba_num_groups"]
    for count, what in ((heads, "Mamba heads"), (groups, "Mamba groups")):
        if count % tensor_parallel_size:
            raise ConfigError(
                f"--tensor-parallel-size is {tensor_parallel_size}, it must divide the {count} {what} of the model"
            )
    heads, groups = heads // tensor_parallel_size, groups // tensor_parallel_size
    head_dim, state_dim = layers["mamba_head_dim"], layers["mamba_state_dim"]
    return StateShape(
        num_layers=num_mixers,
        conv_shape=(heads * head_dim + 2 * groups * state_dim, description.hybrid.conv_width),
        ssm_shape=(heads, head_dim, state_dim),
        conv_dtype=dtype,
        ssm_dtype="float32",
    )


def num_parameters(description: ModelDescription, *, num_stages: int = 1, stage: int = 0) -> int:
    """Parameters of the whole model or of a pipeline stage, counted from its description.

    Example: SmolLM2-135M -> 134,515,008. Two stages of a tied model hold the embedding once each.
    """
    hidden, num_layers = description.transformer["hidden_size"], description.transformer["num_layers"]
    is_first, is_last = stage == 0, stage == num_stages - 1
    begin, end = stage_span(num_layers, num_stages, stage)
    of = _layer_parameters(description, begin, end)
    attends = _symbols(description, begin, end).count("*")
    total = attends * (of.norm + of.qkv + of.proj) + of.num_mlps * (of.norm + of.mlp)
    total += of.num_moes * (of.norm + of.router + of.num_experts * of.expert + of.shared_experts)
    total += of.num_mixers * (of.norm + of.mixer)
    if is_first:
        positions = description.max_sequence_length if description.position_embedding == "learned_absolute" else 0
        total += (description.vocab_size + positions) * hidden
    if is_last:
        total += of.norm + (0 if is_first and description.tied_embeddings else description.vocab_size * hidden)
        if num_mtp := description.transformer.get("mtp_num_layers") or 0:  # each with the kind of layer that comes last
            last = _layer_parameters(description, num_layers - 1, num_layers)
            body = last.mlp if last.num_mlps else last.router + last.num_experts * last.expert + last.shared_experts
            total += num_mtp * (5 * last.norm + 2 * hidden * hidden + last.qkv + last.proj + body)
    return total


def step_counter(description: ModelDescription, *, dtype: str, kv_element_bytes: int | None = None) -> StepCounter:
    """Counts the work of a model's steps on one device. kv_element_bytes: see `StepCounter`."""
    return StepCounter(
        shape=shape_of(description, dtype=dtype),
        parameters=_layer_parameters(description, 0, description.transformer["num_layers"]),
        kv_element_bytes=kv_element_bytes,
    )


def _symbols(description: ModelDescription, begin: int, end: int) -> str:
    """megatron-core's symbols of these layers; a layer of a model that is no hybrid attends, then has an MLP."""
    return _pattern(description)[begin:end] if description.hybrid is not None else "*-" * (end - begin)


def _layer_parameters(description: ModelDescription, begin: int, end: int) -> LayerParameters:
    layers = description.transformer
    hidden, ffn, heads = layers["hidden_size"], layers["ffn_hidden_size"], layers["num_attention_heads"]
    head_dim, kv_heads = layers["kv_channels"], layers.get("num_query_groups") or heads
    gates = 2 if layers.get("gated_linear_unit") else 1
    qkv, biases = (heads + 2 * kv_heads) * head_dim, _biases(layers, description)
    symbols = _symbols(description, begin, end)
    num_experts, has_head_norms = layers.get("num_moe_experts") or 0, bool(layers.get("qk_layernorm"))
    return LayerParameters(
        norm=hidden * (2 if layers.get("normalization", "LayerNorm") == "LayerNorm" else 1),
        qkv=qkv * hidden + 2 * head_dim * has_head_norms + qkv * ("qkv" in biases),
        proj=heads * head_dim * hidden + hidden * ("proj" in biases),
        mlp=(gates + 1) * ffn * hidden + gates * ffn * ("fc1" in biases) + hidden * ("fc2" in biases),
        router=num_experts * hidden,
        expert=(gates + 1) * hidden * (layers.get("moe_ffn_hidden_size") or 0),
        shared_experts=(gates + 1) * hidden * (layers.get("moe_shared_expert_intermediate_size") or 0),
        mixer=0 if description.hybrid is None else _mixer_parameters(layers, description.hybrid),
        num_mlps=symbols.count("-"),
        num_moes=symbols.count("E"),
        num_mixers=symbols.count("M"),
        num_experts=num_experts,
        has_head_norms=has_head_norms,
    )


def _mixer_parameters(layers: Mapping[str, Any], hybrid: HybridDescription) -> int:
    hidden, heads = layers["hidden_size"], layers["mamba_num_heads"]
    inner = heads * layers["mamba_head_dim"]
    channels = inner + 2 * layers["mamba_num_groups"] * layers["mamba_state_dim"]
    projected = inner + channels + heads  # z, (x, B, C), dt
    biases = projected + hidden if hybrid.projection_bias else 0
    conv = channels * (hybrid.conv_width + hybrid.conv_bias)
    return projected * hidden + inner * hidden + biases + conv + 3 * heads + inner


def _biases(layers: Mapping[str, Any], description: ModelDescription) -> tuple[str, ...]:
    """Linears that have a bias once built: megatron-core gives one to all of them or to qkv alone."""
    if layers.get("add_bias_linear"):
        return ("qkv", "proj", "fc1", "fc2")
    return ("qkv",) if layers.get("add_qkv_bias") or "qkv" in description.linear_biases else ()
