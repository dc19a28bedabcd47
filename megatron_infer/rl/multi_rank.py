"""Rollouts on an engine of several ranks: each rank has the groups of its own prompts, all step the engine together.

exchange()   every rank's prompts are compared: a rank's own, or shared with the rank that is their source
step()       the leader steps the engine; the others take part, and queue or abort their own groups with that
deliver()    a source sends its readers which groups are theirs; their outputs are on every rank already
end()        a rank takes part until the calls of all have ended
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_infer.engine.command_relay import ROLLOUT
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InvalidPrompt, LockstepError, PromptsDiffer, RankFailure, RequestError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl import sample_file
from megatron_infer.rl.samples import RolloutGroup, group_of

if TYPE_CHECKING:
    from megatron_infer.rl.group_tracker import GroupTracker

PREFIX = "rollout/"
"""Begins the ids of the engine's requests that are groups; the rank follows unless it is the leader."""


def source_of(request_id: str) -> int | None:
    """The rank that began a group, by its id; None for a request that is no group."""
    if not request_id.startswith(PREFIX):
        return None
    rank, slash, _ = request_id.removeprefix(PREFIX).partition("/")
    return int(rank) if slash and rank.isdigit() else 0


@dataclass(slots=True, eq=False)
class Shares:
    """Whose prompts a call of this rank is served with, and what the source has sent of them."""

    source: int = 0
    readers: tuple[int, ...] = ()
    """Ranks that share this rank's prompts."""
    num_sources: int = 1
    """Ranks with prompts of their own, in the engine."""
    received: deque[RolloutGroup] = field(default_factory=deque)
    has_ended: bool = False
    """The source's call."""
    error: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """Arguments of `stats_of` that the source knows."""

    def again(self) -> Shares:
        """For another call with the same prompts."""
        return Shares(self.source, self.readers, self.num_sources)


class RolloutRanks:
    """One rank's side of rollouts; in an engine of one rank it steps the engine and calls on_delivered."""

    def __init__(
        self, engine: DynamicInferenceEngine, *, on_delivered: Callable[[Sequence[RolloutGroup]], None] | None = None
    ) -> None:
        self._engine, self._relay, self._on_delivered = engine, engine.relay, on_delivered
        self.rank, self.size = engine.relay.rank, engine.relay.size
        """Of the ranks that share the engine's requests."""
        self._shares = Shares(self.rank)
        self._readers: dict[str, tuple[int, ...]] = {}
        """Of this rank's groups that other ranks share, until they are delivered or gone."""
        self._outputs: dict[str, RequestOutput] = {}
        """Finished groups of other ranks that these share with this one and have not delivered."""
        self._news: list[RequestOutput] = []
        self._has_ended = False
        """On ranks other than the leader: the leader has ended the call."""
        self._error = ""
        self._announced = False
        self._ended: set[int] = set()
        """Ranks whose groups of this call have all come, or will not."""
        self._calls: dict[str, Callable[[Any], Any]] = {}

    @property
    def is_leader(self) -> bool:
        return self._relay.is_leader

    # ------------------------------------------------------------------ the beginning of a call
    def start(self, shares: Shares) -> None:
        """A call begins, or goes on, with these shares."""
        self._take_received()  # what the last round of the call before has brought
        self._shares, self._has_ended, self._error = shares, False, ""
        self._announced, self._ended = False, set()
        if self.size > 1:
            self._calls = self._engine.followed() | {"step()": self._on_step, ROLLOUT: self._on_rollout}

    def exchange(self, read: Callable[[], Any], params: Any) -> tuple[Shares, Any]:
        """Compare the prompts of all ranks' calls -> (this call's shares, what `read` gave): see `CommandRelay`."""
        self.start(Shares(self.rank))
        sources, given = self._relay.exchange(read, params)
        readers = tuple(rank for rank, one in enumerate(sources) if one == self.rank and rank != self.rank)
        source = sources[self.rank]
        assert source is not None
        self.start(Shares(source, readers, len(set(sources) - {None})))
        return self._shares, given

    def is_own(self, shares: Shares) -> bool:
        """Whether this rank begins the groups of the call."""
        return shares.source == self.rank

    def name(self, number: str) -> str:
        """The id of a group that this rank begins."""
        return f"{PREFIX}{self.rank}/{number}" if self.rank else PREFIX + number

    def share(self, group_id: str, shares: Shares) -> None:
        """The group that was queued last has the readers of its call."""
        if shares.readers:
            self._readers[group_id] = shares.readers
            self._relay.outbox.address(shares.readers)

    def check(self, shares: Shares, info: dict[str, Any]) -> None:
        """Raise InvalidPrompt for a prompt's data that cannot be sent to the readers."""
        if shares.readers:
            try:
                json.dumps(info)
            except (TypeError, ValueError) as error:
                raise InvalidPrompt(
                    f"the info of a prompt ({', '.join(map(str, info))}) is no JSON, and rank "
                    f"{', '.join(map(str, shares.readers))} shares the prompt: {error}; give ids or text in its place"
                ) from None

    # ------------------------------------------------------------------ steps
    def step(self, *, has_groups: bool) -> list[RequestOutput]:
        """One step of the engine -> outputs of this rank's groups, and of requests that are no groups.

        On ranks other than the leader: the leader's next call, with no output if that is no step. has_groups: whether
        this rank has groups in flight.
        """
        if self._relay.is_leader:
            self._news = self._engine.step()
        else:
            if self._has_ended:
                raise RequestError(f"rank 0 has ended the rollout{self._error and f': {self._error}'}")
            self._follow(wants_steps=has_groups or self.is_own(self._shares))
            if self._error:
                raise RequestError(f"rank 0: {self._error}")
        self._take_received()
        return self._take_news()

    def _follow(self, *, wants_steps: bool) -> None:
        self._relay.wants_steps = wants_steps
        try:
            self._relay.follow_once(self._calls, until="")
        finally:
            self._relay.wants_steps = False

    def _on_step(self, among: Any) -> None:
        self._news = self._engine.step()

    def _on_rollout(self, given: dict[str, Any]) -> None:
        met = self._relay.meet(ROLLOUT)
        if given["end"] and (given["error"] or not met.wants_steps):
            self._has_ended, self._error = True, given["error"]

    def _take_news(self) -> list[RequestOutput]:
        own = []
        for output in self._news:
            if source_of(output.request_id) in (None, self.rank):
                own.append(output)
            elif output.request_id in self._relay.addressed:
                self._outputs[output.request_id] = output
        self._news = []
        return own

    # ------------------------------------------------------------------ groups that ranks share
    def deliver(self, groups: Sequence[RolloutGroup], *, whole: Collection[str], shares: Shares) -> bool:
        """The caller has these groups of this rank: their readers have them too -> whether they get them with the next
        call of all ranks; else they have them now.

        whole: ids of groups that the readers have no output of; they are sent whole.
        """
        self.delivered(groups)
        shared = [(group, to) for group in groups if (to := self._readers_of(group, whole, shares))]
        for to in {to for _, to in shared}:
            sent = [
                [
                    group.group_id,
                    group.index,
                    group.info,
                    group.begun_version,
                    _encoded(group) if group.group_id in whole else None,
                ]
                for group, readers in shared
                if readers == to
            ]
            self._relay.outbox.deliver(to, sent)
        if not shared or not self._relay.is_leader:
            return bool(shared)
        self._relay.meet(ROLLOUT, {"end": False, "error": ""}, compare=False)
        return False

    def _readers_of(self, group: RolloutGroup, whole: Collection[str], shares: Shares) -> tuple[int, ...]:
        return self._readers.pop(group.group_id, shares.readers if group.group_id in whole else ())

    def delivered(self, groups: Sequence[RolloutGroup]) -> None:
        """The caller has these groups, which this rank has begun."""
        if self._on_delivered is not None:
            self._on_delivered(groups)

    def _take_received(self) -> None:
        """Take in what other ranks have sent."""
        received, self._relay.received = self._relay.received, []
        shares = self._shares
        for given in received:
            for group_id, index, info, version, encoded in given["groups"]:
                output = self._forget(group_id)
                if encoded is not None:
                    shares.received.append(sample_file.decode(base64.b85decode(encoded))[0])
                elif output is not None:
                    shares.received.append(group_of(output, index=index, info=info, begun_version=version))
            for group_id in given.get("gone", ()):
                self._forget(group_id)
            if not given.get("end"):
                continue
            self._ended.add(given.get("rank", 0))
            if given.get("rank", 0) == shares.source:
                shares.has_ended, shares.error, shares.figures = True, given["error"], given["figures"]

    def _forget(self, group_id: str) -> RequestOutput | None:
        self._relay.addressed.discard(group_id)
        return self._outputs.pop(group_id, None)

    def waits(self, shares: Shares, *, for_all: bool) -> bool:
        """Whether groups of other ranks may still come. for_all: also those that an earlier call has shared."""
        if not self.is_own(shares) and not shares.has_ended:
            return True
        return for_all and any(source_of(group_id) not in self._ended for group_id in self._relay.addressed)

    # ------------------------------------------------------------------ the end of a call
    def announce(
        self,
        shares: Shares,
        failure: BaseException | None,
        tracker: GroupTracker,
        figures: dict[str, Any] | None = None,
    ) -> None:
        """The readers have all groups of this rank that its call gives. Once a call."""
        readers = {rank for to in self._readers.values() for rank in to} | {*shares.readers}
        if readers and not self._announced:
            live = tracker.live
            gone = [group_id for group_id in self._readers if group_id not in live]
            self._readers = {group_id: to for group_id, to in self._readers.items() if group_id in live}
            how = {"error": described(failure), "figures": figures or {}, "gone": gone}
            self._relay.outbox.deliver(readers, [], end=True, **how)
        self._announced = True

    def end(
        self,
        shares: Shares,
        failure: BaseException | None,
        tracker: GroupTracker,
        figures: dict[str, Any] | None = None,
    ) -> None:
        """This rank's call has ended: take part until those of the other ranks have.

        figures: for the readers' statistics. The error of a rank is its own, and that of ranks that share its prompts.
        An interrupt of the leader ends the calls of all ranks.
        """
        left = isinstance(failure, LockstepError | RankFailure) and not isinstance(failure, PromptsDiffer)
        differ: PromptsDiffer | None = None
        try:
            if self.size > 1 and not left:
                self.announce(shares, failure, tracker, figures)
                differ = self._until_all_end(failure, tracker)
        finally:
            tracker.return_other_outputs()
            if not left:
                self._engine.serve_others()
        if differ is not None and failure is None:
            raise differ

    def _until_all_end(self, failure: BaseException | None, tracker: GroupTracker) -> PromptsDiffer | None:
        """Steps along -> what another rank's prompts differed in meanwhile: the others go on to their ends."""
        differ: PromptsDiffer | None = None
        while not self._has_ended:
            try:
                if self._relay.is_leader:
                    stops = isinstance(failure, KeyboardInterrupt | SystemExit)
                    self._lead_to_end(described(failure) if stops else "", tracker)
                    break
                self._follow(wants_steps=False)
                self._take_received()
                tracker.take(self._take_news())
            except PromptsDiffer as error:
                differ = error
        return differ

    def _lead_to_end(self, error: str, tracker: GroupTracker) -> None:
        """On the leader: step for the other ranks until none of them wants more. error: ends their calls at once."""
        try:
            while not error:
                tracker.drain()
                if not self._relay.meet(ROLLOUT, {"end": True, "error": ""}, compare=False).wants_steps:
                    return
                tracker.step()
                while self._relay.others_want_steps:
                    tracker.step()
        except (LockstepError, RankFailure):
            raise
        except BaseException as stopped:
            error = described(stopped)
            raise
        finally:
            if error:
                self._relay.meet(ROLLOUT, {"end": True, "error": error}, compare=False)


def described(failure: BaseException | None) -> str:
    """An error for other ranks; "" for none, and for an iterator that was closed early."""
    if failure is None or isinstance(failure, GeneratorExit):
        return ""
    return f"{type(failure).__name__}: {failure}"


def _encoded(group: RolloutGroup) -> str:
    return base64.b85encode(sample_file.encode([group])).decode()
