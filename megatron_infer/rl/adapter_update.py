"""One update of a LoRA adapter, by tensors that come one by one. `updates.WeightUpdate` is the same of a model.

    begin ---- write(name, tensor) ... ---- finish()      read, checked and packed on every rank
      |             | error                    |
      +--------- rollback(): as before --------+-- settle(): the engine has the adapter

Until `settle` the engine computes with the adapters that it had. Every rank has an update and gets all tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from megatron_infer.config.lora import ReceivedAdapter
from megatron_infer.engine.adapters import AdapterReading, EngineAdapters, check_running
from megatron_infer.errors import ConfigError, WeightUpdateError, WrongState
from megatron_infer.rl.update_report import UpdateReport


class AdapterUpdate:
    """One rank's side."""

    def __init__(self, engine: Any, given: Mapping[str, Any], *, numbered: dict[int, str], most_elements: int) -> None:
        """given: fields of `ReceivedAdapter`. numbered: number -> the adapter received last under it, which the update
        keeps. most_elements: of all tensors. Raises ConfigError."""
        try:
            self._given = msgspec.convert(given, ReceivedAdapter)
        except msgspec.ValidationError as error:
            raise ConfigError(f"an adapter that is received: {error}") from None
        self._adapters: EngineAdapters = engine.controls.adapters
        self._adapters.require()
        self._ranks = engine.rank_group
        self._numbered = numbered
        self._most_elements = most_elements
        self._num_elements = self._num_bytes = 0
        self._tensors: dict[str, Tensor] = {}
        self._reading: AdapterReading | None = None
        self._digest = self._running = ""
        self._started = time.perf_counter()

    @property
    def is_open(self) -> bool:
        """Whether it has not been finished."""
        return not self._digest

    def check(self, look: Callable[[], object]) -> None:
        """If `look` raises on any rank, the call fails on all ranks."""
        with self._ranks.together(f"an update of adapter {self._given.name!r}"):
            look()

    def write(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of the tensor until the end of the update."""
        self._num_elements += tensor.numel()
        if name in self._tensors:
            raise WeightUpdateError(f"{name} came twice", tensor=name)
        if self._num_elements > self._most_elements:
            text = f"{name}: an adapter may have {self._most_elements:,} elements, twice those of the model"
            raise WeightUpdateError(text, tensor=name)
        self._tensors[name] = tensor.detach().to("cpu", copy=True)

    def count_received(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def finish(self, version: int, *, running: str = "keep") -> UpdateReport:
        """Read the adapter from the tensors. Raises ModelError, ConfigError or AdapterInUse, on all ranks.

        version: of the model's weights, which they keep. running: see `EngineAdapters.load`.
        """
        if not self.is_open:
            raise WrongState("the update of the adapter has ended; begin another", state="")
        check_running(running)
        name = self._given.name
        self._reading = self._adapters.read(name, self._tensors, config=self._given.config)
        self._digest = self._adapters.check(name, self._reading, replace=self._given.replace)
        self._running = running
        return UpdateReport(
            version=version,
            num_tensors=len(self._tensors),
            bytes_copied=0,
            bytes_received=self._num_bytes,
            seconds=time.perf_counter() - self._started,
        )

    def settle(self) -> dict[str, Any]:
        """Load what `finish` has read -> its name and digest, and the adapter that it retires. Unfinished requests of
        that one end with an error."""
        name, number, retired = self._given.name, self._given.number, None
        self._adapters.load(name, self._reading, replace=True, running=self._running)
        if number is not None:
            before, self._numbered[number] = self._numbered.get(number, name), name
            is_last = before in self._numbered.values()  # of this number, or of another one
            if not is_last and before in {one.name for one in self._adapters.loaded()}:
                self._adapters.unload(before, abort=True)
                retired = before
        return {"name": name, "digest": self._digest, "retires": retired}

    def rollback(self) -> None:
        """Forget what came; the engine's adapters are those from before the update."""
        if self._reading is not None:
            self._adapters.forget(self._reading)
