"""New weights for an engine behind a coordinator: the commands that its replica obeys, on every rank of the engine.

    load_weights(path)                                    finish_weights(version) -> settle_weights()
    begin_weights(), write_weights(a piece) ...           cancel_weights(): as it was before, also after a finish

Nothing of an update is final before `settle_weights`: whoever steers several replicas finishes it on all or on none.
A failure is told to all ranks, and what was written is put back.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.coordinator.protocol import WEIGHT_COMMANDS
from megatron_infer.errors import ConfigError, WeightUpdateError, WrongState, unknown_name
from megatron_infer.model_loader.hf_weights import SafetensorsReader
from megatron_infer.rl.weights import WeightUpdate, as_source
from megatron_infer.rl.weights.digest import checksum_of, model_digests
from megatron_infer.rl.weights.sources import LazyTensors, StreamSource
from megatron_infer.rl.weights.target import Target

CALL = "weights()"
SHOWN = 8
"""Names of tensors that are said to differ."""
RESET = "they were overwritten to see whether an update restores them; finish an update that writes every tensor"
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
"""As safetensors names them."""


@dataclass(slots=True)
class _Arriving:
    """A tensor of which pieces have come."""

    name: str
    tensor: Tensor
    num_bytes: int = 0

    def take(self, offset: int, data: bytes) -> bool:
        """Whether it is whole."""
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


class RemoteWeights:
    """One rank's side; the leader's `commands` go to its replica, the others' `followed` to `engine.follow`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._update: WeightUpdate | None = None
        self._arriving: _Arriving | None = None
        self._snapshot: dict[str, int] | None = None

    def commands(self) -> dict[str, Callable[..., Any]]:
        """By the names that `wire.Control` has."""
        return {name: partial(self._obey, name) for name in WEIGHT_COMMANDS}

    def followed(self) -> dict[str, Callable[[Any], Any]]:
        return {CALL: lambda given: self._obey(given["command"], **given["args"])}

    def _obey(self, command: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """On every rank. timeout_s: of the part that is a transition of the engine."""
        if self._engine.rank_group.size > 1:
            if isinstance(args.get("data"), bytes):
                args["data"] = base64.b85encode(args["data"]).decode()
            self._engine.relay.meet(CALL, {"command": command, "args": args})
        if isinstance(args.get("data"), str):
            args["data"] = base64.b85decode(args["data"])
        return getattr(self, command)(**args)

    # ------------------------------------------------------------------ one update

    def load_weights(self, path: str) -> dict[str, Any]:
        """Tensors out of files; all of them, unless an update is under way already and `path` is one file of several.

        What can be known is checked before the first is written.
        """
        if os.path.realpath(path) != path:
            raise ConfigError(f"{path} leads to {os.path.realpath(path)}; give the path that it leads to")
        is_part = self._update is not None and os.path.isfile(path)
        update = self.begin_weights() if self._update is None else self._update
        source: list[Any] = []

        def opened() -> None:
            found = as_source(path)
            source.append(StreamSource(LazyTensors(SafetensorsReader(Path(path))).items()) if is_part else found)
            source[0].check(update.target, strict=True)

        update.check(opened)
        update.check(lambda: source[0].write_into(update))
        return {"last": update.last}

    def begin_weights(self) -> Any:
        """The engine computes nothing until the update has ended."""
        if self._update is not None:
            raise WrongState("a weight update is under way; finish or cancel it", state=self._engine.state.value)
        self._update, self._arriving = WeightUpdate(self._engine, undo=True), None
        return self._update

    def write_weights(self, name: str, dtype: str, shape: list[int], offset: int, data: bytes) -> None:
        """A piece of one tensor of the whole model; pieces come in order, and a tensor's before those of the next."""
        update = self._open("write_weights")

        def write() -> None:
            tensor = self._take(name, dtype, shape, offset, data)
            if tensor is not None:
                update.write(name, tensor)

        update.check(write)

    def _take(self, name: str, dtype: str, shape: list[int], offset: int, data: bytes) -> Tensor | None:
        """The tensor, once it is whole."""
        if dtype not in DTYPES:
            raise WeightUpdateError(f"{name} is {dtype}; known are {', '.join(DTYPES)}", tensor=name)
        arriving = self._arriving
        if offset == 0:
            if arriving is not None:
                raise WeightUpdateError(f"{name} came before all of {arriving.name}", tensor=arriving.name)
            arriving = self._arriving = _Arriving(name, torch.empty(shape, dtype=DTYPES[dtype]))
        if arriving is None or arriving.name != name:
            raise WeightUpdateError(f"{name} does not begin with its first byte", tensor=name)
        if not arriving.take(offset, data):
            return None
        self._arriving = None
        return arriving.tensor

    def finish_weights(self, version: int, running: str = "keep") -> dict[str, Any]:
        """The engine has the weights; they can still be taken back."""
        update = self._open("finish_weights")
        if self._arriving is not None:
            name = self._arriving.name
            update.check(partial(_raise, WeightUpdateError(f"{name} has not come whole", tensor=name)))
        report = update.finish(version, running=running)
        return {"version": version, "num_tensors": report.num_tensors, "bytes_copied": report.bytes_copied}

    def settle_weights(self) -> None:
        """Forget what was there before."""
        self._update = self._arriving = None

    def cancel_weights(self, version: int | None = None) -> None:
        """Weights and version as they were before the update; without one there is nothing to do.

        version: that the coordinator expects of its replicas from now on.
        """
        update, self._update, self._arriving = self._update, None, None
        if update is not None:
            update.rollback()

    def _open(self, call: str) -> WeightUpdate:
        if self._update is None:
            raise WrongState(f"{call} without a weight update under way", state=self._engine.state.value)
        return self._update

    # ------------------------------------------------------------------ what the weights are

    def check_weights(self, action: str) -> dict[str, Any]:
        """checksum: a digest of all weights. snapshot: remember digests. compare: with those. reset: spoil the weights.

        Every answer but that to reset reads all weights once; derived copies are computed again and compared.
        """
        if self._update is not None:
            raise WrongState("check_weights during a weight update", state=self._engine.state.value)
        if action == "reset":
            return self._spoil()
        if action not in ("checksum", "snapshot", "compare"):
            known = ("checksum", "snapshot", "compare", "reset")
            raise ConfigError(f"{unknown_name('action', action, known)}; one of {', '.join(known)}")
        if action == "compare" and self._snapshot is None:
            raise ConfigError("compare: there is no snapshot to compare with; take one first")
        target = Target.of(self._engine)
        digests = model_digests(target)
        if target.torn is None and not self._engine.weights.derived.is_released:
            self._engine.verify_weights()
        answer: dict[str, Any] = {"checksum": checksum_of(digests), "num_tensors": len(digests)}
        if action == "snapshot":
            self._snapshot = digests
        elif action == "compare":
            assert self._snapshot is not None
            different = [name for name in digests if self._snapshot.get(name) != digests[name]]
            answer |= {"num_different": len(different), "different": different[:SHOWN]}
        return answer

    @torch.no_grad()
    def _spoil(self) -> dict[str, Any]:
        target = Target.of(self._engine)
        target.hold()
        target.torn = RESET
        for local in target.inventory.tensors:
            live = local.tensor.detach()
            live.uniform_(-1.0, 1.0) if live.is_floating_point() else live.bitwise_not_()
        return {"num_tensors": len(target.inventory.tensors)}


def _raise(error: Exception) -> None:
    raise error
