"""How far generation may run ahead of training: which groups may begin, and which a training step may consume.

With lag L and P groups a step, at most (L + 1) * P groups are begun and not consumed. Training step t consumes only
groups that were begun during steps t - L to t:

    L = 1, P = 2    step 0: begins a b c d, consumes two of them      c d left, due at step 1 at the latest
                    step 1: begins e f,     consumes c d              e f left, due at step 2

The lag may change between steps: a group keeps the limit that it was begun with.

Source: megatron/rl's generation lag; its automatic value is `automatic_lag`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from megatron_infer.errors import ConfigError, unknown_name


class Granularity(str, Enum):
    """How many groups are begun or consumed at once. A group's samples are never separated: they are one request.

    Megatron-RL's letters G and B are taken too; its R, single rollouts, has no counterpart.
    """

    GROUP = "group"
    BATCH = "batch"

    @classmethod
    def _missing_(cls, value: object) -> Granularity | None:
        return {"G": cls.GROUP, "B": cls.BATCH}.get(str(value))


def automatic_lag(*, max_requests: int, samples_per_group: int, groups_per_step: int, data_parallel: int = 1) -> int:
    """The lag at which the groups in flight just fill the engines: DP * max_requests / (G * P) - 1, at least 0.

    Example: 2 engines of 128 requests, 8 samples, 16 groups a step: 256 / 128 - 1 = 1.
    """
    for name, value in (
        ("max_requests", max_requests),
        ("samples_per_group", samples_per_group),
        ("groups_per_step", groups_per_step),
        ("data_parallel", data_parallel),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be 1 or more")
    return max(0, data_parallel * max_requests // (samples_per_group * groups_per_step) - 1)


@dataclass(slots=True)
class OutstandingGroup:
    """A group that has been begun and not consumed."""

    begun: int
    """The training step during which it was begun."""
    due: int
    """The last training step that may consume it."""
    order: int
    batch: int
    """The training step that is to consume it, if whole batches are consumed."""
    finished: bool = False


class RolloutLag:
    """Bookkeeping of begun groups, by id; knows neither engine nor samples."""

    def __init__(
        self,
        lag: int,
        *,
        groups_per_step: int,
        submission: Granularity | str = Granularity.GROUP,
        consumption: Granularity | str = Granularity.GROUP,
    ) -> None:
        """submission "batch": begin groups only when a whole batch may begin. consumption "group": a step takes any
        finished groups, as long as no other group becomes too old; "batch": those begun together, in order."""
        if not isinstance(lag, int) or isinstance(lag, bool) or lag < 0:
            raise ConfigError(f"lag is {lag!r}, it must be an integer of 0 (no group outlives a step) or more")
        if groups_per_step < 1:
            raise ConfigError(f"groups_per_step is {groups_per_step}, it must be 1 or more")
        self.lag, self.groups_per_step = lag, groups_per_step
        self.submission = _granularity("submission", submission)
        self.consumption = _granularity("consumption", consumption)
        self.step = 0
        """The next training step."""
        self.ages: list[int] = []
        """Training steps between the begin of each group and its consumption, for the latest step."""
        self._outstanding: dict[str, OutstandingGroup] = {}
        self._num_begun = 0
        self._short_batches: list[int] = []
        """Batches that lost a group."""

    @property
    def num_outstanding(self) -> int:
        """Groups begun and not consumed."""
        return len(self._outstanding)

    def room(self) -> int:
        """How many groups may begin now."""
        room = (self.lag + 1) * self.groups_per_step - len(self._outstanding)
        if self.consumption is Granularity.BATCH:  # what a batch has lost is replaced, also where the lag has fallen
            room = max(room, len(self._short_batches))
        room = max(room, 0)
        if self.submission is Granularity.GROUP:
            return room
        # A batch that lost a group, or was begun in part, is completed at once.
        missing = min(room, len(self._short_batches) + -self._num_begun % self.groups_per_step)
        whole = missing + (room - missing) // self.groups_per_step * self.groups_per_step
        return max(whole, self.groups_per_step - len(self._outstanding))  # a step waits for at least its own groups

    def begin(self, group_id: str) -> None:
        """A group was submitted."""
        assert group_id not in self._outstanding, f"group {group_id} has begun already"
        assert self._short_batches or len(self._outstanding) < (self.lag + 1) * self.groups_per_step, (
            f"group {group_id} begins although {len(self._outstanding)} are outstanding"
        )
        if self._short_batches:
            batch = self._short_batches.pop(0)
        else:
            batch, self._num_begun = self._num_begun // self.groups_per_step, self._num_begun + 1
        order = max((group.order for group in self._outstanding.values()), default=-1) + 1
        self._outstanding[group_id] = OutstandingGroup(self.step, self.step + self.lag, order, batch)

    def finish(self, group_id: str) -> None:
        self._outstanding[group_id].finished = True

    def drop(self, group_id: str) -> None:
        """A group will not be consumed; another may begin in its place."""
        self._short_batches.append(self._outstanding.pop(group_id).batch)
        self._short_batches.sort()

    def take(self) -> list[str] | None:
        """The groups that the training step consumes, oldest first; None while it has to wait for a group."""
        chosen = self._next_batch() if self.consumption is Granularity.BATCH else self._finished_groups()
        if chosen is None:
            return None
        self.ages = [self.step - self._outstanding.pop(group_id).begun for group_id in chosen]
        if self.consumption is Granularity.GROUP:
            self._short_batches = []  # batches do not matter
        self.step += 1
        return chosen

    def _next_batch(self) -> list[str] | None:
        batch = [group_id for group_id, group in self._outstanding.items() if group.batch == self.step]
        if len(batch) < self.groups_per_step or not all(self._outstanding[group_id].finished for group_id in batch):
            return None
        return sorted(batch, key=self._age)

    def _finished_groups(self) -> list[str] | None:
        """Finished groups, oldest first; None if too many of the others would then be due at the same steps."""
        finished = sorted((name for name, group in self._outstanding.items() if group.finished), key=self._age)
        chosen = finished[: self.groups_per_step]
        if len(chosen) < self.groups_per_step:
            return None
        deadlines = Counter(group.due for name, group in self._outstanding.items() if name not in chosen)
        due = 0
        for deadline in sorted(deadlines):
            due += deadlines[deadline]
            if due > (deadline - self.step) * self.groups_per_step:
                return None
        return chosen

    def _age(self, group_id: str) -> tuple[int, int]:
        group = self._outstanding[group_id]
        return group.begun, group.order


def _granularity(name: str, value: Granularity | str) -> Granularity:
    known = [choice.value for choice in Granularity]
    try:
        return Granularity(value)
    except ValueError:
        text = f"{name}: {unknown_name('value', str(value), known)}; one of {', '.join(known)}"
        raise ConfigError(f"{text} (Megatron-RL's B and G; samples of a group are one request)") from None
