"""Tiny random models with every feature, for one process on gloo, without ports and files.

tiny_gpt()                                                        GQA, RoPE, RMSNorm, SwiGLU, untied
tiny_hybrid("M*-ME")                                              Mamba-2, attention, MLP, experts; no positions
tiny_mamba(num_layers=3)                                          Mamba-2 alone
tiny_delta()                                                      gated delta nets and gated attention
tiny_gpt(mtp_num_layers=1)                                        and a multi-token prediction layer
tiny_gpt(position_embedding_type="yarn", **YARN)                  yarn, by attributes that the config gets
tiny_gpt(num_query_groups=1, position_embedding_type="none")      any field of TransformerConfig, argument of GPTModel
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_infer.errors import unknown_name
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.extended_modules import extend, extended_config
from megatron_infer.models.hybrid import hybrid_spec
from megatron_infer.models.loading.build_model import UNFUSED
from megatron_infer.models.rotary import cpu_rotary
from megatron_infer.models.specs import gpt_spec, mtp_spec
from megatron_infer.testing.cpu_shim import cpu_shim

CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "init_method_std": 0.1,
    "params_dtype": torch.float32,
    **UNFUSED,
    "moe_token_dispatcher_type": "allgather",
    "cuda_graph_scope": [],  # 0.16 warns about its own default
}
MODEL: dict[str, Any] = {
    "vocab_size": 128,
    "max_sequence_length": 256,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}

HYBRID: dict[str, Any] = {
    "mamba_state_dim": 16,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "is_hybrid_model": True,
    "position_embedding_type": "none",
}
YARN: dict[str, Any] = {
    "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 64,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": False,
}
"""Attributes of a config that a GPTModel reads for position_embedding_type="yarn": no fields of TransformerConfig."""
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
}


def init_single_process() -> None:
    """Initialize torch.distributed and megatron-core's groups for this one process, unless they are."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not mcore.parallel_state.model_parallel_is_initialized():
        mcore.parallel_state.initialize_model_parallel()
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    # Without CUDA the tracker's fork() must do nothing; with CUDA it needs initialized states.
    if not torch.cuda.is_available():
        model_parallel_cuda_manual_seed(1234, inference_rng_tracker=True)
    elif not get_cuda_rng_tracker().is_initialized():
        model_parallel_cuda_manual_seed(1234)


DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 1, 0],
    "num_layers": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "layernorm_zero_centered_gamma": True,
    "rotary_percent": 0.5,
}


def tiny_delta(**overrides: Any) -> Any:
    """A GPTModel as Qwen3-Next's: gated delta nets, then gated attention; otherwise as `tiny_gpt`.

    States decay over 1 to 20 tokens; as megatron-core initializes them most would be gone after one.
    """
    model = tiny_gpt(**DELTA | overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".dt_bias"):
                parameter.sub_(4.0)
    return model


def tiny_config(**overrides: Any) -> Any:
    """A TransformerConfig of a tiny model with the given fields changed."""
    known = mcore.config_fields()
    for name in overrides:
        if name not in known | YARN.keys() | {"extensions"}:
            raise TypeError(unknown_name("field of TransformerConfig", name, known))
    extensions = overrides.pop("extensions", None)
    extra = {name: overrides.pop(name) for name in YARN if name in overrides and name not in known}
    settings = {name: value for name, value in CONFIG.items() if name in known} | overrides
    settings.setdefault("use_cpu_initialization", not torch.cuda.is_available())
    settings.setdefault("bf16", settings["params_dtype"] == torch.bfloat16)
    settings.setdefault("pipeline_dtype", settings["params_dtype"])
    if extensions is None:
        config = mcore.config_class(settings)(**settings)
    else:
        config = extended_config(settings)(extensions=extensions, **settings)
    vars(config).update(extra)
    return config


def tiny_gpt(*, spec: Any = None, seed: int = 0, randomize: bool = True, **overrides: Any) -> Any:
    """A GPTModel in eval mode; equal arguments give equal weights, independent of the global generator's state.

    `overrides` are fields of TransformerConfig, `extensions` (`models.extensions`), or arguments of GPTModel. `spec` is
    a layer or block spec, or a function config -> spec; None is specs.gpt_spec. With `randomize` biases and norm
    weights are random too, so that one that is not applied shows. Initializes torch.distributed for one process, unless
    it is.
    """
    config, model_arguments = _settings(mcore.GPTModel, "tiny_gpt", "transformer_layer_spec", overrides)
    layer_spec = gpt_spec(config) if spec is None else spec(config) if inspect.isroutine(spec) else spec
    if config.mtp_num_layers:
        model_arguments.setdefault("mtp_block_spec", mtp_spec(config, layer_spec))
    return _built(lambda: extend(mcore.GPTModel(config, layer_spec, **model_arguments)), seed, randomize)


def tiny_hybrid(
    pattern: str = "M*-M",
    *,
    spec: Any = None,
    seed: int = 0,
    randomize: bool = True,
    norm_groups: int | None = None,
    **overrides: Any,
) -> Any:
    """A MambaModel with the layers of `pattern` in eval mode; otherwise as `tiny_gpt`.

    M Mamba-2 (16 heads of 8, state 16, 2 groups), * attention, P both side by side (then no *), - MLP, E experts (4, 2
    per token). No positions unless
    position_embedding_type sets them. Recurrences decay as megatron-core initializes them: over 10 to 1000 tokens.
    norm_groups: see `hybrid_spec`. From megatron-core 0.19 on | divides pipeline stages.
    """
    settings = HYBRID | (EXPERTS if "E" in pattern else {}) | overrides | {"num_layers": len(pattern.replace("|", ""))}
    config, model_arguments = _settings(mcore.MambaModel, "tiny_hybrid", "mamba_stack_spec", settings)
    if spec is None:
        stack_spec = hybrid_spec(config, norm_groups=norm_groups, parallel="P" in pattern)
    else:
        stack_spec = spec(config) if inspect.isroutine(spec) else spec
    model_arguments["hybrid_override_pattern"] = pattern.replace("P", "*")
    return _built(lambda: extend(mcore.MambaModel(config, stack_spec, **model_arguments)), seed, randomize)


def tiny_mamba(*, num_layers: int = 2, **settings: Any) -> Any:
    """A MambaModel with Mamba layers only; otherwise as `tiny_hybrid`."""
    return tiny_hybrid("M" * num_layers, **settings)


def _settings(model: type, function: str, spec: str, overrides: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(config, arguments of the model) of a tiny model; initializes torch.distributed."""
    init_single_process()
    arguments: set[str] = set()
    for base in model.__mro__[:2]:  # 0.19's MambaModel passes further arguments to its base
        arguments |= set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    arguments -= {"self", "args", "kwargs", "config", spec}
    known = mcore.config_fields() | YARN.keys() | {"extensions"}
    for name in overrides:
        if name not in arguments | known:
            raise TypeError(unknown_name(f"argument of {function}", name, arguments | known))
    # A name that is both (in 0.19) is an argument of the model.
    model_arguments = MODEL | {name: value for name, value in overrides.items() if name in arguments}
    return tiny_config(**{name: value for name, value in overrides.items() if name not in arguments}), model_arguments


def _built(build: Callable[[], Any], seed: int, randomize: bool) -> Any:
    # The constructor of yarn's embedding computes a table on the current CUDA device.
    shim = contextlib.nullcontext() if torch.cuda.is_available() else cpu_shim(1)
    with torch.random.fork_rng(devices=[]), shim:
        torch.manual_seed(seed)
        model = build()
        if randomize:
            randomize_vectors(model)
    return cpu_rotary(model).eval()


def randomize_vectors(model: torch.nn.Module) -> None:
    """Add noise to every 1-D parameter (biases, norm weights), in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape).mul_(0.1).to(parameter))


def stock_spec(config: Any) -> Any:
    """megatron-core's own local spec, as training scripts use it; its attention cannot run on a CPU."""
    return mcore.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
