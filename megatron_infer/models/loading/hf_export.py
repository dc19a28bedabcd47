"""Write a model as a Hugging Face directory: config.json, *.safetensors, and the tokenizer's files.

The recipes of `hf_names`, which make a parameter of Hugging Face tensors, are given tensors of numbered elements: what
they make says where each element of the parameter belongs. The config counts only if reading it gives the model's
description again. So what is written is what loading would read, for every layout that loading knows.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.hf_config import config_of
from megatron_infer.models.loading.hf_names import WHOLE, Recipe, Span
from megatron_infer.models.loading.hf_weights import recipes_of, targets
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.loading.sources import ModelSource
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
        sizes = _write_tensors(tensors_of(model, written), folder, max_shard_bytes)
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
        first, stop = (0, shape[0]) if rows is None else rows
        line = torch.Size(shape[1:]).numel()
        numbers = torch.arange(start + first * line, start + stop * line, dtype=dtype).reshape(-1, *shape[1:])
        return numbers if columns is None else numbers[:, columns[0] : columns[1]]


def tensors_of(model: nn.Module, description: ModelDescription) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of all that a whole model holds, by the row of the description's family.

    Raises ModelError for a value that has no place in the family's tensors. Loading must not have multiplied factors
    (`WeightScales`) into the weights.
    """
    recipes, _ = recipes_of(model, description)
    unfinished: dict[str, tuple[Tensor, int]] = {}
    for name, one in tracked(list(targets(model)), unit="tensor", what="writing weights"):
        yield from _taken_apart(name, one, recipes[name], unfinished)
    assert not unfinished, f"{', '.join(unfinished)}: not every element has a place"


def _taken_apart(
    name: str, parameter: Tensor, recipe: Recipe, unfinished: dict[str, tuple[Tensor, int]]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of each tensor that this parameter completes.

    unfinished: tensors of all experts, flat, and the number of their elements that no parameter has given yet.
    Raises ModelError for a value that has no place.
    """
    value = (parameter.detach().float() - recipe.shift).to(parameter.dtype) if recipe.shift else parameter.detach()
    if recipe.make is None:
        if bool(value.any()):
            raise ModelError(f"{name} is not zero, and the Hugging Face model has no such tensor")
        return
    reader = _Numbered(recipe.sources)
    numbers = recipe.make(reader, WHOLE)
    value = value[: numbers.shape[0]]  # behind a vocabulary's end there is padding
    assert numbers.shape == value.shape, f"{name}: not every element has a place"
    numbers, value = numbers.flatten(), value.flatten()
    for source, shape in recipe.sources.items():
        start, size = reader.starts[source], torch.Size(shape).numel()
        flat, left = unfinished.pop(source, None) or (torch.empty(size, dtype=value.dtype), size)
        here = slice(None) if len(recipe.sources) == 1 else (numbers >= start) & (numbers < start + size)
        places = numbers[here] - start
        flat[places] = value[here]
        left -= len(places)
        if left:
            unfinished[source] = flat, left
        else:
            yield source, flat.reshape(shape)


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
