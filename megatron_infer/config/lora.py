"""Options for LoRA adapters: `LoRAConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_infer.config.options import checked, option, options_of
from megatron_infer.errors import ConfigError, check_known

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """How many adapters serve at once, and which are there from the start. Raises ConfigError if wrong."""

    max_loras: int = option(1, least=1, most=4096, is_common=True)
    """Adapters that are on the device at once, so that a step may compute with all of them. More may be loaded: they
    are kept in host memory, and the least recently used one makes room. Requests of an adapter wait while running
    requests use all places."""
    max_rank: int = option(16, least=1, most=4096, flag="max-lora-rank")
    """The largest rank of an adapter; larger ones are refused. An adapter of a smaller rank costs what it is."""
    adapters: tuple[tuple[str, str], ...] = option((), flag="lora", is_common=True)
    """Adapters loaded at the start: (name, PEFT directory) of each, also given as "name=path" or as a mapping."""

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_rank"):
            object.__setattr__(self, name, checked(options_of(LoRAConfig)[name], getattr(self, name), where="lora: "))
        given: Any = self.adapters
        if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
            raise ConfigError(f"lora: adapters is {given!r}, it must be a list of name=path or a mapping")
        pairs = given.items() if isinstance(given, Mapping) else map(_pair_of, given)
        adapters = tuple((check_adapter_name(name), _path_of(path)) for name, path in pairs)
        names = [name for name, _ in adapters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"lora: adapter {twice[0]!r} is given twice; choose another name")
        object.__setattr__(self, "adapters", adapters)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoRAConfig:
        """From plain values. Raises ConfigError for an unknown field."""
        check_known("field", values, options_of(cls), where="lora: ", lists_known=True)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedAdapter:
    """What the tensors of an update become, where they are an adapter's and not the model's."""

    name: str
    config: dict[str, Any]
    """Fields of an adapter_config.json."""
    replace: bool = False
    """An adapter of this name with another content is replaced."""
    number: int | None = None
    """The adapter that was received last under this number is unloaded once this one is there."""


def check_adapter_name(name: object) -> str:
    """The name. Raises ConfigError for one that requests, files and metrics could not name."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:77] + "..."
        raise ConfigError(
            f"adapter name {shown}: a name has 1 to {MAX_NAME_CHARS} characters, letters, digits and . _ : @ / -, and "
            "begins with a letter or digit"
        )
    return name


def _pair_of(entry: Any) -> tuple[Any, Any]:
    if isinstance(entry, str):
        name, equals, path = entry.partition("=")
        if equals and name and path:
            return name, path
    elif isinstance(entry, Sequence) and len(entry) == 2:
        return entry[0], entry[1]
    raise ConfigError(f"lora: adapters has {entry!r}, it must be name=path")


def _path_of(path: Any) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"lora: adapters has the path {path!r}, it must be a directory")
    return str(os.fspath(path))
