"""The one state machine behind all dialects: it changes the state of all engines together, or of none.

Changes happen one at a time, each to its end: a caller who goes away does not leave one half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from megatron_infer.coordinator.protocol import Overloaded
from megatron_infer.server.control.control_states import GRAPHS, SERVING, TAGS, ControlStatus, State, refusal
from megatron_infer.server.control.fanout import Fanout
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import ApiError, bad_request, unavailable

T = TypeVar("T")

TIMEOUT_S = 300.0
"""For every command, and for the requests that a pause waits for."""
MODES = ("keep", "abort", "retract", "wait")
_ENGINE_STATES = {"running": State.SERVING, "paused": State.PAUSED, "suspended": State.ASLEEP}


class ControlMachine:
    """Where all engines stand, and the changes that leave memory and weights alone or give memory back."""

    def __init__(self, service: EngineClient, *, max_waiting: int, timeout_s: float = TIMEOUT_S) -> None:
        """max_waiting: requests that may wait while those before them end."""
        self.service, self.orders = service, Fanout(service, timeout_s=timeout_s)
        self.standing = SERVING
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._num_waiting, self._max_waiting = 0, max_waiting
        self._timeout_s = timeout_s

    # ------------------------------------------------------------------ requests

    async def admit(self) -> None:
        """Before requests begin: none while memory is away; they wait while others are waited for."""
        if self.standing.refuses_requests:
            message = f"the engines are {self.standing.name}; ask again once they have been woken up"
            raise unavailable(message, "asleep")
        if self._open.is_set():
            return
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting:,} requests wait while the engines change their state; ask again")
        self._num_waiting += 1
        try:
            await self._open.wait()
        finally:
            self._num_waiting -= 1
        await self.admit()

    @asynccontextmanager
    async def _none_begins(self) -> AsyncIterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    # ------------------------------------------------------------------ changes

    async def change(self, command: str, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` when nothing else is being changed, if the state allows `command` then; to its end, whoever waits.

        Raises ApiError 409 naming the state and the way out.
        """
        task = asyncio.create_task(self._change(command, work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody may wait any more

    async def _change(self, command: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with self._lock:
                await self.look()
                self.require(command)
                return await work
        finally:
            work.close()

    def require(self, command: str) -> None:
        """Raises ApiError 409 unless the state allows it."""
        reason = refusal(command, self.standing)
        if reason is not None:
            raise wrong_state(reason)

    async def look(self) -> None:
        """See whether others have paused or woken the engines: a trainer's own client, say, or an earlier server."""
        await self.service.look()
        found = {replica["state"] for replica in self.service.replicas}
        if len(found) != 1 or self.standing.state in (State.UPDATING, State.SPOILED):
            return
        state = _ENGINE_STATES.get(found.pop())
        expected = self.standing.state
        if self.standing.state is State.ASLEEP and not self.standing.tags:
            expected = State.PAUSED
        if state is None or state is expected:
            return
        self.standing = {
            State.SERVING: SERVING,
            State.PAUSED: ControlStatus(state=State.PAUSED, detail="keep"),
            State.ASLEEP: ControlStatus(state=State.ASLEEP, tags=TAGS, before=SERVING),
        }[state]

    # ------------------------------------------------------------------ pause and resume

    async def pause(self, mode: str) -> int:
        """Stand still -> requests that were ended for it.

        keep: they freeze and go on later. retract: likewise, computed anew. abort: they end with what they have.
        wait: they end by themselves first, while new ones wait.
        """
        return await self.change("pause", self._pause(mode))

    async def _pause(self, mode: str) -> int:
        before = self.standing
        async with self._none_begins():
            count = await self._settle_requests(mode)
            if before.state is State.SERVING:
                await self.quiesce(mode)
            elif mode == "retract":
                await self.recompute()
        if before.state is State.SERVING or mode != "keep":
            self.standing = ControlStatus(state=State.PAUSED, detail=mode)
        return count

    async def _settle_requests(self, mode: str) -> int:
        """What becomes of requests before a standstill -> how many were ended."""
        if mode == "abort":
            return self.service.abort()
        if mode == "wait" and self.service.num_calls:
            if self.standing.state is not State.SERVING:
                text = f"{self.service.num_calls} requests cannot end while the engines are {self.standing.name}"
                raise wrong_state(f"{text}; resume first, or take mode abort")
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self.service.idle()
            except TimeoutError:
                text = f"{self.service.num_calls} requests have not ended within {self._timeout_s:g} s"
                raise ApiError(504, f"{text}; the engines are {self.standing.name}", code="timeout") from None
        return 0

    async def quiesce(self, mode: str = "keep") -> None:
        """Pause all engines. On failure none is."""
        engine_mode = "keep" if mode == "wait" else mode
        try:
            await self.orders.give("pause", "pause", self.standing.name, mode=engine_mode)
        except ApiError:
            await self.orders.undo("unpause")
            raise

    async def go_on(self, then: ControlStatus) -> None:
        """Unpause all engines, which leads to `then`. On failure they are PAUSED."""
        paused = ControlStatus(state=State.PAUSED, detail="keep")
        try:
            await self.orders.give("unpause", "resume", paused.name)
        except ApiError:
            await self.orders.undo("pause", mode="keep")
            self.standing = paused
            raise
        self.standing = then

    async def recompute(self) -> None:
        """Requests under way drop their keys and values, and compute them anew."""
        version = self.version
        await self.orders.give(
            "set_weight_version", "recompute", self.standing.name, version=version, running="recompute"
        )

    async def resume(self) -> None:
        """Go on; of engines that do anyway: nothing."""
        await self.change("resume", self._resume())

    async def _resume(self) -> None:
        if self.standing.state is State.PAUSED:
            await self.go_on(SERVING)

    # ------------------------------------------------------------------ memory

    async def sleep(self, tags: Iterable[str], mode: str) -> dict[str, Any]:
        """Give the memory of `tags` back -> each replica's report. No tags: only the scheduling stops.

        The cache is dropped: requests that are kept are computed anew after the wake_up.
        """
        return await self.change("sleep", self._sleep(tuple(tags), mode))

    async def _sleep(self, tags: tuple[str, ...], mode: str) -> dict[str, Any]:
        before = self.standing
        asleep = before.state is State.ASLEEP
        async with self._none_begins():
            await self._settle_requests(mode)
            if not tags:
                if before.state is State.SERVING:
                    await self.quiesce(mode)
                if not asleep:
                    self.standing = ControlStatus(state=State.ASLEEP, before=before)
                return {}
            fresh = [tag for tag in tags if tag not in before.tags]
            try:
                reports = await self.orders.give("suspend", "sleep", before.name, mode="recompute", tags=list(tags))
            except ApiError:
                if fresh:
                    await self.orders.undo("resume", tags=fresh)
                raise
            away = tuple(tag for tag in TAGS if tag in {*before.tags, *tags})
            returns_to = before.before if asleep else before
            if asleep and not before.tags:
                returns_to = ControlStatus(state=State.PAUSED, detail="keep")  # which is how the engines went deeper
            self.standing = ControlStatus(state=State.ASLEEP, tags=away, before=returns_to)
        return reports

    async def wake_up(self, tags: Iterable[str] | None) -> dict[str, Any]:
        """Take memory back (None: all) -> each replica's report. On failure all engines sleep as before."""
        return await self.change("wake_up", self._wake_up(tags))

    async def _wake_up(self, tags: Iterable[str] | None) -> dict[str, Any]:
        before = self.standing
        assert before.before is not None, before
        wanted = set(before.tags if tags is None else tags)
        missing = wanted - set(before.tags)
        if missing:
            raise wrong_state(f"wake_up of {', '.join(sorted(missing))} while the engines are {before.name}")
        left = tuple(tag for tag in before.tags if tag not in wanted)
        if set(left) <= {GRAPHS}:  # clients that do not know of it never ask for it
            wanted, left = set(before.tags), ()
        reports: dict[str, Any] = {}
        if wanted:
            order = None if not left else [tag for tag in TAGS if tag in wanted]
            try:
                reports = await self.orders.give("resume", "wake_up", before.name, tags=order)
            except ApiError:
                await self.orders.undo("suspend", mode="recompute", tags=list(before.tags))
                raise
        elif before.before.state is State.SERVING:
            await self.go_on(SERVING)
        self.standing = ControlStatus(state=State.ASLEEP, tags=left, before=before.before) if left else before.before
        return reports

    # ------------------------------------------------------------------ cache

    async def reset_prefix_cache(self, *, running: bool = False) -> int:
        """Nothing computed before is matched again -> blocks that came free. running: requests compute theirs anew."""
        return await self.change("reset_prefix_cache", self._reset_prefix_cache(running))

    async def _reset_prefix_cache(self, running: bool) -> int:
        if running:
            await self.recompute()
        freed = await self.orders.give("reset_prefix_cache", "reset_prefix_cache", self.standing.name)
        return sum(value for value in freed.values() if isinstance(value, int))

    # ------------------------------------------------------------------ questions

    @property
    def version(self) -> int:
        """Of the weights; the newest where replicas differ."""
        return max((replica["weight_version"] for replica in self.service.replicas), default=0)


def wrong_state(message: str) -> ApiError:
    return ApiError(409, message, code="wrong_state")


def checked_mode(mode: str, known: Iterable[str] = MODES) -> str:
    """Raises ApiError 400."""
    if mode not in known:
        raise bad_request(f"mode is {mode[:40]!r}; one of {', '.join(known)}", "mode", "invalid_value")
    return mode


def checked_tags(tags: Iterable[str], names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The engines' names for `tags`. Raises ApiError 400."""
    chosen: set[str] = set()
    for tag in tags:
        if tag not in names:
            raise bad_request(f"tags: {tag[:40]!r} is unknown; any of {', '.join(names)}", "tags", "invalid_value")
        chosen |= set(names[tag])
    return [tag for tag in TAGS if tag in chosen]
