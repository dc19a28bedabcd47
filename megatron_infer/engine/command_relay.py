"""How all ranks of one engine execute the same commands: each collects its own, all get them with a call.

    leader: add_request(), abort() --Outbox--> next call of all ranks (step(), suspend(), ...) --> other ranks, in order
    other ranks: submit(), abort_later() --Outbox, report of that call--> all ranks, after the leader's, rank by rank

In an engine of one process the outbox collects nothing and every call is this process's own (see LocalLockstep).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from typing import Any, NamedTuple

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.distributed.lockstep import FOLLOW, Meeting
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.given_prompts import GivenPrompts, Params, digests_of, report_of, sources_of
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import ConfigError, LockstepError, NotLeader, PromptsDiffer, RankFailure, UnknownRequest
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_costs import StepCosts

DISMISS = "dismiss()"
LOOK = "a look at the weights"
ROLLOUT = "rollout()"
"""A round of ranks that roll out, see rl.multi_rank: commands arrive, or the leader ends its call."""
PROMPTS = "prompts()"
"""The first round of a call with prompts: every rank reports its own, see `given_prompts`."""
SERVE = "serve_others()"
"""A round of ranks with requests of their own, of which this one computes none."""
OF_SHARING = ("step()", SERVE, "generate()", PROMPTS, ROLLOUT)
"""Calls of the ranks that share requests, whatever other ranks of the engine do; steps exchange sizes besides."""
IDLE_S = 0.002
"""Until ranks with requests of their own look again whether one of them has work."""
LEADERS = ("price", "release", "step price")
"""Commands that the leader executes with the other ranks."""


class StepStart(NamedTuple):
    """What the ranks have agreed on before a step."""

    weights_changed: bool | None
    """On any rank; None: the step itself checks."""
    among: Collection[str] | None
    """The requests that may run, see `DynamicInferenceEngine.step`."""
    ranks_have_work: bool | None = None
    """See `StepLoop.step`."""
    has_ended: bool = False
    """No rank needs another step: see `DynamicInferenceEngine.serve_others`."""


class Outbox:
    """Commands that not all ranks have executed yet: the leader has executed its own, the other ranks have not."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._is_used = groups.shares_requests
        self.commands: list[dict[str, Any]] = []

    def add(self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, **how: Any) -> None:
        if self._is_used:
            self._pass_on("add", id=request_id, text=text, ids=ids, params=params.to_dict(), **how)

    def continue_from(
        self, request_id: str, ids: list[int], params: SamplingParams, drawn: Sequence[DrawnSequence], **how: Any
    ) -> None:
        if self._is_used:
            every = list(map(asdict, drawn))
            self._pass_on("continue", id=request_id, ids=ids, params=params.to_dict(), drawn=every, **how)

    def read(self, prompt: Any, params: Params) -> None:
        """The caller has given this prompt, which the ranks that share it compare with their own."""
        if self._is_used:
            self._pass_on("read", digest=next(digests_of([prompt], params)))

    def abort(self, request_id: str) -> None:
        if self._is_used:
            self._pass_on("abort", id=request_id)

    def deliver(self, to: Collection[int], groups: list[Any], **end: Any) -> None:
        """Finished rollout groups for other ranks, see rl.multi_rank."""
        self._pass_on("groups", to=sorted(to), groups=groups, **end)

    def address(self, to: Collection[int]) -> None:
        """These ranks share the request that was added last."""
        self.commands[-1]["to"] = sorted(to)

    def withdraw(self, request_id: str) -> bool:
        """Whether a request was still here; it is queued nowhere then."""
        before = self.commands
        self.commands = [one for one in before if one["kind"] != "add" or one["id"] != request_id]
        return len(self.commands) < len(before)

    @property
    def has_aborts(self) -> bool:
        return any(command["kind"] == "abort" for command in self.commands)

    def set_costs(self, costs: CostModel) -> None:
        """New prices of evictions, which the leader takes with the other ranks."""
        self._pass_on("price", costs=asdict(costs))

    def set_step_costs(self, costs: StepCosts) -> None:
        """New costs of steps, by which all ranks decide on drafts and on the shares of callers."""
        self._pass_on("step price", costs=asdict(costs))

    def release(self, arrival: int) -> None:
        """Requests before `arrival` may be admitted from the next step on, by all ranks."""
        self._pass_on("release", arrival=arrival)

    def _pass_on(self, kind: str, **values: Any) -> None:
        self.commands.append({"kind": kind, **values})


class CommandRelay:
    """One rank's part. The leader executes its command at once and passes it on with the next call that all ranks
    make; the others execute it then, before the call. Commands of the others are executed in that call, on all ranks,
    after the leader's and in the order of the ranks. Nothing is scheduled in between, so that all ranks schedule from
    the same state.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        outbox: Outbox,
        loop: StepLoop,
        scheduler: Scheduler,
        *,
        queue: Callable[..., str],
        continue_from: Callable[..., None],
        submit: Callable[..., None],
    ) -> None:
        """queue(id, text, token ids, params, stream, salt, caller): queues a request that the leader has checked.
        continue_from(id, token ids, params, drawn, salt=, caller=): the same of one that another engine began.
        submit(id, text, token ids, params, salt): puts one of another rank into the outbox."""
        self.is_leader = rank_group.groups.is_leader
        self.own_requests = rank_group.groups.own_requests
        """Expert-parallel ranks have requests of their own: commands reach the ranks that share them, and calls that
        concern the model or a step are made with all ranks of the engine after that."""
        self._lockstep = rank_group.sharing
        self._engine = rank_group.lockstep
        self.size = self._lockstep.size
        self.rank = self._lockstep.rank
        """Of the ranks that share their requests."""
        self.outbox = outbox
        self._loop = loop
        self._queue = queue
        self._continue_from = continue_from
        self._submit = submit
        self._data_rank = rank_group.groups.data_rank
        self._commands: dict[str, Callable[[dict[str, Any]], Any]] = {
            "add": self._add,
            "continue": self._continue,
            "read": self._compare,
            "abort": self._abort,
            "groups": self._receive,
            "price": lambda given: scheduler.set_costs(CostModel(**given["costs"])),
            "release": lambda given: scheduler.queue.release(given["arrival"]),
            "step price": lambda given: scheduler.set_step_costs(StepCosts(**given["costs"])),
        }
        self._met: Meeting | None = None
        """A call of the leader that `follow` has received and whose method has not begun here."""
        self._own: tuple[int, GivenPrompts] | None = None
        """The source of the call in progress, and the prompts that this rank compares with the source's."""
        self._other_prompts = ""
        """How they differ, until the other ranks have it."""
        self.addressed: set[str] = set()
        """Ids of requests of other ranks that these share with this one."""
        self.received: list[dict[str, Any]] = []
        """Rollout groups that other ranks have sent to this one, until they are taken."""
        self.wants_steps = False
        """Reported with each call that this rank follows: the leader is to go on with steps."""
        self.others_want_steps = False
        """Whether any rank other than the leader did so, in the latest call."""

    def require_leader(self, call: str) -> None:
        """Raise NotLeader unless this is the rank that takes requests."""
        if not self.is_leader:
            raise NotLeader(
                f"{call} on rank {self._lockstep.rank} of an engine of {self._lockstep.size} ranks: requests go to its "
                "rank 0, which passes them on; call it there, and step(), generate() or follow() here"
            )

    def require_shared(self, call: str) -> None:
        """Raise ConfigError where each rank has requests of its own: `call` is not for such an engine."""
        if self.own_requests:
            raise ConfigError(
                f"{call} with dp_attention=True is not supported: each rank has requests of its own and steps with the "
                "others, by generate(), step() and the calls of a Rollout; take dp_attention=False"
            )

    def meet(
        self, call: str, arguments: Any = None, *, flag: bool = False, compare: bool = True, text: str = ""
    ) -> Meeting:
        """Begin a call together with all ranks; all ranks' commands have been executed here when it returns.

        flag, text: see `Lockstep.meet`. compare: False where the arguments of the other ranks do not count.
        """
        met, self._met = self._met, None
        self._engine.phase = call.removesuffix("()")
        if met is None:
            commands, complaint = self.outbox.commands, self._complaint()
            met = self._lockstep.meet(
                call,
                commands,
                arguments=plain(arguments),
                flag=flag,
                compare=compare,
                other_prompts=complaint,
                text=text,
            )
        elif met.call != call:
            raise LockstepError(f"{call} while following {met.call}")
        self._execute(met)
        if self.own_requests and call not in OF_SHARING:
            every = self._engine.meet(call, arguments=met.arguments, flag=met.flag, compare=compare, text=text)
            return met._replace(flag=every.flag, texts=every.texts)
        return met

    def begin_step(self, among: Collection[str] | None, *, running: bool) -> StepStart:
        """Receive the leader's commands, and agree."""
        loop = self._loop
        if self.is_leader and loop.grammars.may_hold():
            states = loop.output_processor.requests
            requests = ((state.id, [one.request for one in state.sequences]) for state in states)
            among = loop.grammars.without_held(requests, among, waits=not loop.num_in_flight)
        if self._engine.size == 1:
            return StepStart(None, among)
        if self.own_requests:
            arguments = self.meet("step()", None if among is None else sorted(among), compare=False).arguments
            return self._agree_on_step(arguments, has_work=running and not loop.is_idle, running=running)
        was_idle = loop.was_idle
        arguments = None if among is None else sorted(among)
        met = self.meet("step()", arguments, flag=self._weights_moved(), compare=False)
        # A rank that was idle, or that has just received an abort, has not read the content of its weights.
        if running and (was_idle or any(command["kind"] == "abort" for command in met.commands)):
            differ = not loop.is_idle and loop.weights_differ()
            return StepStart(self._lockstep.agree(differ, LOOK), met.arguments)
        return StepStart(met.flag, met.arguments)

    def begin_serving(self, before: str, *, running: bool) -> StepStart:
        """`begin_step` of a rank that computes nothing of its own before what `before` names, see `serve_others`."""
        ends = self.meet(SERVE, before, compare=False).arguments
        return self._agree_on_step((), has_work=False, running=running, ends=ends)

    def _agree_on_step(
        self, among: Collection[str] | None, *, has_work: bool, running: bool, ends: str = ""
    ) -> StepStart:
        """Where each rank has requests of its own: an idle rank takes part as long as another has work."""
        loop, was_idle = self._loop, self._loop.was_idle
        moved = running and not was_idle and loop.weights_differ(reads=False)
        every = self._engine.meet("step()", flag=moved, compare=False, text=json.dumps([has_work, ends]))
        each = [json.loads(text) for text in every.texts]
        have_work, has_ended = any(work for work, _ in each), bool(ends) and all(end == ends for _, end in each)
        changed = every.flag
        if have_work and was_idle:  # no rank has read the content of its weights
            changed = self._engine.agree(loop.weights_differ(), LOOK)
        elif not have_work:
            loop.was_idle = True
            if not has_ended:
                time.sleep(IDLE_S)
        return StepStart(changed, among, have_work, has_ended)

    @contextmanager
    def comparing(self, source: int, own: GivenPrompts) -> Iterator[None]:
        """Around a call that shares the prompts of rank `source`: where that reads others than `own`, PromptsDiffer is
        raised on all ranks by their next call, or on this one at the end of the body."""
        before, self._own = self._own, (source, own)
        try:
            yield
            if complaint := self._complaint():
                raise PromptsDiffer(complaint)
        finally:
            self._own, self._other_prompts = before, ""

    def exchange(self, read: Callable[[], Any], params: Params) -> tuple[list[int | None], Any]:
        """The first round of a call with prompts -> (`sources_of` all ranks, what `read` gave on this one).

        read: this rank's prompts, None for none. Its error is raised after the round.
        """
        if self.size == 1:
            return [0], read()
        failure: Exception | None = None
        try:
            given = read()
            report = report_of(self._data_rank, given, params)
        except Exception as error:  # the other ranks wait for this one, whatever is wrong with the prompts
            failure, given, report = error, [], report_of(self._data_rank, [], None)
        sources = sources_of(self.meet(PROMPTS, text=report, compare=False).texts)
        if failure is not None:
            raise failure
        return sources, given

    def take_in(
        self, take_in: Callable[[], list[str]], source: int | None
    ) -> tuple[list[dict[str, Any]], Exception | None]:
        """Queue the prompts of every source on all ranks -> (by rank {"ids": ...}, or {"refused": why none is queued};
        this rank's refusal).

        take_in: queues this rank's prompts.
        """
        mine: dict[str, Any] = {}
        refusal: Exception | None = None
        if source == self.rank:
            try:
                mine = {"ids": take_in()}
            except Exception as error:  # the other ranks wait for this one, whatever is wrong with the prompts
                refusal, mine = error, {"refused": f"{type(error).__name__}: {error}"}
        if self.size == 1:
            return [mine], refusal
        texts = self.meet("generate()", text=json.dumps(mine), compare=False).texts
        return [json.loads(text or "{}") for text in texts], refusal

    def submit(self, request_id: str, ids: list[int], params: SamplingParams, *, salt: str) -> None:
        """On ranks other than the leader: a request of this rank's, which all ranks queue with the next call."""
        self._submit(request_id, None, ids, params, salt)

    def abort_later(self, request_id: str) -> RequestOutput | None:
        """On ranks other than the leader: all ranks end a request with the next call -> what it has so far; None: it
        was not queued yet."""
        state = self._loop.output_processor.get(request_id)
        if self.outbox.withdraw(request_id) or state is None:
            return None
        self.outbox.abort(request_id)
        return state.output()

    def follow(self, calls: dict[str, Callable[[Any], Any]], *, until: str = DISMISS) -> Any:
        """Take part in the leader's `calls` until it calls `until` -> the arguments of `until`.

        An error of a call that is raised on the leader too is ignored here: the leader handles it.
        """
        while True:
            try:
                met = self.follow_once(calls, until=until)
            except PromptsDiffer:  # the leader raises it, and ends what it was about to do with the other ranks
                continue
            if met.call == until:
                return met.arguments

    def follow_once(self, calls: Mapping[str, Callable[[Any], Any]], *, until: str) -> Meeting:
        """Take part in the next of the leader's `calls`, as in `follow`."""
        self._engine.phase = FOLLOW
        met = self._lockstep.meet(
            FOLLOW,
            self.outbox.commands,
            flag=self._weights_moved(),
            other_prompts=self._complaint(),
            wants_steps=self.wants_steps or self.outbox.has_aborts,
        )
        self._met = met
        if met.call == until:
            return self.meet(until)
        if met.call not in calls:
            raise LockstepError(f"rank 0 calls {met.call} where this rank waits for {until}")
        try:
            calls[met.call](met.arguments)
        except (LockstepError, RankFailure):
            raise
        except (ValueError, RuntimeError, UnknownRequest):  # the leader has it too: calls fail on all ranks alike
            pass
        finally:
            self._met = None
        return met

    def _weights_moved(self) -> bool:
        """Whether weights changed on this rank, as far as that matters before a step."""
        return not self._loop.was_idle and self._loop.weights_differ()

    def _add(self, given: dict[str, Any]) -> None:
        if self._lockstep.rank in given.get("to", ()):
            self.addressed.add(given["id"])
        params = SamplingParams.from_dict(given["params"])
        self._queue(given["id"], given["text"], given["ids"], params, given["stream"], given["salt"], given["caller"])

    def _continue(self, given: dict[str, Any]) -> None:
        params, drawn = SamplingParams.from_saved(given["params"]), [DrawnSequence(**one) for one in given["drawn"]]
        self._continue_from(given["id"], given["ids"], params, drawn, salt=given["salt"], caller=given["caller"])

    def _abort(self, given: dict[str, Any]) -> None:
        if "rank" not in given or given["id"] in self._loop.output_processor:  # else it has ended with others
            self._loop.abort(given["id"])

    def _receive(self, given: dict[str, Any]) -> None:
        if self._lockstep.rank in given["to"]:
            self.received.append(given)

    def _compare(self, given: dict[str, Any]) -> None:
        source = given.get("rank", 0)
        found = "" if self._own is None or self._own[0] != source else self._own[1].difference(given["digest"])
        if found and not self._other_prompts:
            self._other_prompts = (
                f"rank {self._lockstep.rank} shares the prompts of rank {source}, and was given others: {found}. Ranks "
                "whose iterators begin alike share one, which has to be the same on each to its end; iterators of a "
                "rank's own differ within the prompts that the first call begins with, or in their info"
            )

    def _complaint(self) -> str:
        """What the other ranks do not know yet of `_other_prompts`."""
        complaint, self._other_prompts = self._other_prompts, ""
        return complaint

    def _execute(self, met: Meeting) -> None:
        self.others_want_steps = met.wants_steps
        self.outbox.commands = []
        for command in met.commands:
            if not self.is_leader or "rank" in command or command["kind"] in LEADERS:
                self._commands[command["kind"]](command)
        self.outbox.commands = []  # all ranks have executed what these commands have passed on


def plain(value: Any) -> Any:
    """Arguments as JSON gives them back on another rank."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
