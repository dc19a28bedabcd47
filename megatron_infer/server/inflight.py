"""The engine requests of one HTTP call and their newest outputs.

The client's thread stores the newest output of each request; the event loop takes all stored outputs at once. Outputs
are cumulative, so an output that is replaced before it was taken loses nothing: however slowly a client reads, the
server holds one output per request, and no request waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.engine.metrics.server_meter import RequestMeter, ServerMeter
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server.output_detokenizer import OutputDetokenizer, RequestDetokenizer, without_text
from megatron_infer.server.tracing import RequestSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    caller: str = ""
    """Whom it is served for: requests of several callers are served in turn."""
    call_id: str = ""
    """Id of the HTTP call it belongs to."""
    route: str = ""
    """Path of that call, as registered."""
    prompt_bytes: float | None = None
    """Bytes of the reply for the prompt in each of the n choices; None: the prompt's log probabilities, once."""
    token_bytes: float = 0.0
    """Bytes of the reply for each drawn token, besides those that its parameters ask for."""


class LatestOutputs:
    """The newest output or error of each request, passed from any thread to the event loop it was created on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._items: dict[int, RequestOutput | BaseException] = {}
        self._waiter: asyncio.Future[None] | None = None
        """The future of the `take` that waits."""
        self._late_at = inf
        """When it has waited for too long, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """Goes on from one `take` to the next: a timer for every token of a stream costs more than its text."""

    def put(self, index: int, item: RequestOutput | BaseException) -> None:
        """From any thread; never waits."""
        with self._lock:
            is_first = not self._items
            self._items[index] = item
        if is_first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """End the wait of `take`, if there is something."""
        if self._items and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _tick(self) -> None:
        """End the wait of `take`, if it is late; else look again when it would be."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._late_at:
            self._waiter.set_result(None)
        elif self._late_at < inf:
            self._timer = self._loop.call_at(self._late_at, self._tick)

    def close(self) -> None:
        """No `take` follows."""
        if self._timer is not None:
            self._timer.cancel()

    async def take(self, timeout_s: float | None = None) -> dict[int, RequestOutput | BaseException]:
        """Everything put since the last call, waiting until there is something; {} after timeout_s seconds, which are
        no fewer than in the call before."""
        if not self._items:  # a `put` from now on wakes it, as the loop runs `_wake` later
            self._waiter = self._loop.create_future()
            self._late_at = inf if timeout_s is None else self._loop.time() + timeout_s
            if timeout_s is not None and self._timer is None:
                self._timer = self._loop.call_at(self._late_at, self._tick)
            await self._waiter
        with self._lock:
            items, self._items = self._items, {}
        return items


class InFlightCall:
    """The requests of one call, as an async context: leaving it aborts those that have not finished.

    `updates` and `results` raise the error of the first request that fails; the call then drops the others.
    """

    def __init__(
        self,
        client: AsyncInferenceClient,
        requests: Sequence[EngineRequest],
        *,
        stream: bool,
        meter: ServerMeter,
        abort_ids: frozenset[str] = frozenset(),
        detokenizer: OutputDetokenizer | None = None,
        spans: RequestSpans | None = None,
    ) -> None:
        """abort_ids: see `EngineClient.abort`. detokenizer: None leaves all detokenization to the engines. spans: None
        for a call that is not traced."""
        self.abort_ids = abort_ids
        self._spans = spans
        self._detokenizer = detokenizer
        self._detokenizers: dict[int, RequestDetokenizer] = {}
        self._client, self._requests, self._stream, self._meter = client, requests, stream, meter
        self._meters: dict[int, RequestMeter] = {}
        self._numbers: dict[int, int] = {}
        """Index of an unfinished request -> its number at the coordinator's client."""
        self._latest = LatestOutputs()

    async def __aenter__(self) -> InFlightCall:
        await self._client.ready()
        try:
            for index, request in enumerate(self._requests):
                self._submit(index, request)
        except BaseException:
            self._drop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._drop()

    def _submit(self, index: int, request: EngineRequest) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        params = request.params
        if self._detokenizer is not None:
            detokenizer = self._detokenizer.for_request(request.prompt_ids, params)
            if detokenizer is not None:
                params, self._detokenizers[index] = without_text(params), detokenizer
        latest, meter, spans = self._latest, self._meter.request(stream=self._stream), self._spans
        self._meters[index] = meter

        def sink(item: RequestOutput | BaseException) -> None:
            _record(meter, item)
            if spans is not None:
                spans.put(index, item)
            latest.put(index, item)

        self._numbers[index] = self._client.begin(
            prompt, params, sink, stream=self._stream, caller=request.caller, call=request.call_id
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._numbers)

    def abort(self) -> None:
        """Abort the unfinished requests; `updates` and `results` still return what they have."""
        for number in self._numbers.values():
            self._client.end(number)

    def _drop(self) -> None:
        """Abort the unfinished requests; their outputs are not read any more."""
        self._latest.close()
        for meter in self._meters.values():
            meter.abandoned()
        self.abort()
        self._numbers.clear()
        if self._spans is not None:
            self._spans.end()

    def fail(self, error: BaseException) -> None:
        """Fail every unfinished request with `error`; on the event loop."""
        for index in self._numbers:
            self._meters[index].failed("error")
            if self._spans is not None:
                self._spans.put(index, error)
            self._latest.put(index, error)

    async def updates(self, keep_alive_s: float) -> AsyncIterator[dict[int, RequestOutput]]:
        """New outputs by the index of their request, until all have finished.

        The first item is {}: the requests were accepted, or no message about them came within a second. Every other {}
        says that there was nothing new for keep_alive_s seconds. Raises the error a request was refused with.
        """
        first = await self._take(min(1.0, keep_alive_s))
        yield {}
        if first:
            yield first
        while self._numbers:
            yield await self._take(keep_alive_s)

    async def results(self) -> list[RequestOutput]:
        """Every request's last output, in the order of the requests."""
        last: dict[int, RequestOutput] = {}
        while self._numbers:
            last.update(await self._take(None))
        return [last[index] for index in range(len(self._requests))]

    async def _take(self, timeout_s: float | None) -> dict[int, RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        for index, item in (await self._latest.take(timeout_s)).items():
            if isinstance(item, BaseException):
                self._numbers.pop(index, None)
                raise item
            if item.error is not None:
                raise item.error
            if item.finished:
                self._numbers.pop(index, None)
            outputs[index] = item
        if self._detokenizer is not None:
            await self._detokenizer.fill(outputs, self._detokenizers)
        return outputs


def _record(meter: RequestMeter, item: RequestOutput | BaseException) -> None:
    if isinstance(item, protocol.CoordinatorError) and not isinstance(item, protocol.Overloaded):
        meter.failed("error")
    elif isinstance(item, BaseException):
        meter.failed("refused")
    else:
        meter.output(item)
