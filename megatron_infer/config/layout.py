"""How many ranks share the work: `Layout`; and the options of `LLM` that are no options of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_infer.config.options import option
from megatron_infer.errors import ConfigError

LLM_OPTIONS = ("dtype", "device", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of ranks."""

    dp: int = option(1, is_common=True)
    """Engines, each a replica."""
    tp: int = option(1, is_common=True)
    """Tensor-parallel ranks of an engine."""
    pp: int = option(1, is_common=True)
    """Pipeline stages of an engine."""
    ep: int = option(1, is_common=True)
    """Expert-parallel ranks of an engine."""

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.dp * self.tp * self.pp * self.ep

    def check(self, names: Mapping[str, str] | None = None) -> None:
        """Raise ConfigError for a number that is none of ranks. names: what an error calls the fields instead."""
        for name, size in asdict(self).items():
            value: Any = size
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                shown = (names or {}).get(name, name)
                raise ConfigError(f"{shown} is {value!r}, it must be an integer of at least 1")
