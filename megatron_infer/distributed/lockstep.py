"""The ranks of one engine in lockstep: each call that all of them make begins with a round over the leader (rank 0).

    other ranks --report: call, flag, digest, text, commands--> leader --answer, the same for all--> other ranks

One round trip per step. No tensor and no process group is involved.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.distributed.collective_errors import is_of_collective, mark_shared
from megatron_infer.distributed.heartbeat import Heartbeat
from megatron_infer.distributed.rank_links import RankLinks
from megatron_infer.distributed.wire import LinkClosed
from megatron_infer.errors import InferenceError, LockstepError, OtherRankFailed, PromptsDiffer, RankFailure
from megatron_infer.scheduler.step_plan import StepPlan

_M = TypeVar("_M")
ShapeOf = Callable[[StepPlan], GraphShape | None]
"""What a step is padded to; None: it is not padded."""
FOLLOW = "follow()"
FAILED_STEP = "a failed step"
PIECE_BYTES = 1 << 20
"""`collect` and `deal` send bytes in pieces of this size."""
SLICE_S = 0.2
"""A wait checks this often whether the other ranks are alive."""
ALONE_S = 10.0
"""Ranks whose part of a step raises the same report it within this time; a rank that raises alone is missed by others
that wait for it in a collective."""


class Meeting(NamedTuple):
    """The result of a round, the same on every rank."""

    call: str
    """The call that the leader makes."""
    commands: list[dict[str, Any]]
    """The leader's, then those of the other ranks by rank, each with its "rank"."""
    arguments: Any
    """Arguments of the leader's call."""
    flag: bool
    """Whether any rank raised its flag."""
    texts: list[str]
    """The text of each rank, by rank; "" of a rank that follows."""
    wants_steps: bool
    """Whether any rank other than the leader wants the leader to go on with steps."""


class _RoundReport(NamedTuple):
    """One rank's message in a round."""

    call: str
    flag: bool = False
    digest: str = ""
    """Must be equal on all ranks, unless it is empty."""
    text: str = ""
    failed: bool = False
    of_collective: bool = False
    """What it raised is of a collective, and the sign of a failure elsewhere."""
    other_prompts: str = ""
    """See `Lockstep.meet`."""
    commands: Sequence[dict[str, Any]] = ()
    """Those of a rank other than the leader."""
    wants_steps: bool = False
    trouble: str = ""
    """See `Lockstep.trouble`."""


class LocalLockstep:
    """The lockstep of an engine of one process: every round ends at once with this process's own message."""

    rank, size, is_leader = 0, 1, True

    def __init__(self) -> None:
        self.phase = "start"
        self.trouble = ""

    def close(self) -> None:
        """No other rank waits for this one."""

    def meet(
        self, call: str, commands: Any = None, *, arguments: Any = None, flag: bool = False, text: str = "", **_: Any
    ) -> Meeting:
        return Meeting(call, commands or [], arguments, flag, [text], False)

    def agree(self, flag: bool, what: str = "an agreement") -> bool:
        return flag

    def gather(self, what: str, text: str) -> list[str]:
        return [text]

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        return list(values)

    def collect(self, what: str, content: bytes) -> list[bytes]:
        return [content]

    def deal(self, what: str, contents: Sequence[bytes]) -> bytes:
        return contents[0]

    def together(self, what: str, **_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def raised(self, error: BaseException, seconds: float, *, of_collective: bool) -> None:
        """No other rank computes with this one."""

    def left(self, trouble: str) -> None:
        """No other rank waits for this one."""

    def share_failures(self, others: Iterable[Lockstep | LocalLockstep]) -> None:
        """No other rank can fail."""

    def check_alive(self, *, goodbyes: bool = True) -> None:
        """No other rank can be gone."""

    def planned(self, plan: StepPlan, **_: Any) -> None:
        """No other rank plans."""

    def step_failed(self, error: BaseException, seconds: float, **_: Any) -> None:
        """All ranks failed in the same way."""


class Lockstep:
    """One of several ranks. After a RankFailure, or plans that differ, it is broken: each later call raises that again.

    timeout_s: how long a rank may be late or silent before it counts as failed.
    """

    def __init__(
        self,
        links: RankLinks,
        *,
        timeout_s: float,
        give_up: Callable[[], bool] = lambda: True,
        patient: bool = False,
        within: Lockstep | None = None,
        ranks: Sequence[int] = (),
        members: Sequence[int] = (),
    ) -> None:
        """give_up: see `Heartbeat`. patient: a rank that lives may be late, unless it has left a block by an error.
        within: the lockstep of all ranks of the engine, of which these are some, whose heartbeats it shares. ranks:
        their numbers there, for errors. members: the ranks that errors count, in the world."""
        self.rank, self.size, self.timeout_s = links.rank, links.size, timeout_s
        self._ranks = ranks or range(links.size)
        self._members = list(members or range(links.size))
        self._others: weakref.WeakSet[Lockstep] = weakref.WeakSet()
        """See `share_failures`."""
        self._links = links
        self._patient = patient
        if within is None:
            self._watch = Heartbeat(links.heartbeats, timeout_s=timeout_s, give_up=give_up)
        else:
            self._watch = within._watch
        self._broken: RankFailure | LockstepError | None = None
        self._finalizer = weakref.finalize(self, _close, self._watch if within is None else None, links)

    @property
    def phase(self) -> str:
        """What the engine is doing, for error messages here and on the other ranks."""
        return self._watch.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._watch.phase = phase

    @property
    def trouble(self) -> str:
        """Why this rank may leave the calls that the others make; errors of the other ranks have it. See `left`."""
        return self._watch.trouble

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Leave: the other ranks' next call fails."""
        self._finalizer()

    # ------------------------------------------------------------------ rounds

    def meet(
        self,
        call: str,
        commands: list[dict[str, Any]] | None = None,
        *,
        arguments: Any = None,
        flag: bool = False,
        compare: bool = True,
        other_prompts: str = "",
        text: str = "",
        wants_steps: bool = False,
    ) -> Meeting:
        """Every rank calls it at the same place -> all ranks' commands and texts, the leader's arguments, and whether
        any raised `flag`.

        `follow()` fits every call. Raises LockstepError, on all ranks, when they are in different calls or pass
        different arguments; RankFailure when a rank does not come. compare: False where only the leader has arguments.
        other_prompts: how the prompts that this rank was given differ from the leader's; then all ranks raise
        PromptsDiffer in place of the call. wants_steps: see `Meeting`.
        """
        digest = digest_of(arguments) if compare and call != FOLLOW else ""
        content = {"commands": commands or [], "arguments": arguments}
        own = [] if self.is_leader else commands or []
        report = _RoundReport(
            call, flag, digest, text, other_prompts=other_prompts, commands=own, wants_steps=wants_steps
        )
        answer = self._round(report, content, patient=call == FOLLOW)
        if "commands" not in answer:  # a round that is no call, which `follow()` does not take part in
            raise LockstepError(f"rank 0 is in {answer['call']} where this rank follows its calls")
        return Meeting(
            answer["call"],
            answer["commands"],
            answer["arguments"],
            answer["flag"],
            answer["texts"],
            answer["wants steps"],
        )

    def agree(self, flag: bool, what: str = "an agreement") -> bool:
        """Whether `flag` is set on any rank."""
        return bool(self._round(_RoundReport(what, flag))["flag"])

    def gather(self, what: str, text: str) -> list[str]:
        """The text of each rank, by rank."""
        texts: list[str] = self._round(_RoundReport(what, text=text))["texts"]
        return texts

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        """The least value of each column over the ranks."""
        rows = [json.loads(text) for text in self.gather(what, json.dumps(list(values)))]
        return [min(column) for column in zip(*rows, strict=True)]

    def collect(self, what: str, content: bytes) -> list[bytes]:
        """On the leader the bytes of each rank, by rank; [] elsewhere. They may be many."""
        sizes = [int(text) for text in self.gather(what, str(len(content)))]
        if not self.is_leader:
            self._send_bytes(0, content)
            return []
        return [content, *(self._receive_bytes(rank, size, what) for rank, size in enumerate(sizes[1:], start=1))]

    def deal(self, what: str, contents: Sequence[bytes]) -> bytes:
        """What the leader has for this rank. contents: the leader's, by rank; they may be long."""
        sizes = json.loads(self.gather(what, json.dumps([len(content) for content in contents]))[0])
        if not self.is_leader:
            return self._receive_bytes(0, sizes[self.rank], what)
        for rank in range(1, self.size):
            self._send_bytes(rank, contents[rank])
        return contents[0]

    @contextmanager
    def together(self, what: str, *, has_collectives: bool = False) -> Iterator[None]:
        """The body succeeds on all ranks or fails on all: with its own error where it raised, elsewhere with
        OtherRankFailed, which names the rank. The body makes no rounds of its own.

        has_collectives: other ranks may wait in one for a rank that raises. It names itself with RankFailure where they
        do not come, before their collectives end.
        """
        try:
            yield
        except (RankFailure, LockstepError):
            raise
        except BaseException as error:
            text = str(error) if isinstance(error, InferenceError) else f"{type(error).__name__}: {error}"
            of_collective = has_collectives and is_of_collective(error)
            alone = None
            if has_collectives and not of_collective:
                alone = RankFailure(self._ranks[self.rank], self.phase, text)
            report = _RoundReport(what, text=text, failed=True, of_collective=of_collective)
            self._check_collectives(self._round(report, alone=alone, alone_s=self._alone_s))
            mark_shared(error)
            raise
        answer = self._round(_RoundReport(what))
        self._check_collectives(answer)
        if answer["failed"]:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in answer["failed"])
            raise OtherRankFailed(reasons, ranks=[rank for rank, _ in answer["failed"]])

    def _check_collectives(self, answer: dict[str, Any]) -> None:
        """Raise RankFailure where a collective of any rank has failed: its group is of no use."""
        if answer["broken"]:
            rank, text = answer["failed"][0]
            self._fail(RankFailure(self._ranks[rank], self.phase, text))

    @property
    def _alone_s(self) -> float:
        return max(ALONE_S, self.timeout_s / 2)

    def raised(self, error: BaseException, seconds: float, *, of_collective: bool) -> None:
        """This rank raised in what it computes with the others, after `seconds`. Returns if all ranks raised errors of
        their own: then none waits in a collective. Else RankFailure names the rank that raised first."""
        what = f"{type(error).__name__}: {error}"
        shown: BaseException = error if of_collective else OtherRankFailed("an error of its own", ranks=[])
        cause = "" if of_collective else what
        self.step_failed(shown, seconds, fatal=of_collective, own=not of_collective, cause=cause)

    def left(self, trouble: str) -> None:
        """Send the others why this rank may leave the calls that they make."""
        if trouble != self._watch.trouble:
            self._watch.trouble = trouble
            self._watch.catch_up()

    def share_failures(self, others: Iterable[Lockstep | LocalLockstep]) -> None:
        """Send the ranks of these locksteps, too, a failure that this one finds: they may wait for ranks that end by
        it."""
        self._others.update(one for one in others if isinstance(one, Lockstep) and one is not self)

    def check_alive(self, *, goodbyes: bool = True) -> None:
        """Raise RankFailure if a rank has ended or is silent: for waits that are not rounds.

        goodbyes: see `Heartbeat.check`.
        """
        try:
            self._watch.check(goodbyes=goodbyes)
        except RankFailure as failure:
            self._fail(failure)

    def planned(self, plan: StepPlan, *, check: bool, shape_of: ShapeOf = lambda plan: None) -> None:
        """This rank is about to run `plan`; check: raise LockstepError unless plan and padding are equal on all."""
        self.phase = f"{'prefill' if plan.prefill else 'decode'} of step {plan.step}"
        if check:
            self.check_plan(plan, shape_of(plan))

    def check_plan(self, plan: StepPlan, shape: GraphShape | None = None) -> None:
        """Raise LockstepError, naming the first request that differs, unless every rank has planned the same step."""
        lines = describe(plan)
        if shape is not None:
            lines.append(["padded to", *shape.as_tuple()])
        answer = self._round(_RoundReport("check of the plan", text=digest_of(lines)))
        if len(set(answer["texts"])) == 1:
            return
        plans = [json.loads(text) for text in self.gather("comparison of plans", json.dumps(lines))]
        # The ranks' schedulers differ from here on: there is no way back to a common state.
        self._broken = LockstepError(f"step {plan.step}: {_first_difference(plans)}")
        raise self._broken

    def step_failed(
        self, error: BaseException, seconds: float, *, fatal: bool = False, cause: str = "", own: bool = False
    ) -> None:
        """This rank's part of a step raised, after `seconds`. Returns if it raised the same on all ranks and was fatal
        on none; else the engine has failed, and RankFailure names the rank that raised first.

        fatal: what the ranks compute with cannot be used again, even if their errors are equal. cause: what raised on
        this rank, where `error` is the same on all; a rank with a cause is named before those that missed it. own: the
        error arose here and is not the sign of a failure elsewhere. Ranks that do not come are then waiting for this
        one: it names itself after ALONE_S, and at once if the error is fatal as well.
        """
        what = f"{type(error).__name__}: {error}"
        here = RankFailure(self.rank, self.phase, cause or what) if own else None
        if here is not None and fatal:
            self._check_broken()
            self._fail(here)
        text = json.dumps([what, seconds, fatal, cause])
        report = _RoundReport(FAILED_STEP, text=text, failed=True, of_collective=fatal and not own)
        texts = [json.loads(text) for text in self._round(report, alone=here)["texts"]]
        if len({message for message, *_ in texts}) == 1 and not any(final for *_, final, _ in texts):
            return
        origins = [rank for rank in range(self.size) if texts[rank][3]] or range(self.size)
        first = min(origins, key=lambda rank: texts[rank][1])
        self._fail(RankFailure(first, self.phase, texts[first][3] or texts[first][0]))

    # ------------------------------------------------------------------ the exchange

    def _check_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _round(
        self,
        mine: _RoundReport,
        content: Any = None,
        *,
        patient: bool = False,
        alone: RankFailure | None = None,
        alone_s: float | None = None,
    ) -> dict[str, Any]:
        """alone: raised if a rank does not come within `alone_s` (None: ALONE_S); None: it has the usual time and is
        named as failed."""
        self._check_broken()
        mine = mine._replace(trouble=self.trouble)
        patience_s = self._watch.patience_s
        if alone is not None:
            patience_s = min(ALONE_S if alone_s is None else alone_s, patience_s)
        elif patient or (self._patient and not mine.failed):
            patience_s = math.inf
        try:
            answer = (
                self._lead(mine, content, alone, patience_s)
                if self.is_leader
                else self._report(mine, alone, patience_s)
            )
        except RankFailure as failure:
            self._fail(failure)
        if "lost" in answer:
            rank, reason = answer["lost"]
            self._fail(RankFailure(rank, self.phase, reason))
        if "differ" in answer:
            raise LockstepError(answer["differ"])
        if "other prompts" in answer:
            raise PromptsDiffer(answer["other prompts"])
        return answer

    def _lead(self, mine: _RoundReport, content: Any, alone: RankFailure | None, patience_s: float) -> dict[str, Any]:
        reports = [mine]
        self._watch.leads = True
        if self.trouble:  # the others wait for as long as each of them may take
            self._watch.catch_up()
        try:
            for rank in range(1, self.size):
                receive = self._links.calls[rank].receive
                reports.append(_RoundReport(*self._receive(rank, receive, mine.call, alone, patience_s)))
        except RankFailure as failure:
            self._answer({"lost": [failure.rank, failure.reason]})
            raise
        finally:
            self._watch.leads = False
        answer = _answer_to(reports, content)
        self._answer(answer)
        return answer

    def _receive(
        self,
        rank: int,
        receive: Callable[[float], _M | None],
        call: str,
        alone: RankFailure | None,
        patience_s: float,
    ) -> _M:
        """What `receive` of the link to a rank gives next."""
        deadline, limit = time.monotonic() + patience_s, math.inf
        while True:
            try:
                message = receive(SLICE_S)
            except LinkClosed:
                self._watch.catch_up()  # the reason may have arrived
                self._watch.check()
                raise RankFailure(self._ranks[rank], self.phase, self._watch.reason_of(self._ranks[rank])) from None
            if message is not None:
                return message
            self._watch.check()
            limit = self._limit_of_trouble(rank, limit)
            if time.monotonic() > min(deadline, limit):
                raise alone or RankFailure(self._ranks[rank], self.phase, self._late(rank, call))

    def _answer(self, answer: dict[str, Any]) -> None:
        for link in self._links.calls.values():
            try:
                link.send(answer)
            except LinkClosed:
                continue  # the next round misses it

    def _report(self, mine: _RoundReport, alone: RankFailure | None, patience_s: float) -> dict[str, Any]:
        link = self._links.calls[0]
        is_sent = True
        try:
            link.send(mine)
        except LinkClosed:
            is_sent = False

        def receive(timeout_s: float) -> dict[str, Any] | None:
            message: dict[str, Any] | None = link.receive(timeout_s)
            if message is None and not is_sent:  # what the leader sent before it ended has been read
                raise LinkClosed
            return message

        # The leader may wait for other ranks first, for each as long as for this one.
        wait_s = patience_s if alone is not None else self.size * patience_s
        return self._receive(0, receive, mine.call, alone, wait_s)

    def _send_bytes(self, rank: int, content: bytes) -> None:
        """Send a rank what may be many bytes."""
        view = memoryview(content)
        try:
            for start in range(0, len(view), PIECE_BYTES):  # a rank may have others to listen to before
                piece = view[start : start + PIECE_BYTES]
                self._links.calls[rank].send_body(piece, wait_s=self.size * self._watch.patience_s)
        except LinkClosed as error:
            self._fail(RankFailure(self._ranks[rank], self.phase, f"it takes no bytes: {error}"))

    def _receive_bytes(self, rank: int, size: int, what: str) -> bytes:
        """`size` bytes that a rank sends with `_send_bytes`."""
        content, receive = bytearray(), self._links.calls[rank].receive_body
        try:
            while len(content) < size:
                content += self._receive(rank, receive, what, None, self.size * self._watch.patience_s)
        except RankFailure as failure:
            self._fail(failure)
        return bytes(content)

    def _limit_of_trouble(self, rank: int, limit: float) -> float:
        """Until when a wait goes on for a rank that may have left the calls of the others; one that leads a call has
        not. limit: as found before."""
        if not self._watch.is_in_trouble(self._ranks[rank]):
            return math.inf
        return min(limit, time.monotonic() + self._watch.patience_s)

    def _late(self, rank: int, call: str) -> str:
        where = self._watch.phase_of(self._ranks[rank])
        return f"it lives, in {where}, but has not come to {call} for {self.timeout_s:g} s (collective_timeout_s)"

    def _fail(self, failure: RankFailure) -> None:
        self._broken = failure
        failure.job_rank = self._members[failure.rank]
        self._watch.spread(failure.rank, failure.reason)
        for other in self._others:
            if other._broken is None and failure.job_rank in other._members:
                other._watch.spread(other._members.index(failure.job_rank), failure.reason)
        raise failure


def _close(watch: Heartbeat | None, links: RankLinks) -> None:
    if watch is not None:
        watch.close()
    links.close()


def _answer_to(reports: Sequence[_RoundReport], content: Any) -> dict[str, Any]:
    """What the leader answers to all ranks."""
    named = [(rank, report) for rank, report in enumerate(reports) if report.call != FOLLOW]
    calls = {report.call for _, report in named}
    if FAILED_STEP in calls and (len(calls) > 1 or len(named) < len(reports)):
        failed = [
            (report.of_collective, report.call != FAILED_STEP, not cause, rank, cause or what)
            for rank, report in named
            if report.failed
            for what, *_, cause in [json.loads(report.text) if report.call == FAILED_STEP else [report.text, ""]]
        ]
        return {"lost": min(failed)[3:]}
    if len(calls) > 1:
        where = (f"rank {rank}: {report.call}{report.trouble and f' ({report.trouble})'}" for rank, report in named)
        return {"differ": f"ranks are in different calls: {', '.join(where)}"}
    if len({report.digest for _, report in named}) > 1:
        others = [str(rank) for rank, report in named if report.digest != reports[0].digest]
        call = reports[0].call
        return {"differ": f"{call} with other arguments on rank {', '.join(others)} than on rank 0; give all the same"}
    if complaint := next((report.other_prompts for report in reports if report.other_prompts), ""):
        return {"other prompts": complaint}
    answer = {
        "call": reports[0].call,
        "flag": any(report.flag for report in reports),
        "texts": [report.text for report in reports],
        "failed": [
            (rank, report.text) for rank, report in sorted(named, key=lambda one: one[1].of_collective) if report.failed
        ],
        "broken": any(report.of_collective for report in reports) and reports[0].call != FAILED_STEP,
    }
    if content is None:
        return answer
    others = [command | {"rank": rank} for rank, report in enumerate(reports) for command in report.commands]
    return answer | {
        "commands": content["commands"] + others,
        "arguments": content["arguments"],
        "wants steps": any(report.wants_steps for report in reports),
    }


def digest_of(value: Any) -> str:
    """16 hex digits that differ for values whose JSON differs; "" for None."""
    if value is None:
        return ""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def describe(plan: StepPlan) -> list[list[Any]]:
    """A plan as JSON values, a line per request: what it computes, where, and the token before. Then the copies."""
    lines = [
        [r.id, "decodes at", start, "after token", r.tokens[-1], "of", len(r.tokens)]
        for r, start in zip(plan.decode, plan.decode_starts, strict=True)
    ]
    for piece in plan.prefill:
        lease = piece.request.lease
        lines.append(
            [
                piece.request.id,
                "prefills from",
                piece.start,
                piece.n,
                len(piece.request.tokens),
                [fork.id for fork in piece.forks],
                lease.blocks if lease is not None else [],
                piece.captures,
                piece.drafts,
            ]
        )
    copies = [(copy.kind.value, *copy[1:]) for copy in (*plan.copies_before, *plan.copies_after)]
    return [*lines, ["copies", copies, [request.id for request in plan.readmitted]]]


def _first_difference(plans: Sequence[list[list[Any]]]) -> str:
    length = max(map(len, plans))
    for index in range(length):
        lines = [plan[index] if index < len(plan) else None for plan in plans]
        if any(line != lines[0] for line in lines):
            first = next((line[0] for line in lines if line is not None and line[0] != "copies"), "copies")
            shown = ", ".join(f"rank {rank}: {_shown(line)}" for rank, line in enumerate(lines))
            return f"the ranks' plans differ, first in request {first!r}: {shown}"
    return "the ranks' plans differ"


def _shown(line: list[Any] | None) -> str:
    return "nothing" if line is None else " ".join(map(str, line))
