"""One update of a model's weights, in place: begin, write tensors in any order, finish with a version or roll back.

    begin ---- write(name, tensor) ... ---- finish(version)     derived copies rebuilt once, the engine runs again
      |             | error                     |
      |        undo: restored as before         +-- rollback()    as before the update, at any later time (undo=True)
      |        else: the engine refuses to generate, naming the tensor, until another update has written them all
      +--- from here on the engine refuses to generate

Parameters and persistent buffers are written where they are: no object is replaced and no address changes. In an engine
of several ranks each rank has an update and writes its own part; the updates begin, finish and fail together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_infer.engine.controls import check_version
from megatron_infer.errors import LockstepError, RankFailure, WeightUpdateError, WrongState
from megatron_infer.kernels.lora import is_finite
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.updates.digest import model_checksum
from megatron_infer.rl.updates.inventory import LocalTensor
from megatron_infer.rl.updates.names import TensorRouter
from megatron_infer.rl.updates.target import UpdateTarget

_END = "the end of a weight update"


class WeightUpdate:
    """An update for callers that have tensors one by one; as a context manager it finishes at the end of the block."""

    def __init__(
        self,
        target: Any,
        *,
        strict: bool = True,
        undo: bool = False,
        check_finite: bool = False,
        plan: ModelDescription | None = None,
        names: str = "whole",
    ) -> None:
        """Begins at once. target: an engine, or a megatron-core model.

        strict: every tensor must be written, and no other name is accepted; else missing tensors keep their values.
        undo: keep overwritten values on the host, so that a failure or `rollback` restores them. check_finite: refuse
        NaN and infinity, also what rounding makes so. plan: the model's description (`open_source(...).config()`), for
        Hugging Face names of a family that the names do not imply. names: megatron-core's names number layers and
        experts over the "whole" model or on this rank ("local").
        """
        self.target = UpdateTarget.of(target)
        self.report: UpdateReport | None = None
        self._router = TensorRouter(self.target, plan=plan, names=names, strict=strict)
        self._undo, self._check_finite = undo, check_finite
        self._written: dict[str, LocalTensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._bytes = self._received = 0
        self._is_open = True
        self._started = time.perf_counter()
        self._incomplete_before = self.target.incomplete_reason
        self._version_before = self.target.version
        self.target.hold()

    @property
    def is_open(self) -> bool:
        """Whether it has neither ended nor failed."""
        return self._is_open

    # ------------------------------------------------------------------ writing

    def check(self, look: Callable[[], object]) -> None:
        """Before anything is written: if `look` raises on any rank, the update fails on all ranks."""
        self._require_open()
        problem: Exception | None = None
        try:
            look()
        except (RankFailure, LockstepError):
            raise
        except Exception as error:  # `_settle` raises it on all ranks
            problem = error
        self._settle(problem)

    def write(self, name: str, tensor: Tensor, *, names: str | None = None) -> None:
        """Write one tensor: the whole one, of which this rank takes its part, or this rank's part of it.

        Under its megatron-core or Hugging Face name, in any order. Floating types are rounded to the model's own.
        names: None: as in the constructor.
        """
        self._require_open()
        for local, value in self._router.route(name, tensor, names=names):
            self.put(local, value)

    def write_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.write(name, tensor)

    @torch.no_grad()
    def put(self, local: LocalTensor, value: Tensor) -> None:
        """Write this rank's part of a tensor, in its own shape."""
        live = local.tensor
        if value.shape != live.shape:
            self._refuse(local, f"has shape {list(live.shape)}, got {list(value.shape)}")
        if value.dtype != live.dtype and not (value.is_floating_point() and live.is_floating_point()):
            self._refuse(local, f"is {live.dtype}, got {value.dtype}, which is not rounded to it")
        if self._check_finite and not is_finite(rounded := value.to(live.dtype)):
            wrong = int((~torch.isfinite(rounded)).sum())
            self._refuse(local, f"got {wrong} values of {value.numel()} that are NaN or infinite in {live.dtype}")
        if local.name in self._written:
            self._unpack()
            if not torch.equal(live, value.to(device=live.device, dtype=live.dtype)):
                self._refuse(local, "came twice, with different values")
            return
        self.writable(local).copy_(value)

    def writable(self, local: LocalTensor) -> Tensor:
        """The live tensor, for a source that writes all of it in pieces; counted as written."""
        self._require_open()
        self._unpack()
        if self.target.engine is not None:  # the next step looks, should the end of the update fail
            self.target.engine.weights.guard.invalidate()
        if self._undo and local.name not in self._kept:
            self._kept[local.name] = local.tensor.detach().to("cpu", copy=True)
        if local.name not in self._written:
            self._written[local.name] = local
            self._bytes += local.tensor.nbytes
        return local.tensor.detach()

    @property
    def last_written(self) -> str:
        """Name of the last tensor written; "" before the first."""
        return next(reversed(self._written.values())).layout.name if self._written else ""

    def count_received(self, num_bytes: int) -> None:
        """Add to the bytes that came from other processes."""
        self._received += num_bytes

    # ------------------------------------------------------------------ the end

    def finish(self, version: int | None = None, *, running: str = "keep", checksum: bool = False) -> UpdateReport:
        """End the update: the engine has the weights as `version` (None: the next number) and runs again.

        Raises WeightUpdateError, on all ranks, if a tensor was not written. running: see `set_weight_version`.
        checksum: put the digest of the whole model into the report, which reads all weights once.
        """
        self._require_open()
        version = self._version_before + 1 if version is None else version
        check_version(version, running)
        self._settle(self._router.missing(self._written))
        self._is_open = False
        if len(self._written) == len(self.target.inventory.tensors):
            self.target.incomplete_reason = None
        else:
            self.target.incomplete_reason = self._incomplete_before
        self.target.accept(version, running)
        self.report = UpdateReport(
            version=version,
            num_tensors=len(self._written),
            bytes_copied=self._bytes,
            bytes_received=self._received,
            checksum=model_checksum(self.target) if checksum else None,
            seconds=time.perf_counter() - self._started,
        )
        return self.report

    def settle(self) -> None:
        """No `rollback` follows: what was kept for one is freed."""
        self._kept.clear()
        self._undo = False

    def rollback(self) -> None:
        """Restore weights and version from before the update; on every rank, also after `finish`. Needs undo=True."""
        if not self._undo:
            raise WrongState("rollback() of a weight update that kept nothing; begin it with undo=True", state="")
        self._is_open = False
        self._restore()
        self.target.incomplete_reason = self._incomplete_before
        self.target.restore(self._version_before)

    def __enter__(self) -> WeightUpdate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_open:
            return
        if error is None:
            self.finish()
            return
        if isinstance(error, RankFailure | LockstepError):
            self._is_open = False
            self.target.incomplete_reason = f"the update ended with {type(error).__name__}: {error}"
            return
        try:
            self._settle(error)
        except WeightUpdateError as failure:
            if isinstance(error, WeightUpdateError):
                raise failure from error
            error.add_note(str(failure))

    # ------------------------------------------------------------------ inside

    def _settle(self, error: BaseException | None) -> None:
        """Exchange outcomes; an error on any rank ends the update on all of them."""
        mine = None if error is None else _message(error)
        tensor = getattr(error, "tensor", "")
        reports = self.target.gather(_END, json.dumps([mine, tensor, len(self._written), self.target.rank]))
        found = [json.loads(text) for text in reports]
        failed = [(rank, tensor, text) for text, tensor, _, rank in found if text is not None]
        if not failed:
            return
        self._is_open = False
        written = sum(count for _, _, count, _ in found)
        rank, tensor, _ = failed[0]
        reasons = "; ".join(f"rank {rank}: {text}" for rank, _, text in failed)
        if not written:
            self.target.incomplete_reason, outcome = self._incomplete_before, "nothing was written"
        elif self._undo:
            self._restore()
            self.target.incomplete_reason, outcome = self._incomplete_before, "what had been written was put back"
            written = 0
            self.target.restore(self._version_before)
        else:
            outcome = f"{written} tensors had been written: the weights are half old, half new"
            self.target.incomplete_reason = f"the last update failed, {reasons}; finish one that writes every tensor"
        failure = WeightUpdateError(
            f"the weight update failed, {reasons}; {outcome}", tensor=tensor, rank=rank, written=written
        )
        if error is not None and not isinstance(error, WeightUpdateError):
            raise failure from error
        raise failure

    @torch.no_grad()
    def _restore(self) -> None:
        self._unpack()
        for name, kept in self._kept.items():
            self._written[name].tensor.detach().copy_(kept)

    def _unpack(self) -> None:
        """Weights may have been accepted, and freed, since the update began."""
        if self.target.engine is not None:
            self.target.engine.weights.unpack()

    def _refuse(self, local: LocalTensor, what: str) -> None:
        raise WeightUpdateError(f"{local.layout.name} {what}", tensor=local.layout.name, rank=self.target.rank)

    def _require_open(self) -> None:
        if not self._is_open:
            raise WrongState("the weight update has ended; begin another", state="")


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, WeightUpdateError) else f"{type(error).__name__}: {error}"
