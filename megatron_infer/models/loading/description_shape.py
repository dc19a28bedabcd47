"""The sizes of a model from its description, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_infer.config.model_shape import (
    DTYPE_BYTES,
    ExpertShape,
    LatentShape,
    ModelShape,
    StateShape,
    heads_per_rank,
)
from megatron_infer.config.step_work import LayerParameters, StepCounter
from megatron_infer.errors import ConfigError
from megatron_infer.models.loading.head_padding import divisible
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.loading.parameter_layouts import LAYOUTS, sizes_of
from megatron_infer.models.stage_layers import delta_layers, expert_layers, stage_span


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
    kv_heads = max(layers.get("num_query_groups") or heads, description.extensions.local_query_groups or 0)
    padded = -(-description.vocab_size // tensor_parallel_size) * tensor_parallel_size
    symbols = _symbols(description, begin, end)
    attends = symbols.count("*")
    if attends and heads % tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size is {tensor_parallel_size}, it must divide the {heads} attention heads of the model"
        )
    # Without attention layers: one head of width 1, as for a live model; no key is ever stored.
    per_rank = (heads // tensor_parallel_size, heads_per_rank(kv_heads, tensor_parallel_size), layers["kv_channels"])
    latent = None
    if layers.get("multi_latent_attention") and attends:
        latent = LatentShape(
            rank=layers["kv_lora_rank"],
            num_heads=heads,
            rotary_dim=layers["qk_pos_emb_head_dim"],
            key_dim=layers["kv_channels"],
            value_dim=layers["v_head_dim"],
            index_dim=layers["dsa_indexer_head_dim"] if layers.get("experimental_attention_variant") == "dsa" else 0,
        )
        width = latent.rank + latent.rotary_dim + latent.index_dim
        per_rank = (heads // tensor_parallel_size, 1, width)
    query, kv, width = per_rank if attends else (1, 1, 1)
    return ModelShape(
        num_layers=end - begin,
        num_attention_layers=attends,
        num_query_heads=query,
        num_kv_heads=kv,
        head_dim=width,
        latent=latent,
        hidden_size=layers["hidden_size"],
        vocab_size=description.vocab_size,
        padded_vocab_size=padded,
        max_position=description.max_sequence_length,
        kv_dtype_bytes=DTYPE_BYTES[dtype],
        dtype=dtype,
        num_parameters=parameters,
        state=_state_of(
            description, sum(map(symbols.count, "MG")), dtype=dtype, tensor_parallel_size=tensor_parallel_size
        ),
        experts=ExpertShape.of(layers.get, 1 if description.has_whole_experts else tensor_parallel_size),
        is_stage=pipeline_parallel_size > 1,
        num_mtp_layers=layers.get("mtp_num_layers") or 0,
    )


def _state_of(
    description: ModelDescription, num_mixers: int, *, dtype: str, tensor_parallel_size: int
) -> StateShape | None:
    """The state of one request in the recurrent layers of one rank."""
    layers, hybrid = description.transformer, description.hybrid
    if not num_mixers:
        return None
    if hybrid is None:
        heads, groups = layers["linear_num_value_heads"], layers["linear_num_key_heads"]
        head_dim, state_dim, taps = (
            layers[name] for name in ("linear_value_head_dim", "linear_key_head_dim", "linear_conv_kernel_dim")
        )
        named = (heads, "value heads of delta nets"), (groups, "key heads of delta nets")
    else:
        heads, groups = layers["mamba_num_heads"], layers["mamba_num_groups"]
        head_dim, state_dim, taps = layers["mamba_head_dim"], layers["mamba_state_dim"], hybrid.conv_width
        named = (heads, "Mamba heads"), (groups, "Mamba groups")
    for count, what in named:
        if count % tensor_parallel_size:
            raise ConfigError(
                f"--tensor-parallel-size is {tensor_parallel_size}, it must divide the {count} {what} of the model"
            )
    heads, groups = heads // tensor_parallel_size, groups // tensor_parallel_size
    return StateShape(
        num_layers=num_mixers,
        conv_shape=(heads * head_dim + 2 * groups * state_dim, taps),
        ssm_shape=(heads, head_dim, state_dim),
        conv_dtype=dtype,
        ssm_dtype="float32",
        is_delta=hybrid is None,
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
    if description.hybrid is not None:
        total -= description.hybrid.pattern[begin:end].count("P") * of.norm  # one for both
    total -= sum(description.extensions.index_shared[begin:end]) * of.indexer
    if description.extensions.mixes_heads:
        forms = [description.of_layers(has_window=one) for one in (False, True)]
        sizes = [_layer_parameters(one, begin, end).qkv for one in forms]
        total += sum(sizes[one] - of.qkv for one in description.window_layers[begin:end])
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
    """megatron-core's symbols of these layers; one of a model that is no hybrid attends, then has an MLP or experts. A
    layer that attends and mixes side by side has both symbols."""
    if description.hybrid is not None:
        return description.hybrid.pattern[begin:end].replace("P", "*M")
    layers = description.transformer
    has_experts = expert_layers(layers["num_layers"], layers.get("moe_layer_freq", 1))
    seconds = ["E" if layers.get("num_moe_experts") and one else "-" for one in has_experts[begin:end]]
    is_delta = delta_layers(layers["num_layers"], layers.get("linear_attention_freq"))[begin:end]
    return "".join(f"{'G' if delta else '*'}{second}" for delta, second in zip(is_delta, seconds, strict=True))


def _layer_parameters(description: ModelDescription, begin: int, end: int) -> LayerParameters:
    layers, symbols = description.transformer, _symbols(description, begin, end)
    sizes, is_gated = sizes_of(description), bool(layers.get("gated_linear_unit"))
    biased, has_head_norms = _biased(description), bool(layers.get("qk_layernorm"))

    kind = "G" if description.hybrid is None else "M"  # of the recurrent layers
    without = "" if description.hybrid is None or description.hybrid.gated_norm else "mixer.norm"

    def count(*modules: str) -> int:
        layouts = [(LAYOUTS[one], one in biased or LAYOUTS[one].bias in biased) for one in modules]
        return sum(layout.num_elements(sizes, is_gated=is_gated, has_bias=has_bias) for layout, has_bias in layouts)

    qkv = [f"self_attention.{name}" for name in _inputs_of_attention(layers)]
    if layers.get("softmax_type") == "learnable":
        qkv.append("self_attention.core_attention.softmax_offset")
    proj, mlp = ["self_attention.linear_proj"], ["mlp.linear_fc1", "mlp.linear_fc2"]
    if description.extensions.norms == "both":  # of one norm it makes no difference where it is
        proj.append("self_attention.linear_proj.post_layernorm")
        mlp.append("mlp.linear_fc2.post_layernorm")
    shared = ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    if layers.get("moe_shared_expert_gate"):
        shared.append("mlp.shared_experts.gate_weight")
    latent = ["mlp.fc1_latent_proj", "mlp.fc2_latent_proj"] if layers.get("moe_latent_size") else []
    return LayerParameters(
        norm=count("input_layernorm"),
        qkv=count(*qkv),
        indexer=count(*(f"self_attention.{name}" for name in _INDEXER)),
        proj=count(*proj),
        mlp=count(*mlp),
        router=count("mlp.router", *latent),
        expert=count("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"),
        shared_experts=count(*shared),
        mixer=count(
            *(one for one, layout in LAYOUTS.items() if kind in layout.layers and one not in ("norm", without))
        ),
        num_mlps=symbols.count("-"),
        num_moes=symbols.count("E"),
        num_mixers=symbols.count(kind),
        num_experts=sizes["experts"],
        has_head_norms=has_head_norms,
    )


_INDEXER = tuple(
    f"core_attention.indexer.{name}" for name in ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")
)


def _inputs_of_attention(layers: Mapping[str, Any]) -> list[str]:
    """The modules of an attention layer before its attention."""
    if not layers.get("multi_latent_attention"):
        return ["linear_qkv", *(["q_layernorm", "k_layernorm"] if layers.get("qk_layernorm") else [])]
    whole = layers.get("q_lora_rank") is None
    queries = ["linear_q_proj"] if whole else ["linear_q_down_proj", "linear_q_up_proj"]
    norms = ["kv_layernorm", *([] if whole else ["q_layernorm"])] if layers.get("qk_layernorm") else []
    indexer = _INDEXER if layers.get("experimental_attention_variant") == "dsa" else ()
    return [*queries, "linear_kv_down_proj", "linear_kv_up_proj", *norms, *indexer]


def _biased(description: ModelDescription) -> set[str]:
    """What has a bias once built: modules, and names in `Layout.bias`. megatron-core gives biases to all linears
    outside of mixers or to qkv alone."""
    layers, hybrid = description.transformer, description.hybrid
    found = {"self_attention.core_attention.indexer.k_norm"}
    if layers.get("normalization", "LayerNorm") == "LayerNorm":
        found.add("input_layernorm")
    if layers.get("add_bias_linear"):
        found |= {"qkv", "proj", "fc1", "fc2", "router", "experts"}
    elif layers.get("add_qkv_bias") or "qkv" in description.linear_biases:
        found.add("qkv")
    if hybrid is not None and hybrid.projection_bias:
        found |= {"mixer.in_proj", "mixer.out_proj"}
    if hybrid is not None and hybrid.conv_bias:
        found.add("mixer.conv1d")
    return found
