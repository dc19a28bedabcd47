"""The process groups of an engine, and groups for scripts that have none."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.distributed.backends import device_of, group_rank, group_size
from megatron_infer.distributed.lockstep import LocalLockstep, Lockstep
from megatron_infer.distributed.rank_links import RankLinks, connect
from megatron_infer.errors import ConfigError

log = logging.getLogger("megatron_infer")

_WIDE = ("tp", "pp", "ep", "mp", "tp_ep", "expt_tp", "tp_ep_pp", "embd", "pos_embd")
"""Groups within a replica, whose collectives the model waits for."""
_TEXT_BYTES = 1024
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The process groups of one replica, and of the replicas beside it (dp). None: one rank."""

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    """Ranks of equal weights that divide a training sequence; each generates by itself."""
    data: ProcessGroup | None = None
    """Ranks to which a trainer gives different data."""
    engine: ProcessGroup | None = None
    """All ranks of this replica: tensor, pipeline and expert parallel together."""
    sharing: ProcessGroup | None = None
    """Those that compute this rank's requests: all of the engine; with own_requests its tensor- and pipeline-parallel
    ranks."""
    inner: tuple[ProcessGroup, ...] = field(default=(), repr=False)
    """Every group of several ranks within the replica."""
    own_requests: bool = False
    """Expert-parallel ranks have requests of their own (data-parallel attention): `dp` is the trainer's group, with
    these ranks."""

    tp_rank = property(lambda self: group_rank(self.tp))
    tp_size = property(lambda self: group_size(self.tp))
    pp_rank = property(lambda self: group_rank(self.pp))
    pp_size = property(lambda self: group_size(self.pp))
    ep_rank = property(lambda self: group_rank(self.ep))
    ep_size = property(lambda self: group_size(self.ep))
    dp_rank = property(lambda self: group_rank(self.dp))
    dp_size = property(lambda self: group_size(self.dp))
    cp_rank = property(lambda self: group_rank(self.cp))
    cp_size = property(lambda self: group_size(self.cp))
    data_rank = property(lambda self: group_rank(self.data))
    data_size = property(lambda self: group_size(self.data))
    engine_rank = property(lambda self: group_rank(self.engine))
    engine_size = property(lambda self: group_size(self.engine))

    @property
    def context_place(self) -> tuple[int, int]:
        """(number, how many there are) of the engines that context parallelism has next to each other, or of the parts
        of an engine that have requests of their own.

        Numbers differ between them and are the same on all ranks of one; the first is 0.
        """
        among, group = (self.ep, self.sharing) if self.own_requests else (self.cp, self.engine)
        if among is None:
            return 0, 1
        own = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
        places = [place for place, rank in enumerate(dist.get_process_group_ranks(among)) if rank in own]
        return places[0], among.size() // len(places)

    @property
    def is_leader(self) -> bool:
        """Whether requests are added on this rank."""
        return group_rank(self.sharing) == 0

    @property
    def shares_requests(self) -> bool:
        """Whether other ranks compute this rank's requests, too."""
        return self.sharing is not None

    @property
    def divides_experts_within_tp(self) -> bool:
        """Whether expert-parallel ranks are tensor-parallel ranks too, which have the same tokens."""
        return _within(self.ep, self.tp)

    def of_expert_ranks(self, values: Sequence[_T]) -> list[_T]:
        """values: by rank of the engine -> those of the ranks that divide experts with this one, in their order."""
        assert self.engine is not None and self.ep is not None
        ranks = dist.get_process_group_ranks(self.engine)
        return [values[ranks.index(rank)] for rank in dist.get_process_group_ranks(self.ep)]

    @property
    def stage_ranks(self) -> set[int]:
        """Global ranks that compute this rank's pipeline stage with it."""
        own = {dist.get_rank()} if dist.is_initialized() else {0}
        others = set() if self.pp is None else set(dist.get_process_group_ranks(self.pp)) - own
        found = [set(dist.get_process_group_ranks(one)) for one in (*self.inner, self.cp) if one is not None]
        return own.union(*(ranks for ranks in found if not ranks & others))

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @classmethod
    def of(cls, collection: Any, model: Any, *, own_requests: bool = False) -> ParallelGroups:
        """The groups of InferenceConfig.pg_collection and, where it lacks one, of the model's own collection.

        own_requests: see `dp_attention` of the config. parallel_state is never read. Raises ConfigError if the two
        contradict each other or a group is missing.
        """
        own = getattr(model, "pg_collection", None)
        found = {name: _wide(collection, name) or _wide(own, name) for name in (*_WIDE, "dp", "expt_dp", "cp")}
        for name in ("tp", "pp", "ep"):
            given = getattr(collection, name, None)
            if given is not None and getattr(own, name, None) is not None and given.size() != getattr(own, name).size():
                raise ConfigError(
                    f"pg_collection has {name}={given.size()}, the model was built with {name}="
                    f"{getattr(own, name).size()}; give the groups that the model was built with"
                )
        size = getattr(getattr(model, "config", None), "context_parallel_size", 1)
        if size != group_size(found["cp"]):
            raise ConfigError(
                f"the model's config has context_parallel_size={size}, pg_collection and the model's own groups have "
                f"cp={group_size(found['cp'])}; give the groups that the model was built with"
            )
        inner = tuple({id(group): group for name in _WIDE if (group := found[name]) is not None}.values())
        engine = _spanning(found)
        # For a trainer, ranks that divide experts are data-parallel ranks too; here they belong to one replica.
        replicas = found["dp"] if _within(found["tp_ep"], found["tp"]) else found["expt_dp"]
        data = found["dp"] or (found["ep"] if found["cp"] is None else None)
        if own_requests:
            replicas = data
        sharing = _spanning({name: found[name] for name in ("tp", "pp", "mp")}) if own_requests else engine
        parts = {name: found[name] for name in ("tp", "pp", "ep", "cp")}
        return cls(
            **parts, dp=replicas, data=data, engine=engine, sharing=sharing, inner=inner, own_requests=own_requests
        )

    def lockstep(self, *, timeout_s: float, give_up: Callable[[], bool] = lambda: True) -> Lockstep | LocalLockstep:
        """Link the engine's ranks. Every rank calls it. give_up: see `Heartbeat`."""
        if self.engine is None:
            return LocalLockstep()
        links = _links_over(self.engine, timeout_s)
        return Lockstep(links, timeout_s=timeout_s, give_up=give_up, members=self.engine_ranks)

    def sharing_lockstep(self, engine: Lockstep | LocalLockstep, *, timeout_s: float) -> Lockstep | LocalLockstep:
        """Link the ranks of `sharing`, where these are some of the engine's. Every rank of the engine calls it."""
        if self.sharing is None or self.engine is None or isinstance(engine, LocalLockstep):
            return LocalLockstep()
        every, own = (dist.get_process_group_ranks(group) for group in (self.engine, self.sharing))
        numbers = [every.index(rank) for rank in own]
        links = _links_over(self.sharing, timeout_s)
        return Lockstep(links, timeout_s=timeout_s, within=engine, ranks=numbers, members=every)

    @property
    def engine_ranks(self) -> list[int]:
        """Global ranks of this engine."""
        if self.engine is None:
            return [torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]
        return torch.distributed.get_process_group_ranks(self.engine)

    def context_ranks(self) -> list[int]:
        """`engine_ranks`, and those of the engines that context parallelism has next to it. Every rank calls it."""
        return self.engine_ranks if self.cp is None else list(self._gather_with_context(""))

    def context_lockstep(self, ranks: Sequence[int], *, timeout_s: float, give_up: Callable[[], bool]) -> Lockstep:
        """Link `context_ranks`. They wait for each other's rollouts as long as all live. Every rank calls it."""
        links = connect(
            ranks.index(torch.distributed.get_rank()),
            len(ranks),
            lambda text: list(self._gather_with_context(text).values()),
            timeout_s=timeout_s,
            hosts=list(own_addresses()),
        )
        return Lockstep(links, timeout_s=timeout_s, give_up=give_up, patient=True, members=ranks)

    def _gather_with_context(self, text: str) -> dict[int, str]:
        """The texts of the engine's ranks and of those beside it, by global rank."""
        assert self.cp is not None
        named = {torch.distributed.get_rank(): text}
        if self.engine is not None:
            named = dict(zip(torch.distributed.get_process_group_ranks(self.engine), self._gather(text), strict=True))
        found: dict[str, str] = {}
        for part in _texts_of(self.cp, json.dumps(named), 2 * _TEXT_BYTES * self.engine_size):
            found |= json.loads(part)
        return {int(rank): found[rank] for rank in sorted(found, key=int)}

    def _gather(self, text: str) -> list[str]:
        """The texts of all ranks, over the engine's group."""
        assert self.engine is not None
        return _texts_of(self.engine, text, _TEXT_BYTES)


def lockstep_over(group: ProcessGroup, *, timeout_s: float) -> Lockstep:
    """Link the ranks of a group; a rank that lives may be late. Every rank of it calls this."""
    members = dist.get_process_group_ranks(group)
    return Lockstep(_links_over(group, timeout_s), timeout_s=timeout_s, patient=True, members=members)


def _links_over(group: ProcessGroup, timeout_s: float) -> RankLinks:
    gather = partial(_texts_of, group, limit=_TEXT_BYTES)
    return connect(group.rank(), group.size(), gather, timeout_s=timeout_s, hosts=list(own_addresses()))


class TimeLimit:
    """Between `enter` and `leave`, collectives of an engine's groups wait at most `timeout_s`.

    The groups are the trainer's: outside they have the trainer's timeouts.
    """

    def __init__(self, groups: Iterable[ProcessGroup], timeout_s: float) -> None:
        self._usual = tuple(groups)
        self._limit = timedelta(seconds=timeout_s)
        self._groups = self._usual
        self._before: list[timedelta] | None = None
        self._lock = threading.Lock()
        self.was_cut = False
        """Collectives were aborted: their results on the device are undefined."""

    def enter(self, groups: Iterable[ProcessGroup] | None = None) -> bool:
        """groups: in place of the engine's -> whether this call has begun the limit."""
        if has_begun := self._before is None:
            self._groups = self._usual if groups is None else tuple(groups)
            before = [_backend(group).options._timeout for group in self._groups]
            for group in self._groups:
                _backend(group)._set_default_timeout(self._limit)
            self._before = before
        return has_begun

    def leave(self) -> None:
        if self._before is not None:
            with self._lock:
                before, self._before = self._before, None
            for group, limit in zip(self._groups, before, strict=True):
                _backend(group)._set_default_timeout(limit)

    def cut(self) -> bool:
        """Abort running collectives for good, so that threads waiting for them go on -> False outside `enter`/`leave`.

        Called from another thread: the one that launched an NCCL collective may be waiting for the device, where no
        timeout reaches it, until NCCL's watchdog ends the process. gloo's collectives end at the timeout, or when the
        other process ends. Not yet run on a GPU.
        """
        with self._lock:
            if self._before is None:
                return False
            backends = [_backend(group) for group in self._groups if device_of(group).type == "cuda"]
            self.was_cut = bool(backends)
        if backends:
            log.error("ending the collectives of %d process groups: a rank is gone", len(backends))
            # Kernels end at once, but a communicator lives until the last CUDA graph with it is destroyed.
            threading.Thread(target=_abort, args=(backends,), daemon=True, name="megatron_infer abort").start()
        return True


def groups_among(ranks: Collection[int]) -> Iterator[ProcessGroup]:
    """Every group of several of these ranks that this process has, a trainer's own too.

    torch keeps one number for all groups that this process is not in, with the ranks of the last of these groups.
    """
    for group, found in dist.distributed_c10d._world.pg_group_ranks.items():
        if group is dist.GroupMember.NON_GROUP_MEMBER or len(found) < 2 or not found.keys() <= set(ranks):
            continue
        if _backend(group).name() in ("gloo", "nccl"):
            yield group


def _texts_of(group: ProcessGroup, text: str, limit: int) -> list[str]:
    """The texts of all ranks of a group, each of fewer than `limit` bytes."""
    body = text.encode()
    assert len(body) < limit, f"{len(body)} bytes"
    mine = torch.tensor([*body, *bytes(limit - len(body))], dtype=torch.uint8, device=device_of(group))
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine, group=group)
    return [bytes(part.tolist()).rstrip(b"\0").decode() for part in parts]


def build_groups(
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    backend: str | None = None,
    timeout_s: float = 600.0,
) -> Any:
    """A ProcessGroupCollection over all processes of a torchrun script; the remaining dimension is data parallel.

    Initializes torch.distributed (backend None: nccl with CUDA, else gloo) and megatron-core's groups, unless they are.
    Raises ConfigError when the world is not a multiple of the product.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not torch.distributed.is_initialized():
        backend = backend or ("nccl" if torch.accelerator.is_available() else "gloo")
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ:  # no launcher: a single process needs no port
            alone = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **alone)
    world = torch.distributed.get_world_size()
    check_world(world, tensor_parallel, pipeline_parallel, expert_parallel)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=pipeline_parallel,
            expert_model_parallel_size=expert_parallel,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def collection_of(**groups: ProcessGroup | None) -> Any:
    """megatron-core's ProcessGroupCollection of these groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection(**groups)


def check_world(world: int, tensor_parallel: int, pipeline_parallel: int, expert_parallel: int) -> None:
    """Raise ConfigError unless `world` is a multiple of the ranks of a replica."""
    for name, value in (("tp", tensor_parallel), ("pp", pipeline_parallel), ("ep", expert_parallel)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
    ranks = tensor_parallel * pipeline_parallel * expert_parallel
    if world % ranks:
        raise ConfigError(
            f"{world} process{'es' * (world > 1)}, but tp x pp x ep = {tensor_parallel} x {pipeline_parallel} x "
            f"{expert_parallel} = {ranks}; start a multiple of {ranks} (torchrun --nproc-per-node {ranks})"
        )


def _spanning(found: dict[str, ProcessGroup | None]) -> ProcessGroup | None:
    """The group of all ranks of the replica."""
    wide = {name: group for name in ("tp", "pp", "ep", "tp_ep") if (group := found.get(name)) is not None}
    for group in sorted(filter(None, (found.get(name) for name in _WIDE)), key=group_size):
        if all(_within(part, group) for part in wide.values()):
            return group
    if wide:
        raise ConfigError(
            f"pg_collection has {' and '.join(wide)} of several ranks but no group of all of them; set "
            "pg_collection.mp, or pg_collection.tp_ep_pp where experts are divided (tensor-parallel ranks that no "
            "group of expert-parallel ones holds, or that hold a part of one, are not supported)"
        )
    return None


def _within(part: ProcessGroup | None, whole: ProcessGroup | None) -> bool:
    """Whether all ranks of the first group are in the second. None: a group of one rank."""
    if part is None or part is whole:
        return True
    return whole is not None and set(dist.get_process_group_ranks(part)) <= set(dist.get_process_group_ranks(whole))


def _wide(collection: Any, name: str) -> Any:
    group = getattr(collection, name, None)
    return group if hasattr(group, "size") and group.size() > 1 else None


def _backend(group: ProcessGroup) -> Any:
    return group._get_backend(device_of(group))


def _abort(backends: Sequence[Any]) -> None:
    """Abort all NCCL communicators as one group: one after the other they may wait for each other."""
    backends[0]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        backends[0]._group_end()


def own_addresses() -> Iterable[str]:
    """Addresses of this machine: first the one on the route to the rendezvous store, then those of its name."""
    store = torch.distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    if host:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing: it only finds the route
                yield probe.getsockname()[0]
        except OSError:
            pass  # no route by IPv4
    try:
        yield from {item[4][0] for item in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)}
    except OSError:
        return


def num_micro_batches_of(groups: ParallelGroups, config: InferenceConfig) -> int:
    """Micro-batches in flight: one per pipeline stage, and one more where host work overlaps with all of them."""
    if groups.pp is None:
        return 1
    if config.max_steps_in_flight > 1:
        raise ConfigError(
            f"max_steps_in_flight is {config.max_steps_in_flight}, the {groups.pp_size} pipeline stages keep "
            f"{groups.pp_size + bool(config.overlap)} steps in flight by themselves; leave it at 1"
        )
    return groups.pp_size + bool(config.overlap)
