"""Requests of one call on their way through the engine, and their news.

The client's thread leaves the newest output of each request in a mailbox; the event loop takes what is there when it
gets to it. Outputs carry all so far, so one that is replaced before it was read is not missed: a reader however slow
holds one output a request, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.errors import RequestError
from megatron_infer.metrics.server_meter import RequestWatch, ServerMeter
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server.detokenize import RequestTexts, Texts, without_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request for the engine."""

    prompt_ids: list[int]
    params: SamplingParams
    salt: str = ""


class Mailbox:
    """The newest item of each sender; taken by the event loop that it was made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._items: dict[int, RequestOutput | BaseException] = {}
        self._bell = asyncio.Event()
        self._rung = False

    def put(self, sender: int, item: RequestOutput | BaseException) -> None:
        """From any thread; never waits."""
        with self._lock:
            self._items[sender] = item
            if self._rung:
                return
            self._rung = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bell.set)

    async def take(self, timeout_s: float | None = None) -> dict[int, RequestOutput | BaseException]:
        """What has come since, waiting until there is something; {} after timeout_s without news."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            return {}
        with self._lock:
            self._bell.clear()
            self._rung = False
            items, self._items = self._items, {}
        return items


class InFlightCall:
    """The requests of one call, as an async context: leaving it aborts what has not ended.

    `updates` and `results` raise the first request's error; then the others are of no use to anyone, either.
    """

    def __init__(
        self,
        client: AsyncInferenceClient,
        jobs: Sequence[Job],
        *,
        stream: bool,
        meter: ServerMeter,
        names: frozenset[str] = frozenset(),
        texts: Texts | None = None,
    ) -> None:
        """names: what it can be ended by, see `Service.abort`. texts: makes the outputs' texts; None: engines do."""
        self.names = names
        self._texts = texts
        self._makers: dict[int, RequestTexts] = {}
        self._client, self._jobs, self._stream, self._meter = client, jobs, stream, meter
        self._watches: dict[int, RequestWatch] = {}
        self._numbers: dict[int, int] = {}
        self._mailbox = Mailbox()
        self._early: dict[int, RequestOutput] = {}

    async def __aenter__(self) -> InFlightCall:
        await self._client.ready()
        try:
            for index, job in enumerate(self._jobs):
                self._begin(index, job)
        except BaseException:
            self._abort()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._abort()

    def _begin(self, index: int, job: Job) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": job.prompt_ids}
        if job.salt:
            prompt["cache_salt"] = job.salt
        params, maker = job.params, None if self._texts is None else self._texts.of(job.prompt_ids, job.params)
        if maker is not None:
            params, self._makers[index] = without_text(params), maker
        mailbox, watch = self._mailbox, self._meter.request(stream=self._stream)
        self._watches[index] = watch

        def sink(item: RequestOutput | BaseException) -> None:
            _note(watch, item)
            mailbox.put(index, item)

        self._numbers[index] = self._client.begin(prompt, params, sink, stream=self._stream)

    def end(self) -> None:
        """End what is under way; its last outputs, with what it has, come as ever."""
        for number in self._numbers.values():
            self._client.end(number)

    @property
    def num_unfinished(self) -> int:
        return len(self._numbers)

    def _abort(self) -> None:
        for watch in self._watches.values():
            watch.left()
        for number in self._numbers.values():
            self._client.end(number)
        self._numbers.clear()

    def fail(self, error: BaseException) -> None:
        """End every request with `error`; from the event loop."""
        for index in self._numbers:
            self._watches[index].failed("error")
            self._mailbox.put(index, error)

    async def taken(self, patience_s: float) -> None:
        """Wait until there are first news, or for patience_s. Raises what the call is refused with."""
        self._early = await self._take(patience_s)

    async def updates(self, keep_alive_s: float) -> AsyncIterator[dict[int, RequestOutput]]:
        """Outputs that have news, by the place of their job; {} after keep_alive_s without. Ends with the last one."""
        while self._numbers or self._early:
            news, self._early = self._early, {}
            yield news or await self._take(keep_alive_s)

    async def results(self) -> list[RequestOutput]:
        """Every request's last output, in the order of the jobs."""
        last: dict[int, RequestOutput] = {}
        while self._numbers:
            last.update(await self._take(None))
        return [last[index] for index in range(len(self._jobs))]

    async def _take(self, timeout_s: float | None) -> dict[int, RequestOutput]:
        news: dict[int, RequestOutput] = {}
        for index, item in (await self._mailbox.take(timeout_s)).items():
            if isinstance(item, BaseException):
                self._numbers.pop(index, None)
                raise item
            if item.error is not None:
                raise item.error
            if item.finished:
                self._numbers.pop(index, None)
            news[index] = item
        if self._texts is not None:
            await self._texts.fill(news, self._makers)
        return news


def _note(watch: RequestWatch, item: RequestOutput | BaseException) -> None:
    if isinstance(item, protocol.CoordinatorError) and not isinstance(item, protocol.Overloaded):
        watch.failed("error")
    elif isinstance(item, BaseException):
        watch.failed("refused")
    else:
        watch.news(item)


def params_from(values: dict[str, Any]) -> SamplingParams:
    """Raises RequestError naming the field."""
    try:
        return SamplingParams.from_dict(values)
    except TypeError as error:
        raise RequestError(str(error)) from None
