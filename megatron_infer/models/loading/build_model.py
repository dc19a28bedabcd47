"""Build a GPTModel or MambaModel from a description, with the weights of its source."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.distributed.backends import group_rank, group_size
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.activations import ScaledActivation, quick_gelu, squared_relu, tanh_gelu
from megatron_infer.models.extensions import Extensions
from megatron_infer.models.loading.head_padding import divisible
from megatron_infer.models.loading.hf_names import Shard
from megatron_infer.models.loading.model_description import ModelDescription, RopeScaling
from megatron_infer.models.loading.parameter_layouts import check_split
from megatron_infer.models.stage_layers import stage_options

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_infer.models.loading.sources import ModelSource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# Not megatron-core's own squared_relu, which is compiled: seconds at the first call on a CPU.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
}

UNFUSED: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
"""Fields of TransformerConfig without dropout and fusions, each of which costs seconds of C++ compilation on a CPU."""

# megatron-core's rope_scaling switch means these numbers of Llama 3.1; others are set on the built model.
_LLAMA3_NATIVE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def build_model(
    source: ModelSource | ModelDescription,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    vocab_multiple: int = 1,
    pg_collection: Any = None,
    use_legacy_module: bool = False,
    max_sequence_length: int | None = None,
    **config_overrides: Any,
) -> GPTModel | MambaModel:
    """The source's model in `dtype` on `device`, in eval mode, with its weights (uninitialised for a description).

    Without torch.distributed a single-process gloo group is made (no port, no network). For several ranks the caller
    has set up torch.distributed; each rank builds its pipeline stage and reads only its own part of the weights. Sizes
    come from pg_collection where it is given. Stages are as even as megatron-core allows, unless its own options
    (num_layers_in_first_pipeline_stage, ...) divide the layers. The vocabulary is padded to a multiple of
    vocab_multiple * tensor_parallel, and kv groups with zeros where they do not divide (see `head_padding`).
    use_legacy_module: of megatron-core's stock classes, which adoption makes paged in place, not of our paged spec; a
    forward of the model itself then needs CUDA. max_sequence_length: of the sequences that will be served; it decides
    the factors of a longrope (`ModelDescription.for_length`). `config_overrides` go to TransformerConfig.
    Raises ModelError or ConfigError.
    """
    description = source if isinstance(source, ModelDescription) else source.config()
    given, description = description, description.for_length(max_sequence_length)
    dtype = _dtype(dtype)
    if use_legacy_module and description.needs_paged_spec is not None:
        raise ConfigError(f"use_legacy_module=True: {description.needs_paged_spec}; leave it False")
    groups = _groups(pg_collection, tensor_parallel, pipeline_parallel, expert_parallel)
    if description.has_whole_experts and group_size(getattr(groups, "expt_tp", None)) > 1:
        groups, expert_parallel = _whole_experts(groups), group_size(groups.tp_ep)
        config_overrides = {"expert_tensor_parallel_size": 1} | config_overrides
    tensor_parallel, pipeline_parallel = group_size(groups.tp), group_size(groups.pp)
    true_groups, description = description.transformer.get("num_query_groups"), divisible(description, tensor_parallel)
    check_split(
        description,
        tensor=tensor_parallel,
        expert=group_size(getattr(groups, "ep", None)),
        expert_tensor=group_size(getattr(groups, "expt_tp", None)),
    )
    config = transformer_config(
        description,
        dtype=dtype,
        device=device,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        **({"expert_model_parallel_size": expert_parallel} if expert_parallel > 1 else {}),
        **config_overrides,
    )
    multiple = vocab_multiple * tensor_parallel
    padded_vocab = -(-description.vocab_size // multiple) * multiple
    model = _construct(description, config, padded_vocab, groups, stock=use_legacy_module)
    if description.transformer.get("num_query_groups") != true_groups:
        model.true_kv_groups = true_groups  # checkpoint: the others are zeros
    model.source_description = given  # names of adapters' linears: what a live model does not tell
    model = model.to(device=device, dtype=dtype)
    _keep_routers_exact(model)
    _mark_parts(model)
    if not isinstance(source, ModelDescription):
        load_weights(model, source)
    return model.eval()


def load_weights(model: GPTModel | MambaModel, source: ModelSource) -> None:
    """Read this rank's part of the weights into a model that `build_model` made of the source's description."""
    source.load_into(model, Shard.of(model.pg_collection.tp))


def _groups(given: Any, tensor: int, pipeline: int, expert: int) -> Any:
    """The caller's groups, which then give the sizes; else megatron-core's global ones, made if need be."""
    if given is None:
        init_process_groups(tensor, pipeline, expert)
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection.use_mpu_process_groups()
    for size, group, name in ((tensor, given.tp, "tensor"), (pipeline, given.pp, "pipeline")):
        if size not in (1, group_size(group)):
            raise ConfigError(f"{name}_parallel={size}, but pg_collection has {group_size(group)} ranks for it")
    return given


def _whole_experts(groups: Any) -> Any:
    """The groups with no expert split over ranks: each of the ranks that would split them has some whole ones."""
    groups = copy.copy(groups)
    groups.ep, groups.expt_tp = groups.tp_ep, groups.cp  # the latter has one rank
    return groups


def init_process_groups(tensor_parallel: int = 1, pipeline_parallel: int = 1, expert_parallel: int = 1) -> None:
    """Set up torch.distributed and megatron-core's groups where they are not set up yet."""
    from megatron_infer.models.mcore_compat import parallel_state

    asked = {
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "expert_parallel": expert_parallel,
    }
    if not torch.distributed.is_initialized():
        several = ", ".join(f"{name}={size}" for name, size in asked.items() if size != 1)
        if several:
            raise ConfigError(
                f"{several} needs torch.distributed; start with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        # A HashStore lives in this process: no port that could be taken, no file left behind.
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=pipeline_parallel,
            expert_model_parallel_size=expert_parallel,
        )
    actual = {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, size in asked.items():
        if actual[name] != size:
            raise ConfigError(f"{name}={size}, but megatron-core is set up for {actual[name]}")


def transformer_config(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    **overrides: Any,
) -> TransformerConfig:
    """megatron-core's config for a description: no dropout, no initialisation of weights, no fusions."""
    from megatron_infer.models.extended_modules import extended_config
    from megatron_infer.models.mcore_compat import config_class

    kwargs = dict(description.transformer)
    kwargs["activation_func"] = ACTIVATIONS[kwargs.pop("activation")]
    if (factors := description.extensions.mlp_multipliers) != (1.0, 1.0):
        kwargs["activation_func"] = ScaledActivation(kwargs["activation_func"], *factors)
    if kwargs.get("multi_latent_attention"):
        kwargs |= latent_rope(description)
    make = config_class(kwargs)
    if "window_size" in kwargs:
        kwargs["window_size"] = tuple(kwargs["window_size"])
    on_cpu = torch.device(device).type == "cpu"
    kwargs |= {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        **stage_options(kwargs["num_layers"], pipeline_parallel, overrides),
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,
        **UNFUSED,
        "attention_softmax_in_fp32": True,
    }
    if "cuda_graph_scope" not in overrides and getattr(make, "cuda_graph_scope", None) == "full":
        kwargs["cuda_graph_scope"] = []  # 0.16's own default, in the spelling that gives no warning
    if description.extensions != Extensions():
        make = functools.partial(extended_config(kwargs), extensions=description.extensions)
    config = make(**(kwargs | overrides))
    scaling = description.rope_scaling
    if scaling is not None and scaling.is_in_rotation:
        # Attention reads these of any config and multiplies cosines and sines by (0.1 m log s + 1), with s = e.
        config.yarn_rotary_scaling_factor = math.e
        config.yarn_mscale, config.yarn_mscale_all_dim = 10 * (scaling.attention_factor - 1), 0.0
    return config


def latent_rope(description: ModelDescription) -> dict[str, Any]:
    """The fields of MLATransformerConfig for the rotation of latent attention. Raises ModelError where there are none.

    megatron-core makes the factor of angles and that of the softmax of mscale and mscale_all_dim, as `transformers`.
    """
    scaling, fields = description.rope_scaling, {"rotary_base": description.rotary_base}
    if scaling is None:
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    rounds = scaling.kind == "yarn" and scaling.truncate
    if not rounds or not math.isclose(scaling.mscale_ratio, scaling.attention_factor, rel_tol=1e-6):
        raise ModelError(
            f"{description.name}: latent attention has no rope, or yarn of whole frequencies with mscale and "
            f"mscale_all_dim or neither, got {scaling}"
        )
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
    }


def rotary_frequencies(description: ModelDescription) -> Tensor:
    """Inverse frequencies [rotary_dim / 2] in fp32, scaled as the description says.

    Source: Llama 3.1's frequency scaling, yarn, longrope and linear interpolation, as `transformers` computes them.
    A dynamic rope changes frequencies only beyond the positions that the model has.
    """
    dim = int(description.transformer["kv_channels"] * description.rotary_percent)
    inverse = 1.0 / (description.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    scaling = description.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "factors":
        factors = torch.tensor(scaling.factors, dtype=torch.float32)
        if factors.shape != inverse.shape:
            raise ModelError(
                f"{description.name}: {len(scaling.factors)} rope factors for {len(inverse)} rotary frequencies"
            )
        return inverse / factors
    if scaling.kind == "yarn":
        return _yarn_frequencies(inverse, scaling, description.rotary_base)
    return _llama3_frequencies(inverse, scaling)


def _yarn_frequencies(inverse: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Frequencies before a range stay, those after it are divided by the factor, those within it are blended."""
    dim = 2 * len(inverse)

    def place(rotations: float) -> float:
        """The index, a real number, of the frequency that rotates so often within the original positions."""
        return dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(len(inverse), dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / scaling.factor * divided + inverse * (1 - divided)


def _llama3_frequencies(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, frequencies of long ones are divided by the factor, those between are blended."""
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    longest, shortest = scaling.original_max_position / low, scaling.original_max_position / high
    stretched = torch.where(wavelength > longest, inverse / scaling.factor, inverse)
    blend = (scaling.original_max_position / wavelength - low) / (high - low)
    between = (1 - blend) * stretched / scaling.factor + blend * stretched
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def _construct(
    description: ModelDescription, config: TransformerConfig, padded_vocab: int, groups: Any, *, stock: bool
) -> GPTModel | MambaModel:
    from megatron_infer.models.rotary import cpu_rotary

    # A tied last stage loads its embedding with the other weights, so that building it sends nothing between stages
    # (which needs CUDA in megatron-core). Training finds the group that keeps both copies equal set afterwards.
    without_embedding = copy.copy(groups)
    without_embedding.embd = None
    make, stage = (
        (functools.partial(_gpt, stock=stock) if description.hybrid is None else _hybrid),
        group_rank(groups.pp),
    )
    model = make(
        description,
        config,
        vocab_size=padded_vocab,
        max_sequence_length=description.max_sequence_length,
        position_embedding_type=description.position_embedding,
        rotary_percent=description.rotary_percent,
        share_embeddings_and_output_weights=description.tied_embeddings,
        pre_process=stage == 0,
        post_process=stage == group_size(groups.pp) - 1,
        pg_collection=without_embedding,
    )
    model.true_vocab_size = description.vocab_size  # for adopt: what lies beyond is padding, and never drawn
    model.pg_collection, model.embd_group = groups, getattr(groups, "embd", None)
    return cpu_rotary(model)


def _gpt(description: ModelDescription, config: TransformerConfig, *, stock: bool, **arguments: Any) -> GPTModel:
    from megatron_infer.models.extended_modules import extend
    from megatron_infer.models.mcore_compat import GPTModel
    from megatron_infer.models.specs import gpt_spec, mtp_spec

    stages = arguments["pg_collection"].pp
    own_copy = description.tied_embeddings or description.position_embedding == "learned_absolute"
    if config.mtp_num_layers and own_copy and group_size(stages) > 1:
        raise ConfigError(
            "an MTP layer on the last of several pipeline stages needs an output layer of its own and no learned "
            "positions: megatron-core saves and loads no second copy of tied or learned embeddings; use one stage"
        )
    spec = gpt_spec(config, pp_rank=group_rank(stages), stock=stock)
    arguments["mtp_block_spec"] = mtp_spec(config, spec) if arguments["post_process"] else None
    is_latent = config.multi_latent_attention
    rotary = {} if is_latent else _rope_arguments(description)
    model = GPTModel(config=config, transformer_layer_spec=spec, **arguments, **rotary)
    if is_latent and description.latent_norm_epsilon is not None:
        _set_latent_norms(model, description.latent_norm_epsilon)
    if description.position_embedding == "rope" and not is_latent and not _native_rope(description.rope_scaling):
        _set_frequencies(model, description)
    return extend(model)


def _hybrid(description: ModelDescription, config: TransformerConfig, **arguments: Any) -> MambaModel:
    from megatron_infer.models.extended_modules import extend
    from megatron_infer.models.hybrid import hybrid_spec
    from megatron_infer.models.mcore_compat import MambaModel

    hybrid = description.hybrid
    assert hybrid is not None
    spec = hybrid_spec(
        config,
        norm_groups=hybrid.norm_groups,
        parallel="P" in hybrid.pattern,
        rmsnorm=hybrid.gated_norm,
        norm_epsilon=hybrid.norm_epsilon,
        d_conv=hybrid.conv_width,
        conv_bias=hybrid.conv_bias,
        bias=hybrid.projection_bias,
        dt_limit=(hybrid.dt_min, math.inf if hybrid.dt_max is None else hybrid.dt_max),
    )
    rotary = _rope_arguments(description)
    scaled = rotary.pop("rope_scaling", False) and rotary.pop("rope_scaling_factor")  # MambaModel takes neither
    pattern = hybrid.pattern.replace("P", "*")  # megatron-core's stack puts the spec's layer there
    model = MambaModel(config, spec, hybrid_override_pattern=pattern, **arguments, **rotary)
    if description.position_embedding == "rope" and (scaled or not _native_rope(description.rope_scaling)):
        _set_frequencies(model, description)
    return extend(model)


def _set_latent_norms(model: GPTModel, epsilon: float) -> None:
    for name, module in model.named_modules():
        if name.endswith(("self_attention.q_layernorm", "self_attention.kv_layernorm")) and hasattr(module, "eps"):
            module.eps = epsilon


def _set_frequencies(model: GPTModel | MambaModel, description: ModelDescription) -> None:
    inverse = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = rotary_frequencies(description).to(inverse.device)


def _mark_parts(model: torch.nn.Module) -> None:
    """Mark the parameters that are parts of larger ones, as megatron-core's initialisation would. Its optimizer takes
    unmarked ones for copies that every rank has, and its gradient norm then counts only those of the first rank."""
    from megatron_infer.models.mcore_compat import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            parts = [(module.weight, 1)]  # the bias is whole
        elif isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            parts = [(module.weight, 0), (getattr(module, "bias", None), 0)]
        else:
            continue
        for parameter, dim in parts:
            if parameter is not None and not getattr(parameter, "tensor_model_parallel", False):
                parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def _keep_routers_exact(model: torch.nn.Module) -> None:
    """Routers' correction biases back to fp32, in which megatron-core keeps them whatever the weights' dtype."""
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias = module.expert_bias.float()


def _rope_arguments(description: ModelDescription) -> dict[str, Any]:
    arguments: dict[str, Any] = {"rotary_base": description.rotary_base}
    scaling = description.rope_scaling
    if scaling is None or not _native_rope(scaling):
        return arguments
    if scaling.kind == "linear":
        return arguments | {"seq_len_interpolation_factor": scaling.factor}
    return arguments | {"rope_scaling": True, "rope_scaling_factor": scaling.factor}


def _native_rope(scaling: RopeScaling | None) -> bool:
    """True when GPTModel's own arguments can express it."""
    if scaling is None or scaling.kind == "linear":
        return True
    return scaling.kind == "llama3" and all(getattr(scaling, key) == value for key, value in _LLAMA3_NATIVE.items())


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known (known: {', '.join(_DTYPES)})")
    return _DTYPES[name]
