"""The two kinds of a session's weight update: written in place by the trainer, or copied from a source."""

from __future__ import annotations

import time
from typing import Any

from megatron_infer.engine.controls import check_version
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import LockstepError, RankFailure, WeightUpdateError
from megatron_infer.models.weights.change_guard import guarded_tensors
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.updates import WeightUpdate, as_source
from megatron_infer.rl.updates.digest import model_checksum
from megatron_infer.rl.updates.target import UpdateTarget


class ColocatedUpdate:
    """The trainer has written the weights in place: nothing is copied, and there is nothing to roll back."""

    def __init__(
        self, engine: DynamicInferenceEngine, *, version: int | None, running: str, checksum: bool = False
    ) -> None:
        """version: None: the next number."""
        self._engine, self._version, self._running, self._checksum = engine, version, running, checksum

    def run(self) -> UpdateReport:
        started = time.perf_counter()
        version = self._engine.weight_version + 1 if self._version is None else self._version
        self._engine.set_weight_version(version, self._running)
        return UpdateReport(
            version=version,
            num_tensors=sum(1 for _ in guarded_tensors(self._engine.model)),
            bytes_copied=0,
            bytes_received=0,
            checksum=model_checksum(UpdateTarget.of(self._engine)) if self._checksum else None,
            seconds=time.perf_counter() - started,
        )

    def rollback(self) -> None:
        """The trainer's weights stay; the next resume detects changes again."""


class SourceUpdate:
    """The weights are copied from a source over the model's own."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        source: Any,
        *,
        version: int | None,
        running: str,
        checksum: bool = False,
        undo: bool,
    ) -> None:
        """source: anything that `as_source` takes. undo: keep on the host what is overwritten."""
        self._engine, self._source, self._version, self._running = engine, source, version, running
        self._checksum, self._undo = checksum, undo
        self._update: WeightUpdate | None = None

    def run(self) -> UpdateReport:
        check_version(0 if self._version is None else self._version, self._running)
        with self._engine.rank_group.together("opening the source of the weights"):
            weights = as_source(self._source)
        with WeightUpdate(self._engine, undo=self._undo) as update:
            self._update = update
            update.check(self._engine.weights.check_modules)
            update.check(lambda: weights.check(update.target, strict=True))
            try:
                weights.write_into(update)
            except (RankFailure, LockstepError, WeightUpdateError):
                raise
            except Exception as error:  # the source's own error does not name the tensor
                progress = f"after {update.last_written}" if update.last_written else "before the first tensor"
                raise WeightUpdateError(
                    f"{type(error).__name__}: {error}, {progress}", rank=update.target.rank
                ) from error
            return update.finish(self._version, running=self._running, checksum=self._checksum)

    def rollback(self) -> None:
        """Without `undo` the tensors that were written stay."""
        if self._update is not None and self._undo:
            self._update.rollback()
