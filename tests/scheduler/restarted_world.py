"""A world's requests continue in another process: in another pool, some with the keys and values they had."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from world import PrefillAccount, World

from megatron_infer.scheduler.request import Request, Status

VISITED = ("steps", "late hits", "readmitted", "shared returns")
"""Counts that say what a schedule has visited, kept from one process to the next."""


@dataclass
class Saved:
    """What a file would hold of a request."""

    arrival: int
    heir: Request
    """Its successor in the next process."""
    blocks: list
    """Blocks it held, and the cache entries of its tokens; empty when it keeps no KV."""
    entries: list
    state: tuple | None = None
    """Its recurrent state, in a model that has one."""


def restart(world: World, *, num_blocks, block_size, num_rows, slots, version, keeps_kv) -> None:
    """Save and load: afterwards `world` is the next process. keeps_kv(): whether the next request keeps its KV."""
    world.commit_previous()
    for copy in world.context.take_copies():
        world.device.copy(*copy)
    saved = {request: _save(world, request, keeps_kv()) for request in world.requests if request.finish_reason is None}
    world.origins = {saved[r].heir if r in saved else r: origins for r, origins in world.origins.items()}
    saved_block_size = world.block_size
    world.num_blocks, world.block_size, world.num_rows = num_blocks, block_size, num_rows
    world.swap, world.version = replace(world.swap, slots=slots), version
    world.account = PrefillAccount(counts=Counter({what: world.account.counts[what] for what in VISITED}))
    world.build()
    returned: list[Saved] = []
    for one in _in_order(list(saved.values())):
        if one.entries and _readmit(world, one, returned, saved_block_size):
            returned.append(one)
        else:
            world.scheduler.add(one.heir)
    world.check()


def _save(world, request, keeps_kv) -> Saved:
    history = replace(request.history, spans=list(request.history.spans))
    fields = {"lease": None, "scheduled": 0, "arrival": -1, "siblings": (), "status": Status.WAITING}
    heir = replace(request, history=history, **fields)
    if request.lease is None or not keeps_kv:
        return Saved(request.arrival, heir, [], [])
    entries = world.device.content(request.lease, request.scheduled)
    state = world.device.states[request.lease.row] if world.recurrent else None
    return Saved(request.arrival, heir, list(request.lease.blocks), entries, state)


def _in_order(saved: list[Saved]) -> list[Saved]:
    """By arrival; siblings that have drawn nothing are led by the first of them that keeps its KV."""
    order = [one for one in saved if one.heir.num_output]
    fresh: dict[str, list[Saved]] = {}
    for one in saved:
        if not one.heir.num_output:
            fresh.setdefault(one.heir.id.partition("#")[0], []).append(one)
    for members in fresh.values():
        leader, *others = sorted(members, key=lambda one: (not one.entries, one.arrival))
        leader.heir.siblings = tuple(one.heir for one in others)
        order.append(replace(leader, arrival=min(one.arrival for one in members)))
    return sorted(order, key=lambda one: one.arrival)


def _readmit(world, one: Saved, returned: list[Saved], saved_block_size: int) -> bool:
    """Readmit as a load does: whole blocks are shared with the request that has most leading blocks in common."""
    like, num_shared = None, 0
    for other in returned:
        pairs = zip(one.blocks, other.blocks, strict=False)
        run = next(
            (i for i, (own, theirs) in enumerate(pairs) if own != theirs), min(map(len, (one.blocks, other.blocks)))
        )
        same = min(run * saved_block_size, len(one.entries), len(other.entries)) // world.block_size * world.block_size
        if same > num_shared:
            like, num_shared = other.heir, same
    if world.scheduler.readmit(one.heir, len(one.entries), like=like, num_shared=num_shared) is None:
        return False
    world.device.put(one.heir.lease, one.entries, start=num_shared)
    world.device.states[one.heir.lease.row] = one.state
    world.account.readmit(one.heir, len(one.entries))
    world.account.counts["shared returns"] += like is not None
    return True
