"""One update of a model's weights, in place: begin, write tensors in any order, finish with a version or take it back.

    begin ---- write(name, tensor) ... ---- finish(version)     derived copies rebuilt once, the engine runs again
      |             | error                     |
      |        undo: put back, as before        +-- rollback()    as before the update, at any later time (undo=True)
      |        else: the engine refuses to generate, naming the tensor, until another update has written them all
      +--- from here on the engine refuses to generate

Parameters and persistent buffers are written where they are: no object is replaced and no address changes. An engine of
several ranks has an update on each of them: they begin, finish and fail together, each writes its own part.
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
from megatron_infer.model_loader.model_description import ModelDescription
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.weights.digest import model_checksum
from megatron_infer.rl.weights.inventory import LocalTensor
from megatron_infer.rl.weights.names import TensorRouter
from megatron_infer.rl.weights.target import UpdateTarget

_END = "the end of a weight update"


class WeightUpdate:
    """The bracket around an update, for whoever has tensors one by one; also a context manager, which finishes."""

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

        strict: every tensor must come, and no other may; else those that do not come stay. undo: keep what is
        overwritten on the host: a failure puts it back, and `rollback` can. check_finite: refuse NaN and infinity.
        plan: what the model is (`open_source(...).config()`), for Hugging Face names that it does not tell by itself.
        names: megatron-core's names count layers and experts over the "whole" model or on this rank ("local").
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
        self._torn_before = self.target.torn
        self._version_before = self.target.version
        self.target.hold()

    # ------------------------------------------------------------------ writing

    def check(self, look: Callable[[], object]) -> None:
        """Before anything is written: `look` raises what can be known now, and then the update fails on all ranks."""
        self._require_open()
        problem: Exception | None = None
        try:
            look()
        except (RankFailure, LockstepError):
            raise
        except Exception as error:  # told to all ranks, and raised on each
            problem = error
        self._settle(problem)

    def write(self, name: str, tensor: Tensor, *, names: str | None = None) -> None:
        """Write one tensor of the whole model, of which this rank takes its part, or this rank's part of it.

        Under its megatron-core or Hugging Face name, in any order. Floating types are rounded to the model's own.
        names: None, as the update was begun with.
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
        if self._check_finite and not bool(torch.isfinite(value).all()):
            wrong = int((~torch.isfinite(value)).sum())
            self._refuse(local, f"got {wrong} values of {value.numel()} that are NaN or infinite")
        if local.name in self._written:
            if not torch.equal(live, value.to(device=live.device, dtype=live.dtype)):
                self._refuse(local, "came twice, with different values")
            return
        self.opened(local).copy_(value)

    def opened(self, local: LocalTensor) -> Tensor:
        """The live tensor, for a source that writes all of it in pieces; counted as written."""
        self._require_open()
        if self._undo and local.name not in self._kept:
            self._kept[local.name] = local.tensor.detach().to("cpu", copy=True)
        if local.name not in self._written:
            self._written[local.name] = local
            self._bytes += local.tensor.nbytes
        return local.tensor.detach()

    @property
    def last(self) -> str:
        """Name of the last tensor written; "" before the first."""
        return next(reversed(self._written.values())).layout.name if self._written else ""

    def received(self, num_bytes: int) -> None:
        """Counts what came from other processes."""
        self._received += num_bytes

    # ------------------------------------------------------------------ the end

    def finish(self, version: int | None = None, *, running: str = "keep", checksum: bool = False) -> UpdateReport:
        """All is written: the engine takes the weights as `version` (None: the next) and runs again.

        Raises WeightUpdateError, on all ranks, when a tensor has not come. running: see `set_weight_version`.
        checksum: put the digest of the whole model into the report; reads all weights once.
        """
        self._require_open()
        version = self._version_before + 1 if version is None else version
        check_version(version, running)
        self._settle(self._router.missing(self._written))
        self._is_open = False
        if len(self._written) == len(self.target.inventory.tensors):
            self.target.torn = None
        else:
            self.target.torn = self._torn_before
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

    def rollback(self) -> None:
        """Put back what was there before, under its version; on every rank. For undo=True, also after `finish`."""
        if not self._undo:
            raise WrongState("rollback() of a weight update that kept nothing; begin it with undo=True", state="")
        self._is_open = False
        self._put_back()
        self.target.torn = self._torn_before
        self.target.accept(self._version_before, "keep")

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
            self.target.torn = f"the update ended with {type(error).__name__}: {error}"
            return
        try:
            self._settle(error)
        except WeightUpdateError as told:
            if isinstance(error, WeightUpdateError):
                raise told from error
            error.add_note(str(told))

    # ------------------------------------------------------------------ inside

    def _settle(self, error: BaseException | None) -> None:
        """All ranks tell how they fared; an error of any ends the update on every one of them."""
        mine = None if error is None else _told(error)
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
            self.target.torn, outcome = self._torn_before, "nothing was written"
        elif self._undo:
            self._put_back()
            self.target.torn, outcome = self._torn_before, "what had been written was put back"
            written = 0
            self.target.accept(self._version_before, "keep")
        else:
            outcome = f"{written} tensors had been written: the weights are half old, half new"
            self.target.torn = f"the last update failed, {reasons}; finish one that writes every tensor"
        told = WeightUpdateError(
            f"the weight update failed, {reasons}; {outcome}", tensor=tensor, rank=rank, written=written
        )
        if error is not None and not isinstance(error, WeightUpdateError):
            raise told from error
        raise told

    @torch.no_grad()
    def _put_back(self) -> None:
        for name, kept in self._kept.items():
            self._written[name].tensor.detach().copy_(kept)

    def _refuse(self, local: LocalTensor, what: str) -> None:
        raise WeightUpdateError(f"{local.layout.name} {what}", tensor=local.layout.name, rank=self.target.rank)

    def _require_open(self) -> None:
        if not self._is_open:
            raise WrongState("the weight update has ended; begin another", state="")


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, WeightUpdateError) else f"{type(error).__name__}: {error}"
