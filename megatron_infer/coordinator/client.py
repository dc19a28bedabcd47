"""Clients of a coordinator, synchronous and for asyncio: prompts in, outputs out, commands to all replicas.

with InferenceClient("tcp://127.0.0.1:5757") as client:
    outputs = client.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=8))
    for output in client.stream([1, 2, 3]): ...

async with AsyncInferenceClient("tcp://127.0.0.1:5757") as client:
    async for output in client.stream([1, 2, 3]): ...
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.connection import CoordinatorConnection
from megatron_infer.coordinator.request_receiver import RequestReceiver, Sink
from megatron_infer.engine.lifecycle_commands import COMMANDS, EngineCommands
from megatron_infer.engine.states import DEFAULT_TIMEOUT_S
from megatron_infer.errors import ConfigError, InvalidPrompt
from megatron_infer.outputs.request_output import OnError, RequestOutput, check_on_error, checked_outputs
from megatron_infer.outputs.schema import bytes_to_ids, ids_to_bytes

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with "prompt" or "prompt_token_ids", and optionally "cache_salt"."""
Answers = dict[str, protocol.Answer]
"""Every replica's answer to a command, by its name."""
LaterAnswers = Coroutine[Any, Any, Answers]


class Encoder(Protocol):
    """The part of a tokenizer that a client uses."""

    def encode(self, text: str) -> list[int]: ...


class _Session:
    """A client's connection, with its running requests and queries. Sinks are called on the connection's thread.

    Requests outlive the connection: the coordinator that welcomes this client next gets them again, with the tokens
    that have come.
    """

    def __init__(
        self,
        address: str,
        *,
        key: bytes | None,
        name: str,
        timeout_s: float,
        reconnect_s: float,
        tokenizer: Encoder | None,
    ) -> None:
        self._tokenizer, self._timeout_s, self._reconnect_s = tokenizer, timeout_s, reconnect_s
        self._giving_up: threading.Timer | None = None
        self._lock = threading.RLock()  # a signal handler may abort while it is held
        self._receivers: dict[int, RequestReceiver] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._num_ids = 0
        self._failure: protocol.CoordinatorError | None = None
        self.connection = CoordinatorConnection(address, self, role="client", name=name, key=key, timeout_s=timeout_s)
        self.connection.start()

    # the connection's thread
    def on_welcome(self, welcome: protocol.Welcome) -> Sequence[protocol.Message]:
        self._stop_waiting()
        messages: list[protocol.Message] = []
        ending: list[Callable[[], None]] = []
        with self._lock:  # no request is between its receiver and the outbox
            self.connection.drop_unsent()
            for number, receiver in list(self._receivers.items()):
                submit = receiver.handed_in_again()
                try:
                    protocol.encode(submit, limit=welcome.max_message)
                except protocol.MessageTooLarge as error:
                    ending.append(partial(self._receivers.pop(number).fail, error))
                else:
                    if receiver.is_aborted:
                        ending.append(self._receivers.pop(number).abort)
                    else:
                        messages.append(submit)
        for end in ending:  # sinks may call this session
            end()
        return messages

    def on_message(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Output):
            receiver = self._receivers.get(message.number)
            if receiver is not None and receiver.add(message):
                self._receivers.pop(message.number, None)
                if not message.finished:
                    self.connection.send(protocol.Abort(message.number))
        elif isinstance(message, protocol.ControlResult | protocol.Report):
            future = self._answers.pop(message.id, None)
            if future is not None and future.set_running_or_notify_cancel():  # else it was cancelled
                future.set_result(message)
        elif isinstance(message, protocol.Refused):  # it does not say which message was refused
            self._fail(protocol.BadMessage(message.message))

    def on_lost(self, error: protocol.CoordinatorError, final: bool) -> None:
        if final:
            self._failure = error
            self.connection.welcomed.set()  # `ready` raises the failure
        if final or not self._reconnect_s:
            self._stop_waiting()
            self._fail(error)
            return
        self._fail_answers(error)
        if self._giving_up is None:
            self._giving_up = threading.Timer(self._reconnect_s, self._give_up, (error,))
            self._giving_up.daemon = True
            self._giving_up.start()

    def beat(self) -> protocol.Message:
        return protocol.Ping()

    def _stop_waiting(self) -> None:
        """Do not give up the requests that wait for a coordinator's welcome."""
        timer, self._giving_up = self._giving_up, None
        if timer is not None:
            timer.cancel()

    def _give_up(self, error: BaseException) -> None:
        self._giving_up = None
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            receiver.fail(error)
        self._fail_answers(error)

    def _fail_answers(self, error: BaseException) -> None:
        with self._lock:
            answers, self._answers = list(self._answers.values()), {}
        for future in answers:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    # any thread
    def ready(self, timeout_s: float | None = None) -> None:
        """Wait for the coordinator's welcome. Raises AccessRefused or ConnectionLost."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        if not self.connection.welcomed.wait(limit):
            raise protocol.ConnectionLost(f"no coordinator answers at {self.connection.address} within {limit:g} s")
        if self._failure is not None:
            raise self._failure

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        stream: bool,
        sink: Sink,
        *,
        caller: str = "",
        call: str = "",
    ) -> int:
        text, ids, salt = self._parsed(prompt)
        values = {name: value for name, value in (params or SamplingParams()).to_dict().items() if value is not None}
        if params is not None and params.max_tokens is None:
            values["max_tokens"] = None
        seed = values.pop("seed", None)
        self.ready()
        with self._lock:
            self._num_ids += 1
            data = None if ids is None else ids_to_bytes(ids)
            text_sent = text if ids is None else None
            submit = protocol.Submit(self._num_ids, data, text_sent, salt, values, seed, stream, caller, call)
            self._receivers[submit.id] = RequestReceiver(submit, text, sink)
            try:
                self.connection.send(submit)
            except protocol.MessageTooLarge:
                del self._receivers[submit.id]
                raise
        return submit.id

    def submit_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> dict[int, Future[RequestOutput]]:
        """Submit prompts -> a future of each output, by its number. If one is refused, those before it are aborted."""
        batch = _batch(prompts)
        futures: dict[int, Future[RequestOutput]] = {}
        try:
            for prompt, one in zip(batch, _params_for(len(batch), params), strict=True):
                future: Future[RequestOutput] = Future()
                futures[self.submit(prompt, one, False, _settler(future))] = future
        except BaseException:
            self.abort_all(futures)
            raise
        return futures

    def abort_all(self, request_ids: Iterable[int]) -> None:
        """Abort requests; those that have ended are left as they are."""
        for request_id in request_ids:
            self.abort(request_id)

    def abort(self, request_id: int) -> None:
        with self._lock:
            receiver = self._receivers.get(request_id)
            if receiver is not None:
                receiver.is_aborted = True
                self.connection.send(protocol.Abort(request_id))

    def ask(self, make: Callable[[int], protocol.Message]) -> Future[Any]:
        self.ready()
        future: Future[Any] = Future()
        with self._lock:
            self._num_ids += 1
            number = self._num_ids
            self._answers[number] = future
        try:
            self.connection.send(make(number))
        except protocol.BadMessage:
            del self._answers[number]
            raise
        return future

    def control(self, command: str, args: Mapping[str, Any], timeout_s: float | None) -> Future[Any]:
        if command not in COMMANDS:
            raise ConfigError(f"unknown command {command!r}; one of {', '.join(COMMANDS)}")
        limit = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        sent = {name: list(value) if isinstance(value, Iterator) else value for name, value in args.items()}
        given = {name: value for name, value in sent.items() if value is not None}
        return self.ask(lambda number: protocol.Control(number, command, given, limit))

    def close(self) -> None:
        self._stop_waiting()
        self._fail(protocol.ConnectionLost("the client was closed"))
        self.connection.close(
            protocol.Goodbye() if self.connection.welcomed.is_set() and self._failure is None else None
        )

    def _parsed(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str]:
        salt = ""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise InvalidPrompt("a mapping prompt has 'prompt' or 'prompt_token_ids', and 'cache_salt' if need be")
            salt = prompt.get("cache_salt", "")
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            return prompt, None if self._tokenizer is None else self._tokenizer.encode(prompt), salt
        ids: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        try:
            return None, list(bytes_to_ids(ids_to_bytes(ids))), salt
        except (TypeError, OverflowError):
            raise InvalidPrompt(f"a prompt is text or token ids (int32), got {str(prompt)[:60]!r}") from None


def _checked(result: protocol.ControlResult, command: str) -> Answers:
    failed = {name: answer for name, answer in result.answers.items() if not answer.ok}
    if failed:
        texts = "; ".join(f"{name}: {answer.message}" for name, answer in failed.items())
        total = len(result.answers)
        raise protocol.ControlFailed(f"{command}: {len(failed)} of {total} replicas failed: {texts}", result.answers)
    return result.answers


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """The prompts, also where a single one was given."""
    if isinstance(prompts, str | Mapping) or getattr(prompts, "ndim", 2) == 1:
        return [prompts]
    items = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _params_for(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidPrompt(f"{count} prompts but {len(params)} SamplingParams; pass one, or one for each prompt")
    return params


class InferenceClient(EngineCommands[Answers, Answers, Answers]):
    """A client of a coordinator, usable from several threads. Connects in the background when constructed.

    timeout_s: longest wait for the coordinator's welcome. tokenizer: tokenizes text prompts here, so that they can be
    routed by prefix; without one the replica does, and they go to the least loaded replica. reconnect_s: when the
    coordinator is lost, how long its requests wait for it or another one at its address, where they continue behind the
    tokens that have come. Errors of a request are raised where its output is awaited: RequestError if it is invalid,
    Overloaded when the queue is full, ConnectionLost when the coordinator does not come back.
    """

    def __init__(
        self,
        address: str,
        *,
        key: bytes | None = None,
        name: str = "",
        timeout_s: float = 10.0,
        reconnect_s: float = 30.0,
        tokenizer: Encoder | None = None,
    ) -> None:
        self._session = _Session(
            address, key=key, name=name, timeout_s=timeout_s, reconnect_s=reconnect_s, tokenizer=tokenizer
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Run prompts to the end -> outputs in their order. If one is refused, the others are aborted.

        Raises GenerationError, once all have ended, if any failed (on_error "return": its output has `error`).
        """
        check_on_error(on_error)
        futures = self._session.submit_all(prompts, params)
        try:
            return checked_outputs([future.result() for future in futures.values()], on_error)
        finally:
            self._session.abort_all(futures)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Future[RequestOutput]:
        """Submit one request -> a future of its output; `abort(future)` ends it."""
        future: Future[RequestOutput] = Future()
        future.request_id = self._session.submit(prompt, params, False, _settler(future))  # type: ignore[attr-defined]
        return future

    def abort(self, future: Future[RequestOutput]) -> None:
        """End a request of `submit`; its future gets the output so far."""
        self._session.abort(future.request_id)  # type: ignore[attr-defined]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Cumulative outputs of one request as it grows. Leaving the loop early aborts it.

        Raises GenerationError, with its last output, if it fails.
        """
        items: queue.SimpleQueue[RequestOutput | BaseException] = queue.SimpleQueue()
        request_id = self._session.submit(prompt, params, True, items.put)
        finished = False
        try:
            while not finished:
                output = _checked_news(items.get())
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._session.abort(request_id)

    def control(self, command: str, *, timeout_s: float | None = None, check: bool = True, **args: Any) -> Answers:
        """Send one of `lifecycle_commands.COMMANDS` to all replicas -> each one's answer by its name, within timeout_s
        (300) seconds.

        Raises ControlFailed, which has the answers, unless all replicas carry it out (check=False: returns them).
        """
        limit = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        result = self._session.control(command, args, limit).result(limit + 30.0)
        return _checked(result, command) if check else result.answers

    def _command(self, name: str, *, timeout_s: float | None, **args: Any) -> Answers:
        return self.control(name, timeout_s=timeout_s, **args)

    def drain(self, replica: str, *, move: bool = False, end: bool = False, timeout_s: float = 10.0) -> Answers:
        """A replica takes no more requests; move: those it has go on elsewhere, with what is computed of them. The
        value has "running": how many it still has (`stats` says when there is none). end: it takes requests again.
        All replicas of the name do so. Raises ControlFailed for a name that no replica has, and for a replica without
        `control`.
        """
        result = self._session.ask(lambda number: protocol.Drain(number, replica, move, end)).result(timeout_s)
        return _checked(result, "drain")

    def stats(self, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """The coordinator's counters, and the state of every replica."""
        report: protocol.Report = self._session.ask(protocol.Query).result(timeout_s)
        return report.stats

    def close(self) -> None:
        """Abort running requests; where their outputs are awaited, ConnectionLost is raised."""
        self._session.close()

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncInferenceClient(EngineCommands[LaterAnswers, LaterAnswers, LaterAnswers]):
    """`InferenceClient` for asyncio: the same methods, awaited, with the same errors."""

    def __init__(self, address: str, **options: Any) -> None:
        self._client = InferenceClient(address, **options)
        self._session = self._client._session

    @property
    def blocking(self) -> InferenceClient:
        """The synchronous client of the same connection, for code outside the event loop; closing it closes both."""
        return self._client

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Run prompts to the end -> outputs in their order; raises as `InferenceClient.generate`. Cancelling it aborts
        them."""
        check_on_error(on_error)
        await self.ready()
        futures = self._session.submit_all(prompts, params)
        try:
            outputs = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures.values()))
            return checked_outputs(outputs, on_error)
        finally:
            self._session.abort_all(futures)

    def begin(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        sink: Sink,
        *,
        stream: bool,
        caller: str = "",
        call: str = "",
    ) -> int:
        """Submit one request -> its number, for `end`. caller, call: see `protocol.Submit`.

        Its cumulative outputs (only the last one unless `stream`), or its error, are passed to `sink` on a thread of
        the client, which it must not block. Raises as `ready` does.
        """
        return self._session.submit(prompt, params, stream, sink, caller=caller, call=call)

    def end(self, number: int) -> None:
        """Abort a request of `begin`; does nothing if it has ended."""
        self._session.abort(number)

    async def ready(self) -> None:
        """Wait for the coordinator's welcome. Raises AccessRefused or ConnectionLost."""
        if not self._session.connection.welcomed.is_set():
            await asyncio.to_thread(self._session.ready)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs of one request as it grows. Leaving the loop early aborts it.

        Raises GenerationError, with its last output, if it fails.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

        def sink(item: RequestOutput | BaseException) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, item)

        await self.ready()
        request_id = self._session.submit(prompt, params, True, sink)
        finished = False
        try:
            while not finished:
                output = _checked_news(await items.get())
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._session.abort(request_id)

    async def control(
        self, command: str, *, timeout_s: float | None = None, check: bool = True, **args: Any
    ) -> Answers:
        """See `InferenceClient.control`."""
        await self.ready()
        result = await asyncio.wrap_future(self._session.control(command, args, timeout_s))
        return _checked(result, command) if check else result.answers

    async def _command(self, name: str, *, timeout_s: float | None, **args: Any) -> Answers:
        return await self.control(name, timeout_s=timeout_s, **args)

    async def drain(self, replica: str, *, move: bool = False, end: bool = False) -> Answers:
        """See `InferenceClient.drain`."""
        await self.ready()
        ask = self._session.ask(lambda number: protocol.Drain(number, replica, move, end))
        return _checked(await asyncio.wrap_future(ask), "drain")

    async def stats(self) -> dict[str, Any]:
        await self.ready()
        report: protocol.Report = await asyncio.wrap_future(self._session.ask(protocol.Query))
        return report.stats

    async def __aenter__(self) -> AsyncInferenceClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self._client.close)


def _checked_news(item: RequestOutput | BaseException) -> RequestOutput:
    """An output of a stream. Raises what the request failed with."""
    if isinstance(item, BaseException):
        raise item
    return checked_outputs([item], "raise")[0]


def _settler(future: Future[RequestOutput]) -> Sink:
    def settle(item: RequestOutput | BaseException) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(item, BaseException):
            future.set_exception(item)
        else:
            future.set_result(item)

    return settle
