"""The state machine behind both APIs: it changes the state of all engines together, or of none.

Changes run one at a time and to the end: a client that disconnects does not leave one half done.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from megatron_infer.coordinator.protocol import Overloaded
from megatron_infer.engine.lifecycle_commands import GRAPHS, PAUSE_MODES, TAGS
from megatron_infer.engine.states import DEFAULT_TIMEOUT_S
from megatron_infer.server.control.control_states import SERVING, ControlState, ControlStatus, refusal
from megatron_infer.server.control.fanout import Fanout
from megatron_infer.server.control.version_labels import Version, VersionLabels
from megatron_infer.server.engine_client import EngineClient, is_outdated
from megatron_infer.server.http_errors import ApiError, bad_request, unavailable

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

MODES = (*PAUSE_MODES, "wait")
_ENGINE_STATES = {"running": ControlState.SERVING, "paused": ControlState.PAUSED, "suspended": ControlState.ASLEEP}


def as_change(command: str) -> Callable[[F], F]:
    """Have a method run as a change of the state: see `ControlMachine.change`."""

    def of(method: F) -> F:
        @functools.wraps(method)
        async def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
            return await owner.change(command, method(owner, *args, **kwargs))

        return cast(F, run)

    return of


class ControlMachine:
    """The control status of all engines, and the changes that pause them, release memory or reset the prefix cache."""

    def __init__(self, client: EngineClient, *, max_waiting: int) -> None:
        """max_waiting: most calls that wait while the state changes."""
        self.client = client
        self.fanout = Fanout(client)
        self.status = SERVING
        self.labels = VersionLabels()
        client.version_name = self.shown_version
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._admits = asyncio.Event()
        self._admits.set()
        self._num_waiting, self._max_waiting = 0, max_waiting

    # ------------------------------------------------------------------ requests

    async def admit(self) -> None:
        """An admission hook: waits while requests are held. Raises ApiError while memory is released."""
        if self.status.refuses_requests:
            message = f"the engines are {self.status.name}; ask again once they have been woken up"
            raise unavailable(message, "asleep")
        if self._admits.is_set():
            return
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting:,} requests wait while the engines change their state; ask again")
        self._num_waiting += 1
        try:
            await self._admits.wait()
        finally:
            self._num_waiting -= 1
        await self.admit()

    @asynccontextmanager
    async def _hold_new_requests(self) -> AsyncIterator[None]:
        self._admits.clear()
        try:
            yield
        finally:
            self._admits.set()

    # ------------------------------------------------------------------ changes

    async def change(self, command: str, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` after the changes before it, if the state then allows `command`, to the end even if cancelled.

        Raises ApiError 409 naming the state and the remedy.
        """
        task = asyncio.create_task(self._change(command, work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have been cancelled

    async def _change(self, command: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with self._lock:
                await self.refresh()
                self.require(command)
                return await work
        finally:
            work.close()

    def require(self, command: str) -> None:
        """Raises ApiError 409 unless the state allows `command`."""
        reason = refusal(command, self.status)
        if reason is not None:
            raise wrong_state(reason)

    async def refresh(self) -> None:
        """Adopt a state that others have brought the engines into: a trainer's own client, or an earlier server."""
        await self.client.refresh()
        found = {replica["state"] for replica in self.client.replicas}
        if len(found) != 1 or self.status.state in (ControlState.UPDATING, ControlState.SPOILED):
            return
        state = _ENGINE_STATES.get(found.pop())
        expected = self.status.state
        if self.status.state is ControlState.ASLEEP and not self.status.tags:
            expected = ControlState.PAUSED
        if state is None or state is expected:
            return
        self.status = {
            ControlState.SERVING: SERVING,
            ControlState.PAUSED: ControlStatus(state=ControlState.PAUSED, detail="keep"),
            ControlState.ASLEEP: ControlStatus(state=ControlState.ASLEEP, tags=TAGS, before=SERVING),
        }[state]

    # ------------------------------------------------------------------ pause and resume

    @as_change("pause")
    async def pause(self, mode: str) -> int:
        """Pause all engines -> how many requests were aborted for it.

        keep: running requests are frozen and go on later. retract: the same, but recomputed. abort: they end with the
        tokens they have. wait: they finish first, while new ones wait.
        """
        before = self.status
        async with self._hold_new_requests():
            count = await self._settle_requests(mode)
            if before.state is ControlState.SERVING:
                await self.quiesce(mode)
            elif mode == "retract":
                await self.recompute()
        if before.state is ControlState.SERVING or mode != "keep":
            self.status = ControlStatus(state=ControlState.PAUSED, detail=mode)
        return count

    async def _settle_requests(self, mode: str) -> int:
        """Abort running requests, wait for them, or neither -> how many were aborted."""
        if mode == "abort":
            return self.client.abort()
        if mode == "wait" and self.client.num_calls:
            if self.status.state is not ControlState.SERVING:
                text = f"{self.client.num_calls} requests cannot end while the engines are {self.status.name}"
                raise wrong_state(f"{text}; resume first, or take mode abort")
            try:
                async with asyncio.timeout(DEFAULT_TIMEOUT_S):
                    await self.client.wait_idle()
            except TimeoutError:
                text = f"{self.client.num_calls} requests have not ended within {DEFAULT_TIMEOUT_S:g} s"
                raise ApiError(504, f"{text}; the engines are {self.status.name}", code="timeout") from None
        return 0

    async def quiesce(self, mode: str = "keep") -> None:
        """Pause all engines; on failure none is paused."""
        engine_mode = "keep" if mode == "wait" else mode
        try:
            await self.fanout.run("pause", "pause", self.status.name, mode=engine_mode)
        except ApiError:
            await self.fanout.end("unpause")
            raise

    async def unpause(self, then: ControlStatus) -> None:
        """Unpause all engines, which leads to `then`; on failure they are PAUSED."""
        paused = ControlStatus(state=ControlState.PAUSED, detail="keep")
        try:
            await self.fanout.run("unpause", "resume", paused.name)
        except ApiError:
            await self.fanout.end("pause", mode="keep")
            self.status = paused
            raise
        self.status = then

    async def recompute(self) -> None:
        """Have running requests drop their keys and values and recompute them."""
        version = self.version
        await self.fanout.run("set_weight_version", "recompute", self.status.name, version=version, running="recompute")

    @as_change("resume")
    async def resume(self) -> None:
        """Resume paused engines; does nothing if they are serving."""
        if self.status.state is ControlState.PAUSED:
            await self.unpause(SERVING)

    # ------------------------------------------------------------------ memory

    @as_change("sleep")
    async def sleep(self, tags: Sequence[str], mode: str) -> dict[str, Any]:
        """Release the memory of `tags` -> each replica's report. No tags: only scheduling stops.

        The cache is dropped: kept requests are recomputed after wake_up.
        """
        before = self.status
        asleep = before.state is ControlState.ASLEEP
        async with self._hold_new_requests():
            await self._settle_requests(mode)
            if not tags:
                if before.state is ControlState.SERVING:
                    await self.quiesce(mode)
                if not asleep:
                    self.status = ControlStatus(state=ControlState.ASLEEP, before=before)
                return {}
            fresh = [tag for tag in tags if tag not in before.tags]
            try:
                reports = await self.fanout.run("suspend", "sleep", before.name, mode="recompute", tags=list(tags))
            except ApiError:
                if fresh:
                    await self.fanout.end("resume", tags=fresh)
                raise
            away = tuple(tag for tag in TAGS if tag in {*before.tags, *tags})
            returns_to = before.before if asleep else before
            if asleep and not before.tags:
                returns_to = ControlStatus(state=ControlState.PAUSED, detail="keep")  # level 0 had paused the engines
            self.status = ControlStatus(state=ControlState.ASLEEP, tags=away, before=returns_to)
        return reports

    @as_change("wake_up")
    async def wake_up(self, tags: Iterable[str] | None) -> dict[str, Any]:
        """Restore the memory of `tags` (None: all) -> each replica's report; on failure all engines sleep as before."""
        before = self.status
        assert before.before is not None, before
        wanted = set(before.tags if tags is None else tags)
        missing = wanted - set(before.tags)
        if missing:
            raise wrong_state(f"wake_up of {', '.join(sorted(missing))} while the engines are {before.name}")
        left = tuple(tag for tag in before.tags if tag not in wanted)
        if set(left) <= {GRAPHS}:  # a client that does not know this tag never asks for it
            wanted, left = set(before.tags), ()
        reports: dict[str, Any] = {}
        if wanted:
            order = None if not left else [tag for tag in TAGS if tag in wanted]
            try:
                reports = await self.fanout.run("resume", "wake_up", before.name, tags=order)
            except ApiError:
                await self.fanout.end("suspend", mode="recompute", tags=list(before.tags))
                raise
        elif before.before.state is ControlState.SERVING:
            await self.unpause(SERVING)
        self.status = (
            ControlStatus(state=ControlState.ASLEEP, tags=left, before=before.before) if left else before.before
        )
        return reports

    # ------------------------------------------------------------------ cache

    @as_change("reset_prefix_cache")
    async def reset_prefix_cache(self, *, running: bool = False) -> int:
        """Empty the prefix cache -> blocks that became free. running: running requests are recomputed."""
        if running:
            await self.recompute()
        freed = await self.fanout.run("reset_prefix_cache", "reset_prefix_cache", self.status.name)
        return sum(value for value in freed.values() if isinstance(value, int))

    # ------------------------------------------------------------------ queries

    @property
    def version(self) -> int:
        """Version of the weights in force; the newest where replicas differ."""
        there = [int(replica["weight_version"]) for replica in self.client.replicas if not is_outdated(replica)]
        return max(there, default=int(self.client.stats.get("weight_version", 0)))

    @property
    def ranks(self) -> list[int]:
        """How many ranks each engine has."""
        return [replica["limits"].get("num_ranks", 1) for replica in self.client.replicas]

    def shown_version(self, number: int | None = None) -> Version:
        """A version under the name that its caller gave it. None: the version of the weights now."""
        return self.labels.shown(self.version if number is None else number)


def wrong_state(message: str) -> ApiError:
    return ApiError(409, message, code="wrong_state")


def checked_mode(mode: str, known: Iterable[str] = MODES, *, name: str = "mode") -> str:
    """Raises ApiError 400."""
    if mode not in known:
        raise bad_request(f"{name} is {mode[:40]!r}; one of {', '.join(known)}", name, "invalid_value")
    return mode


def checked_tags(tags: Iterable[str], names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The engine's tags for those of an API. Raises ApiError 400."""
    chosen: set[str] = set()
    for tag in tags:
        if tag not in names:
            raise bad_request(f"tags: {tag[:40]!r} is unknown; any of {', '.join(names)}", "tags", "invalid_value")
        chosen |= set(names[tag])
    return [tag for tag in TAGS if tag in chosen]
