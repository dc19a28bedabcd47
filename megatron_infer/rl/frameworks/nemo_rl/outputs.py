"""Outputs on their way from the policy's workers to the processes that asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import ray

from megatron_infer.errors import InferenceError

MAX_WAITING = 100_000
"""Requests whose outputs callers wait for, at once."""
WATCH_S = 30.0
"""Seconds between two questions whether a worker is there, while outputs of its engine are awaited."""
KEEP_S = 3600.0
"""Seconds for which outputs are kept that no caller has come for."""
PUT = "put"
"""Ray's concurrency group of `Outputs.put`. Ray runs a group in a thread of its own."""


class Outputs:
    """A Ray actor in which outputs wait for their callers. `put` runs however many callers wait."""

    def __init__(self) -> None:
        self._waiting: dict[str, Future[tuple[Any, str]]] = {}

    @ray.method(concurrency_group=PUT)
    async def put(self, key: str, value: Any, error: str) -> None:
        _end(self._of(key), value, error)

    async def watch(self, worker: Any, keys: Sequence[str], submitted: Sequence[Any]) -> None:
        """Keys that get no output, as the call `submitted` raises or the worker ends, get the error."""
        waiting = [self._of(key) for key in keys]
        ended = [asyncio.wrap_future(one) for one in waiting]
        try:
            await submitted[0]
            while (await asyncio.wait(ended, timeout=WATCH_S))[1]:
                await worker.__ray_ready__.remote()
        except Exception as error:
            for one in waiting:
                _end(one, None, f"{type(error).__name__}: {error}")
        asyncio.get_running_loop().call_later(KEEP_S, self._drop, keys)

    async def get(self, key: str) -> Any:
        value, error = await asyncio.wrap_future(self._of(key))
        self._drop([key])
        if error:
            raise InferenceError(error)
        return value

    def _of(self, key: str) -> Future[tuple[Any, str]]:
        return self._waiting.setdefault(key, Future())

    def _drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._waiting.pop(key, None)


def _end(waiting: Future[tuple[Any, str]], value: Any, error: str) -> None:
    with suppress(InvalidStateError):  # the first end of a row counts
        waiting.set_result((value, error))


def start_outputs() -> Any:
    """The actor."""
    actor = ray.remote(concurrency_groups={PUT: 1})(Outputs)
    return actor.options(max_concurrency=MAX_WAITING, num_cpus=0).remote()
