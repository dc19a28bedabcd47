"""The engine on a thread of its own, stepped while a coroutine waits for it and idle otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from megatron_infer.rl.group_tracker import GroupTracker

_T = TypeVar("_T")


class RolloutThread:
    """Runs functions on one thread, in order. Coroutines that wait for a step share it."""

    def __init__(self, tracker: GroupTracker) -> None:
        self._tracker = tracker
        self._thread: ThreadPoolExecutor | None = None
        self._step: Future[None] | None = None

    async def run(self, work: Callable[[], _T]) -> _T:
        """`work` between two steps. A caller that is cancelled waits until it is done, and is cancelled then."""
        return await _settled(self._submit(work))

    async def step(self) -> None:
        """One step of the engine; joins the step that other coroutines wait for, if there is one."""
        step = self._step
        if step is None or step.done():
            step = self._step = self._submit(self._tracker.step)
        await _settled(step)

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            device = self._tracker.engine.device
            self._thread = ThreadPoolExecutor(1, "megatron-infer-rollout", initializer=device.make_current)
        return self._thread.submit(work)


async def _settled(future: Future[_T]) -> _T:
    """The future's result; a cancellation is raised only once the future is done."""
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not future.cancelled():
            await asyncio.wait([waiting])
        raise
