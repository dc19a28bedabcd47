"""Experts and the hybrid part of a model description, from a live model or the arguments of a Megatron-LM run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.families import EXPERTS
from megatron_infer.models.loading.model_description import HybridDescription
from megatron_infer.models.parallel_layer import ParallelLayer

_MAMBA_FIELDS = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
_MOE_FIELDS = (
    "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_router_pre_softmax", "moe_router_score_function", "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_router_num_groups", "moe_router_group_topk",
)  # fmt: skip
_MOE_REFUSED = (
    "moe_shared_expert_gate", "moe_apply_probs_on_input", "moe_expert_capacity_factor",
    "moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased", "moe_layer_recompute_only",
    "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size", "moe_router_topk_limited_devices",
)  # fmt: skip
_OF_GPT = ("moe_layer_freq", "moe_shared_expert_gate")
"""Fields of experts that a GPTModel has."""
_MEGATRON_EXPAND = 2
"""Inner width / hidden size of megatron-core's mixer where the number of heads is not given."""


def hybrid_of_model(model: Any) -> tuple[HybridDescription, dict[str, Any]]:
    """(hybrid part, TransformerConfig fields) of a live MambaModel. Raises ModelError for the rest."""
    config, pattern = model.config, _whole_pattern(model)
    if any(isinstance(layer, ParallelLayer) for layer in model.decoder.layers):
        pattern = pattern.replace("*", "P")
    fields = {"is_hybrid_model": True} | {key: getattr(config, key) for key in _MAMBA_FIELDS}
    if "E" in pattern:
        fields |= expert_fields(lambda key: getattr(config, key, None))
    mixers = [layer.mixer for layer in model.decoder.layers if hasattr(layer, "mixer")]
    if not mixers:
        return HybridDescription(pattern=pattern, norm_groups=config.mamba_num_groups), _with_heads(
            fields, config.hidden_size
        )
    found = {_mixer_of(mixer) for mixer in mixers}
    if len(found) > 1:
        raise ModelError("the model's Mamba mixers differ, which a model description cannot express")
    groups, epsilon, width, conv_bias, bias, (low, high) = found.pop()
    hybrid = HybridDescription(
        pattern=pattern,
        norm_groups=groups * model.pg_collection.tp.size(),
        norm_epsilon=config.layernorm_epsilon if epsilon is None else epsilon,
        gated_norm=epsilon is not None,
        conv_width=width,
        conv_bias=conv_bias,
        projection_bias=bias,
        dt_min=low,
        dt_max=None if high == float("inf") else high,
    )
    return hybrid, _with_heads(fields, config.hidden_size)


def _whole_pattern(model: Any) -> str:
    """The symbol of each layer, over all pipeline stages."""
    given = getattr(model, "hybrid_override_pattern", None) or getattr(model, "hybrid_layer_pattern", None)
    if given:
        return "".join(given).partition("/")[0].replace("|", "")  # behind it the patterns of MTP layers
    kinds = "".join(model.decoder.layer_type_list)
    if len(kinds) != model.config.num_layers:
        ratios = {"hybrid_attention_ratio": model.hybrid_attention_ratio, "hybrid_mlp_ratio": model.hybrid_mlp_ratio}
        return _allocated({"num_layers": model.config.num_layers, **ratios})
    return kinds


def _mixer_of(mixer: Any) -> tuple[Any, ...]:
    """A mixer's fields of a description beyond the config's."""
    from megatron_infer.models.mcore_compat import conv_parameters

    for wrong, what in (
        (getattr(mixer, "D_has_hdim", False), "one skip factor a channel (D_has_hdim)"),
        (getattr(mixer, "norm_before_gate", False), "its norm before the gate (norm_before_gate)"),
    ):
        if wrong:
            raise ModelError(f"the model's Mamba mixers have {what}, which a model description cannot express")
    norm, (conv, _, conv_bias) = getattr(mixer, "norm", None), conv_parameters(mixer)
    width = 0 if norm is None else norm.weight.shape[0]
    return (
        mixer.ngroups_local_tp if norm is None else width // (norm.group_size or width),
        None if norm is None else float(norm.eps),
        int(mixer.d_conv),
        conv.get(conv_bias) is not None,
        getattr(mixer.in_proj, "bias", None) is not None,
        tuple(getattr(mixer, "dt_limit", (0.0, float("inf")))),
    )


def hybrid_of_arguments(arguments: Mapping[str, Any], *, name: str) -> tuple[HybridDescription, dict[str, Any]] | None:
    """(hybrid part, TransformerConfig fields) of a training run of a MambaModel; None for a run of a GPTModel."""
    pattern = arguments.get("hybrid_override_pattern") or arguments.get("hybrid_layer_pattern")
    if not pattern and not _is_mamba(arguments):
        return None
    if not pattern:
        pattern = _allocated(arguments)
    if len(pattern) != arguments["num_layers"] or set(pattern) - set("M*-E"):
        raise ModelError(
            f"{name}: hybrid pattern {pattern!r} must have {arguments['num_layers']} symbols (num_layers) out of "
            "M Mamba, * attention, - MLP, E mixture of experts"
        )
    absent = [key for key in _MAMBA_FIELDS[:3] if arguments.get(key) is None]
    if absent and "M" in pattern:
        raise ModelError(f"{name}: its training arguments lack {', '.join(absent)}")
    fields = {"is_hybrid_model": True} | {key: arguments.get(key) for key in _MAMBA_FIELDS if arguments.get(key)}
    if "E" in pattern:
        fields |= expert_fields(argument_of(arguments))
    groups = arguments.get("mamba_num_groups") or 1
    return HybridDescription(pattern=pattern, norm_groups=groups), _with_heads(fields, arguments["hidden_size"])


def _is_mamba(arguments: Mapping[str, Any]) -> bool:
    spec: Any = arguments.get("spec") or ()
    parts: Iterable[Any] = (spec,) if isinstance(spec, str) else spec
    return bool(arguments.get("is_hybrid_model")) or any("mamba" in str(part) for part in parts)


def _allocated(arguments: Mapping[str, Any]) -> str:
    """The pattern that megatron-core derives from the ratios of attention and MLP layers."""
    try:
        from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers
    except ImportError as error:
        raise ModelError(
            "no hybrid_override_pattern in the training arguments, and this megatron-core has no ratios"
        ) from error

    ratios = (float(arguments.get(key) or 0.0) for key in ("hybrid_attention_ratio", "hybrid_mlp_ratio"))
    return "".join(allocate_layers(arguments["num_layers"], *ratios))


def argument_of(arguments: Mapping[str, Any]) -> Callable[[str], Any]:
    """Gives the argument of a Megatron-LM run that sets a field of TransformerConfig; None without one."""
    return lambda field: arguments.get("num_experts" if field == "num_moe_experts" else field)


def expert_fields(get: Callable[[str], Any], *, in_gpt: bool = False) -> dict[str, Any]:
    """Fields of TransformerConfig. get: the value of one. Raises ModelError for what a description cannot express."""
    names = (*_MOE_FIELDS, *(_OF_GPT if in_gpt else ()))
    refused = [f"{key}={get(key)!r}" for key in _MOE_REFUSED if get(key) and key not in names]
    if "sinkhorn" in str(get("moe_router_load_balancing_type")):  # it chooses by what the whole batch asks for
        refused.append("moe_router_load_balancing_type='sinkhorn'")
    if refused:
        raise ModelError(f"experts with {', '.join(refused)}: a model description cannot express them yet")
    found = {**EXPERTS, **{key: get(key) for key in names if get(key) is not None}}
    found.setdefault("moe_ffn_hidden_size", get("ffn_hidden_size"))
    return found


def _with_heads(fields: dict[str, Any], hidden: int) -> dict[str, Any]:
    if fields.get("mamba_num_heads") is None and fields.get("mamba_head_dim"):
        fields["mamba_num_heads"] = _MEGATRON_EXPAND * hidden // fields["mamba_head_dim"]
    return fields
