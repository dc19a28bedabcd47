"""AsyncLLM: an engine behind asyncio; one thread steps it, any number of coroutines wait for tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.lifecycle_commands import EngineCommands
from megatron_infer.engine.llm import LLM
from megatron_infer.engine.requests.input_processor import Prompt
from megatron_infer.engine.requests.request_state import StreamMode
from megatron_infer.engine.states import DEFAULT_TIMEOUT_S
from megatron_infer.engine.suspend import MemoryReport
from megatron_infer.errors import FreedWeightsWritten, InferenceError, TransitionTimeout
from megatron_infer.outputs.request_output import OnError, RequestOutput, check_on_error, checked_outputs

log = logging.getLogger("megatron_infer")


class EngineStopped(InferenceError):
    """The engine's thread has ended; __cause__ says why if it was not shut down."""


class EngineThread:
    """Steps an engine on a thread of its own; commands are callables that run between steps, in order."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        engine.relay.require_shared("stepping on a thread (AsyncLLM, servers)")
        self.engine = engine
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._sinks: dict[str, Callable[[RequestOutput | BaseException], None]] = {}
        self._thread = threading.Thread(target=self._run, name="megatron-infer-engine", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], Any]) -> Future[Any]:
        """Run `command` on the engine's thread between two steps."""
        future: Future[Any] = Future()
        with self._wake:
            if self._stopping or self._failure is not None:
                future.set_exception(self._stopped())
                return future
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        stream: StreamMode,
        sink: Callable[[RequestOutput | BaseException], None],
    ) -> Future[str]:
        """Queue a request; `sink` is called with its outputs (or the engine's end) on the engine's thread."""

        def add() -> str:
            added = self.engine.add_request(prompt, params, request_id=request_id, stream=stream)
            self._sinks[added] = sink
            return added

        return self.call(add)

    def abort(self, request_id: str) -> Future[RequestOutput]:
        def end() -> RequestOutput:
            output = self.engine.abort(request_id)
            sink = self._sinks.pop(request_id, None)
            if sink is not None:
                sink(output)
            return output

        return self.call(end)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the present step; waiting callers get EngineStopped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _stopped(self) -> EngineStopped:
        error = EngineStopped("the engine has been shut down" if self._failure is None else "the engine's loop failed")
        error.__cause__ = self._failure
        return error

    def _run(self) -> None:
        try:
            self.engine.device.make_current()
            while self._take_commands():
                try:
                    outputs = self.engine.step()
                except FreedWeightsWritten:  # of no request's doing; the weights are as before
                    log.exception("a step was not run")
                    continue
                for output in outputs:
                    sink = self._sinks.get(output.request_id)
                    if output.finished:
                        self._sinks.pop(output.request_id, None)
                    if sink is not None:
                        sink(output)
        except BaseException as error:  # reported to every waiting caller, then the thread ends
            self._failure = error
        finally:
            with self._wake:
                self._stopping = True
                left = list(self._commands)
                self._commands.clear()
            for _, future in left:
                future.set_exception(self._stopped())
            for sink in self._sinks.values():
                sink(self._stopped())
            self._sinks.clear()

    def _take_commands(self) -> bool:
        """Run queued commands, waiting for one while the engine is idle -> False once the thread is to end."""
        while True:
            with self._wake:
                while not self._commands and not self._stopping and not self.engine.can_step():
                    self._wake.wait()
                if self._stopping:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command, future in commands:
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(command())
                except Exception as error:  # raised at the caller of this command
                    future.set_exception(error)
            if self.engine.can_step():
                return True


class AsyncLLM(EngineCommands[Coroutine[Any, Any, None], Coroutine[Any, Any, MemoryReport], Coroutine[Any, Any, int]]):
    """An engine for asyncio: pass a model's name (and options of `LLM`), or an `LLM`."""

    def __init__(self, model: str | LLM, **options: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.tokenizer = self.llm.tokenizer
        self._thread = EngineThread(self.llm.engine)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: StreamMode = "cumulative",
        on_error: OnError = "raise",
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come, the last one finished. Leaving the loop early aborts the request.

        Raises RequestError if it cannot be served, GenerationError with its last output if it fails (on_error "return":
        that output has `error`), EngineStopped if the engine's thread ends.
        """
        check_on_error(on_error)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

        def sink(item: RequestOutput | BaseException) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        preparing = None if params is None else self.llm.engine.prepare(params)
        if preparing is not None:  # not on the engine's thread, where other requests' steps would wait for it
            await asyncio.wrap_future(preparing)
        submitted = self._thread.submit(prompt, params, request_id, stream, sink)
        try:
            added = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._abort_unseen)
            raise
        finished = False
        try:
            while not finished:
                item = await queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                checked_outputs([item], on_error)
                yield item
        finally:
            if not finished:
                self._thread.abort(added)

    def _abort_unseen(self, submitted: Future[str]) -> None:
        """Abort a request that was queued after its caller had been cancelled."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._thread.abort(submitted.result())

    async def abort(self, request_id: str) -> RequestOutput:
        """End a request -> what it has so far, which also ends its generate() loop. Raises UnknownRequest."""
        return await asyncio.wrap_future(self._thread.abort(request_id))

    async def _command(self, name: str, *, timeout_s: float | None, **args: Any) -> Any:
        """Run it on the engine's thread between two steps; it must begin within the time that it may take. Streams wait
        meanwhile, and end if a pause aborts their requests."""
        future = self._thread.call(partial(getattr(self.llm.engine, name), timeout_s=timeout_s, **args))
        waiting = asyncio.wrap_future(future)
        limit = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            begun = bool((await asyncio.wait({waiting}, timeout=limit))[0])
        except asyncio.CancelledError:
            future.cancel()  # a command that has not begun does not run after the caller has left
            raise
        if not begun and future.cancel():
            raise TransitionTimeout(f"the engine did not get to it within {limit:g} s: it waits for the step under way")
        return await waiting

    def shutdown(self) -> None:
        """End the engine's thread; callers of unfinished requests get EngineStopped."""
        self._thread.stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)
