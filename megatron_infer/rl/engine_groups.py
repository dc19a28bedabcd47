"""The groups in which an engine's ranks receive a trainer's weights, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_infer.errors import ConfigError, InferenceError, WeightUpdateError
from megatron_infer.rl.adapter_update import AdapterUpdate
from megatron_infer.rl.group_process import GroupProcess
from megatron_infer.rl.trainer_group import GroupAddress, Membership, TrainerGroup, checked_specs, tensors
from megatron_infer.rl.updates import WeightUpdate
from megatron_infer.rl.updates.target import UpdateTarget

MAX_GROUPS = 64
"""A trainer has one for each of its pipeline stages."""
MOST_WAIT_S = 60.0
"""Most seconds that a rank waits for the others of a group, and for each broadcast."""


@dataclass(frozen=True, slots=True)
class _Member:
    group: Membership
    most_elements: int
    """Of one call."""


def most_elements_of(engine: Any, what: str) -> int:
    """Most elements that a trainer may send at once: twice those of the model. Every rank calls it."""
    inventory = UpdateTarget.of(engine).inventory
    own = sum(math.prod(local.layout.shape) for local in inventory.tensors)
    return 2 * sum(map(int, engine.rank_group.lockstep.gather(what, str(own))))


class EngineGroups:
    """One rank's memberships. All ranks of an engine make the same calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._members: dict[str, _Member] = {}

    def join(self, name: str, where: dict[str, Any], num_ranks: int) -> None:
        """See `WeightCommands.join_weight_group`. Raises ConfigError or WeightUpdateError, on all ranks."""
        self.leave(name)
        ranks, config = self._engine.rank_group, self._engine.config
        limit_s = min(MOST_WAIT_S, config.collective_timeout_s / 2)
        opened: list[Membership] = []
        what = f"joining the group {name[:80]!r} at {where.get('address')}:{where.get('port')}"
        try:
            with ranks.together(what):
                opened.append(self._opened(where, num_ranks, limit_s))
                is_first = ranks.groups.engine_rank == 0
                # engines that are alone have the first place; more than one take theirs in any order
                place = opened[0].place(ranks.size) if is_first and num_ranks > ranks.size else 0
            place = ranks.from_leader(what, place)
            with ranks.together(what):
                opened[0].join(place + ranks.groups.engine_rank)
            most_elements = most_elements_of(self._engine, what)
        except BaseException as error:
            for one in opened:
                one.close()
            if isinstance(error, RuntimeError) and not isinstance(error, InferenceError):
                raise WeightUpdateError(f"{what} failed after {limit_s:g} s at most: {error}") from error
            raise
        self._members[name] = _Member(opened[0], most_elements)

    def _opened(self, where: dict[str, Any], num_ranks: int, limit_s: float) -> Membership:
        if len(self._members) >= MAX_GROUPS:
            raise ConfigError(f"there are {MAX_GROUPS} groups of weights already; leave one")
        try:
            given = msgspec.convert(where, GroupAddress)
        except msgspec.ValidationError as error:
            raise ConfigError(f"where a group meets: {error}") from None
        device = self._engine.device.torch
        address = given.checked(num_ranks, device)
        if address.backend == "gloo":
            return GroupProcess(address, timeout_s=limit_s)
        return TrainerGroup(address, device=device, timeout_s=limit_s)

    def leave(self, name: str) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            member.group.close()

    def receive_into(
        self,
        update: WeightUpdate | AdapterUpdate,
        name: str,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        buffer_bytes: int | None = None,
    ) -> None:
        """Write what comes. After an error this rank is out of step with the trainer: its caller leaves the group."""
        member = self._members.get(name)
        if member is None:
            known = ", ".join(map(repr, self._members)) or "none"
            raise WeightUpdateError(f"there is no group {name[:80]!r} (there are: {known}); have the engines join it")
        specs = checked_specs(names, dtypes, shapes, most_elements=member.most_elements)
        for tensor_name, tensor in tensors(member.group.receive, specs, buffer_bytes=buffer_bytes):
            update.count_received(tensor.nbytes)
            update.write(tensor_name, tensor)
