"""Load weights into a live model, in place, one tensor at a time and only this rank's part of each.

Any `TensorReader` (safetensors here, GGUF in gguf.py) gives tensors by their Hugging Face names; `hf_names` knows which
tensors make which parameter.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_infer.errors import ModelError
from megatron_infer.models.attached_lora import attached_tensors
from megatron_infer.models.loading.families import family_of
from megatron_infer.models.loading.head_padding import PaddedReader, pad_groups
from megatron_infer.models.loading.hf_names import (
    WHOLE,
    ExpertPlace,
    Recipe,
    Recipes,
    Shard,
    Span,
    TensorReader,
    head_from_embedding,
)
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.loading.parameter_layouts import check_split
from megatron_infer.utils.files import regular
from megatron_infer.utils.json_file import read_json
from megatron_infer.utils.progress import tracked


def load_weights(model: nn.Module, reader: TensorReader, description: ModelDescription, shard: Shard = WHOLE) -> None:
    """Copy every parameter of `model` (a GPTModel, a MambaModel or one pipeline stage of it) from `reader`.

    Nothing is written unless everything fits: one ModelError lists all missing, unexpected and mis-shaped tensors.
    Tensors are stored in the model's dtype; rounding from fp32 to bf16 is to nearest even.
    """
    reader, recipes = fitted(model, reader, description, shard)
    with torch.no_grad():
        for name, parameter in tracked(list(targets(model)), unit="tensor", what="reading weights"):
            parameter.copy_(made(name, parameter, recipes[name], reader, shard))


def fitted(
    model: nn.Module, reader: TensorReader, description: ModelDescription, shard: Shard = WHOLE
) -> tuple[TensorReader, dict[str, Recipe]]:
    """(reader, recipe of every parameter); raises as `load_weights` does. Reads shapes, and a tied head's tensors."""
    recipes, padded = recipes_of(model, description)
    if padded is not description:
        reader = PaddedReader(reader, source_shapes(model, description), source_shapes(model, padded))
        description = padded
    shapes = reader.shapes()
    needed = {source: shape for recipe in recipes.values() for source, shape in recipe.sources.items()}
    _check(description, shapes, needed, whole=_is_whole(model))
    place = ExpertPlace.of(model)
    check_split(description, tensor=shard.size, expert=place.size, expert_tensor=place.shard.size)
    if getattr(model, "post_process", True):
        _check_tied(description, reader)
    return reader, recipes


def recipes_of(model: nn.Module, description: ModelDescription) -> tuple[dict[str, Recipe], ModelDescription]:
    """(recipe of every parameter of this rank, the description with as many kv groups as the model has)."""
    groups = getattr(model.config, "num_query_groups", None)
    if groups is not None and groups > description.transformer["num_query_groups"]:
        description = pad_groups(description, groups)
    return dict(_recipes(model, description)), description


def source_shapes(model: nn.Module, description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that this rank's parameters are made of."""
    return {source: shape for _, recipe in _recipes(model, description) for source, shape in recipe.sources.items()}


def made(name: str, parameter: Tensor, recipe: Recipe, reader: TensorReader, shard: Shard) -> Tensor:
    """The value of one parameter; raises ModelError where it has another shape than the parameter."""
    if recipe.make is None:
        return torch.zeros_like(parameter)
    value = recipe.make(reader, shard)
    if recipe.shift:
        value = (value.float() + recipe.shift).to(torch.promote_types(value.dtype, parameter.dtype))
    vocabulary = "word_embeddings" in name or name.startswith("output_layer")
    if vocabulary and value.shape[0] < parameter.shape[0]:  # padding entries: masked by the sampler, kept at zero
        padding = value.new_zeros(parameter.shape[0] - value.shape[0], *value.shape[1:])
        value = torch.cat([value, padding])
    if value.shape != parameter.shape:
        raise ModelError(f"{name}: the model has shape {tuple(parameter.shape)}, the weights make {tuple(value.shape)}")
    return value


def targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and routers' correction biases, buffers that belong to the model; not those of an adapter on it."""
    adapter = attached_tensors(model)
    yield from ((name, parameter) for name, parameter in model.named_parameters() if name not in adapter)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".router.expert_bias"))


def _is_whole(model: nn.Module) -> bool:
    return bool(getattr(model, "pre_process", True) and getattr(model, "post_process", True))


def _check(
    description: ModelDescription,
    shapes: Mapping[str, tuple[int, ...]],
    needed: Mapping[str, tuple[int, ...]],
    *,
    whole: bool,
) -> None:
    missing = sorted(set(needed) - set(shapes))
    misshaped = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in sorted(needed.items())
        if name in shapes and tuple(shapes[name]) != shape
    ]
    unexpected = sorted(name for name in set(shapes) - set(needed) if not ignorable(name, description)) if whole else []
    problems = []
    if missing:
        problems.append(f"missing ({len(missing)}): {', '.join(missing)}")
    if misshaped:
        problems.append(f"wrong shape ({len(misshaped)}): {'; '.join(misshaped)}")
    if unexpected:
        problems.append(f"unexpected ({len(unexpected)}): {', '.join(unexpected)}")
    if problems:
        raise ModelError(
            f"{description.name or description.architecture}: tensors do not fit the config; " + "; ".join(problems)
        )


def ignorable(name: str, description: ModelDescription) -> bool:
    """True for buffers in old checkpoints and for a tied model's copy of the embedding."""
    if name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):
        return True
    num_layers = description.transformer["num_layers"]
    if any(name.startswith(one.format(num_layers=num_layers)) for one in family_of(description).ignored_tensors):
        return True
    return head_from_embedding(description) and name == "lm_head.weight"


def _check_tied(description: ModelDescription, reader: TensorReader) -> None:
    """Raise ModelError if a tied model's file holds a head with other values: transformers would use that head."""
    embedding = f"{family_of(description).tensors['embedding.word_embeddings']}.weight"
    if not head_from_embedding(description) or not {"lm_head.weight", embedding} <= set(reader.shapes()):
        return
    if not torch.equal(reader.read("lm_head.weight"), reader.read(embedding)):
        raise ModelError(
            f"{description.name}: tie_word_embeddings is true, but lm_head.weight is not {embedding}; set it to false "
            "to use the former, or remove the former"
        )


def _recipes(model: nn.Module, description: ModelDescription) -> Iterator[tuple[str, Recipe]]:
    recipes = Recipes(description, model)
    layers = getattr(getattr(model, "decoder", None), "layers", ())
    # layer_number counts from 1 over the whole model, in a pipeline stage too.
    numbers = [layer.layer_number - 1 for layer in layers]
    unknown = []
    for name, _ in targets(model):
        if name.startswith("decoder.layers."):
            _, _, index, part = name.split(".", 3)
            recipe = recipes.recipe(part, numbers[int(index)])
        else:
            recipe = recipes.recipe(name)
        if recipe is None:
            unknown.append(name)
        else:
            yield name, recipe
    if unknown:
        raise ModelError(
            f"{description.architecture}: no weights are known for these parameters of the model: {', '.join(unknown)}"
        )


class SafetensorsReader:
    """Tensors of a Hugging Face directory, memory-mapped, out of the files that transformers loads: model.safetensors,
    else those of model.safetensors.index.json, which decides where each tensor is; else pytorch_model.bin or those of
    its index; else every *.safetensors or every pytorch_model*.bin file.

    The latter are read with torch.load(weights_only=True): no code from the file runs.
    """

    def __init__(self, directory: str | Path, *, base: str = "") -> None:
        """directory: or one .safetensors file. base: prefix of the model's tensors, added to the names in files that
        were saved without it, from the model without its head."""
        self.directory = Path(directory)
        self._home: dict[str, Any] = {}
        self._bin: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._added = ""
        self._open_all()
        if base and not any(name.startswith(f"{base}.") for name in self._shapes):
            self._added = f"{base}."
            self._shapes = {
                name if name == "lm_head.weight" else self._added + name: s for name, s in self._shapes.items()
            }

    def _open_all(self) -> None:
        if self.directory.is_file():
            self._open(self.directory, None)
            return
        files, open_one = self._files("model.safetensors"), self._open
        if not files and (files := self._files("pytorch_model.bin")):
            open_one = self._load_bin
        if not files:
            files = dict.fromkeys(sorted(self.directory.glob("*.safetensors")))
        if not files:
            files, open_one = dict.fromkeys(sorted(self.directory.glob("pytorch_model*.bin"))), self._load_bin
        if not files:
            raise ModelError(f"{self.directory}: no *.safetensors files (nor pytorch_model*.bin)")
        for path, names in files.items():
            open_one(path, names)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        name = name.removeprefix(self._added)
        if name in self._bin:
            tensor: Any = self._bin[name]
        elif rows is None and columns is None:
            return self._home[name].get_tensor(name)
        else:
            tensor = self._home[name].get_slice(name)
        if columns is not None:
            return tensor[:, columns[0] : columns[1]]
        return tensor[rows[0] : rows[1]] if rows is not None else tensor

    def _files(self, whole: str) -> dict[Path, set[str] | None]:
        """The files to read -> the tensors to take out of each; None: all. {}: there is neither `whole` nor its index.

        whole: name of the file that has all tensors where they are not in shards.
        """
        path, index_path = self.directory / whole, self.directory / f"{whole}.index.json"
        if not index_path.exists():
            return {path: None} if path.exists() else {}
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise ModelError(f"{index_path}: no weight_map")
        foreign = [file for file in weight_map.values() if Path(str(file)).name != file]
        if foreign:
            raise ModelError(f"{index_path}: {foreign[0]!r} is no file of this directory")
        if path.exists():
            if set(weight_map.values()) != {whole}:
                warnings.warn(
                    f"{self.directory}: {whole} is read, as transformers does, and not what {index_path.name} names; "
                    "remove the one that is out of date",
                    stacklevel=2,
                )
            return {path: None}
        paths: dict[Path, set[str] | None] = {}
        for file, named in itertools.groupby(sorted(weight_map, key=weight_map.__getitem__), weight_map.__getitem__):
            paths[self.directory / file] = set(named)
        absent = [path.name for path in paths if not path.exists()]
        if absent:
            raise ModelError(f"{self.directory}: {index_path.name} names files that are not there: {', '.join(absent)}")
        return paths

    def _open(self, path: Path, names: set[str] | None) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            handle = safe_open(regular(path), framework="pt")
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if names is None or name in names:
                    self._home[name] = handle
                    self._shapes[name] = tuple(handle.get_slice(name).get_shape())
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (SafetensorError, ValueError) as error:
            raise ModelError(f"{path}: damaged or truncated safetensors file: {error}") from error

    def _load_bin(self, path: Path, names: set[str] | None) -> None:
        try:
            tensors = torch.load(regular(path), map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds here; each means this file cannot be used
            raise ModelError(f"{path}: cannot be read safely (torch.load, weights_only): {error}") from error
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ModelError(f"{path}: it holds no mapping of tensors by their names")
        tensors = {name: tensor for name, tensor in tensors.items() if names is None or name in names}
        self._bin.update(tensors)
        self._shapes.update({name: tuple(tensor.shape) for name, tensor in tensors.items()})


_OF_IMAGES = ("visual.", "vision_tower.", "multi_modal_projector.")
_TEXT_NAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""How names of a language model's tensors begin in a model of text and images, and in the language model alone."""


class TextReader:
    """The tensors of the language model in a model of text and images, by the names that they have in one alone."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._names = {
            next((new + name.removeprefix(old) for old, new in _TEXT_NAMES if name.startswith(old)), name): name
            for name in reader.shapes()
            if not name.removeprefix("model.").startswith(_OF_IMAGES)
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._reader.shapes()
        return {name: shapes[given] for name, given in self._names.items()}

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        return self._reader.read(self._names[name], rows, columns)
