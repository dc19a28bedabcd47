"""The Ray actor of one of verl's replicas: calls wait in it until the worker that has the engine takes them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from megatron_infer.errors import ConfigError, InferenceError, RequestError


class RolloutServer:
    """Its methods are those of verl's servers; `attach`, `take` and `settle` are for the worker."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calls: list[tuple[int, str, tuple[Any, ...]]] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._change = asyncio.Condition()
        self._has_engine = self._is_closed = self._rejects = False

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> TokenOutput:
        """Waits until the engine has weights, and while `abort_all_requests` holds; raises a request's error."""
        if any((image_data, video_data, audio_data)):
            raise RequestError("megatron_infer takes token ids in verl; leave out image_data, video_data, audio_data")
        async with self._change:
            await self._change.wait_for(lambda: self._rejects or not self._is_closed)
            if self._rejects:
                return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": None})
            answer = self._add("generate", list(prompt_ids), dict(sampling_params))
        output: TokenOutput = await answer
        return output

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, int]:
        """Requests end with what they have; later ones wait for `resume_generation`, or are rejected."""
        await self._set_gate(is_closed=True, rejects=reject_request)
        return {"aborted_count": await self._command("abort_all") or 0}

    async def resume_generation(self) -> None:
        await self._set_gate(is_closed=False, rejects=False)

    async def sleep(self) -> None:
        await self._command("training")

    async def wake_up(self) -> None:
        await self._command("generating")

    async def release_kv_cache(self) -> None:
        await self._command("training")

    async def resume_kv_cache(self) -> None:
        await self._command("generating")

    async def clear_kv_cache(self) -> None:
        await self._command("reset_prefix_cache")

    async def start_profile(self, **_: Any) -> None:
        raise ConfigError("megatron_infer has no profile for verl; set rollout.profiler.enable=False")

    async def stop_profile(self) -> None:
        """Nothing was started."""

    async def attach(self) -> None:
        """For the worker: it has an engine, to which commands go from here on."""
        self._has_engine = True

    async def take(self) -> list[tuple[int, str, tuple[Any, ...]]]:
        """For the worker: the calls that wait, at least one."""
        async with self._change:
            await self._change.wait_for(lambda: self._calls)
            calls, self._calls = self._calls, []
            return calls

    async def settle(self, number: int, value: Any, error: str) -> None:
        """For the worker: the answer of a call."""
        answer = self._answers.pop(number)
        if answer.done():
            return
        if error:
            answer.set_exception(InferenceError(error))
        else:
            answer.set_result(value)

    async def _command(self, name: str) -> Any:
        if not self._has_engine:  # no weights have come yet
            return None
        async with self._change:
            answer = self._add(name)
        return await answer

    def _add(self, name: str, *args: Any) -> asyncio.Future[Any]:
        number = next(self._numbers)
        self._calls.append((number, name, args))
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._change.notify_all()
        return self._answers[number]

    async def _set_gate(self, *, is_closed: bool, rejects: bool) -> None:
        async with self._change:
            self._is_closed = is_closed
            self._rejects = rejects
            self._change.notify_all()
