"""The ranks of one engine as its parts see them; for a process alone every question has its own answer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_infer.comm.groups import ParallelGroups, TimeLimit
from megatron_infer.comm.lockstep import Lockstep


class RankGroup:
    """What is decided once for all ranks."""

    def __init__(self, groups: ParallelGroups, *, timeout_s: float) -> None:
        """Links the ranks; every rank of the engine calls it."""
        self.groups = groups
        self._time_limit = TimeLimit(groups.inner, timeout_s)
        self.lockstep: Lockstep | None = groups.lockstep(timeout_s=timeout_s, give_up=self._time_limit.cut)
        """None for a process alone."""

    def together(self, what: str) -> AbstractContextManager[None]:
        """The body happens on every rank or fails on every rank (see `Lockstep.together`)."""
        return nullcontext() if self.lockstep is None else self.lockstep.together(what)

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag if self.lockstep is None else self.lockstep.agree(flag)

    def first_word(self, what: str, text: str | None) -> str | None:
        """What the first rank that has something to say says; None when none has."""
        if self.lockstep is None:
            return text
        words = enumerate(self.lockstep.gather(what, text or ""))
        return next((word if rank == 0 else f"rank {rank}: {word}" for rank, word in words if word), None)

    def from_leader(self, what: str, value: Any) -> Any:
        """The leader's value, in what JSON makes of it."""
        return value if self.lockstep is None else self.lockstep.meet(what, [], arguments=value, mine=False).arguments

    def check_alive(self, *, goodbyes: bool = True) -> None:
        """Raise RankFailure if another rank is gone. goodbyes: also one that has closed its engine."""
        if self.lockstep is not None:
            self.lockstep.check_alive(goodbyes=goodbyes)

    def check_collectives(self) -> None:
        """Raise RankFailure if collectives were ended because a rank is gone: what the device holds means nothing."""
        if self._time_limit.was_cut:
            self.check_alive()

    def limit_collectives(self, limited: bool) -> None:
        """Whether collectives of the model's groups wait no longer than the engine's ranks do for each other."""
        if self.lockstep is None:
            return
        if limited:
            self._time_limit.enter()
        else:
            self._time_limit.leave()
