"""The engine on a thread of its own, driven by whichever coroutines wait for it: nothing runs when nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from megatron_infer.rl.group_tracker import GroupTracker

_T = TypeVar("_T")


class RolloutThread:
    """Runs work on one thread, in order. Coroutines that wait for a step share it."""

    def __init__(self, flow: GroupTracker) -> None:
        self._flow = flow
        self._thread: ThreadPoolExecutor | None = None
        self._step: Future[None] | None = None

    async def run(self, work: Callable[[], _T]) -> _T:
        """`work` between two steps. A caller that is cancelled waits until it is done, and is cancelled then."""
        return await _settled(self._submit(work))

    async def step(self) -> None:
        """One step of the engine: the one that others wait for, if there is one."""
        step = self._step
        if step is None or step.done():
            step = self._step = self._submit(self._flow.step)
        await _settled(step)

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        if self._thread is None:
            device = self._flow.engine.device
            self._thread = ThreadPoolExecutor(1, "megatron-infer-rollout", initializer=device.take_thread)
        return self._thread.submit(work)


async def _settled(future: Future[_T]) -> _T:
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not future.cancelled():
            await asyncio.wait([waiting])
        raise
