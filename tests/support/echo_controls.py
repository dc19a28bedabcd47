"""The controls of an echo engine: the states of the real one, and weights that are only a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_infer.coordinator.weight_paths import fingerprint
from megatron_infer.engine.lifecycle_commands import TAGS
from megatron_infer.engine.states import EngineState, Lifecycle
from megatron_infer.errors import ConfigError, InferenceError, WeightUpdateError, WrongState

BYTES = {"weights": 1000, "graphs": 10, "kv_cache": 5000}
"""Memory that each tag reports."""


class EchoControls:
    """Pause, suspend, weights and versions. A command in `faults` fails as often as its number says."""

    def __init__(self, *, abort_all: Callable[[], None]) -> None:
        self.weight_version = 0
        self.digest = "made"
        """The weights' digest."""
        self.suspended: set[str] = set()
        self.faults: dict[str, int] = {}
        self.num_requeued = 0
        self.torn = False
        """A weight update is in progress or has ended half-way."""
        self.weight_groups: set[str] = set()
        self.adapters: dict[str, str] = {}
        """Name -> digest of those that came as tensors."""
        self._adapter: Mapping[str, Any] | None = None
        self._numbered: dict[int | None, str] = {}
        self._abort_all = abort_all
        self._lifecycle = Lifecycle()
        self._returns_to = EngineState.RUNNING
        self._before: tuple[str, int, bool] | None = None
        self._hash = hashlib.sha256()
        self._snapshot: str | None = None

    @property
    def state(self) -> str:
        return self._lifecycle.state.value

    @property
    def can_run(self) -> bool:
        return self.state == "running" and not self.torn

    def pause(self, mode: str = "keep", *, timeout_s: float | None = None) -> None:
        self._fault("pause")
        with self._lifecycle.transition("pause", timeout_s=timeout_s):
            if mode == "abort":
                self._abort_all()
            elif mode == "retract":
                self.num_requeued += 1

    def unpause(self, *, timeout_s: float | None = None) -> None:
        self._fault("unpause")
        with self._lifecycle.transition("unpause", timeout_s=timeout_s):
            pass

    def suspend(
        self, mode: str | None = None, tags: Iterable[str] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        self._fault("suspend")
        with self._lifecycle.transition("suspend", timeout_s=timeout_s) as transition:
            fresh = set(TAGS if tags is None else tags) - self.suspended
            if transition.source is not EngineState.SUSPENDED:
                self._returns_to = transition.source
            self.suspended |= fresh
        return self._memory("suspend", {tag: BYTES[tag] for tag in fresh})

    def resume(self, tags: Iterable[str] | None = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        self._fault("resume")
        self._lifecycle.require("resume()", EngineState.SUSPENDED)
        wanted = set(self.suspended if tags is None else tags)
        if wanted - self.suspended:
            raise ConfigError(f"resume(tags={sorted(wanted)}): suspended now: {sorted(self.suspended)}")
        with self._lifecycle.transition("resume", timeout_s=timeout_s) as transition:
            self.suspended -= wanted
            transition.target = EngineState.SUSPENDED if self.suspended else self._returns_to
        return self._memory("resume", {tag: -BYTES[tag] for tag in wanted})

    def _memory(self, command: str, freed: dict[str, int]) -> dict[str, Any]:
        return {
            "command": command,
            "state": self.state,
            "tags": {tag: {"bytes_freed": size, "bytes_copied": 0, "bytes_resident": 0} for tag, size in freed.items()},
        }

    # ------------------------------------------------------------------ weights

    def set_weight_version(self, version: int, running: str = "keep", *, timeout_s: float | None = None) -> None:
        """Cached blocks are never hit again; tokens stay the same."""
        self._fault("set_weight_version")
        self.weight_version = version
        self.num_requeued += running == "recompute"

    def load_weights(self, path: str) -> dict[str, str]:
        if self._before is None:
            self.begin_weights()
        self._fault("load_weights")
        files = sorted(Path(path).rglob("*.safetensors")) if Path(path).is_dir() else [Path(path)]
        for file in files:
            self._hash.update(file.read_bytes())
        return {"files": fingerprint(path)}

    def restore_weights(self, sources: Sequence[Sequence[str]], version: int) -> None:
        self._fault("restore_weights")
        self.cancel_weights()
        self.begin_weights()
        for path, files in sources:
            if self.load_weights(path)["files"] != files:
                self.cancel_weights()
                raise WeightUpdateError(f"{path} was changed since the update")
        self.finish_weights(version)
        self.settle_weights()

    def begin_weights(self, adapter: Mapping[str, Any] | None = None) -> None:
        self._fault("begin_weights")
        if self._before is not None:
            raise WrongState("a weight update is under way; finish or cancel it", state=self.state)
        self._before = self.digest, self.weight_version, self.torn
        self._hash = hashlib.sha256()
        self._adapter = adapter
        self.torn = self.torn or adapter is None

    def write_weights(self, name: str, dtype: str, shape: list[int], offset: int, data: bytes) -> None:
        self._require_update("write_weights")
        self._fault("write_weights")
        self._hash.update(f"{name} {dtype} {shape} {offset}".encode() + data)

    def join_weight_group(self, name: str, where: dict[str, Any], num_ranks: int) -> None:
        """There is no trainer: the tensors that come are their names."""
        self._fault("join_weight_group")
        self.weight_groups.add(name)

    def leave_weight_group(self, name: str) -> None:
        self.weight_groups.discard(name)

    def receive_weights(self, group: str, **tensors: Any) -> None:
        self._require_update("receive_weights")
        self._fault("receive_weights")
        if group not in self.weight_groups:
            raise WeightUpdateError(f"there is no group {group!r}")
        self._hash.update(json.dumps(tensors).encode())

    def finish_weights(self, version: int, running: str = "keep") -> dict[str, int]:
        self._require_update("finish_weights")
        self._fault("finish_weights")
        if self._adapter is None:
            self.digest, self.weight_version, self.torn = self._hash.hexdigest(), version, False
        return {"version": version, "num_tensors": 1, "bytes_copied": 1}

    def settle_weights(self) -> dict[str, Any] | None:
        self._fault("settle_weights")
        self._before, adapter, self._adapter = None, self._adapter, None
        if adapter is None:
            return None
        name, number, digest = adapter["name"], adapter["number"], self._hash.hexdigest()
        before = self._numbered.get(number, name)
        retired = None if before == name or number is None else before
        self.adapters.pop(retired, None)
        self.adapters[name], self._numbered[number] = digest, name
        return {"name": name, "digest": digest, "retires": retired}

    def cancel_weights(self, version: int | None = None) -> None:
        self._fault("cancel_weights")
        if self._before is not None:
            self.digest, self.weight_version, self.torn = self._before
            self._before = self._adapter = None

    def check_weights(self, action: str) -> dict[str, Any]:
        if action == "reset":
            self.digest, self.torn = "spoiled", True
            return {"num_tensors": 1}
        if action == "snapshot":
            self._snapshot = self.digest
        answer: dict[str, Any] = {"checksum": self.digest, "num_tensors": 1}
        if action == "compare":
            if self._snapshot is None:
                raise ConfigError("compare: there is no snapshot to compare with; take one first")
            wrong = ["all"] if self._snapshot != self.digest else []
            answer |= {"num_different": len(wrong), "different": wrong}
        return answer

    # ------------------------------------------------------------------ parts

    def _require_update(self, call: str) -> None:
        if self._before is None:
            raise WrongState(f"{call} without a weight update under way", state=self.state)

    def _fault(self, name: str) -> None:
        if self.faults.get(name, 0) > 0:
            self.faults[name] -= 1
            kind = WeightUpdateError if name.endswith("_weights") else InferenceError
            raise kind(f"{name} was set to fail")
