"""The ranks of one engine, for code that must do the same on all of them; a process alone is a group of one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_infer.distributed.collective_errors import is_of_collective, is_shared, mark_shared
from megatron_infer.distributed.groups import ParallelGroups, TimeLimit, groups_among, lockstep_over, own_addresses
from megatron_infer.distributed.lockstep import ALONE_S, LocalLockstep, Lockstep
from megatron_infer.distributed.peer_reports import PeerReports, Report
from megatron_infer.errors import OtherRankFailed, RankFailure

BLAME_S = 3.0
"""Seconds in which the end of a process is noticed, after a collective with it has failed."""
_SLICE_S = 0.3
POLL_S = 0.02
_RAISED: Counter[str] = Counter()
"""Calls of `whole_stage_raises` in this process, by the ranks of the stage: engines of other layouts count apart."""


class RankGroup:
    """Decides once for all ranks of an engine."""

    def __init__(
        self,
        groups: ParallelGroups,
        *,
        timeout_s: float,
        context_ranks: list[int] | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        """Links the ranks; every rank of the engine calls it. context_ranks: see `with_context_ranks`. lockstep: of
        these ranks, linked already."""
        self.groups = groups
        self.ranks = context_ranks or groups.engine_ranks
        self._time_limit = TimeLimit(groups.inner, timeout_s)
        how: dict[str, Any] = {"timeout_s": timeout_s, "give_up": self._time_limit.cut}
        self.lockstep: Lockstep | LocalLockstep = lockstep or (
            groups.lockstep(**how) if context_ranks is None else groups.context_lockstep(context_ranks, **how)
        )
        self.sharing = self.lockstep
        """Lockstep of the ranks that compute the same requests."""
        self._timeout_s = timeout_s
        self._reports: PeerReports | None = None

    def divide_requests(self, groups: ParallelGroups) -> None:
        """Expert-parallel ranks have requests of their own from now on. Every rank calls it. groups: with these."""
        self.groups = groups
        self.sharing = groups.sharing_lockstep(self.lockstep, timeout_s=self._timeout_s)

    def with_context_ranks(self, *, timeout_s: float) -> RankGroup:
        """These ranks and those of the engines that context parallelism has beside theirs. Every rank calls it."""
        ranks = self.groups.context_ranks()
        return self if len(ranks) == self.size else RankGroup(self.groups, timeout_s=timeout_s, context_ranks=ranks)

    def context_parts(self, *, timeout_s: float) -> RankGroup | None:
        """With `dp_attention`, the ranks of this part of the engine and of those that context parallelism has next to
        it: a trainer gives all of them the same prompts. Every rank calls it. None: there are no such parts."""
        if self.groups.cp is None or not self.groups.own_requests:
            return None
        parts = replace(self.groups, engine=self.groups.sharing)
        return RankGroup(parts, timeout_s=timeout_s, context_ranks=parts.context_ranks())

    def with_ranks(self, group: Any, *, timeout_s: float) -> RankGroup:
        """All ranks of a process group, these and those of engines next to theirs; None: only these. Every rank of the
        group calls it. They wait for each other's rollouts as long as all live."""
        if group is None:
            return self
        ranks, lockstep = dist.get_process_group_ranks(group), lockstep_over(group, timeout_s=timeout_s)
        return RankGroup(self.groups, timeout_s=timeout_s, context_ranks=ranks, lockstep=lockstep)

    @property
    def size(self) -> int:
        """Ranks of the engine."""
        return self.lockstep.size

    def together(self, what: str, *, has_collectives: bool = False) -> AbstractContextManager[None]:
        """The body succeeds on every rank or fails on every rank (see `Lockstep.together`)."""
        return self.lockstep.together(what, has_collectives=has_collectives)

    def any_rank(self, flag: bool) -> bool:
        return self.lockstep.agree(flag)

    def first_text(self, what: str, text: str | None) -> str | None:
        """The text of the first rank that has one, with the rank's number unless it is the leader; None: no rank has.

        text: None on a rank that has none.
        """
        texts = enumerate(self.lockstep.gather(what, text or ""))
        return next((found if rank == 0 else f"rank {rank}: {found}" for rank, found in texts if found), None)

    def from_leader(self, what: str, value: Any) -> Any:
        """The leader's value on every rank, as JSON gives it back."""
        return self.lockstep.meet(what, arguments=value, compare=False).arguments

    def check_alive(self, *, goodbyes: bool = True) -> None:
        """Raise RankFailure if another rank is gone. goodbyes: also one that has closed its engine."""
        self.lockstep.check_alive(goodbyes=goodbyes)

    def check_collectives(self) -> None:
        """Raise RankFailure if collectives were ended because a rank is gone: what they left on the device is void."""
        if self._time_limit.was_cut:
            self.check_alive()

    def limit_collectives(self, limited: bool) -> None:
        """Whether collectives of the model's groups wait no longer than the engine's ranks wait for each other."""
        if limited:
            self._time_limit.enter()
        else:
            self._time_limit.leave()

    # ------------------------------------------------------------------ a trainer's calls

    @contextmanager
    def computing(self, phase: str) -> Iterator[None]:
        """Every rank computes the block, with collectives that wait no longer than these ranks wait for each other.

        Raises RankFailure where a rank raises alone or ends: the others wait for that rank in a collective. An error
        that all raise is raised as it is, and they go on. phase: for the errors of all ranks.
        """
        self.lockstep.phase = phase
        started = time.perf_counter()
        with self.naming(phase):
            is_first = self._time_limit.enter(groups_among(self.ranks) if self.size > 1 else ())
            try:
                yield
            except BaseException as error:
                if not is_shared(error):
                    self._tell(phase, error)
                    of_collective = is_of_collective(error)
                    if of_collective:
                        self._blame(error)
                    self.lockstep.raised(error, time.perf_counter() - started, of_collective=of_collective)
                    mark_shared(error)
                raise
            finally:
                if is_first:
                    self._time_limit.leave()

    @contextmanager
    def naming(self, phase: str) -> Iterator[None]:
        """Where the block raises because another rank of the job has failed, that is RankFailure, which names the rank;
        another error is reported to the other ranks."""
        if self._reports is not None:
            self._reports.tell(None)
            self._reports.meet()
        try:
            yield
        except BaseException as error:
            if is_of_collective(error) or isinstance(error, RankFailure):
                self._blame(error)
            self._tell(phase, error)
            raise

    def whole_stage_raises(self) -> bool:
        """This rank has raised between two collectives of its pipeline stage -> whether all ranks of the stage have, in
        as many calls of this: else another one waits in the collective, and must meet this rank in no later one."""
        ranks = sorted(self.groups.stage_ranks & set(self.ranks))
        if len(ranks) == 1:
            return True
        stage = ",".join(map(str, ranks))
        _RAISED[stage] += 1
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + ALONE_S
        key = f"megatron_infer/raised/{stage}/{_RAISED[stage]}/{{}}".format
        store.set(key(dist.get_rank()), "")
        while not (all_have := store.check([key(rank) for rank in ranks])):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        return bool(all_have)

    def join_job(self) -> None:
        """Report to the job's other ranks, whose trainers they compute with: data-parallel replicas."""
        if dist.is_initialized() and dist.get_world_size() > self.size:
            self._reports = PeerReports(next(iter(own_addresses()), "127.0.0.1"), self.ranks)

    def _blame(self, error: BaseException) -> None:
        """Raise RankFailure where a rank that has failed is found."""
        if self._reports is None and (self.size == 1 or isinstance(error, RankFailure)):
            return
        if isinstance(error, RankFailure) and error.is_of_job:
            return
        is_own = isinstance(error, RankFailure) and self._in_world(error) == self.ranks[self.lockstep.rank]
        if is_own and not is_of_collective(error):
            return
        found = None
        deadline = time.monotonic() + BLAME_S
        while found is None and time.monotonic() < deadline:
            if not isinstance(error, RankFailure):
                self.check_alive()
            if self._reports is not None:
                found = self._reports.find()
            time.sleep(_SLICE_S)
        if found is not None:
            assert self._reports is not None
            self._reports.tell(found)
            raise RankFailure(found.rank, found.phase or self.lockstep.phase, found.reason, is_of_job=True) from error

    def _in_world(self, failure: RankFailure) -> int:
        """The rank that failed."""
        return self.ranks[failure.rank] if failure.job_rank is None else failure.job_rank

    def _tell(self, phase: str, error: BaseException) -> None:
        """Report an error of this rank, or of another one that it names, to the job's other ranks."""
        if self._reports is None or self._reports.has_told:
            return
        if isinstance(error, RankFailure):
            self._reports.tell(Report(self._in_world(error), error.phase, error.reason))
        elif isinstance(error, OtherRankFailed) and error.ranks and max(error.ranks) < self.size:
            self._reports.tell(Report(self.ranks[error.ranks[0]], phase, str(error)))
        elif not is_of_collective(error):
            self._reports.tell(Report(self._reports.rank, phase, f"{type(error).__name__}: {error}"))
