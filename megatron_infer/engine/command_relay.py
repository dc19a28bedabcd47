"""How all ranks of one engine execute the same commands: the leader collects them, the others get them with a call.

    leader: add_request(), abort() --Outbox--> next call of all ranks (step(), suspend(), ...) --> other ranks, in order

In an engine of one process the outbox collects nothing and every call is this process's own (see LocalLockstep).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from typing import Any, NamedTuple

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.distributed.lockstep import FOLLOW, Meeting
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.given_prompts import GivenPrompts, Params, digests_of
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import ConfigError, LockstepError, NotLeader, PromptsDiffer, RankFailure, RequestError
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.step_costs import StepCosts

DISMISS = "dismiss()"
LOOK = "a look at the weights"
ROLLOUT = "rollout()"
"""The leader sends finished rollout groups, or ends a rollout: see rl.multi_rank."""


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
    """Commands that the leader has executed and the other ranks have not. Other ranks collect nothing."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._is_used = groups.is_leader and groups.shares_requests
        self.commands: list[dict[str, Any]] = []

    def add(self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, **how: Any) -> None:
        if self._is_used:
            self._pass_on("add", id=request_id, text=text, ids=ids, params=params.to_dict(), **how)

    def read(self, prompts: Any, params: Params, *, is_all: bool) -> None:
        """The leader's caller has given these prompts, which the other ranks compare with their own."""
        if self._is_used:
            self._pass_on("read", digests=list(digests_of(prompts, params)), is_all=is_all)

    def abort(self, request_id: str) -> None:
        if self._is_used:
            self._pass_on("abort", id=request_id)

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
    """One rank's part. The leader executes a command at once and passes it on with the next call that all ranks make;
    the others execute it then, in order, before the call. Nothing is scheduled in between, so that all ranks schedule
    from the same state.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        outbox: Outbox,
        loop: StepLoop,
        *,
        queue: Callable[..., str],
        set_costs: Callable[[CostModel], None],
        release: Callable[[int], None],
        set_step_costs: Callable[[StepCosts], None],
    ) -> None:
        """queue(id, text, token ids, params, stream, salt, caller): queues a request that the leader has checked.
        set_costs: takes new prices of evictions. release: of requests that wait for `ce_delay_ms`. set_step_costs:
        takes new costs of steps."""
        self.is_leader = rank_group.groups.is_leader
        self.own_requests = rank_group.groups.own_requests
        """Each rank is the leader of its own requests: calls of all ranks pass none on."""
        self._lockstep, self._outbox, self._loop, self._queue = rank_group.lockstep, outbox, loop, queue
        self._commands: dict[str, Callable[[dict[str, Any]], Any]] = {
            "add": self._add,
            "read": self._compare,
            "abort": lambda given: loop.abort(given["id"]),
            "price": lambda given: set_costs(CostModel(**given["costs"])),
            "release": lambda given: release(given["arrival"]),
            "step price": lambda given: set_step_costs(StepCosts(**given["costs"])),
        }
        self._met: Meeting | None = None
        """A call of the leader that `follow` has received and whose method has not begun here."""
        self._own: GivenPrompts | None = None
        """On ranks other than the leader: the prompts of the call in progress."""
        self._other_prompts = ""
        """How they differ from the leader's, until the other ranks have it."""

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
        """Begin a call together with all ranks; the leader's commands have been executed here when it returns.

        flag, text: see `Lockstep.meet`. compare: False where the arguments of the other ranks do not count.
        """
        met, self._met = self._met, None
        self._lockstep.phase = call.removesuffix("()")
        if met is None:
            commands, complaint = self._outbox.commands, self._complaint()
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
        return met

    def begin_step(self, among: Collection[str] | None, *, running: bool, ends: bool = False) -> StepStart:
        """Receive the leader's commands, and agree. ends: this rank computes nothing of its own, see `serve_others`."""
        loop = self._loop
        if self.is_leader and loop.grammars.may_hold():
            states = loop.output_processor.requests
            requests = ((state.id, [one.request for one in state.sequences]) for state in states)
            among = loop.grammars.without_held(requests, among, waits=not loop.num_in_flight)
        if self._lockstep.size == 1:
            return StepStart(None, among)
        if self.own_requests:
            return self._begin_own_step(among, running=running, ends=ends)
        was_idle = loop.was_idle
        arguments = None if among is None else sorted(among)
        met = self.meet("step()", arguments, flag=self._weights_moved(), compare=False)
        # A rank that was idle, or that has just received an abort, has not read the content of its weights.
        if running and (was_idle or any(command["kind"] == "abort" for command in met.commands)):
            differ = not loop.is_idle and loop.weights_differ()
            return StepStart(self._lockstep.agree(differ, LOOK), met.arguments)
        return StepStart(met.flag, met.arguments)

    def _begin_own_step(self, among: Collection[str] | None, *, running: bool, ends: bool) -> StepStart:
        """`begin_step` where each rank has requests of its own: an idle rank takes part as long as another has work."""
        loop, was_idle = self._loop, self._loop.was_idle
        has_work = running and not ends and not loop.is_idle
        moved = not was_idle and loop.weights_differ(reads=False)
        met = self.meet("step()", flag=moved, compare=False, text=json.dumps([has_work, ends]))
        each = [json.loads(text) for text in met.texts]
        have_work, has_ended = any(work for work, _ in each), all(end for _, end in each)
        changed = met.flag
        if have_work and was_idle:  # no rank has read the content of its weights
            changed = self._lockstep.agree(loop.weights_differ(), LOOK)
        elif not have_work:
            loop.was_idle = True
        return StepStart(changed, among, have_work, has_ended)

    @contextmanager
    def comparing(self, own: GivenPrompts | None) -> Iterator[None]:
        """Around a call that every rank makes with prompts: where the leader reads others than `own`, PromptsDiffer is
        raised on all ranks by their next call, or on this one at the end of the body."""
        before, self._own = self._own, own
        try:
            yield
            if complaint := self._complaint():
                raise PromptsDiffer(complaint)
        finally:
            self._own, self._other_prompts = before, ""

    def read(self, prompts: Any, params: Params, *, is_all: bool) -> None:
        """On the leader: these are the next prompts of a call that every rank makes. is_all: no others follow."""
        self._outbox.read(prompts, params, is_all=is_all)

    def take_in(self, take_in: Callable[[], list[str]]) -> list[str]:
        """Queue the leader's prompts on every rank -> their ids; a refusal of the leader is raised on all."""
        if self.own_requests:
            return take_in()
        mine: dict[str, Any] = {}
        refusal: Exception | None = None
        if self.is_leader:
            try:
                mine = {"ids": take_in()}
            except Exception as error:  # the other ranks wait for this one, whatever is wrong with the prompts
                refusal, mine = error, {"refused": f"{type(error).__name__}: {error}"}
        given = self.meet("generate()", mine, compare=False).arguments
        if refusal is not None:
            raise refusal
        if "refused" in given:
            raise RequestError(f"rank 0 refused the prompts: {given['refused']}")
        ids: list[str] = given["ids"]
        return ids

    def follow(self, calls: dict[str, Callable[[Any], Any]], *, until: str = DISMISS) -> Any:
        """Take part in the leader's `calls` until it calls `until` -> the arguments of `until`.

        An error of a call that is raised on the leader too is ignored here: the leader handles it.
        """
        while True:
            self._lockstep.phase = FOLLOW
            try:
                met = self._lockstep.meet(FOLLOW, flag=self._weights_moved(), other_prompts=self._complaint())
            except PromptsDiffer:  # the leader raises it, and ends what it was about to do with the other ranks
                continue
            if met.call == until:
                self._execute(met)
                return met.arguments
            if met.call not in calls:
                raise LockstepError(f"rank 0 calls {met.call} where this rank waits for {until}")
            self._met = met
            try:
                calls[met.call](met.arguments)
            except (LockstepError, RankFailure):
                raise
            except (ValueError, RuntimeError):  # the leader has it as well: transitions fail on all ranks alike
                continue
            finally:
                self._met = None

    def _weights_moved(self) -> bool:
        """Whether weights changed on this rank, as far as that matters before a step."""
        return not self._loop.was_idle and self._loop.weights_differ()

    def _add(self, given: dict[str, Any]) -> None:
        params = SamplingParams.from_dict(given["params"])
        self._queue(given["id"], given["text"], given["ids"], params, given["stream"], given["salt"], given["caller"])

    def _compare(self, given: dict[str, Any]) -> None:
        found = "" if self._own is None else self._own.difference(given["digests"], is_all=given["is_all"])
        if found and not self._other_prompts:
            rank, size = self._lockstep.rank, self._lockstep.size
            self._other_prompts = (
                f"rank {rank} was given other prompts than rank 0: {found}. The {size} ranks of an engine (tensor, "
                "pipeline and expert parallel) serve one list, that of rank 0: give all of them the same prompts and "
                "parameters, or none ([]) to the others. Prompts of every rank are gathered first "
                "(torch.distributed.all_gather_object), and each rank takes its part of the outputs"
            )

    def _complaint(self) -> str:
        """What the other ranks do not know yet of `_other_prompts`."""
        complaint, self._other_prompts = self._other_prompts, ""
        return complaint

    def _execute(self, met: Meeting) -> None:
        self._outbox.commands = []
        for command in met.commands:
            if not self.is_leader or command["kind"] in ("price", "release", "step price"):
                self._commands[command["kind"]](command)


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
