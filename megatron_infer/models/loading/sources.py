"""Model sources: from a name or a path to a `ModelSource`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.checkpoint import CheckpointSource
from megatron_infer.models.loading.families import OF_TEXT_AND_IMAGES, family_of
from megatron_infer.models.loading.find import CHOICES, Kind, damage_named, description_of_directory, find_model
from megatron_infer.models.loading.gguf_description import GGUFReader
from megatron_infer.models.loading.gguf_file import GGUFFile
from megatron_infer.models.loading.gguf_source import GGUFWeights
from megatron_infer.models.loading.hf_config import architecture_of
from megatron_infer.models.loading.hf_names import WHOLE, Shard, TensorReader
from megatron_infer.models.loading.hf_weights import SafetensorsReader, TextReader, load_weights
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.loading.mxfp4 import Mxfp4Reader
from megatron_infer.text.gguf_vocab import tokenizer_from_metadata
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.utils.json_file import read_json


class ModelSource(Protocol):
    """A model that can be loaded: description, weights, tokenizer. Weights are read on demand."""

    name: str

    def config(self) -> ModelDescription:
        """The description of the model to build."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name, one at a time."""
        ...

    def load_into(self, model: nn.Module | None, shard: Shard = WHOLE) -> None:
        """Copy this rank's part of the weights into a model built from `config()`; None: it has no part. All ranks call
        it: those of a torch_dist checkpoint are read together."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Raises ModelError when the source has none."""
        ...


class HFDirectory:
    """A Hugging Face model directory: config.json, *.safetensors, tokenizer.json."""

    def __init__(self, path: str | Path, *, name: str = "") -> None:
        self.path = Path(path)
        self.name = name or str(path)
        self._description = description_of_directory(self.path, name=self.name)
        self._reader: TensorReader | None = None

    def config(self) -> ModelDescription:
        return self._description

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return _stream(self._open(), self.name)

    def load_into(self, model: nn.Module | None, shard: Shard = WHOLE) -> None:
        if model is not None:
            load_weights(model, self._open(), self._description, shard)
            self._reader = None  # and with it the mapped files

    def tokenizer(self) -> Tokenizer:
        with damage_named(self.name):
            return Tokenizer.from_directory(self.path, name=self.name)

    def _open(self) -> TensorReader:
        if self._reader is None:
            family, kind = family_of(self._description), architecture_of(read_json(self.path / "config.json"))
            with damage_named(self.name):
                is_part = kind in OF_TEXT_AND_IMAGES
                reader = SafetensorsReader(self.path, base="" if is_part else family.base)
            self._reader = Mxfp4Reader(reader) if family.reads_mxfp4 else TextReader(reader) if is_part else reader
        return self._reader


class GGUFSource:
    """A .gguf file: description, weights and tokenizer in one."""

    def __init__(self, path: str | Path, *, name: str = "") -> None:
        self.path = Path(path)
        self.name = name or str(path)
        with damage_named(self.name):
            self._file = GGUFFile(path)
            self._description = GGUFReader(self._file, name=self.name).describe()
            self._reader = GGUFWeights(self._file, self._description)

    def config(self) -> ModelDescription:
        return self._description

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return _stream(self._reader, self.name)

    def load_into(self, model: nn.Module | None, shard: Shard = WHOLE) -> None:
        if model is not None:
            load_weights(model, self._reader, self._description, shard)
            self._file.release_pages()

    def tokenizer(self) -> Tokenizer:
        with damage_named(self.name):
            return tokenizer_from_metadata(self._file.metadata, name=self.name)


def _stream(reader: TensorReader, source: str) -> Iterator[tuple[str, Tensor]]:
    for name in reader.shapes():
        with damage_named(source):
            tensor = reader.read(name)
        yield name, tensor


def open_source(
    name_or_path: str | os.PathLike[str], *, hf_config: str | os.PathLike[str] | None = None
) -> ModelSource:
    """The model behind an alias, a Hugging Face directory, a .gguf file, a torch_dist checkpoint directory or a hub id.

    hf_config: for a checkpoint that does not describe its model, a Hugging Face directory of the same model.
    Raises ModelError, which says what was looked for.
    """
    place = find_model(name_or_path)
    if hf_config is not None and place.kind is not Kind.CHECKPOINT:
        raise ModelError(f"{place.name}: it describes itself; hf_config is for torch_dist checkpoints, leave it out")
    if place.kind is Kind.HF_DIRECTORY:
        return HFDirectory(place.path, name=place.name)
    if place.kind is Kind.CHECKPOINT:
        return CheckpointSource(place.path, name=place.name, hf_config=hf_config)
    if place.kind is Kind.GGUF:
        return GGUFSource(place.path, name=place.name)
    return HFDirectory(fetch(place.name), name=place.name)


def fetch(name: str, *, force: bool = False) -> str:
    """The folder of a hub model, owner/name or owner/name@REVISION; force fetches it again. Raises ModelError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{name!r}: no such path, and huggingface_hub, which could fetch it, is not installed; give {CHOICES}"
        ) from error
    hub_id, _, revision = name.partition("@")
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        folder = snapshot_download(hub_id, revision=revision or None, allow_patterns=patterns, force_download=force)
    except Exception as error:  # offline, unknown, gated, refused: many exception families
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name!r}: no such path, and it could not be fetched from the hub ({reason}); give {CHOICES}"
        ) from error
    return str(folder)


def open_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model; of a directory also where its architecture is one's own. Raises ModelError."""
    try:
        return open_source(name_or_path).tokenizer()
    except ModelError:
        path = Path(os.fspath(name_or_path)).expanduser()
        if not (path / "tokenizer.json").is_file() or not (path / "config.json").is_file():
            raise
        return Tokenizer.from_directory(path, name=os.fspath(name_or_path))
