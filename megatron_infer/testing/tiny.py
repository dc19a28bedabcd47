"""Tiny random GPT models with every feature, in one process on gloo, with no port and no file.

tiny_gpt()                                                        GQA, RoPE, RMSNorm, SwiGLU, untied
tiny_gpt(num_query_groups=1, position_embedding_type="none")      any field of TransformerConfig or argument of GPTModel
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from megatron_infer.errors import unknown_name
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.rotary import cpu_rotary
from megatron_infer.models.specs import gpt_spec

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
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "params_dtype": torch.float32,
    # Each fusion costs a C++ compile of seconds on a CPU.
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "moe_token_dispatcher_type": "allgather",
    "cuda_graph_scope": [],  # 0.16's own default is one that it warns about
}
MODEL: dict[str, Any] = {
    "vocab_size": 128,
    "max_sequence_length": 256,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}


def init_single_process() -> None:
    """torch.distributed and megatron-core's groups for this one process, where they are not up yet."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not mcore.parallel_state.model_parallel_is_initialized():
        mcore.parallel_state.initialize_model_parallel()
    # Without CUDA the tracker must be the one whose fork() does nothing.
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not torch.cuda.is_available():
        model_parallel_cuda_manual_seed(1234, inference_rng_tracker=True)


def tiny_config(**overrides: Any) -> Any:
    """A TransformerConfig of a tiny model with the given fields changed."""
    known = mcore.config_fields()
    for name in overrides:
        if name not in known:
            raise TypeError(unknown_name("field of TransformerConfig", name, known))
    settings = {name: value for name, value in CONFIG.items() if name in known} | overrides
    settings.setdefault("use_cpu_initialization", not torch.cuda.is_available())
    settings.setdefault("bf16", settings["params_dtype"] == torch.bfloat16)
    settings.setdefault("pipeline_dtype", settings["params_dtype"])
    return mcore.TransformerConfig(**settings)


def tiny_gpt(*, spec: Any = None, seed: int = 0, randomize: bool = True, **overrides: Any) -> Any:
    """A GPTModel in eval mode; equal arguments give equal weights, whatever the global generator holds.

    `overrides` are fields of TransformerConfig or arguments of GPTModel. `spec` is a layer or block spec, or a function
    of the config that makes one; None is specs.gpt_spec. With `randomize` biases and norm weights are random too, so
    that a forgotten one shows. Sets up torch.distributed for one process if nobody has.
    """
    init_single_process()
    arguments = set(inspect.signature(mcore.GPTModel.__init__).parameters) - {
        "self",
        "config",
        "transformer_layer_spec",
    }
    known = mcore.config_fields()
    for name in overrides:
        if name not in arguments | known:
            raise TypeError(unknown_name("argument of tiny_gpt", name, arguments | known))
    # Some names are both (0.19): those belong to the model.
    model_arguments = MODEL | {name: value for name, value in overrides.items() if name in arguments}
    config = tiny_config(**{name: value for name, value in overrides.items() if name not in arguments})
    layer_spec = gpt_spec(config) if spec is None else spec(config) if inspect.isroutine(spec) else spec
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mcore.GPTModel(config, layer_spec, **model_arguments)
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
    """megatron-core's own local spec, as a training script takes it; its attention cannot run forward on a CPU."""
    return mcore.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
