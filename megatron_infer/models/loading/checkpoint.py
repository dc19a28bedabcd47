"""megatron-core `torch_dist` checkpoints: save, load, and use as a model source.

    directory/
      metadata.json, common.pt, .metadata, *.distcp     megatron-core's; readable with any parallel layout
      megatron_infer.json                               the model description: the directory needs no other source
      tokenizer.json, tokenizer_config.json             when a tokenizer was given
      run_config.yaml                                   of Megatron-Bridge

A checkpoint without megatron_infer.json is described by the Hugging Face directory that is given, by run_config.yaml,
or by the training arguments in Megatron-LM's common.pt.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_infer.distributed.backends import group_size
from megatron_infer.errors import ModelError
from megatron_infer.kernels.activations import ScaledActivation
from megatron_infer.models.bridge_modules import is_bridge, name_of
from megatron_infer.models.extensions import extensions_of
from megatron_infer.models.loading.build_model import ACTIVATIONS
from megatron_infer.models.loading.checkpoint_bridge import RUN_CONFIG, arguments_of_run
from megatron_infer.models.loading.checkpoint_files import tensors_only
from megatron_infer.models.loading.checkpoint_hybrid import (
    argument_of,
    expert_fields,
    hybrid_of_arguments,
    hybrid_of_model,
)
from megatron_infer.models.loading.checkpoint_keys import by_keys_of
from megatron_infer.models.loading.families import FAMILIES, architecture_named_by
from megatron_infer.models.loading.find import DISTCP_REMEDY, damage_named, description_of_directory, is_distcp
from megatron_infer.models.loading.head_padding import allow_padding, unpadded
from megatron_infer.models.loading.hf_names import WHOLE, Shard
from megatron_infer.models.loading.model_description import ModelDescription, RopeScaling
from megatron_infer.models.model_chunks import as_one, chunks_of
from megatron_infer.utils.json_file import read_json

if TYPE_CHECKING:
    from megatron_infer.text.tokenizer import Tokenizer

DESCRIPTION_FILE = "megatron_infer.json"
REMEDY = (
    "write it as safetensors with `megatron-infer convert CHECKPOINT DIRECTORY --hf-config DIR`, DIR the Hugging Face "
    "directory of the same model, or give it a description (docs/checkpoints.md)"
)
_FORMAT = 1
_MEGATRON, _MEGATRON_HYBRID = "MegatronGPT", "MegatronMamba"


def save_checkpoint(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    description: ModelDescription | None = None,
) -> None:
    """Write the model, or the list of its chunks (every rank calls this), so that `open_source(directory)` and Megatron
    can load it.

    description: None reads it off the model. Works on a CPU: no CUDA call, no helper process. Raises ModelError for a
    description that says other scores of routers than the model has.
    """
    from megatron.core import dist_checkpointing

    model = as_one(model)
    description = unpadded(description or _description_of_stages(model), model)
    if description.extensions.softmax_scores != extensions_of(model.config).softmax_scores:
        raise ModelError(
            f"softmax_scores={description.extensions.softmax_scores} in the description, and the model's routers score "
            "by another function (megatron-core's add a correction bias to sigmoid scores only); give the description "
            "with the other value of extensions.softmax_scores"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    first = torch.distributed.get_rank() == 0
    if first:
        (directory / DESCRIPTION_FILE).unlink(missing_ok=True)
    dist_checkpointing.save(_sharded(model), str(directory), sharded_strategy=sync_strategy())
    if not first:
        return
    if tokenizer is not None:
        tokenizer.save(directory)
    groups = model.config.num_query_groups if hasattr(model, "true_kv_groups") else None
    write_description(directory, description, saved_kv_groups=groups)  # last: it says that the rest is complete


def write_description(
    directory: str | Path, description: ModelDescription, *, saved_kv_groups: int | None = None
) -> None:
    """Write megatron_infer.json into a checkpoint's directory, which needs no other source then.

    saved_kv_groups: of its tensors, where they are more than the description's (see head_padding). Raises ModelError
    for a description that says other scores of routers than Megatron-Bridge's model has.
    """
    if description.extensions.softmax_scores and (Path(directory) / RUN_CONFIG).exists():
        raise ModelError(
            f"{directory}: Megatron-Bridge's routers add a correction bias to sigmoid scores, and the description says "
            "softmax; give it with extensions.softmax_scores=False"
        )
    content = {"format": _FORMAT, "versions": _versions(), "plan": description.to_json()}
    if saved_kv_groups is not None:
        content["saved_kv_groups"] = saved_kv_groups
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (Path(directory) / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")


class CheckpointSource:
    """A torch_dist checkpoint directory as a model source."""

    def __init__(self, directory: str | Path, *, name: str = "", hf_config: str | Path | None = None) -> None:
        """hf_config: a Hugging Face directory of the same model, whose config.json and tokenizer are used."""
        self.path = latest_iteration(Path(directory))
        self._tokenizer_path = self.path if hf_config is None else Path(hf_config)
        self.name = name or str(directory)
        if is_distcp(self.path):
            raise ModelError(f"{self.path}: {DISTCP_REMEDY}")
        if not (self.path / "metadata.json").is_file():
            raise ModelError(f"{self.path}: no metadata.json: not a torch_dist checkpoint, or one that was cut short")
        path = self.path / DESCRIPTION_FILE
        self._saved_groups: int | None = None
        """kv groups of its tensors, where it was saved with padding; None: those of the description."""
        if hf_config is not None:
            description = description_of_directory(Path(hf_config), name=self.name)
            # of a checkpoint of megatron-core's own model: whatever the family, its routers score by sigmoid
            extensions = replace(
                description.extensions, softmax_scores=path.is_file() and description.extensions.softmax_scores
            )
            self._description = replace(description, extensions=extensions)
        elif path.is_file():
            self._description, self._saved_groups = _read_description(path)
        else:
            is_of_bridge = (self.path / RUN_CONFIG).exists()
            arguments = (
                arguments_of_run(self.path / RUN_CONFIG, remedy=REMEDY)
                if is_of_bridge
                else _training_arguments(self.path)
            )
            with damage_named(self.name):
                self._description = description_from_arguments(arguments, name=self.name)

    def config(self) -> ModelDescription:
        return self._description

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its megatron-core checkpoint key (layers stacked in the first dimension)."""
        from megatron.core.dist_checkpointing import load_plain_tensors

        with tensors_only(self.path) as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # as in _read
            tensors = load_plain_tensors(str(folder))
        yield from tensors.items()

    def load_into(self, model: nn.Module | Sequence[nn.Module] | None, shard: Shard = WHOLE) -> None:
        """Load this rank's part, which the model knows (`shard` only has to agree with it). model: or the list of its
        chunks."""
        if model is None:
            self._read(None, {})
        else:
            model = as_one(model)
            model.load_state_dict(self._read(model, _sharded(model)), strict=False)

    def part_of(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's part in new tensors under the model's own names; the model is not written to."""
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

        def with_new_memory(leaf: Any) -> Any:
            if isinstance(getattr(leaf, "data", None), Tensor):
                leaf.data = torch.empty_like(leaf.data)
            return leaf

        return self._read(model, dict_list_map_inplace(with_new_memory, _sharded(model)))

    def _read(self, model: nn.Module | None, wanted: Any) -> dict[str, Tensor]:
        """The tensors of `wanted`, this rank's part of `model`; None: it has none. Objects (`_extra_state`) are left
        out: torch unpickles them."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.validation import StrictHandling
        from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

        own = self._description.transformer.get("num_query_groups")
        if model is not None and getattr(model.config, "num_query_groups", own) != (self._saved_groups or own):
            allow_padding(wanted)
        _, wanted = extract_matching_values(wanted, lambda leaf: isinstance(leaf, ShardedObject))
        try:
            with tensors_only(self.path) as folder, warnings.catch_warnings():
                # megatron-core calls functions that torch has renamed; a user can do nothing about it
                warnings.filterwarnings("ignore", category=FutureWarning)
                held = dist_checkpointing.load_tensors_metadata(str(folder))
                state, unasked, absent = dist_checkpointing.load(
                    by_keys_of(wanted, held), str(folder), strict=StrictHandling.RETURN_ALL
                )
        except TorchCheckpointException as error:  # a BaseException with the errors of the ranks
            reason = next((str(failure[0]) for failure in error.failures.values()), str(error))
            raise ModelError(f"{self.path}: the checkpoint cannot be loaded: {reason}") from error
        except (CheckpointingException, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: the checkpoint cannot be loaded: {error}") from error
        beside = _OPTIMIZER if self._description.transformer.get("mtp_num_layers") else (*_OPTIMIZER, _DRAFTING)
        missing = sorted(key for key in absent if "_extra_state" not in key)
        unexpected = sorted(key for key in unasked if "_extra_state" not in key and not key.startswith(beside))
        problems = [
            f"{kind} ({len(keys)}): {', '.join(keys)}"
            for kind, keys in (("missing", missing), ("unexpected", unexpected))
            if keys
        ]
        if problems:
            raise ModelError(f"{self.path}: tensors do not fit the model description; {'; '.join(problems)}")
        names = set() if model is None else set(model.state_dict())
        return {key: value for key, value in state.items() if key in names and isinstance(value, Tensor)}

    def tokenizer(self) -> Tokenizer:
        from megatron_infer.text.tokenizer import Tokenizer  # models in memory need no tokenizers package

        return Tokenizer.from_directory(self._tokenizer_path, eos_ids=self._description.eos_ids, name=self.name)


def _sharded(model: nn.Module) -> Any:
    """megatron-core's sharded state dict, over the model's own groups where it has the one for replicas."""
    groups = getattr(model, "pg_collection", None)
    replicas = getattr(groups, "dp_cp", None)
    return model.sharded_state_dict(metadata=None if replicas is None else {"dp_cp_group": replicas})


def _description_of_stages(model: nn.Module) -> ModelDescription:
    """The description of a model over all its pipeline stages; every rank calls this.

    Only a stage with Mamba layers knows the mixers' sizes, and the first rank may hold a stage without.
    """
    description, stages = description_from_model(chunks_of(model)[0]), getattr(model.pg_collection, "pp", None)
    if description.hybrid is None or group_size(stages) == 1:
        return description
    knows = any(hasattr(layer, "mixer") for layer in model.decoder.layers)
    own = json.dumps(description.to_json() if knows else None).encode()
    length = torch.tensor([len(own)])
    torch.distributed.all_reduce(length, op=torch.distributed.ReduceOp.MAX, group=stages)
    padded = torch.frombuffer(bytearray(own.ljust(int(length))), dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in range(group_size(stages))]
    torch.distributed.all_gather(found, padded, group=stages)
    for text in found:
        if (value := json.loads(bytes(text.tolist()))) is not None:
            return ModelDescription.from_json(value)
    return description


# Fields of TransformerConfig that a description has where they are set.
_WHERE_GIVEN = (
    *("window_size", "window_attn_skip_freq", "no_rope_freq", "softmax_scale", "mtp_num_layers"),
    *("activation_func_clamp_value", "glu_linear_offset", "softmax_type"),
)
_WHERE_TRUE = ("layernorm_zero_centered_gamma", "rotary_interleaved", "attention_output_gate")
_OF_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "gated_delta_net": (
        *("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    ),
    "dsa": ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
}
"""`experimental_attention_variant` -> its fields."""
# Prefixes of what a training checkpoint holds beside the model.
_OPTIMIZER = ("optimizer.", "optimizer_state", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")
_DRAFTING = "mtp."
"""The prefix of layers that only draft, which a description without them leaves out."""


def description_from_model(model: nn.Module) -> ModelDescription:
    """The description of a live GPTModel or MambaModel. Raises ModelError for what a description cannot express."""
    from megatron_infer.models.mcore_compat import quick_gelu, squared_relu, unfused_quick_gelu

    config = model.config
    hybrid, fields = hybrid_of_model(model) if hasattr(model.decoder, "layer_type_list") else (None, {})
    for name, module in model.named_modules():
        if is_bridge(module):
            raise ModelError(f"{name} is a {name_of(type(module))}, which a model description cannot express yet")
    if config.num_moe_experts and hybrid is None:
        fields = expert_fields(lambda key: getattr(config, key, None), in_gpt=True)
    activations = {function: name for name, function in ACTIVATIONS.items()} | {squared_relu: "relu2"}
    activations |= dict.fromkeys((quick_gelu, unfused_quick_gelu), "quick_gelu")
    activation = config.activation_func
    if isinstance(activation, ScaledActivation):  # its factors are in the extensions
        activation = activation.function
    if activation not in activations:
        raise ModelError(f"activation {activation} is not one of {', '.join(sorted(ACTIVATIONS))}")
    keys = (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
        "normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    )  # fmt: skip
    transformer: dict[str, Any] = {key: getattr(config, key) for key in keys}
    transformer |= fields | {"activation": activations[activation]}
    for key in _WHERE_GIVEN:
        value = getattr(config, key, None)
        if value not in (None, 0.0, "vanilla"):
            transformer[key] = list(value) if isinstance(value, tuple) else value
    transformer |= {key: True for key in _WHERE_TRUE if getattr(config, key, False)}
    if variant := getattr(config, "experimental_attention_variant", None):
        if variant not in _OF_VARIANTS:
            raise ModelError(f"experimental_attention_variant={variant!r}, which a model description cannot express")
        names = ("experimental_attention_variant", *_OF_VARIANTS[variant])
        transformer |= {key: getattr(config, key) for key in names}
    rotary = _rope_of(getattr(model, "rotary_pos_emb", None), model)
    if config.multi_latent_attention:
        latent, rotary = _latent_fields(lambda key: getattr(config, key))
        transformer |= latent
        rotary["latent_norm_epsilon"] = _latent_epsilon(model)
    return ModelDescription(
        architecture=_MEGATRON if hybrid is None else _MEGATRON_HYBRID,
        transformer=transformer,
        vocab_size=getattr(model, "true_vocab_size", model.vocab_size),
        max_sequence_length=model.max_sequence_length,
        position_embedding="rope" if model.position_embedding_type == "yarn" else model.position_embedding_type,
        **rotary,
        hybrid=hybrid,
        extensions=extensions_of(config),
        tied_embeddings=model.share_embeddings_and_output_weights,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def description_by_names(model: nn.Module, names: Iterable[str]) -> ModelDescription:
    """The description of a live model, with the family that tensor names imply.

    A model that `build_model` made keeps the description of its source, which counts unless the names are of another
    family. Raises ModelError for a family that multiplies values of config.json into its weights: another model does
    not have them.
    """
    architecture = architecture_named_by(names)
    given: ModelDescription | None = getattr(model, "source_description", None)
    if given is not None and given.architecture in FAMILIES and architecture in (None, given.architecture):
        return given
    description = description_from_model(model)
    if architecture is None:
        return description
    if any(field.startswith("scales.") for field in FAMILIES[architecture].fields):
        raise ModelError(
            f"{architecture}: its weights are multiplied by values of config.json that the model does not have; give "
            "plan=open_source(directory).config()"
        )
    return replace(description, architecture=architecture)


def _latent_fields(get: Callable[[str], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of TransformerConfig, fields of a description) of latent attention. get: the value of a field."""
    if get("rotary_percent") != 1.0:
        raise ModelError(f"latent attention with rotary_percent={get('rotary_percent')}, which no description says yet")
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    layers = {"multi_latent_attention": True, **{name: get(name) for name in names}}
    layers["kv_channels"] = layers["qk_head_dim"] + layers["qk_pos_emb_head_dim"]
    scaling = None
    if get("rope_type") == "yarn":
        scaling = RopeScaling(
            kind="yarn",
            factor=get("rotary_scaling_factor"),
            original_max_position=get("original_max_position_embeddings"),
            beta_fast=get("beta_fast"),
            beta_slow=get("beta_slow"),
            mscale=get("mscale"),
            mscale_all_dim=get("mscale_all_dim"),
        )
        scaling = replace(scaling, attention_factor=scaling.mscale_ratio)
    return layers, {"rotary_base": float(get("rotary_base")), "rope_scaling": scaling}


def _latent_epsilon(model: nn.Module) -> float | None:
    """Of the norms of latents, where another one than the layers'."""
    norms = [one.eps for name, one in model.named_modules() if name.endswith(".kv_layernorm") and hasattr(one, "eps")]
    return next((one for one in norms if one != model.config.layernorm_epsilon), None)


def _rope_of(rope: nn.Module | None, model: nn.Module) -> dict[str, Any]:
    """Rotary fields of a description. A GPTModel keeps its base and percent, a MambaModel only the frequencies."""
    from megatron_infer.models.mcore_compat import YarnRotaryEmbedding, rotary_factor_of, yarn_frequencies

    if rope is None:
        return {}
    is_yarn = isinstance(rope, YarnRotaryEmbedding)
    frequencies = yarn_frequencies(rope) if is_yarn else rope.inv_freq
    inverse, dim = frequencies.float().cpu(), 2 * frequencies.numel()
    base = getattr(model, "rotary_base", None)
    percent = 1.0 if is_yarn else getattr(model, "rotary_percent", None)  # yarn's embedding takes none
    if base is None:
        # the last frequency is base ** (2 / dim - 1); bases are whole numbers
        base = round(inverse[-1].item() ** (-dim / (dim - 2))) if dim > 2 else 10000
    plain = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    scaling = None
    if rope.seq_len_interpolation_factor is not None:
        scaling = RopeScaling(kind="linear", factor=float(rope.seq_len_interpolation_factor))
    elif not torch.equal(plain, inverse):
        scaling = RopeScaling(kind="factors", factors=tuple((plain / inverse).tolist()))
    factor = rotary_factor_of(model.config)
    if factor != 1.0:
        if scaling is not None and scaling.kind == "linear":
            raise ModelError("linear interpolation with yarn's factor, which a model description cannot express")
        scaling = scaling or RopeScaling(kind="factors", factors=(1.0,) * (dim // 2))
        scaling = replace(scaling, attention_factor=factor, is_in_rotation=True)
    return {
        "rotary_base": float(base),
        "rotary_percent": float(dim / model.config.kv_channels if percent is None else percent),
        "rope_scaling": scaling,
    }


def description_from_arguments(arguments: Mapping[str, Any], *, name: str = "") -> ModelDescription:
    """The description in a Megatron-LM run's arguments. Raises ModelError naming what is missing or not supported."""
    from megatron_infer.models.mcore_compat import config_class

    needed = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "padded_vocab_size")
    absent = [key for key in needed if arguments.get(key) is None]
    if absent:
        raise ModelError(
            f"{name}: the checkpoint has no {DESCRIPTION_FILE}, and its training arguments lack {', '.join(absent)}; "
            + REMEDY
        )
    hybrid, fields = hybrid_of_arguments(arguments, name=name) or (None, {})
    if arguments.get("num_experts") and hybrid is None:
        fields = expert_fields(argument_of(arguments), in_gpt=True)
    rotary = {
        "rotary_base": float(arguments.get("rotary_base") or 10000),
        "rope_scaling": _rope_from_arguments(arguments),
    }
    if arguments.get("multi_latent_attention"):
        defaults = config_class({"multi_latent_attention": True})
        given = {key: value for key, value in arguments.items() if (key, value) != ("rope_type", None)}
        latent, rotary = _latent_fields(lambda key: given[key] if key in given else getattr(defaults, key))
        fields |= latent
    experts = () if "num_moe_experts" in fields else ("num_experts",)
    refused = [key for key in (*experts, *_UNSUPPORTED_ARGUMENTS) if arguments.get(key)]
    if refused:
        raise ModelError(f"{name}: trained with {', '.join(refused)}, which a model description cannot express yet")
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else heads
    activation = "silu" if arguments.get("swiglu") else "relu2" if arguments.get("squared_relu") else "gelu"
    transformer: dict[str, Any] = {
        "num_layers": arguments["num_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": arguments.get("kv_channels") or hidden // heads,
        "ffn_hidden_size": arguments.get("ffn_hidden_size") or 4 * hidden,
        "normalization": arguments.get("normalization") or "LayerNorm",
        "layernorm_epsilon": arguments.get("norm_epsilon") or 1e-5,
        "gated_linear_unit": bool(arguments.get("swiglu")),
        "activation": activation,
        "add_bias_linear": bool(arguments.get("add_bias_linear", True)),
        "add_qkv_bias": bool(arguments.get("add_qkv_bias", False)),
        "qk_layernorm": bool(arguments.get("qk_layernorm", False)),
        **fields,
    }
    for key in _WHERE_GIVEN:
        value = arguments.get(key)
        if value not in (None, 0.0, "vanilla"):
            transformer[key] = list(value) if isinstance(value, tuple) else value
    return ModelDescription(
        architecture=_MEGATRON if hybrid is None else _MEGATRON_HYBRID,
        transformer=transformer,
        vocab_size=arguments["padded_vocab_size"],
        max_sequence_length=arguments["max_position_embeddings"],
        position_embedding=arguments.get("position_embedding_type") or "learned_absolute",
        rotary_percent=float(arguments.get("rotary_percent") or 1.0),
        **rotary,
        hybrid=hybrid,
        tied_embeddings=not arguments.get("untie_embeddings_and_output_weights", False),
        dtype="bfloat16" if arguments.get("bf16") else "float16" if arguments.get("fp16") else "float32",
        name=name,
    )


_UNSUPPORTED_ARGUMENTS = (
    "quick_geglu", "openai_gelu", "apply_layernorm_1p", "fp32_residual_connection",
    "apply_residual_connection_post_layernorm", "rotary_interleaved", "qk_l2_norm",
    "attention_output_gate", "use_mup", "experimental_attention_variant",
)  # fmt: skip


def _rope_from_arguments(arguments: Mapping[str, Any]) -> RopeScaling | None:
    if arguments.get("use_rope_scaling"):
        return RopeScaling(kind="llama3", factor=float(arguments.get("rope_scaling_factor") or 8.0))
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    return RopeScaling(kind="linear", factor=float(factor)) if factor else None


def _training_arguments(directory: Path) -> dict[str, Any]:
    path = directory / "common.pt"
    if not path.is_file():
        raise ModelError(
            f"{directory}: neither {DESCRIPTION_FILE} nor common.pt: nothing describes the model; {REMEDY}"
        )
    try:
        with torch.serialization.safe_globals(_safe_classes()):
            common = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here; each means that the file cannot be trusted or read
        raise ModelError(f"{path}: cannot be read safely: {error}") from error
    arguments = common.get("args") if isinstance(common, Mapping) else None
    if arguments is None:
        raise ModelError(f"{directory}: no {DESCRIPTION_FILE}, and common.pt holds no training arguments; {REMEDY}")
    return dict(vars(arguments)) if isinstance(arguments, argparse.Namespace) else dict(arguments)


def _safe_classes() -> list[Any]:
    """The value classes in Megatron-LM's common.pt: a namespace and megatron-core's enums.

    A pickle of early releases of Python 3.11 (3.11.2) has a member of an enum as `getattr(kind, name)`, others have
    `kind(value)`. `getattr` of a file looks up members of these enums, and nothing else.
    """
    import enum
    import pathlib

    from megatron.core.transformer import enums

    kinds = [value for value in vars(enums).values() if isinstance(value, type) and issubclass(value, enum.Enum)]

    def member(kind: Any, name: Any) -> Any:
        if not any(kind is one for one in kinds):
            raise ModelError(f"getattr of {kind!r}, which is no enum of megatron-core")
        return kind[name]

    return [argparse.Namespace, pathlib.PosixPath, *kinds, (member, "builtins.getattr")]


def latest_iteration(directory: Path) -> Path:
    """The folder of the latest iteration, whose number Megatron-LM keeps in a file; else the directory itself."""
    marker = directory / "latest_checkpointed_iteration.txt"
    if not marker.is_file():
        return directory
    text = marker.read_text(encoding="utf-8", errors="replace").strip()
    folder = "release" if text == "release" else f"iter_{int(text):07d}" if text.isdigit() else None
    if folder is None or not (directory / folder).is_dir():
        raise ModelError(f"{marker}: says {text!r}, but there is no such iteration in {directory}")
    return directory / folder


def _read_description(path: Path) -> tuple[ModelDescription, int | None]:
    """(description, kv groups of the tensors where they are more than the description's)."""
    content = read_json(path)
    if content.get("format") != _FORMAT or not isinstance(content.get("plan"), Mapping):
        raise ModelError(f"{path}: format {content.get('format')!r}, this version reads format {_FORMAT}")
    return ModelDescription.from_json(content["plan"]), content.get("saved_kv_groups")


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("megatron-infer", "megatron-core", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a source tree
            versions[package] = "unknown"
    return versions


def sync_strategy() -> Any:
    """megatron-core's torch_dist format, written by this process.

    The stock strategy forks writers and spawns a manager for them even when it saves synchronously. That needs CUDA
    calls, psutil and a guarded main script, and hangs without the latter two. The translation and the planner here are
    megatron-core's own; only the file writer is torch's.
    """
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
    from torch.distributed import checkpoint as torch_checkpoint

    class SyncTorchDistSave(torch_strategies.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
            renamed, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            torch_checkpoint.save(
                torch_strategies.mcore_to_pyt_state_dict(renamed, False),
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
                planner=torch_strategies.MCoreSavePlanner(
                    dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
                ),
            )

    return SyncTorchDistSave("torch_dist", 1)
