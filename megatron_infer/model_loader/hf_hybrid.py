"""Hugging Face configs of Mamba-2 and hybrid models -> parts of a ModelDescription.

Every layer of a description is one block, a norm and a body, added to the residual stream. Mamba2 and NemotronH have
such layers; a layer of Bamba or GraniteMoeHybrid is two blocks, a mixer or attention and then an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.model_loader.hf_keys import ACTIVATIONS, Keys, biases, decoder
from megatron_infer.model_loader.model_description import HybridDescription, WeightScales

_UNBOUNDED_POSITIONS = 1 << 20
"""For models without attention, whose configs give no limit: a state has no positions."""

_SYMBOLS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Layer type in a config, with the names of older versions of transformers -> megatron-core's symbol."""

# Keys for initialisation, training or other implementations of the same arithmetic. The paged path keeps the residual
# stream in fp32 whatever residual_in_fp32 is.
_HARMLESS = (
    "residual_in_fp32",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_max",
    "time_step_rank",
    "num_logits_to_keep",
    "use_mamba_kernels",
    "mamba_ssm_cache_dtype",
    "output_router_logits",
    "router_aux_loss_coef",
    "z_loss_coefficient",
    "use_associative_scan",
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
)


def _mamba2(keys: Keys) -> dict[str, Any]:
    keys.read.update(_HARMLESS)
    # The modelling file does not read norm_before_gate, which Codestral's config sets: it gates first.
    keys.read.update(("time_step_min", "time_step_scale", "time_step_init_scheme", "norm_before_gate"))
    keys.require("rms_norm", None, True, why="mixers without their norm are not mapped")
    hidden, heads, head_dim = keys.number("hidden_size"), keys.number("num_heads", 128), keys.number("head_dim", 64)
    expand = keys.get("expand", 2)
    if expand * hidden != heads * head_dim:
        raise ModelError(
            f"config.json: expand x hidden_size = {expand * hidden}, but num_heads x head_dim = {heads * head_dim}"
        )
    keys.require("intermediate_size", None, expand * hidden, why="the inner width is expand x hidden_size")
    num_layers = keys.number("num_hidden_layers", 64)
    epsilon = keys.number("layer_norm_epsilon", 1e-5, kind=float)
    mixer = _mixer(
        keys,
        activation="hidden_act",
        heads=heads,
        head_dim=head_dim,
        state=("state_size", 128),
        groups=("n_groups", 8),
        width="conv_kernel",
        chunk="chunk_size",
    )
    transformer = _without_attention(mixer, hidden) | {
        "num_layers": num_layers,
        "layernorm_epsilon": epsilon,
        "gated_linear_unit": False,
        "activation": "silu",
    }
    low, high = _limits(keys, "time_step_limit")
    parts = {
        "transformer": transformer,
        "vocab_size": keys.number("vocab_size", 32768),
        "max_sequence_length": keys.number("max_position_embeddings", _UNBOUNDED_POSITIONS),
        "position_embedding": "none",
        "tied_embeddings": bool(keys.get("tie_word_embeddings", False)),
        "hybrid": HybridDescription(
            pattern="M" * num_layers,
            norm_groups=mixer["mamba_num_groups"],
            norm_epsilon=epsilon,
            conv_width=keys.number("conv_kernel", 4),
            conv_bias=bool(keys.get("use_conv_bias", True)),
            projection_bias=bool(keys.get("use_bias", False)),
            dt_min=low,
            dt_max=high,
        ),
    }
    return biases(parts)


_NEMOTRON_RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}
"""Key of an older NemotronH config -> its name now."""


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    keys.rename(_NEMOTRON_RENAMED)
    keys.read.update((*_HARMLESS, "expand", "num_nextn_predict_layers", "moe_shared_expert_overlap"))
    keys.read.update(("n_shared_experts", "rms_norm_eps"))  # the modelling file reads sizes and layer_norm_epsilon
    _refuse_nemotron(keys)
    pattern = _nemotron_pattern(keys)
    hidden, heads = keys.number("hidden_size", 4096), keys.number("num_attention_heads", 32)
    kv_heads = keys.number("num_key_value_heads", 8, null=heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    epsilon = keys.number("layer_norm_epsilon", 1e-5, kind=float)
    mixer = _mixer(
        keys,
        activation="mamba_hidden_act",
        heads=keys.number("mamba_num_heads", 128),
        head_dim=keys.number("mamba_head_dim", 64),
        state=("ssm_state_size", 128),
        groups=("n_groups", 8),
        width="conv_kernel",
        chunk="chunk_size",
    )
    transformer = mixer | {
        "num_layers": len(pattern),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": keys.get("head_dim") or keys.get("attention_head_dim") or 128,
        "ffn_hidden_size": keys.number("intermediate_size", 21504),
        "normalization": "RMSNorm",
        "layernorm_epsilon": epsilon,
        "gated_linear_unit": False,
        "activation": _activation(keys, "mlp_hidden_act", "relu2"),
    }
    keys.get("attention_head_dim")
    mlp_bias = bool(keys.get("mlp_bias", False))
    transformer |= _nemotron_experts(keys, used="E" in pattern, mlp_bias=mlp_bias)
    low = keys.get("time_step_min", 0.001)
    parts = {
        "transformer": transformer,
        "vocab_size": keys.number("vocab_size", 131072),
        "max_sequence_length": keys.number("max_position_embeddings", 4096),
        "position_embedding": "none",
        "tied_embeddings": False,
        "hybrid": HybridDescription(
            pattern=pattern,
            norm_groups=mixer["mamba_num_groups"],
            norm_epsilon=epsilon,
            conv_width=keys.number("conv_kernel", 4),
            conv_bias=bool(keys.get("use_conv_bias", True)),
            projection_bias=bool(keys.get("use_bias", False)),
            dt_min=float(low),
        ),
    }
    return biases(parts, *(("fc1", "fc2") if mlp_bias and "-" in pattern else ()))


def _refuse_nemotron(keys: Keys) -> None:
    keys.require("attention_bias", None, False, why="the modelling file gives attention no biases")
    keys.require("sliding_window", None, why="the modelling file has no sliding windows")
    keys.require("tie_word_embeddings", None, False, why="the modelling file does not tie them")
    # The modelling file has no upper limit and takes the lower one from time_step_min.
    if _limits(keys, "time_step_limit") != (0.0, None):
        limit = keys.get("time_step_limit")
        raise ModelError(f"config.json: time_step_limit={limit!r} is not supported: the modelling file ignores it")
    if bool(keys.get("mamba_proj_bias", False)) and not keys.get("use_bias", False):
        raise ModelError(
            "config.json: mamba_proj_bias=True with use_bias=False: the modelling file reads use_bias only"
        )


def _nemotron_pattern(keys: Keys) -> str:
    text = keys.get("hybrid_override_pattern")
    types = keys.get("layers_block_type", keys.get("layer_types"))
    keys.read.add("num_hidden_layers")
    if types is not None:
        return _symbols(types)
    if text is None:
        raise ModelError(
            "config.json: neither 'layers_block_type' nor 'hybrid_override_pattern' says what each layer is"
        )
    known = "".join(dict.fromkeys(_SYMBOLS.values()))
    for at, symbol in enumerate(text):
        if symbol not in known:
            raise ModelError(
                f"config.json: hybrid_override_pattern {text!r}: symbol {symbol!r} at {at} is not known "
                "(known: M Mamba, * attention, - MLP, E mixture of experts)"
            )
    return str(text)


def _nemotron_experts(keys: Keys, *, used: bool, mlp_bias: bool) -> dict[str, Any]:
    """Sigmoid scores, chosen with a correction bias, normalised and scaled: what megatron-core's router computes."""
    num_experts, top_k = keys.get("n_routed_experts", 8), keys.get("num_experts_per_tok", 2)
    ffn, shared = keys.get("moe_intermediate_size", 7688), keys.get("moe_shared_expert_intermediate_size", 7688)
    scaling, normalised = float(keys.get("routed_scaling_factor", 1.0)), bool(keys.get("norm_topk_prob", True))
    groups, latent = keys.get("n_group", 1), keys.get("moe_latent_size")
    keys.read.update(("topk_group", "num_local_experts"))
    if not used:
        return {}
    problems = {
        f"moe_latent_size={latent}": (latent is not None, "latent projections need Transformer Engine"),
        f"n_group={groups}": (groups != 1, "groups of experts are chosen by other sums in megatron-core"),
        f"norm_topk_prob={normalised} with num_experts_per_tok={top_k}": (
            normalised == (top_k == 1),
            "megatron-core normalises the weights if and only if there are several",
        ),
        "mlp_bias=True": (mlp_bias, "experts with biases are not mapped"),
    }
    for what, (wrong, why) in problems.items():
        if wrong:
            raise ModelError(f"config.json: {what} is not supported: {why}")
    return _moe(num_experts, top_k, ffn=ffn, shared=shared) | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": scaling,
        "moe_router_dtype": "fp32",
    }


def _bamba(keys: Keys) -> dict[str, Any]:
    keys.read.update(_HARMLESS)
    parts = decoder(keys, kv_heads_default=8, eps_default=1e-5, partial_rotary=True, rotary_percent_default=0.5)
    if keys.get("partial_rotary_factor", 0.5) not in (None, 0.5):
        raise ModelError(
            "config.json: partial_rotary_factor must be in rope_parameters; the modelling file assumes 0.5"
        )
    rotary_dim = int(parts["transformer"]["kv_channels"] * parts["rotary_percent"])
    keys.require("attn_rotary_emb", None, rotary_dim, why=f"the rotary part of a head is {rotary_dim}")
    num_layers = parts["transformer"]["num_layers"]
    attends = keys.get("attn_layer_indices") or ()
    kinds = ["*" if layer in attends else "M" for layer in range(num_layers)]
    keys.read.update(("layers_block_type", "layer_types"))  # follows from attn_layer_indices
    return _two_blocks(keys, parts, [f"{kind}-" for kind in kinds], mlp_bias=bool(keys.get("mlp_bias", False)))


def _granite_moe_hybrid(keys: Keys) -> dict[str, Any]:
    keys.read.update((*_HARMLESS, "init_method"))
    keys.require("normalization_function", None, "rmsnorm", why="the modelling file has RMS norms only")
    kind = keys.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise ModelError(f"config.json: position_embedding_type={kind!r} is not supported (supported: rope, null)")
    parts = decoder(keys, eps_default=1e-6)
    if kind != "rope":
        parts |= {"position_embedding": "none", "rope_scaling": None}
    transformer = parts["transformer"]
    experts, top_k = keys.get("num_local_experts", 8) or 0, keys.get("num_experts_per_tok", 2)
    shared = keys.number("shared_intermediate_size", 1024)
    if experts:
        if top_k == 1:
            raise ModelError(
                "config.json: num_experts_per_tok=1 is not supported: the modelling file gives the one expert the "
                "weight 1, megatron-core its probability among all"
            )
        transformer |= _moe(experts, top_k, ffn=transformer["ffn_hidden_size"], shared=shared)
        transformer["moe_router_score_function"] = "softmax"
    transformer["ffn_hidden_size"] = shared
    transformer["softmax_scale"] = float(_or_one(keys.get("attention_multiplier")))
    scales = WeightScales(
        embedding=float(_or_one(keys.get("embedding_multiplier"))),
        residual=float(_or_one(keys.get("residual_multiplier"))),
        logits=1.0 / keys.number("logits_scaling", 1.0, kind=float, null=1.0),
        head_from_embedding=parts["tied_embeddings"],
    )
    parts["scales"] = scales
    if scales.embedding != 1.0 or scales.logits != 1.0:
        parts["tied_embeddings"] = False
    types = keys.get("layer_types", keys.get("layers_block_type")) or ["mamba"] * transformer["num_layers"]
    kinds = _symbols(types)
    if len(kinds) != transformer["num_layers"] or not set(kinds) <= {"M", "*"}:
        raise ModelError(
            f"config.json: layer_types must say mamba or attention for each of {transformer['num_layers']} layers"
        )
    return _two_blocks(keys, parts, [kind + ("E" if experts else "-") for kind in kinds], mlp_bias=False)


def _two_blocks(keys: Keys, parts: dict[str, Any], layers: list[str], *, mlp_bias: bool) -> dict[str, Any]:
    """The Mamba part of configs with Bamba's keys; `layers` holds both symbols of each layer."""
    transformer = parts["transformer"]
    hidden, heads = transformer["hidden_size"], keys.number("mamba_n_heads", 128)
    inner = int(keys.get("mamba_expand", 2) * hidden)
    head_dim = keys.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim in (None, "auto") else head_dim
    if heads * head_dim != inner:
        raise ModelError(
            f"config.json: mamba_expand x hidden_size = {inner}, but mamba_n_heads x mamba_d_head = {heads * head_dim}"
        )
    mixer = _mixer(
        keys,
        activation="hidden_act",
        heads=heads,
        head_dim=head_dim,
        state=("mamba_d_state", 256),
        groups=("mamba_n_groups", 1),
        width="mamba_d_conv",
        chunk="mamba_chunk_size",
    )
    transformer |= mixer | {"num_layers": 2 * len(layers)}
    low, high = _limits(keys, "time_step_limit")
    parts["hybrid"] = HybridDescription(
        pattern="".join(layers),
        norm_groups=mixer["mamba_num_groups"],
        norm_epsilon=transformer["layernorm_epsilon"],
        conv_width=keys.number("mamba_d_conv", 4),
        conv_bias=bool(keys.get("mamba_conv_bias", True)),
        projection_bias=bool(keys.get("mamba_proj_bias", False)),
        dt_min=low,
        dt_max=high,
    )
    attention = ("qkv", "proj") if keys.get("attention_bias", False) else ()
    mlp = ("fc1", "fc2") if mlp_bias else ()
    if attention and "E" in parts["hybrid"].pattern:
        raise ModelError("config.json: attention_bias=True with experts is not supported: megatron-core biases both")
    return biases(parts, *attention, *mlp)


def _mixer(
    keys: Keys,
    *,
    activation: str,
    heads: int,
    head_dim: int,
    state: tuple[str, int],
    groups: tuple[str, int],
    width: str,
    chunk: str,
) -> dict[str, Any]:
    """The fields of TransformerConfig for a Mamba mixer."""
    if keys.get(activation, "silu") not in ("silu", "swish"):
        raise ModelError(f"config.json: {activation}={keys.get(activation)!r} is not supported: Mamba mixers use silu")
    keys.get(chunk)  # how a scan is cut changes its rounding, not its result
    keys.number(width, 4)
    num_groups = keys.number(*groups)
    if heads % num_groups:
        raise ModelError(f"config.json: {heads} Mamba heads cannot share {num_groups} groups evenly")
    return {
        "is_hybrid_model": True,
        "mamba_state_dim": keys.number(*state),
        "mamba_head_dim": int(head_dim),
        "mamba_num_groups": num_groups,
        "mamba_num_heads": heads,
    }


def _without_attention(mixer: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """Fields that TransformerConfig requires; no layer of a pure Mamba model reads them.

    Heads and widths are those of the mixers, so that they divide over tensor-parallel ranks where the mixers do.
    """
    heads, head_dim = mixer["mamba_num_heads"], mixer["mamba_head_dim"]
    return {
        **mixer,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": head_dim,
        "ffn_hidden_size": heads * head_dim,
        "normalization": "RMSNorm",
    }


def _moe(num_experts: int, top_k: int, *, ffn: int, shared: int) -> dict[str, Any]:
    if not 1 <= top_k <= num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {top_k}, it must be 1 to {num_experts}, the experts there are"
        )
    return {
        "num_moe_experts": int(num_experts),
        "moe_router_topk": int(top_k),
        "moe_ffn_hidden_size": int(ffn),
        "moe_shared_expert_intermediate_size": int(shared),
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": False,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_aux_loss_coeff": 0.0,
    }


def _symbols(types: Any) -> str:
    unknown = sorted({str(kind) for kind in types if kind not in _SYMBOLS})
    if unknown:
        raise ModelError(
            f"config.json: layer types {', '.join(unknown)} are not supported (supported: {', '.join(_SYMBOLS)})"
        )
    return "".join(_SYMBOLS[kind] for kind in types)


def _activation(keys: Keys, key: str, default: str) -> str:
    name = keys.get(key, default)
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: {key} {name!r} is not supported (supported: {', '.join(sorted(ACTIVATIONS))})")
    return str(name)


def _limits(keys: Keys, key: str) -> tuple[float, float | None]:
    """The range of the time step; infinity is a float (a JSON extension) or {"__float__": "Infinity"}.

    Every token's step is clamped, as in the modelling files' forward over a sequence. Their cached forward of one token
    clamps none, so that their own decode differs from their own forward where a step is out of range.
    """
    value = keys.get(key)
    if value is None:
        return 0.0, None
    try:
        low, high = (float(end["__float__"]) if isinstance(end, Mapping) else float(end) for end in value)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"config.json: {key}={value!r} is not a pair of numbers") from error
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ModelError(f"config.json: {key}={value!r} is not a range")
    return low, None if math.isinf(high) else high


def _or_one(value: Any) -> Any:
    return 1.0 if value is None else value


FAMILIES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "Mamba2ForCausalLM": _mamba2,
    "NemotronHForCausalLM": _nemotron_h,
    "BambaForCausalLM": _bamba,
    "GraniteMoeHybridForCausalLM": _granite_moe_hybrid,
}

MODEL_TYPES = {
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}

REFUSED = {
    "Zamba2ForCausalLM": "its attention blocks are shared between layers, adapted by LoRA and fed the embedding beside "
    "the hidden state, which MambaModel does not do",
    "ZambaForCausalLM": "its attention blocks are shared between layers and its mixers are Mamba-1",
    "JambaForCausalLM": "its mixers are Mamba-1",
    "MambaForCausalLM": "its mixers are Mamba-1",
    "FalconH1ForCausalLM": "attention and mixer run side by side in one layer, which MambaModel does not do",
    "FalconMambaForCausalLM": "its mixers are Mamba-1",
}
