"""Write a model as a Hugging Face directory: config.json, *.safetensors, and the tokenizer's files.

The recipes of `hf_names`, which make a parameter of Hugging Face tensors, are given tensors of numbered elements: what
they make says where each element of the parameter belongs. The config counts only if reading it gives the model's
description again. So what is written is what loading would read, for every layout that loading knows.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import ModelError
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.hf_config import description_from_config
from megatron_infer.model_loader.hf_names import WHOLE, Recipe, Span
from megatron_infer.model_loader.hf_weights import recipes_of
from megatron_infer.model_loader.model_description import ModelDescription
from megatron_infer.model_loader.sources import ModelSource
from megatron_infer.utils.files import save_tensors
from megatron_infer.utils.progress import tracked

MAX_SHARD_BYTES = 5 << 30
"""Most bytes of tensors in one file, unless a single tensor has more."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What `write_hugging_face` has written."""

    architecture: str
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
    num_files: int
    """The number of safetensors files."""
    no_tokenizer: str | None
    """Why there are no tokenizer's files; None: they are there."""


def write_hugging_face(
    source: ModelSource, directory: str | Path, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Exported:
    """Write the source's model into a new directory, which is there once it is complete.

    The model is built whole in this process. dtype: None is the source's own. Raises ModelError, with nothing written,
    where the directory exists or cannot be written, for a source that cannot be read, and for a model that no Hugging
    Face config of this writer describes.
    """
    directory = Path(directory)
    if directory.exists():
        raise ModelError(f"{directory} exists; give a directory that does not")
    description = source.config()
    config, written = config_of(description)
    config["dtype"] = dtype = dtype or description.dtype
    folder = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ModelError(f"{directory}: cannot be written: {error.strerror}") from None
    try:
        model = build_model(source, dtype=dtype)
        recipes, _ = recipes_of(model, written)
        parameters = tracked(list(model.named_parameters()), unit="tensor", what="writing weights")
        tensors = (pair for name, one in parameters for pair in _taken_apart(name, one, recipes[name]))
        sizes = _write_tensors(tensors, folder, max_shard_bytes)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        no_tokenizer = _write_tokenizer(source, folder)
        folder.rename(directory)
    except OSError as error:
        raise ModelError(f"{directory}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    files = len({file for file, _ in sizes.values()})
    num_bytes = sum(size for _, size in sizes.values())
    return Exported(
        architecture=written.architecture,
        num_tensors=len(sizes),
        num_bytes=num_bytes,
        num_files=files,
        no_tokenizer=no_tokenizer,
    )


def _write_tokenizer(source: ModelSource, folder: Path) -> str | None:
    try:
        source.tokenizer().save(folder)
    except ModelError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- tensors


class _Numbered:
    """A TensorReader whose tensors hold their elements' numbers, counted through all tensors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self.total = shapes, 0
        self.starts: dict[str, int] = {}
        for name, shape in shapes.items():
            self.starts[name] = self.total
            self.total += torch.Size(shape).numel()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        shape, start = self._shapes[name], self.starts[name]
        dtype = torch.int32 if self.total < 1 << 31 else torch.int64
        numbers = torch.arange(start, start + torch.Size(shape).numel(), dtype=dtype).reshape(shape)
        if columns is not None:
            numbers = numbers[:, columns[0] : columns[1]]
        return numbers if rows is None else numbers[rows[0] : rows[1]]


def _taken_apart(name: str, parameter: Tensor, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of what a parameter is made of. Raises ModelError for what has no place there."""
    value = parameter.detach()
    if recipe.make is None:
        if bool(value.any()):
            raise ModelError(f"{name} is not zero, and the Hugging Face model has no such tensor")
        return
    reader = _Numbered(recipe.sources)
    numbers = recipe.make(reader, WHOLE)
    value = value[: numbers.shape[0]]  # behind a vocabulary's end there is padding
    assert numbers.shape == value.shape and numbers.numel() == reader.total, f"{name}: not every element has a place"
    flat = torch.empty(reader.total, dtype=value.dtype)
    flat[numbers.flatten()] = value.flatten()
    for source, shape in recipe.sources.items():
        start = reader.starts[source]
        yield source, flat[start : start + torch.Size(shape).numel()].reshape(shape).clone()


def _write_tensors(
    tensors: Iterator[tuple[str, Tensor]], folder: Path, max_shard_bytes: int
) -> dict[str, tuple[str, int]]:
    """Write them into files of at most max_shard_bytes -> (file, bytes) of each."""
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        save_tensors(folder / f"{len(shards)}.safetensors", held, {"format": "pt"})
        shards.append({name: one.nbytes for name, one in held.items()})
        held.clear()

    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        held[name] = tensor
    flush()
    count = len(shards)
    sizes: dict[str, tuple[str, int]] = {}
    for place, shard in enumerate(shards):
        file = "model.safetensors" if count == 1 else f"model-{place + 1:05d}-of-{count:05d}.safetensors"
        path = (folder / f"{place}.safetensors").rename(folder / file)
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that their owner alone can read
        sizes |= {name: (file, size) for name, size in shard.items()}
    if count > 1:
        total = sum(size for _, size in sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: file for name, (file, _) in sizes.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sizes


# ---------------------------------------------------------------------- config.json


def config_of(description: ModelDescription) -> tuple[dict[str, Any], ModelDescription]:
    """(config.json, the description that reading it gives). Raises ModelError where none says all that it says."""
    own = description.architecture
    reasons = []
    for architecture in (own, *(name for name in _WRITERS if name != own)) if own in _WRITERS else _WRITERS:
        config = {"architectures": [architecture], **_WRITERS[architecture](description)}
        ids = (("bos", description.bos_id), ("eos", list(description.eos_ids) or None), ("pad", description.pad_id))
        config |= {f"{name}_token_id": value for name, value in ids if value is not None}
        try:
            read = description_from_config(config, name=description.name)
        except ModelError as error:
            reasons.append(f"{architecture}: {error}")
            continue
        different = _differences(description, read)
        if not different:
            return config, read
        reasons.append(f"{architecture}: {', '.join(different)}")
    raise ModelError(
        f"{description.name or own}: it can be written as {', '.join(_WRITERS)} only, and is none of them "
        f"({'; '.join(reasons)})"
    )


def _differences(description: ModelDescription, other: ModelDescription) -> list[str]:
    """What the two say differently of the model's arithmetic."""
    mine, theirs = _plain(description), _plain(other)
    return [f"{name} is {mine.get(name)!r}" for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]


_ARITHMETIC = (
    *("vocab_size", "max_sequence_length", "position_embedding", "rotary_base", "rotary_percent", "rope_scaling"),
    *("tied_embeddings", "hybrid", "scales"),
)
"""Fields of a description that decide what the model computes, beside `transformer`. `linear_biases` is not one: of a
bias that has no tensor `_taken_apart` finds out."""


def _plain(description: ModelDescription) -> dict[str, Any]:
    """Every field that decides what the model computes; switches that are off are left out."""
    layers = dict(description.transformer)
    if layers.get("add_bias_linear"):
        layers["add_qkv_bias"] = True  # megatron-core's own meaning
    if description.position_embedding != "rope":
        description = replace(description, rotary_base=0.0, rotary_percent=1.0, rope_scaling=None)
    fields = layers | {name: getattr(description, name) for name in _ARITHMETIC}
    return {name: value for name, value in fields.items() if value not in (None, False)}


def _llama(description: ModelDescription, kind: str = "llama") -> dict[str, Any]:
    layers = description.transformer
    config = {
        "model_type": kind,
        "vocab_size": description.vocab_size,
        "hidden_size": layers["hidden_size"],
        "intermediate_size": layers["ffn_hidden_size"],
        "num_hidden_layers": layers["num_layers"],
        "num_attention_heads": layers["num_attention_heads"],
        "num_key_value_heads": layers.get("num_query_groups") or layers["num_attention_heads"],
        "head_dim": layers["kv_channels"],
        "hidden_act": layers["activation"],
        "max_position_embeddings": description.max_sequence_length,
        "rms_norm_eps": layers["layernorm_epsilon"],
        "rope_theta": description.rotary_base,
        "tie_word_embeddings": description.tied_embeddings,
    }
    scaling = description.rope_scaling
    if scaling is not None and scaling.kind in ("linear", "llama3"):
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            config["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return config


def _has_bias(description: ModelDescription, linear: str) -> bool:
    """Whether the Hugging Face model has a bias there; a description of Megatron's says only that all may have one."""
    if description.linear_biases:
        return linear in description.linear_biases
    return bool(description.transformer.get("add_bias_linear"))


def _llama_with_biases(description: ModelDescription) -> dict[str, Any]:
    biases = {"attention_bias": _has_bias(description, "proj"), "mlp_bias": _has_bias(description, "fc1")}
    return _llama(description) | biases


def _qwen3(description: ModelDescription) -> dict[str, Any]:
    biases = {"attention_bias": _has_bias(description, "proj")}
    return _llama(description, "qwen3") | {"use_sliding_window": False, **biases}


def _gpt2(description: ModelDescription) -> dict[str, Any]:
    layers = description.transformer
    return {
        "model_type": "gpt2",
        "vocab_size": description.vocab_size,
        "n_embd": layers["hidden_size"],
        "n_inner": layers["ffn_hidden_size"],
        "n_layer": layers["num_layers"],
        "n_head": layers["num_attention_heads"],
        "n_positions": description.max_sequence_length,
        "activation_function": layers["activation"],
        "layer_norm_epsilon": layers["layernorm_epsilon"],
        "tie_word_embeddings": description.tied_embeddings,
    }


_WRITERS: dict[str, Callable[[ModelDescription], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama_with_biases,
    "Qwen2ForCausalLM": lambda description: _llama(description, "qwen2") | {"use_sliding_window": False},
    "Qwen3ForCausalLM": _qwen3,
    "GPT2LMHeadModel": _gpt2,
}
