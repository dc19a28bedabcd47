"""Loads and unloads LoRA adapters of a replica's engine for its coordinator, from directories below a root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_infer.coordinator.weight_paths import adapter_path


class AdapterCommands:
    """`protocol.ADAPTER_COMMANDS` for `Replica(adapter_commands=)`."""

    def __init__(self, engine: Any, *, root: str) -> None:
        """root: the directory that adapters must lie in."""
        self._engine, self._root = engine, root

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load_adapter": self.load, "unload_adapter": self.unload}

    def load(
        self, *, name: str, path: str, replace: bool = False, running: str = "keep", timeout_s: float
    ) -> dict[str, Any]:
        """path: absolute, or from the root -> the adapter's name, version, digest and rank.

        Raises WeightsPathRefused, and what `DynamicInferenceEngine.load_adapter` raises.
        """
        source = adapter_path(path, self._root)
        info = self._engine.load_adapter(name, source, replace=replace, running=running)
        return {"name": info.name, "version": info.version, "digest": info.digest, "rank": info.rank}

    def unload(self, *, name: str, abort: bool = False, timeout_s: float) -> dict[str, Any]:
        self._engine.unload_adapter(name, abort=abort)
        return {"name": name}
