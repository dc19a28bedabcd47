"""The ways in which a session's weights become others, each of which can be taken back as far as it wrote them."""

from __future__ import annotations

import hashlib
import time

from megatron_infer.engine import DynamicInferenceEngine
from megatron_infer.forward.weights import guarded_tensors
from megatron_infer.rl.report import UpdateReport


class Colocated:
    """The trainer has written them in place: nothing is copied, and there is nothing to take back."""

    def __init__(self, engine: DynamicInferenceEngine, version: int | None, running: str) -> None:
        """version: None for the next number."""
        self._engine, self._version, self._running = engine, version, running

    def run(self) -> UpdateReport:
        started, parts = time.perf_counter(), self._engine.parts
        version = parts.weight_version + 1 if self._version is None else self._version
        self._engine.set_weight_version(version, self._running)
        return UpdateReport(
            version=version,
            num_tensors=sum(1 for _ in guarded_tensors(parts.model)),
            bytes_copied=0,
            bytes_received=0,
            seconds=time.perf_counter() - started,
            checksum=hashlib.blake2b(repr(parts.guard.sums).encode(), digest_size=8).hexdigest(),
        )

    def roll_back(self) -> None:
        """The weights are the trainer's; whoever wakes the engine has it look at them again."""
