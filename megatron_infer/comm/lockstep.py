"""Ranks of one engine in step: every call that they make together begins with a round over the leader.

    other ranks --report: call, flag, digest, text--> leader --verdict: same for everyone--> other ranks

One round trip per step. Nothing here knows a tensor or a process group.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_infer.comm.heartbeat import Heartbeat
from megatron_infer.comm.rank_links import LinkClosed, RankLinks
from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.errors import InferenceError, LockstepError, OtherRankFailed, RankFailure
from megatron_infer.scheduler.step_plan import StepPlan

FOLLOW = "follow()"
FAILED_STEP = "a failed step"
SLICE_S = 0.2
"""A wait looks so often whether everyone is still there."""
ALONE_S = 10.0
"""Ranks whose part of a step raises alike come to say so within that time; others wait in a collective for the one."""


class Meeting(NamedTuple):
    """What every rank has after a round."""

    call: str
    """The leader's."""
    commands: list[dict[str, Any]]
    arguments: Any
    """The leader's, of the call."""
    flag: bool
    """Raised by any rank."""


class _Report(NamedTuple):
    """What a rank brings to a round."""

    call: str
    flag: bool = False
    digest: str = ""
    """Must be everyone's, unless it is empty."""
    text: str = ""
    failed: bool = False


class Lockstep:
    """One rank's side. After a RankFailure, or plans that differ, it is broken: every later call raises that again.

    timeout_s: how long a rank may be late or silent before it counts as failed.
    """

    def __init__(self, links: RankLinks, *, timeout_s: float, give_up: Callable[[], bool] = lambda: True) -> None:
        """give_up: see `Watch`."""
        self.rank, self.size, self.timeout_s = links.rank, links.size, timeout_s
        self.phase = "start"
        """What the engine does: named by errors, here and on the other ranks."""
        self._links = links
        phase = _PhaseOf(self)
        self._watch = Heartbeat(links.heartbeats, timeout_s=timeout_s, phase=phase, give_up=give_up)
        self._broken: RankFailure | LockstepError | None = None
        self._finalizer = weakref.finalize(self, _close, self._watch, links)

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
        mine: bool = True,
    ) -> Meeting:
        """Every rank calls it at the same place -> the leader's commands and arguments, and whether any raised `flag`.

        `follow()` fits every call. Raises LockstepError, on all ranks, when they are in different calls or bring
        different arguments; RankFailure when a rank does not come. mine: False where only the leader has arguments.
        """
        digest = digest_of(arguments) if mine and call != FOLLOW else ""
        content = {"commands": commands or [], "arguments": arguments}
        answer = self._round(_Report(call, flag, digest), content, patient=call == FOLLOW)
        return Meeting(answer["call"], answer["commands"], answer["arguments"], answer["flag"])

    def agree(self, flag: bool, what: str = "an agreement") -> bool:
        """Whether any rank says so."""
        return bool(self._round(_Report(what, flag))["flag"])

    def gather(self, what: str, text: str) -> list[str]:
        """Everyone's text, by rank."""
        texts: list[str] = self._round(_Report(what, text=text))["texts"]
        return texts

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        """Of each value the least that any rank has."""
        everyone = [json.loads(text) for text in self.gather(what, json.dumps(list(values)))]
        return [min(column) for column in zip(*everyone, strict=True)]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """The body happens on all ranks or fails on all of them: with its own error where it raised, elsewhere with
        OtherRankFailed that names the rank. The body makes no rounds of its own."""
        try:
            yield
        except (RankFailure, LockstepError):
            raise
        except BaseException as error:
            text = str(error) if isinstance(error, InferenceError) else f"{type(error).__name__}: {error}"
            self._round(_Report(what, text=text, failed=True))
            raise
        answer = self._round(_Report(what))
        if answer["failed"]:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in answer["failed"])
            raise OtherRankFailed(told, ranks=[rank for rank, _ in answer["failed"]])

    def check_alive(self, *, goodbyes: bool = True) -> None:
        """Raise RankFailure if a rank has ended or fallen silent: for waits that are no rounds.

        goodbyes: see `Watch.check`.
        """
        try:
            self._watch.check(goodbyes=goodbyes)
        except RankFailure as failure:
            self._fail(failure)

    def planned(self, plan: StepPlan, *, check: bool, shape: GraphShape | None = None) -> None:
        """This rank is about to run `plan`, padded to `shape`; check: see that both are everyone's."""
        self.phase = f"{'prefill' if plan.prefill else 'decode'} of step {plan.step}"
        if check:
            self.check_plan(plan, shape)

    def check_plan(self, plan: StepPlan, shape: GraphShape | None = None) -> None:
        """Raise LockstepError, naming the first request that differs, unless every rank has planned the same step."""
        lines = describe(plan)
        if shape is not None:
            lines.append(["padded to", *shape.as_tuple()])
        answer = self._round(_Report("check of the plan", text=digest_of(lines)))
        if len(set(answer["texts"])) == 1:
            return
        plans = [json.loads(text) for text in self.gather("comparison of plans", json.dumps(lines))]
        # Each rank has other books now: there is no way back to a common state.
        self._broken = LockstepError(f"step {plan.step}: {_first_difference(plans)}")
        raise self._broken

    def step_failed(
        self, error: BaseException, seconds: float, *, fatal: bool = False, cause: str = "", own: bool = False
    ) -> None:
        """This rank's part of a step raised, after `seconds`. Returns if all ranks' did in the same way, and it was
        fatal on none; else the engine has failed, and RankFailure names the rank that was the first to raise.

        fatal: what the ranks compute with is of no use from here on, however alike their errors are. cause: what raised
        on this very rank, where `error` is of all of them; such a rank is named before those that missed it. own: it
        raised here and is no sign of another rank's trouble. Others that do not come are waiting for this rank then: it
        names itself after ALONE_S, and at once where the error is fatal as well.
        """
        what = f"{type(error).__name__}: {error}"
        here = RankFailure(self.rank, self.phase, what) if own else None
        if here is not None and fatal:
            self._check_broken()
            self._fail(here)
        report = _Report(FAILED_STEP, text=json.dumps([what, seconds, fatal, cause]), failed=True)
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
        self, mine: _Report, content: Any = None, *, patient: bool = False, alone: RankFailure | None = None
    ) -> dict[str, Any]:
        """alone: what is raised if a rank does not come within ALONE_S; None: it has the usual time, and is named."""
        self._check_broken()
        try:
            answer = self._lead(mine, content, alone) if self.is_leader else self._report(mine, patient, alone)
        except RankFailure as failure:
            self._fail(failure)
        if "lost" in answer:
            rank, reason = answer["lost"]
            self._fail(RankFailure(rank, self.phase, reason))
        if "differ" in answer:
            raise LockstepError(answer["differ"])
        return answer

    def _lead(self, mine: _Report, content: Any, alone: RankFailure | None) -> dict[str, Any]:
        reports = [mine]
        try:
            reports += [self._hear(rank, mine.call, alone) for rank in range(1, self.size)]
        except RankFailure as failure:
            self._tell({"lost": [failure.rank, failure.reason]})
            raise
        answer = _verdict(reports, content)
        self._tell(answer)
        return answer

    def _hear(self, rank: int, call: str, alone: RankFailure | None) -> _Report:
        patience_s, link = self._watch.patience_s, self._links.calls[rank]
        deadline = time.monotonic() + (patience_s if alone is None else min(ALONE_S, patience_s))
        while True:
            try:
                message = link.receive(SLICE_S)
            except LinkClosed:
                self._watch.catch_up()  # it may have said why
                self._watch.check()
                raise RankFailure(rank, self.phase, "its process has ended") from None
            if message is not None:
                return _Report(*message)
            self._watch.check()
            if time.monotonic() > deadline:
                raise alone or RankFailure(rank, self.phase, self._late(rank, call))

    def _tell(self, answer: dict[str, Any]) -> None:
        for link in self._links.calls.values():
            try:
                link.send(answer)
            except LinkClosed:
                continue  # the next round misses it

    def _report(self, mine: _Report, patient: bool, alone: RankFailure | None) -> dict[str, Any]:
        # Others may be awaited first, each as long as we would be.
        patience_s, link = self.size * self._watch.patience_s, self._links.calls[0]
        deadline = time.monotonic() + (patience_s if alone is None else min(ALONE_S, patience_s))
        lost = False
        try:
            link.send(mine)
        except LinkClosed:
            lost = True  # what it said before it went may still be there to read
        while True:
            try:
                message: dict[str, Any] | None = link.receive(SLICE_S)
            except LinkClosed:
                self._watch.catch_up()
                self._watch.check()
                raise RankFailure(0, self.phase, "its process has ended") from None
            if message is not None:
                return message
            self._watch.check()
            if not lost and alone is not None and time.monotonic() > deadline:
                raise alone
            if lost or (not patient and time.monotonic() > deadline):
                raise RankFailure(0, self.phase, "its process has ended" if lost else self._late(0, mine.call))

    def _late(self, rank: int, call: str) -> str:
        where = self._watch.phase_of(rank)
        return f"it lives, in {where}, but has not come to {call} for {self.timeout_s:g} s (collective_timeout_s)"

    def _fail(self, failure: RankFailure) -> None:
        self._broken = failure
        self._watch.spread(failure.rank, failure.reason)
        raise failure


class _PhaseOf:
    """Reads a lockstep's phase without keeping it alive."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = weakref.ref(lockstep)

    def __call__(self) -> str:
        lockstep = self._lockstep()
        return "its end" if lockstep is None else lockstep.phase


def _close(watch: Heartbeat, links: RankLinks) -> None:
    watch.close()
    links.close()


def _verdict(reports: Sequence[_Report], content: Any) -> dict[str, Any]:
    """What everyone is told."""
    named = [(rank, report) for rank, report in enumerate(reports) if report.call != FOLLOW]
    calls = {report.call for _, report in named}
    if len(calls) > 1:
        if FAILED_STEP in calls:
            rank, report = next((rank, report) for rank, report in named if report.call == FAILED_STEP)
            return {"lost": [rank, json.loads(report.text)[0]]}
        return {"differ": "ranks are in different calls: " + ", ".join(f"rank {r}: {p.call}" for r, p in named)}
    if len({report.digest for _, report in named}) > 1:
        others = [str(rank) for rank, report in named if report.digest != reports[0].digest]
        call = reports[0].call
        return {"differ": f"{call} with other arguments on rank {', '.join(others)} than on rank 0; give all the same"}
    answer = {
        "call": reports[0].call,
        "flag": any(report.flag for report in reports),
        "texts": [report.text for report in reports],
        "failed": [(rank, report.text) for rank, report in named if report.failed],
    }
    return answer | (content or {})


def digest_of(value: Any) -> str:
    """16 hex digits that tell values apart which are the same in JSON."""
    if value is None:
        return ""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def describe(plan: StepPlan) -> list[list[Any]]:
    """A plan in JSON, a line for each request: what it does, where, and the token before. Then what is copied."""
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
            ]
        )
    copies = [(copy.kind.value, *copy[1:]) for copy in (*plan.copies_before, *plan.copies_after)]
    return [*lines, ["copies", copies, [request.id for request in plan.returned]]]


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
