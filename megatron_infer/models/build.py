"""A GPTModel or MambaModel from a plan, with the weights of its source."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.models.hf_names import Shard
from megatron_infer.models.model_plan import ModelPlan, RopeScaling

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_infer.models.sources import ModelSource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()  # megatron-core's own is compiled: seconds at the first call on a CPU


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": squared_relu,
}

# megatron-core's rope_scaling switch means Llama 3.1's numbers; any others are set on the built model.
_LLAMA3_NATIVE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def build_model(
    source: ModelSource | ModelPlan,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    tensor_parallel: int = 1,
    vocab_multiple: int = 1,
    pg_collection: Any = None,
    **config_overrides: Any,
) -> GPTModel | MambaModel:
    """The source's model in `dtype` on `device`, in eval mode, with its weights (none, uninitialised, for a plan).

    Without torch.distributed a single-process gloo group is made (no port, no network). With `tensor_parallel` > 1 the
    caller has set up torch.distributed; each rank reads its own part only. The vocabulary is padded up to a multiple of
    vocab_multiple * tensor_parallel. `config_overrides` go to TransformerConfig. Raises ModelError.
    """
    plan = source if isinstance(source, ModelPlan) else source.config()
    dtype = _dtype(dtype)
    init_process_groups(tensor_parallel)
    config = transformer_config(plan, dtype=dtype, device=device, tensor_parallel=tensor_parallel, **config_overrides)
    multiple = vocab_multiple * tensor_parallel
    padded_vocab = -(-plan.vocab_size // multiple) * multiple
    model = _construct(plan, config, padded_vocab, pg_collection)
    model = model.to(device=device, dtype=dtype)
    _keep_routers_exact(model)
    if not isinstance(source, ModelPlan):
        source.load_into(model, _shard(model, tensor_parallel))
    return model.eval()


def init_process_groups(tensor_parallel: int = 1) -> None:
    """torch.distributed and megatron-core's groups, for whichever of the two is not up yet."""
    from megatron_infer.models.mcore_compat import parallel_state

    if not torch.distributed.is_initialized():
        if tensor_parallel != 1:
            raise ConfigError(
                f"tensor_parallel={tensor_parallel} needs torch.distributed; start with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        # A HashStore lives in this process: no port that could be taken, nothing left behind.
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    actual = parallel_state.get_tensor_model_parallel_world_size()
    if actual != tensor_parallel:
        raise ConfigError(f"tensor_parallel={tensor_parallel}, but megatron-core is set up for {actual}")


def transformer_config(
    plan: ModelPlan,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    tensor_parallel: int = 1,
    **overrides: Any,
) -> TransformerConfig:
    """megatron-core's config for a plan: no dropout, no weights drawn, no fusions.

    Each fusion would cost a C++ compile of seconds on a CPU.
    """
    from megatron_infer.models.mcore_compat import TransformerConfig

    kwargs = dict(plan.transformer)
    kwargs["activation_func"] = ACTIVATIONS[kwargs.pop("activation")]
    if "window_size" in kwargs:
        kwargs["window_size"] = tuple(kwargs["window_size"])
    on_cpu = torch.device(device).type == "cpu"
    kwargs |= {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": tensor_parallel,
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if "cuda_graph_scope" not in overrides and getattr(TransformerConfig, "cuda_graph_scope", None) == "full":
        kwargs["cuda_graph_scope"] = []  # 0.16's own default, spelt in the way that it does not warn about
    return TransformerConfig(**(kwargs | overrides))


def rotary_frequencies(plan: ModelPlan) -> Tensor:
    """Inverse frequencies [rotary_dim / 2] in fp32, stretched as the plan says.

    Source: Llama 3.1's frequency scaling and linear position interpolation, as `transformers` computes them.
    """
    dim = int(plan.transformer["kv_channels"] * plan.rotary_percent)
    inverse = 1.0 / (plan.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    scaling = plan.rope_scaling
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "factors":
        factors = torch.tensor(scaling.factors, dtype=torch.float32)
        if factors.shape != inverse.shape:
            raise ModelError(f"{plan.name}: {len(scaling.factors)} rope factors for {len(inverse)} rotary frequencies")
        return inverse / factors
    return _llama3_frequencies(inverse, scaling)


def _llama3_frequencies(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, long ones are divided by the factor, those between are blended."""
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    longest, shortest = scaling.original_max_position / low, scaling.original_max_position / high
    stretched = torch.where(wavelength > longest, inverse / scaling.factor, inverse)
    blend = (scaling.original_max_position / wavelength - low) / (high - low)
    between = (1 - blend) * stretched / scaling.factor + blend * stretched
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def _construct(
    plan: ModelPlan, config: TransformerConfig, padded_vocab: int, pg_collection: Any
) -> GPTModel | MambaModel:
    from megatron_infer.models.rotary import cpu_rotary

    make = _gpt if plan.hybrid is None else _hybrid
    model = make(
        plan,
        config,
        vocab_size=padded_vocab,
        max_sequence_length=plan.max_sequence_length,
        position_embedding_type=plan.position_embedding,
        rotary_percent=plan.rotary_percent,
        share_embeddings_and_output_weights=plan.tied_embeddings,
        pg_collection=pg_collection,
    )
    return cpu_rotary(model)


def _gpt(plan: ModelPlan, config: TransformerConfig, **arguments: Any) -> GPTModel:
    from megatron_infer.models.mcore_compat import GPTModel
    from megatron_infer.models.specs import gpt_spec

    model = GPTModel(config=config, transformer_layer_spec=gpt_spec(config), **arguments, **_rope_arguments(plan))
    if plan.position_embedding == "rope" and not _native_rope(plan.rope_scaling):
        _set_frequencies(model, plan)
    return model


def _hybrid(plan: ModelPlan, config: TransformerConfig, **arguments: Any) -> MambaModel:
    from megatron_infer.models.hybrid import hybrid_spec
    from megatron_infer.models.mcore_compat import MambaModel

    hybrid = plan.hybrid
    assert hybrid is not None
    spec = hybrid_spec(
        config,
        norm_groups=hybrid.norm_groups,
        norm_epsilon=hybrid.norm_epsilon,
        d_conv=hybrid.conv_width,
        conv_bias=hybrid.conv_bias,
        bias=hybrid.projection_bias,
        dt_limit=(hybrid.dt_min, math.inf if hybrid.dt_max is None else hybrid.dt_max),
    )
    rotary = _rope_arguments(plan)
    scaled = rotary.pop("rope_scaling", False) and rotary.pop("rope_scaling_factor")  # a MambaModel has neither
    model = MambaModel(config, spec, hybrid_override_pattern=hybrid.pattern, **arguments, **rotary)
    if plan.position_embedding == "rope" and (scaled or not _native_rope(plan.rope_scaling)):
        _set_frequencies(model, plan)
    return model


def _set_frequencies(model: GPTModel | MambaModel, plan: ModelPlan) -> None:
    inverse = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = rotary_frequencies(plan).to(inverse.device)


def _keep_routers_exact(model: torch.nn.Module) -> None:
    """Correction biases of routers back to fp32, where megatron-core keeps them whatever the weights' dtype."""
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias = module.expert_bias.float()


def _rope_arguments(plan: ModelPlan) -> dict[str, Any]:
    arguments: dict[str, Any] = {"rotary_base": plan.rotary_base}
    scaling = plan.rope_scaling
    if scaling is None or not _native_rope(scaling):
        return arguments
    if scaling.kind == "linear":
        return arguments | {"seq_len_interpolation_factor": scaling.factor}
    return arguments | {"rope_scaling": True, "rope_scaling_factor": scaling.factor}


def _native_rope(scaling: RopeScaling | None) -> bool:
    """True when GPTModel's own arguments can say it."""
    if scaling is None or scaling.kind == "linear":
        return True
    return scaling.kind == "llama3" and all(getattr(scaling, key) == value for key, value in _LLAMA3_NATIVE.items())


def _shard(model: GPTModel | MambaModel, tensor_parallel: int) -> Shard:
    if tensor_parallel == 1:
        return Shard()
    group = model.pg_collection.tp
    return Shard(rank=torch.distributed.get_rank(group), size=tensor_parallel)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known (known: {', '.join(_DTYPES)})")
    return _DTYPES[name]
