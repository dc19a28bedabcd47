"""Loads and unloads LoRA adapters of a replica's engine for its coordinator, from directories below a root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_infer.coordinator.weight_paths import adapter_path
from megatron_infer.engine.adapters import AdapterReading


class AdapterCommands:
    """The commands of `Group.ADAPTERS` for `Replica(adapter_commands=)`."""

    def __init__(self, engine: Any, *, root: str | None) -> None:
        """root: the directory that adapters must lie in; None: none is loaded from files."""
        self._engine, self._root = engine, root

    def commands(self) -> dict[str, Callable[..., Any]]:
        """`read_adapter` is no command: what it begins for a command to load, `load_adapter` takes as `source`, or
        `forget_reading` gives up."""
        return {
            "read_adapter": self.read,
            "forget_reading": self.forget,
            "load_adapter": self.load,
            "unload_adapter": self.unload,
            "undo_adapter": self.undo,
            "settle_adapter": self.settle,
        }

    def read(self, *, name: str, path: str, **_: Any) -> AdapterReading:
        """Begin to read an adapter while the engine steps. path: absolute, or from the root.

        Raises WeightsPathRefused, and what `EngineAdapters.read` raises.
        """
        reading: AdapterReading = self._engine.controls.adapters.read(name, adapter_path(path, self._root))
        return reading

    def forget(self, reading: AdapterReading) -> None:
        self._engine.controls.adapters.forget(reading)

    def load(
        self,
        *,
        name: str,
        path: str,
        source: AdapterReading,
        replace: bool = False,
        running: str = "keep",
        digest: str | None = None,
        change: str | None = None,
    ) -> dict[str, Any]:
        """-> the adapter's name, version, digest and rank. Raises what `EngineAdapters.load` raises."""
        how = {"replace": replace, "running": running, "digest": digest, "change": change}
        info = self._engine.controls.adapters.load(name, source, **how)
        return {"name": info.name, "version": info.version, "digest": info.digest, "rank": info.rank}

    def unload(self, *, name: str, abort: bool = False, change: str | None = None) -> dict[str, Any]:
        self._engine.controls.adapters.unload(name, abort=abort, change=change)
        return {"name": name}

    def undo(self, *, name: str, change: str) -> dict[str, Any]:
        return {"name": name, "undone": self._engine.controls.adapters.undo(change)}

    def settle(self, *, name: str, change: str) -> dict[str, Any]:
        self._engine.controls.adapters.settle(change)
        return {"name": name}
