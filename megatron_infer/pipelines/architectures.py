"""Architectures that a pipeline can run: models of this package, and of modules that the user names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError

if TYPE_CHECKING:
    from megatron_infer.pipelines.interfaces import PipelineModel
    from megatron_infer.server.audio.registry import Opener

EXPORT = "ARCHITECTURES"
"""The name that a module of custom_architectures must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model that a pipeline can run: `architectures` of its config.json has this name."""

    name: str
    pipeline_model: type[PipelineModel[Any]] | None = None
    """The class that runs it; None: megatron-core's, adopted by the engine."""
    required_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Fields of PipelineConfig -> the value that the model needs, whatever was asked for."""
    open_audio_decoder: Opener | None = None
    """Opens an audio decoder of this name (`audio_decoder`), as those of megatron_infer.server.audio are; None: it is
    none."""


def custom_architectures(entries: Sequence[str], *, built_in: Sequence[str]) -> dict[str, Architecture]:
    """Architectures of the modules named, by name; a name of built_in is replaced, with a warning.

    An entry is a module's path (my_models/toy) or FOLDER:MODULE. Raises ConfigError naming the entry.
    """
    found: dict[str, Architecture] = {}
    for entry in entries:
        module = _import(entry)
        exported = getattr(module, EXPORT, None)
        if not isinstance(exported, list | tuple) or not exported:
            what = "has no" if exported is None else "has an empty" if exported in ([], ()) else "has a wrong"
            raise ConfigError(
                f"custom_architectures: {entry!r} {what} {EXPORT}; it must be a list of "
                "megatron_infer.pipelines.Architecture"
            )
        for one in exported:
            if not isinstance(one, Architecture):
                raise ConfigError(
                    f"custom_architectures: {EXPORT} of {entry!r} holds {one!r} ({type(one).__name__}), it must hold "
                    "megatron_infer.pipelines.Architecture"
                )
            if one.name in built_in or one.name in found:
                warnings.warn(
                    f"custom_architectures: {entry!r} replaces the architecture {one.name}", ConfigWarning, stacklevel=2
                )
            found[one.name] = one
    return found


def _import(entry: str) -> ModuleType:
    """The module of an entry; a folder on the way is the place it is imported from."""
    if entry.count(":") > 1:
        raise ConfigError(f"custom_architectures: {entry!r} has a second colon; give MODULE_PATH or FOLDER:MODULE")
    folder, _, name = entry.rpartition(":")
    place = Path(folder or Path(entry).parent).expanduser()
    name = name if folder else Path(entry).name.removesuffix(".py")
    if not place.is_dir():
        raise ConfigError(f"custom_architectures: {entry!r}: {str(place)!r} is no directory; give its path")
    sys.path.insert(0, str(place.resolve()))
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a module's own code raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"custom_architectures: {entry!r} cannot be imported: {reason}") from error
    finally:
        sys.path.remove(str(place.resolve()))
    if place.resolve() not in Path(module.__file__ or "").resolve().parents:
        raise ConfigError(
            f"custom_architectures: {entry!r}: a module {name} is imported already, from {module.__file__}; rename one"
        )
    return module
