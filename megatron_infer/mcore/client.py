"""megatron-core's coordinator client over this package's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import client as ours
from megatron_infer.errors import NotLeader
from megatron_infer.mcore.context import Named
from megatron_infer.mcore.listening import HERE
from megatron_infer.mcore.results import ledger_entry, prompt_of, refuse_images, result_of

log = logging.getLogger("megatron_infer.mcore")


class _Started:
    """What `start` returns: awaitable, as it was in megatron-core 0.16."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class InferenceClient(Named):
    """Sends requests and commands to all engines of a coordinator.

    Commands return at once and are carried out in order; `engine.wait_until` waits for the state. What keeps the
    engines from it is raised there, if an engine of this process listens to the coordinator, and logged elsewhere.
    """

    def __init__(self, inference_coordinator_address: str, deserialize: bool = False) -> None:
        """deserialize: futures give requests instead of their serialized form."""
        self.address = inference_coordinator_address
        self.deserialize = deserialize
        self.listening = HERE.get(self.address)
        """Where an engine of this process listens to the coordinator; None elsewhere."""
        key = None if self.listening is None else self.listening.key
        self._client = ours.InferenceClient(self.address, key=key)
        self._commands = ThreadPoolExecutor(1, "megatron-infer-commands")
        self.next_request_id = 0
        self.completion_futures: dict[int, asyncio.Future[Any]] = {}

    def start(self, loop: Any = None, connect_timeout_seconds: float | None = None) -> _Started:
        """Wait for the coordinator's welcome. loop: not needed. Raises TimeoutError, or why it refuses."""
        self._client.stats(timeout_s=10.0 if connect_timeout_seconds is None else connect_timeout_seconds)
        return _Started()

    def add_request(self, prompt: Any, sampling_params: Any, *, multi_modal_data: Any = None) -> asyncio.Future[Any]:
        """Submit a prompt -> a future of its result, on the running event loop; cancelling it aborts the request."""
        refuse_images({"multi_modal_data": multi_modal_data})
        given = prompt_of(prompt)
        num_prompt = None if isinstance(given, str) else len(given)
        params = SamplingParams.from_megatron(sampling_params, num_prompt_tokens=num_prompt)
        request_id, self.next_request_id = self.next_request_id, self.next_request_id + 1
        submitted = self._client.submit(given, params)
        waiting = asyncio.ensure_future(self._result(request_id, given, sampling_params, submitted))
        self.completion_futures[request_id] = waiting
        waiting.add_done_callback(lambda _: self.completion_futures.pop(request_id, None))
        return waiting

    async def _result(self, request_id: int, prompt: Any, params: Any, submitted: Future[Any]) -> Any:
        try:
            output = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            self._client.abort(submitted)
            raise
        engine = None if self.listening is None else self.listening.engine
        text = prompt if isinstance(prompt, str) else None
        result = result_of(output, request_id, text, params, None if engine is None else engine.codec)
        if engine is not None and engine.local_metadata_ledger_enabled:
            engine.local_metadata_ledger[getattr(result, "uid", str(request_id))] = ledger_entry(output)
        return result if self.deserialize else result.serialize()

    def abort_request(self, request_id: int) -> None:
        """Cancel an unfinished request's future."""
        if (waiting := self.completion_futures.get(int(request_id))) is not None:
            waiting.cancel()

    # ------------------------------------------------------------------ commands
    def pause_engines(self) -> None:
        """Stop between two steps; nothing happens to engines that are paused or suspended."""
        self._send(self._client.pause)

    def unpause_engines(self) -> None:
        self._send(self._client.unpause)

    def suspend_engines(self) -> None:
        """Paused engines give their memory back, by kv_cache_management_mode."""
        self._send(self._client.suspend)

    def resume_engines(self) -> None:
        """Suspended engines take their memory back, and are paused."""
        self._send(self._client.resume)

    def set_generation_epoch(self, generation_epoch: int) -> None:
        """The weights that the engines have now are of this epoch: `set_weight_version`."""
        self._send(self._client.set_weight_version, generation_epoch)

    def stop_engines(self) -> None:
        """End the coordinator, and with it all engines; on rank 0, once they are paused or suspended."""
        if self.listening is None:
            raise NotLeader("engines are stopped in the process in which their coordinator runs")
        self._send(self.listening.stop_coordinator)

    def shutdown_coordinator(self) -> None:
        """The coordinator has ended with the engines: `stop_engines`."""

    def stop(self) -> None:
        """Close the connection; unfinished futures are cancelled."""
        for waiting in list(self.completion_futures.values()):
            waiting.cancel()
        self._commands.shutdown()
        self._client.close()

    def _send(self, command: Any, *arguments: Any) -> None:
        self._commands.submit(command, *arguments).add_done_callback(self._note)

    def _note(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            return
        log.error("a command to the engines failed: %s", error)
        if self.listening is not None:
            self.listening.fail(error)
