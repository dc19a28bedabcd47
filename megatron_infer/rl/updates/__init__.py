"""New weights for a live model: sources, updates in place, resharding between layouts, digests."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

from torch import Tensor

from megatron_infer.engine.controls import check_version
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.updates.reshard import ReshardReport, ReshardSource
from megatron_infer.rl.updates.sources import AsyncStreamSource, WeightSource, as_source
from megatron_infer.rl.updates.update import WeightUpdate
from megatron_infer.rl.updates.verify import VerifyReport, verify_update


def apply(target: Any, source: Any, *, undo: bool = False, **options: Any) -> UpdateReport:
    """Write the weights of `source` (see `as_source`) into an engine's live model, in place; on every rank of it.

    Raises WeightUpdateError naming tensor and rank. Everything that can be checked is checked before anything is
    written. After a later error undo=True restores the weights (it costs a host copy of them); without it the engine
    refuses to generate until another update has finished. options: as in `apply_undoable`.
    """
    report = apply_undoable(target, source, undo=undo, **options).report
    assert report is not None
    return report


def apply_undoable(
    target: Any,
    source: Any,
    *,
    version: int | None = None,
    running: str = "keep",
    checksum: bool = False,
    undo: bool = True,
    strict: bool = True,
    check_finite: bool = False,
    plan: ModelDescription | None = None,
    names: str | None = None,
) -> WeightUpdate:
    """Like `apply` -> the finished update, whose `rollback()` restores the weights and version before it.

    version, running, checksum: as in `WeightUpdate.finish`; the others: as in `WeightUpdate`.
    """
    check_version(0 if version is None else version, running)
    weights = as_source(source, plan=plan, names=names)
    with WeightUpdate(
        target, strict=strict, undo=undo, check_finite=check_finite, plan=plan, names=names or "whole"
    ) as update:
        update.check(lambda: weights.check(update.target, strict=strict))
        weights.write_into(update)
        update.finish(version, running=running, checksum=checksum)
    return update


async def apply_async(target: Any, pairs: AsyncIterable[tuple[str, Tensor]], **options: Any) -> UpdateReport:
    """Like `apply`, from an async stream of (name, tensor) inside an event loop. The engine must not step meanwhile."""
    finish = {key: options.pop(key) for key in ("version", "running", "checksum") if key in options}
    check_version(finish.get("version") or 0, finish.get("running", "keep"))
    with WeightUpdate(target, **options) as update:
        await AsyncStreamSource(pairs).feed(update)
        return update.finish(finish.pop("version", None), **finish)


__all__ = [
    "ReshardReport",
    "ReshardSource",
    "UpdateReport",
    "VerifyReport",
    "WeightSource",
    "WeightUpdate",
    "apply",
    "apply_async",
    "apply_undoable",
    "as_source",
    "verify_update",
]
