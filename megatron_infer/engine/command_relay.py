"""What an engine's leader is told and the other ranks must hear: requests, aborts, prices, and which call comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from typing import Any

from megatron_infer.comm.lockstep import FOLLOW, Lockstep, Meeting
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import LockstepError, NotLeader, RankFailure, RequestError
from megatron_infer.scheduler.policy import CostModel

DISMISS = "dismiss()"
ROLLOUT = "rollout()"
"""The leader hands out finished groups, or ends a rollout: see rl.ranks."""


class CommandRelay:
    """One rank's side of the commands of an engine.

    The leader does what it is told at once and passes it on with the next call that all ranks make; the others do it
    then, in order, before anything else. Nothing is scheduled in between, so that all ranks schedule from the same.
    """

    def __init__(self, lockstep: Lockstep, loop: StepLoop, queue: Callable[..., str]) -> None:
        """queue(id, text, token ids, params, stream, salt): takes in a request that the leader has checked."""
        self.lockstep = lockstep
        self._loop, self._queue = loop, queue
        self._commands: dict[str, Callable[[dict[str, Any]], Any]] = {
            "add": self._add,
            "abort": lambda given: loop.abort(given["id"]),
            "price": lambda given: loop.take_costs(CostModel(**given["costs"])),
        }
        self._outbox: list[dict[str, Any]] = []
        self._met: Meeting | None = None
        """A call that `follow` has met, and that the method it called has not begun."""

    # ------------------------------------------------------------------ the leader's side

    def require_leader(self, call: str) -> None:
        """Raise NotLeader unless this is the rank that requests go to."""
        if not self.lockstep.is_leader:
            raise NotLeader(
                f"{call} on rank {self.lockstep.rank} of an engine of {self.lockstep.size} ranks: requests go to its "
                "rank 0, where all ranks hear of them; call it there, and step(), generate() or follow() here"
            )

    def pass_on(self, kind: str, **values: Any) -> None:
        """Have every rank do it with the next call."""
        self._outbox.append({"kind": kind, **values})

    def add(self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, **how: str) -> None:
        self.pass_on("add", id=request_id, text=text, ids=ids, params=params.to_dict(), **how)

    def price(self, costs: CostModel) -> None:
        """Prices change on all ranks at the same time, here too."""
        self.pass_on("price", costs=asdict(costs))

    # ------------------------------------------------------------------ every rank's

    def meet(self, call: str, arguments: Any = None, *, flag: bool = False, mine: bool = True) -> Meeting:
        """Begin a call together with all ranks; what the leader passed on has been done when it returns.

        mine: False where the arguments of the others do not count.
        """
        met, self._met = self._met, None
        self.lockstep.phase = call.removesuffix("()")
        if met is None:
            met = self.lockstep.meet(call, self._outbox, arguments=plain(arguments), flag=flag, mine=mine)
        elif met.call != call:
            raise LockstepError(f"{call} while following {met.call}")
        self._take(met)
        return met

    def begin_step(self, *, running: bool) -> bool:
        """Hear what the leader passes on -> whether weights changed on any rank."""
        loop, parts = self._loop, self._loop.parts
        was_idle = loop.was_idle
        met = self.meet("step()", flag=self.weights_moved())
        # Ranks that were idle, or that heard of an abort just now, have looked at too little.
        if running and (was_idle or any(command["kind"] == "abort" for command in met.commands)):
            return self.lockstep.agree(not loop.is_idle and parts.weights_differ(), "a look at the weights")
        return met.flag

    def take_in(self, take_in: Callable[[], list[str]]) -> list[str]:
        """Queue the leader's prompts on every rank -> their ids; what the leader refuses is refused on all."""
        mine: dict[str, Any] = {}
        refusal: Exception | None = None
        if self.lockstep.is_leader:
            try:
                mine = {"ids": take_in()}
            except Exception as error:  # the others wait for word, whatever is wrong with the prompts
                refusal, mine = error, {"refused": f"{type(error).__name__}: {error}"}
        given = self.meet("generate()", mine, mine=False).arguments
        if refusal is not None:
            raise refusal
        if "refused" in given:
            raise RequestError(f"rank 0 refused the prompts: {given['refused']}")
        ids: list[str] = given["ids"]
        return ids

    def weights_moved(self) -> bool:
        """This rank's word on whether weights changed, as far as that matters before a step."""
        return not self._loop.was_idle and self._loop.parts.weights_differ()

    def follow(self, calls: dict[str, Callable[[Any], Any]], *, until: str = DISMISS) -> Any:
        """Take part in what the leader calls until it calls `until` -> what that brings.

        An error that the leader gets, too, is its own.
        """
        while True:
            self.lockstep.phase = FOLLOW
            met = self.lockstep.meet(FOLLOW, flag=self.weights_moved())
            if met.call == until:
                self._take(met)
                return met.arguments
            if met.call not in calls:
                raise LockstepError(f"rank 0 calls {met.call} where this rank waits for {until}")
            self._met = met
            try:
                calls[met.call](met.arguments)
            except (LockstepError, RankFailure):
                raise
            except (ValueError, RuntimeError):  # the leader's to handle: transitions fail on all ranks alike
                continue
            finally:
                self._met = None

    def _add(self, given: dict[str, Any]) -> None:
        params = SamplingParams.from_dict(given["params"])
        self._queue(given["id"], given["text"], given["ids"], params, given["stream"], given["salt"])

    def _take(self, met: Meeting) -> None:
        if self.lockstep.is_leader:
            self._outbox = []
        for command in met.commands:
            if not self.lockstep.is_leader or command["kind"] == "price":
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
