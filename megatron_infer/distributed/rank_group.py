"""The ranks of one engine, for code that must do the same on all of them; a process alone is a group of one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from megatron_infer.distributed.groups import ParallelGroups, TimeLimit, lockstep_over
from megatron_infer.distributed.lockstep import LocalLockstep, Lockstep


class RankGroup:
    """Decides once for all ranks of an engine."""

    def __init__(self, groups: ParallelGroups, *, timeout_s: float, lockstep: Lockstep | None = None) -> None:
        """Links the ranks; every rank of the engine calls it. lockstep: of these ranks and others, linked already."""
        self.groups = groups
        self._time_limit = TimeLimit(groups.inner, timeout_s)
        self.lockstep: Lockstep | LocalLockstep = lockstep or groups.lockstep(
            timeout_s=timeout_s, give_up=self._time_limit.cut
        )
        self.sharing = self.lockstep
        """Of the ranks that compute the same requests."""
        self._timeout_s = timeout_s

    def divide_requests(self, groups: ParallelGroups) -> None:
        """Expert-parallel ranks have requests of their own from now on. Every rank calls it. groups: with these."""
        self.groups = groups
        self.sharing = groups.sharing_lockstep(self.lockstep, timeout_s=self._timeout_s)

    def with_context_ranks(self, *, timeout_s: float) -> RankGroup:
        """These ranks and those of the engines that context parallelism has beside theirs. Every rank calls it."""
        lockstep = self.groups.context_lockstep(timeout_s=timeout_s)
        return self if lockstep is None else RankGroup(self.groups, timeout_s=timeout_s, lockstep=lockstep)

    def with_ranks(self, group: Any, *, timeout_s: float) -> RankGroup:
        """All ranks of a process group, these and those of engines beside theirs; None: only these. Every rank of the
        group calls it. They wait for each other's rollouts as long as all live."""
        if group is None:
            return self
        return RankGroup(self.groups, timeout_s=timeout_s, lockstep=lockstep_over(group, timeout_s=timeout_s))

    @property
    def size(self) -> int:
        """Ranks of the engine."""
        return self.lockstep.size

    def together(self, what: str) -> AbstractContextManager[None]:
        """The body succeeds on every rank or fails on every rank (see `Lockstep.together`)."""
        return self.lockstep.together(what)

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
