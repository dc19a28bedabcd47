"""Receives new weights for an engine behind a coordinator: the weight commands of its replica, on every rank.

    load_weights(path)                                    finish_weights(version) -> settle_weights()
    begin_weights(), write_weights(a piece) ...           cancel_weights(): as it was before, also after a finish
    join_weight_group(name), receive_weights(name) ...    restore_weights(sources, version): a whole update of before,
                                                          for an engine that has missed it

`load_weights` reads below `weights_root` only, an option of the process; without one it reads nothing.
An update can be cancelled until `settle_weights`, so that a controller of several replicas finishes it on all or on
none. An error on one rank is raised on all ranks, and what was written is put back.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.coordinator.weight_paths import fingerprint, weights_path
from megatron_infer.engine.lifecycle_commands import Group, WeightCommands, names_of
from megatron_infer.errors import ConfigError, InferenceError, WeightUpdateError, WrongState, unknown_name
from megatron_infer.models.loading.hf_weights import SafetensorsReader
from megatron_infer.rl.adapter_update import AdapterUpdate
from megatron_infer.rl.engine_groups import EngineGroups, most_elements_of
from megatron_infer.rl.updates import WeightUpdate, as_source
from megatron_infer.rl.updates.digest import checksum_of, model_digests
from megatron_infer.rl.updates.sources import LazyTensors, StreamSource
from megatron_infer.rl.updates.target import UpdateTarget

CALL = "weights()"
MAX_NAMES = 8
"""Most names of differing tensors in an answer."""
RESET = "they were overwritten to test whether an update restores them; finish an update that writes every tensor"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' name -> dtype."""


@dataclass(slots=True)
class _PartialTensor:
    """A tensor that is received in pieces."""

    name: str
    tensor: Tensor
    num_bytes: int = 0

    def append(self, offset: int, data: bytes) -> bool:
        """Add a piece -> whether the tensor is complete."""
        if offset != self.num_bytes or offset + len(data) > self.tensor.nbytes:
            raise WeightUpdateError(
                f"{self.name}: {len(data):,} bytes came for byte {offset:,} of {self.tensor.nbytes:,}, "
                f"{self.num_bytes:,} was next",
                tensor=self.name,
            )
        if data:
            flat = self.tensor.reshape(-1).view(torch.uint8)
            flat[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.num_bytes += len(data)
        return self.num_bytes == self.tensor.nbytes


class WeightReceiver:
    """One rank's side: the leader's replica runs its `commands`, the other ranks run `followed` in `engine.follow`.

    `lifecycle_commands.WeightCommands` documents the commands. Paths are real paths below the root here.
    """

    def __init__(self, engine: Any, *, weights_root: str | Path | None = None) -> None:
        self._engine, self._root = engine, None if weights_root is None else str(weights_root)
        self._update: WeightUpdate | AdapterUpdate | None = None
        self._adapter: dict[str, Any] | None = None
        """The adapter that the update under way is of; None: it is of the model, or there is none."""
        self._partial: _PartialTensor | None = None
        self._numbered_adapters: dict[int, str] = {}
        self._snapshot: dict[str, int] | None = None
        self._groups = EngineGroups(engine)

    def commands(self) -> dict[str, Callable[..., Any]]:
        """The commands of `Group.WEIGHTS`, by name."""
        below_root = {"load_weights": self._load_below_root, "restore_weights": self._restore_below_root}
        return {name: partial(self._run, name) for name in names_of(Group.WEIGHTS)} | below_root

    def followed(self) -> dict[str, Callable[[Any], Any]]:
        return {CALL: lambda given: self._run(given["command"], **given["args"])}

    def _load_below_root(self, path: str, **args: Any) -> Any:
        """Refuse a path before other ranks hear of it. Errors name files from the root on, not where it is."""
        path = weights_path(path, self._root)
        with self._hiding_root():
            return self._run("load_weights", path=path, **args)

    def _restore_below_root(self, sources: list[list[str]], **args: Any) -> Any:
        with self._hiding_root():
            checked = [(weights_path(path, self._root), files) for path, files in sources]
            return self._run("restore_weights", sources=checked, **args)

    @contextlib.contextmanager
    def _hiding_root(self) -> Iterator[None]:
        try:
            yield
        except InferenceError as error:
            root = os.path.realpath(str(self._root)) + os.sep
            error.args = tuple(one.replace(root, "") if isinstance(one, str) else one for one in error.args)
            raise

    def _run(self, command: str, **args: Any) -> Any:
        """Run a command on every rank."""
        method = getattr(self, command)
        if self._engine.rank_group.size > 1:
            declared = inspect.signature(getattr(WeightCommands, command))
            declared.bind(self, **args)  # an argument that is unknown would end the other ranks
            if isinstance(args.get("data"), bytes):
                args["data"] = base64.b85encode(args["data"]).decode()
            self._engine.relay.meet(CALL, {"command": command, "args": args})
        if isinstance(args.get("data"), str):
            args["data"] = base64.b85decode(args["data"])
        return method(**args)

    # ------------------------------------------------------------------ one update

    def load_weights(self, path: str, files: str | None = None) -> dict[str, Any]:
        """Write tensors from files: all tensors, unless an update has begun and `path` is one file of several.

        path: a real path below the root. files: the fingerprint that they must have. Everything that can be
        checked is checked before the first tensor is written.
        """
        if self._adapter is not None:
            raise WrongState("the update under way is of an adapter, which comes as tensors", state="")
        is_part = self._update is not None and os.path.isfile(path)
        update = self.begin_weights() if self._update is None else self._update
        found: list[str] = []
        source: list[Any] = []

        def open_and_check() -> None:
            checked = weights_path(path, self._root)
            found.append(fingerprint(checked) if files is None else files)
            check_unchanged()
            whole = as_source(checked)
            source.append(StreamSource(LazyTensors(SafetensorsReader(Path(path))).items()) if is_part else whole)
            source[0].check(update.target, strict=True)

        def check_unchanged() -> None:
            if fingerprint(path) != found[0]:
                raise WeightUpdateError(f"{path} was changed since the update, or while it was read")

        update.check(open_and_check)
        update.check(lambda: source[0].write_into(update))
        update.check(check_unchanged)
        return {"last": update.last_written, "files": found[0]}

    def begin_weights(self, adapter: dict[str, Any] | None = None) -> Any:
        if self._update is not None:
            raise WrongState("a weight update is under way; finish or cancel it", state=self._engine.state.value)
        if adapter is None:
            self._update = WeightUpdate(self._engine, undo=True, check_finite=True)
        else:
            most_elements = most_elements_of(self._engine, "the start of an adapter's update")
            self._update = AdapterUpdate(
                self._engine, adapter, numbered=self._numbered_adapters, most_elements=most_elements
            )
        self._partial = None
        self._adapter = adapter
        return self._update

    def write_weights(self, name: str, dtype: str, shape: list[int], offset: int, data: bytes) -> None:
        update = self._open_update("write_weights")

        def write() -> None:
            tensor = self._append(name, dtype, shape, offset, data)
            if tensor is not None:
                update.write(name, tensor)

        update.check(write)

    def _append(self, name: str, dtype: str, shape: list[int], offset: int, data: bytes) -> Tensor | None:
        """The tensor, once it is complete."""
        if dtype not in DTYPES:
            raise WeightUpdateError(f"{name} is {dtype}; known are {', '.join(DTYPES)}", tensor=name)
        partial_tensor = self._partial
        if offset == 0:
            if partial_tensor is not None:
                raise WeightUpdateError(f"{name} came before all of {partial_tensor.name}", tensor=partial_tensor.name)
            partial_tensor = self._partial = _PartialTensor(name, torch.empty(shape, dtype=DTYPES[dtype]))
        if partial_tensor is None or partial_tensor.name != name:
            raise WeightUpdateError(f"{name} does not begin with its first byte", tensor=name)
        if not partial_tensor.append(offset, data):
            return None
        self._partial = None
        return partial_tensor.tensor

    def join_weight_group(self, name: str, where: dict[str, Any], num_ranks: int) -> None:
        self._groups.join(name, where, num_ranks)

    def leave_weight_group(self, name: str) -> None:
        self._groups.leave(name)

    def receive_weights(self, group: str, **tensors: Any) -> None:
        update = self._open_update("receive_weights")
        try:
            update.check(partial(self._groups.receive_into, update, group, **tensors))
        except InferenceError:
            self._groups.leave(group)
            raise

    def finish_weights(self, version: int, running: str = "keep") -> dict[str, Any]:
        update = self._open_update("finish_weights")
        if self._partial is not None:
            name = self._partial.name
            update.check(partial(_raise, WeightUpdateError(f"{name} has not come whole", tensor=name)))
        report = update.finish(version, running=running)
        return {"version": version, "num_tensors": report.num_tensors, "bytes_copied": report.bytes_copied}

    def restore_weights(self, sources: list[tuple[str, str]], version: int) -> None:
        self.cancel_weights()
        try:
            self.begin_weights()
            for path, files in sources:
                self.load_weights(path, files)
            self.finish_weights(version)
        except BaseException:
            self.cancel_weights()
            raise
        self.settle_weights()

    def settle_weights(self) -> dict[str, Any] | None:
        if self._update is not None and self._update.is_open:
            text = "settle_weights before finish_weights: the update is under way; finish or cancel it"
            raise WrongState(text, state=self._engine.state.value)
        update = self._ended()
        return None if update is None else update.settle()

    def cancel_weights(self, version: int | None = None) -> None:
        update = self._ended()
        if update is not None:
            update.rollback()

    def _ended(self) -> WeightUpdate | AdapterUpdate | None:
        """The update, which is not under way any more."""
        update = self._update
        self._update = None
        self._partial = None
        self._adapter = None
        return update

    def _open_update(self, call: str) -> WeightUpdate | AdapterUpdate:
        if self._update is None:
            raise WrongState(f"{call} without a weight update under way", state=self._engine.state.value)
        return self._update

    # ------------------------------------------------------------------ checks

    def check_weights(self, action: str) -> dict[str, Any]:
        if self._update is not None:
            raise WrongState("check_weights during a weight update", state=self._engine.state.value)
        if action == "reset":
            return self._overwrite()
        if action not in ("checksum", "snapshot", "compare"):
            known = ("checksum", "snapshot", "compare", "reset")
            raise ConfigError(f"{unknown_name('action', action, known)}; one of {', '.join(known)}")
        if action == "compare" and self._snapshot is None:
            raise ConfigError("compare: there is no snapshot to compare with; take one first")
        target = UpdateTarget.of(self._engine)
        digests = model_digests(target)
        if target.incomplete_reason is None and not self._engine.weights.derived.is_released:
            self._engine.verify_weights()
        answer: dict[str, Any] = {"checksum": checksum_of(digests), "num_tensors": len(digests)}
        if action == "snapshot":
            self._snapshot = digests
        elif action == "compare":
            assert self._snapshot is not None
            different = [name for name in digests if self._snapshot.get(name) != digests[name]]
            answer |= {"num_different": len(different), "different": different[:MAX_NAMES]}
        return answer

    @torch.no_grad()
    def _overwrite(self) -> dict[str, Any]:
        target = UpdateTarget.of(self._engine)
        target.hold()
        target.incomplete_reason = RESET
        for local in target.inventory.tensors:
            live = local.tensor.detach()
            live.uniform_(-1.0, 1.0) if live.is_floating_point() else live.bitwise_not_()
        return {"num_tensors": len(target.inventory.tensors)}


def _raise(error: Exception) -> None:
    raise error
