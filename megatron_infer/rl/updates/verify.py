"""Verifies an engine's weights: live tensors, derived copies, equality across ranks, and against their source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import WeightUpdateError
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.rl.updates.digest import BITS, checksum_of, model_digests
from megatron_infer.rl.updates.inventory import LocalTensor, listed
from megatron_infer.rl.updates.names import TensorRouter
from megatron_infer.rl.updates.reshard import ReshardSource
from megatron_infer.rl.updates.sources import as_source
from megatron_infer.rl.updates.target import UpdateTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The report of a verification that found no difference."""

    checksum: str
    """Digest of the whole model's live weights, the same in every layout."""
    num_tensors: int
    """Live tensors of this rank that were hashed."""
    num_compared: int
    """How many of them were compared with the source; 0 without one."""
    derived: tuple[str, ...]
    """Derived copies that were recomputed from the live weights and equal the copies that kernels read."""


def verify_update(
    target: Any,
    source: Any = None,
    *,
    strict: bool = True,
    plan: ModelDescription | None = None,
    names: str | None = None,
    replicas: Any = None,
) -> VerifyReport:
    """Compare an engine's weights, as its kernels read them, across ranks and with their source.

    Live tensors are hashed on every rank: parts that several ranks hold must be equal, and each tensor must equal the
    one of `source` (as for `apply`; a stream must be a new one). Derived copies are recomputed and compared. replicas:
    a process group across engines that should have the same weights, each rank of which calls this. Reads all weights;
    call it on every rank of the engine. Raises WeightUpdateError or StaleCache naming tensor and rank.
    """
    checked = UpdateTarget.of(target)
    compared = 0
    with checked.unpacked():
        if isinstance(source, ReshardSource):
            source.verify(checked, strict=strict)  # first: other ranks of its group wait
            compared = len(checked.inventory.tensors)
        elif source is not None:
            compared = _compare(checked, source, strict=strict, plan=plan, names=names)
        digests = model_digests(checked)
    derived: tuple[str, ...] = ()
    if checked.engine is not None:
        checked.engine.verify_weights()
        derived = tuple(checked.engine.weights.derived.names)
    if replicas is not None:
        _compare_replicas(digests, replicas)
    return VerifyReport(
        checksum=checksum_of(digests),
        num_tensors=len(checked.inventory.tensors),
        num_compared=compared,
        derived=derived,
    )


class Comparison:
    """Takes a source's tensors as an update does, and compares them with the live tensors."""

    def __init__(self, target: UpdateTarget, *, plan: ModelDescription | None, names: str, strict: bool) -> None:
        self.target = target
        self.router = TensorRouter(target, plan=plan, names=names, strict=strict)
        self.seen: set[str] = set()
        self.wrong: dict[str, str] = {}
        """Tensor -> its difference."""

    def write(self, name: str, tensor: Tensor, *, names: str | None = None) -> None:
        for local, value in self.router.route(name, tensor, names=names):
            self.put(local, value)

    def put(self, local: LocalTensor, value: Tensor) -> None:
        live = local.tensor.detach()
        self.seen.add(local.name)
        if value.shape != live.shape:
            self.wrong[local.layout.name] = f"shape {list(live.shape)}, the source {list(value.shape)}"
            return
        bits = BITS[live.element_size()]
        wanted = value.to(device=live.device, dtype=live.dtype).contiguous()
        different = wanted.view(bits) != live.contiguous().view(bits)
        if bool(different.any()):
            at = different.nonzero()[0].tolist()
            self.wrong[local.layout.name] = f"{int(different.sum())} of {live.numel()} elements, the first at {at}"

    def writable(self, local: LocalTensor) -> Tensor:
        raise WeightUpdateError("this source cannot be compared: it writes its tensors in pieces")

    def count_received(self, num_bytes: int) -> None:
        """Not counted."""


def _compare(
    target: UpdateTarget, source: Any, *, strict: bool, plan: ModelDescription | None, names: str | None
) -> int:
    problem, tensor, count = "", "", 0
    try:
        weights = as_source(source, plan=plan, names=names)
        weights.check(target, strict=strict)
        comparison = Comparison(target, plan=plan, names=names or "whole", strict=strict)
        weights.write_into(comparison)
        missing = comparison.router.missing(comparison.seen)
        if missing is not None:
            problem, tensor = str(missing), missing.tensor
        if comparison.wrong:
            tensor = next(iter(comparison.wrong))
            problem = "not what the source has: " + listed(
                [f"{name} ({what})" for name, what in comparison.wrong.items()]
            )
        count = len(comparison.seen)
    except WeightUpdateError as error:
        problem, tensor = str(error), error.tensor
    reports = target.gather("the comparison with the source", json.dumps([problem, tensor, target.rank]))
    failed = [report for report in map(json.loads, reports) if report[0]]
    if failed:
        reasons = "; ".join(f"rank {rank}: {problem}" for problem, _, rank in failed)
        raise WeightUpdateError(reasons, tensor=failed[0][1], rank=failed[0][2])
    return count


def _compare_replicas(digests: dict[str, int], group: Any) -> None:
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, (torch.distributed.get_rank(), digests), group=group)
    first, known = found[0]
    for rank, other in found[1:]:
        wrong = sorted(name for name in known | other if known.get(name) != other.get(name))
        if wrong:
            raise WeightUpdateError(
                f"the replicas of rank {first} and rank {rank} differ in {listed(wrong)}", tensor=wrong[0], rank=rank
            )
