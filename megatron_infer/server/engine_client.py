"""The seam between HTTP and the engines: what they are, whether they serve, requests in, news out, text and back.

Everything here is for one event loop; tokenizing, templates and longer texts of answers run in threads of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.errors import InferenceError
from megatron_infer.metrics.server_meter import ServerMeter
from megatron_infer.server.detokenize import Texts
from megatron_infer.server.http_errors import ApiError, bad_request, context_overflow, unavailable
from megatron_infer.server.inflight import InFlightCall, Job
from megatron_infer.server.settings import ServerConfig
from megatron_infer.text.tokenizer import Tokenizer

T = TypeVar("T")

LOOK_S = 0.5
"""How often the coordinator is asked how it stands."""


class Fleet(Protocol):
    """Who starts the engines, as far as the server asks. A server whose engines others start has none."""

    def failure(self) -> str | None:
        """Why there will be no engine any more; None: there is one, or there will be."""

    def status(self) -> list[dict[str, Any]]:
        """Each worker: name, state, restarts, the last exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What requests are held against; the least of all replicas."""

    max_length: int
    vocab_size: int


class EngineClient:
    """Engines behind a coordinator, for the modules of the server."""

    def __init__(
        self,
        client: AsyncInferenceClient,
        tokenizer: Tokenizer | None,
        settings: ServerConfig,
        *,
        model: str,
        fleet: Fleet | None = None,
    ) -> None:
        self.client, self.tokenizer, self.settings = client, tokenizer, settings
        self.names = settings.served_model_name or (model,)
        """What the model goes by, the first one in replies."""
        self.started = int(time.time())
        self.stats: dict[str, Any] = {}
        """The coordinator's report, at most LOOK_S old while `is_connected`."""
        self.is_connected = False
        self.meter = ServerMeter()
        self._fleet = fleet
        self._facts: Facts | None = None
        self._draining = False
        self.gates: list[Callable[[], Awaitable[None]]] = []
        """Asked before requests begin: each may wait, or raise ApiError."""
        self._flights: set[InFlightCall] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(settings.token_threads, thread_name_prefix="megatron-infer-text")
        self._texts = None if tokenizer is None else Texts(tokenizer, self.off_loop)
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineClient:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.to_thread(self._threads.shutdown)

    # ------------------------------------------------------------------ how the engines stand

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Every replica that serves now, as the coordinator describes it."""
        return self.stats.get("replicas", []) if self.is_connected else []

    @property
    def workers(self) -> list[dict[str, Any]]:
        return [] if self._fleet is None else self._fleet.status()

    @property
    def state(self) -> str:
        """ "ok", "loading" (no engine yet, or not again yet), "draining" or "failed"."""
        if self._draining:
            return "draining"
        if self._fleet is not None and self._fleet.failure() is not None:
            return "failed"
        return "ok" if self.replicas else "loading"

    async def facts(self) -> Facts:
        """What requests are held against. Raises ApiError 503 while no engine has ever been there."""
        if self._facts is None:
            raise unavailable("the model is loading; ask again in a moment", "loading")
        return self._facts

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and answer together; None while no engine has ever been there."""
        return None if self._facts is None else self._facts.max_length

    async def look(self) -> None:
        """Ask the coordinator now; afterwards `stats` is fresh or `is_connected` False."""
        try:
            async with asyncio.timeout(2.0):
                self.stats = await self.client.stats()
            self.is_connected = True
        except (InferenceError, TimeoutError):
            self.is_connected = False
            self.meter.saw(None, self.workers)
            return
        self.meter.saw(self.stats, self.workers)
        limits = [replica["limits"] for replica in self.stats["replicas"] if replica["limits"]]
        if limits:
            self._facts = Facts(
                max_length=min(one["max_sequence_length"] for one in limits),
                vocab_size=min(one["vocab_size"] for one in limits),
            )

    async def _look(self) -> None:
        while True:
            await self.look()
            reason = None if self._fleet is None else self._fleet.failure()
            if reason is not None:
                self.end_all(protocol.ReplicaLost(reason))
            await asyncio.sleep(LOOK_S if self._facts is not None else LOOK_S / 5)

    # ------------------------------------------------------------------ taking calls, or not

    def refusal(self) -> ApiError | None:
        """Why no call is taken now."""
        if self._draining:
            return unavailable("the server is shutting down and takes no more requests", "draining")
        return None

    def begin_drain(self) -> None:
        """Take no more calls; those under way go on."""
        self._draining = True

    def end_all(self, error: BaseException) -> None:
        """End every call that is under way with `error`."""
        for flight in self._flights:
            flight.fail(error)

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()

    def abort(self, names: Iterable[str] | None = None) -> int:
        """End the requests of calls that go by one of `names` (None: all), which get what they have -> how many."""
        wanted = None if names is None else set(names)
        chosen = [flight for flight in self._flights if wanted is None or flight.names & wanted]
        count = sum(flight.num_unfinished for flight in chosen)
        for flight in chosen:
            flight.end()
        return count

    @property
    def num_calls(self) -> int:
        """Calls whose requests are under way."""
        return len(self._flights)

    # ------------------------------------------------------------------ requests

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name is not None and name not in self.names:
            message = f"the model {name[:200]!r} is not served here; there is {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def check(self, job: Job, *, field: str = "prompt") -> None:
        """Raises ApiError for a job that the engines would refuse or could not do as asked. field: the prompt's."""
        facts, num_prompt = await self.facts(), len(job.prompt_ids)
        if num_prompt == 0:
            raise bad_request("the prompt is empty (0 tokens); give at least one", field, "empty_prompt")
        asked = job.params.max_tokens
        if num_prompt + (asked or 1) > facts.max_length:
            raise context_overflow(facts.max_length, num_prompt, asked or 1, field=field)
        wrong = next((i for i in job.prompt_ids if not 0 <= i < facts.vocab_size), None)
        if wrong is not None:
            message = f"token id {wrong} is outside the vocabulary (0 to {facts.vocab_size - 1})"
            raise bad_request(message, field, "invalid_token_id")

    @asynccontextmanager
    async def fly(
        self, jobs: Sequence[Job], *, stream: bool = False, names: Iterable[str] = ()
    ) -> AsyncIterator[InFlightCall]:
        """Begin requests; leaving the context aborts what has not ended. Raises ApiError 503 without engines.

        stream: news come as tokens are drawn, not only at the end. names: for `abort`.
        """
        for gate in self.gates:
            await gate()
        refused = self.refusal()
        if refused is not None:
            raise refused
        reason = None if self._fleet is None else self._fleet.failure()
        if reason is not None:
            raise unavailable(reason, "engine_failed")
        flight = InFlightCall(
            self.client, jobs, stream=stream, meter=self.meter, names=frozenset(names), texts=self._texts
        )
        self._flights.add(flight)
        self._idle.clear()
        try:
            async with flight:
                yield flight
        finally:
            self._flights.discard(flight)
            if not self._flights:
                self._idle.set()

    # ------------------------------------------------------------------ text

    async def off_loop(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run what computes in a thread, so that streams go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    def require_tokenizer(self) -> Tokenizer:
        """Raises ApiError 400 where the model has none."""
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer: give prompts as token ids", "prompt", "no_tokenizer")
        return self.tokenizer

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        tokenizer = self.require_tokenizer()
        return await self.off_loop(tokenizer.encode, text, add_special=add_special)

    async def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        tokenizer = self.require_tokenizer()
        return await self.off_loop(tokenizer.decode, ids, skip_special=skip_special)
