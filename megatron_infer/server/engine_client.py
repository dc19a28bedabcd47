"""The engines as the routes of the HTTP server see them: their state and limits, requests in, outputs out.

routes, control/*                                HTTP calls: bodies in, JSON out
    |  check_request(), submit(), abort()
EngineClient                                     admission, limits, state, meters; one per HTTP process
    |  InFlightCall (inflight.py)                the requests of one call; detokenizes their outputs
AsyncInferenceClient (coordinator/client.py)     one connection
    |  ZMQ
coordinator process --> replicas                 each steps one engine

All methods run on one event loop; tokenization, chat templates and the detokenization of long outputs run in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.engine.metrics.server_meter import ServerMeter
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.server import call_limits
from megatron_infer.server.call_limits import EngineLimits
from megatron_infer.server.endpoint import CALLER, Call
from megatron_infer.server.http_errors import ApiError, bad_request, unavailable
from megatron_infer.server.inflight import EngineRequest, InFlightCall
from megatron_infer.server.output_detokenizer import OutputDetokenizer
from megatron_infer.server.served_models import adapter_of
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.tracing import Tracing
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.utils.process_memory import give_back
from megatron_infer.utils.turn_pool import TurnPool

if TYPE_CHECKING:
    from megatron_infer.server.http_workers import FrontendLink

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between two reports of the coordinator."""
REPORT_TIMEOUT_S = 2.0
"""Most seconds that a report is waited for."""
TOKEN_THREADS = 2
"""Threads that tokenize and render chat templates."""
CLEAN_S, CLEAN_BUSY_S = 2.0, 300.0
"""Seconds between two times that memory is given back, while no call is running and while some are."""


class EngineProcesses(Protocol):
    """What the server asks of the supervisor that started the engines' processes."""

    def failure(self) -> str | None:
        """Why no engine will serve again; None while one serves or may still come up."""

    def status(self) -> list[dict[str, Any]]:
        """Each engine's process: name, state, restarts, last exit."""


def _salt(caller: str, salt: str, *, isolated: bool) -> str:
    """The cache salt of a request: with its caller in it, where callers share no prefixes."""
    return hashlib.blake2b(f"{caller}\n{salt}".encode(), digest_size=16).hexdigest() if isolated else salt


def is_outdated(replica: dict[str, Any]) -> bool:
    """Whether a replica, as the coordinator describes it, takes no requests until it has the weights in force."""
    return bool(replica["restoring"] or replica["outdated"])


class EngineClient:
    """Requests, state and text of the engines behind a coordinator."""

    def __init__(
        self,
        coordinator: AsyncInferenceClient,
        tokenizer: Tokenizer | None,
        settings: ServerConfig,
        *,
        model: str,
        processes: EngineProcesses | None = None,
        started: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """processes: None where the engines were not started by this server. started: the server, by time.time.
        tracing: None: no call is traced."""
        self.coordinator, self.tokenizer, self.settings = coordinator, tokenizer, settings
        self.model_names = settings.served_model_name or (model,)
        """Names that requests may use; replies have the first one."""
        self.started = int(time.time() if started is None else started)
        self.stats: dict[str, Any] = {}
        """The coordinator's last report; POLL_S old, or older while the coordinator or this process is busy."""
        self.is_connected = False
        self.meter, self.tracing = ServerMeter(), tracing
        self.frontend: FrontendLink | None = None
        """Connects one of several HTTP processes with their parent; None: this is the only one."""
        self.admission_hooks: list[Callable[[], Awaitable[None]]] = []
        """Awaited before requests are submitted: each may wait, or raise ApiError."""
        self.reply_hooks: list[Callable[[str, list[RequestOutput]], None]] = []
        """Called with the id and the outputs of each whole reply before it is sent."""
        self.version_name: Callable[[int | None], int | str | None] = lambda number: number
        """The trainer's name of a weight version (None: of the present one), where routes take such names."""
        self.shown: dict[str, Callable[[], Any]] = {}
        """Further entries of /v1/status, by name."""
        self._processes = processes
        self._limits: EngineLimits | None = None
        self._is_draining = False
        self._calls: set[InFlightCall] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = TurnPool(TOKEN_THREADS, "megatron-infer-text", most_each=TOKEN_THREADS, gives_way=False)
        self._detokenizer = None if tokenizer is None else OutputDetokenizer(tokenizer, self.run_in_thread)
        self._was_busy = False
        """Whether calls have run since memory was given back."""
        self._polling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineClient:
        self._polling = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._polling is not None:
            self._polling.cancel()
        await asyncio.to_thread(self._threads.close)

    # ------------------------------------------------------------------ state of the engines

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Every serving replica, as the coordinator describes it."""
        return self.stats.get("replicas", []) if self.is_connected else []

    @property
    def workers(self) -> list[dict[str, Any]]:
        """The engines' processes, where this server started them."""
        return [] if self._processes is None else self._processes.status()

    @property
    def failure(self) -> str | None:
        """Why no engine will serve again; None while one serves or may still come up."""
        return None if self._processes is None else self._processes.failure()

    @property
    def state(self) -> str:
        """ "ok", "loading" (the first replica, or one that was started again, which may read new weights again),
        "unavailable" (none serves now), "outdated" (none has the weights in force), "draining" or "failed"."""
        if self._is_draining:
            return "draining"
        if self.failure is not None:
            return "failed"
        if any(not is_outdated(replica) for replica in self.replicas):
            return "ok"
        is_starting = any(worker["state"] == "starting" for worker in self.workers)
        if is_starting or self._limits is None or any(replica["restoring"] for replica in self.replicas):
            return "loading"
        return "outdated" if self.replicas else "unavailable"

    def _serves_none(self) -> ApiError | None:
        """The error of all calls where no engine will serve again, or none before the next weight update."""
        if (failure := self.failure) is not None:
            return unavailable(failure, "engine_failed")
        if self.state == "outdated":
            return unavailable(f"no engine serves: {self.replicas[0]['outdated']}", "outdated_weights")
        return None

    @property
    def limits(self) -> EngineLimits:
        """Raises ApiError 503 until the first replica has registered."""
        if self._limits is None:
            raise unavailable("the model is loading; ask again in a moment", "loading")
        return self._limits

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and output together; None until the first replica has registered."""
        return None if self._limits is None else self._limits.max_length

    @property
    def adapters(self) -> Sequence[str]:
        """The LoRA adapters that replicas have loaded; while none is there, those of before."""
        return () if self._limits is None else self._limits.adapters

    async def refresh(self) -> None:
        """Ask the coordinator for its report. One that is late leaves `stats` as they are: the connection finds out
        whether the coordinator is gone."""
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                self.stats = await self.coordinator.stats()
            self.is_connected = True
        except TimeoutError:
            return
        except InferenceError:
            self.is_connected = False
            self.meter.update(None, self.workers)
            return
        self.meter.update(self.stats, self.workers)
        self._limits = EngineLimits.of(self.stats) or self._limits

    async def _poll(self) -> None:
        cleaned = time.monotonic()
        while True:
            await self.refresh()
            is_due = time.monotonic() - cleaned > CLEAN_S
            if self._was_busy and ((is_due and not self._calls) or time.monotonic() - cleaned > CLEAN_BUSY_S):
                give_back()
                self._was_busy, cleaned = bool(self._calls), time.monotonic()
            if (error := self._serves_none()) is not None:
                self.fail_all(error)
            await asyncio.sleep(POLL_S if self._limits is not None else POLL_S / 5)

    # ------------------------------------------------------------------ calls in flight

    def refusal(self) -> ApiError | None:
        """The error that every call is refused with now; None: calls are accepted."""
        if self._is_draining:
            return unavailable("the server is shutting down and takes no more requests", "draining")
        return None

    def begin_drain(self) -> None:
        """Refuse further calls; running calls go on."""
        self._is_draining = True

    def fail_all(self, error: BaseException) -> None:
        """Fail every running call with `error`."""
        for call in self._calls:
            call.fail(error)

    async def wait_idle(self) -> None:
        """Wait until no call is running."""
        await self._idle.wait()

    def abort(self, ids: Iterable[str] | None = None) -> int:
        """Abort the requests of the calls that have one of these abort ids (None: of all calls) -> how many requests.

        Their replies hold what was generated so far.
        """
        wanted = None if ids is None else set(ids)
        chosen = [call for call in self._calls if wanted is None or call.abort_ids & wanted]
        count = sum(call.num_unfinished for call in chosen)
        for call in chosen:
            call.abort()
        return count

    @property
    def num_calls(self) -> int:
        """Calls that run in this process."""
        return len(self._calls)

    @property
    def num_server_calls(self) -> int:
        """Calls that run in all HTTP processes of the server."""
        return self.num_calls if self.frontend is None else self.frontend.num_calls

    # ------------------------------------------------------------------ requests

    def checked(self, requests: Sequence[EngineRequest], call: Call, *, field: str = "prompt") -> list[EngineRequest]:
        """The requests of a call, in its caller's name, bounded by `max_reply_bytes`, with the adapter that its model
        names.

        field: the body's field with the prompts.

        Raises ApiError 400 for requests that the engines would refuse, or could never take.
        """
        limits, settings = self.limits, self.settings
        if (adapter := adapter_of(self, getattr(call.body, "model", None))) is not None:
            requests = [replace(one, params=replace(one.params, adapter=adapter)) for one in requests]
        call_limits.check_num_requests(len(requests), limits, field=field)
        for request in requests:
            call_limits.check_enabled(request.params, settings)
            call_limits.check_prompt(request.prompt_ids, request.params.max_tokens, limits, field=field)
            call_limits.check_num_ids(request.params, limits)
        bounded = self.within_reply(requests)
        caller, isolated = call.caller, settings.isolate_prefix_cache
        return [
            replace(
                one,
                caller=caller,
                call_id=call.id,
                route=call.route,
                cache_salt=_salt(caller, one.cache_salt, isolated=isolated),
            )
            for one in bounded
        ]

    def within_reply(self, requests: Iterable[EngineRequest]) -> Sequence[EngineRequest]:
        """See `call_limits.within_reply`."""
        return call_limits.within_reply(list(requests), self.limits, self.settings.max_reply_bytes)

    @asynccontextmanager
    async def submit(
        self, requests: Sequence[EngineRequest], *, stream: bool = False, abort_ids: Iterable[str] = ()
    ) -> AsyncIterator[InFlightCall]:
        """Submit the requests of a call; leaving the context aborts those that have not finished.

        stream: outputs come as tokens are sampled, not only at the end. abort_ids: see `abort`.
        Raises ApiError 503 while no engine can take requests.
        """
        for hook in self.admission_hooks:
            await hook()
        if (refused := self.refusal() or self._serves_none()) is not None:
            raise refused
        call = InFlightCall(
            self.coordinator,
            requests,
            stream=stream,
            meter=self.meter,
            abort_ids=frozenset(abort_ids),
            detokenizer=self._detokenizer,
            spans=None if self.tracing is None else self.tracing.begin_requests(requests, stream=stream),
        )
        self._calls.add(call)
        self._was_busy = True
        self._idle.clear()
        try:
            async with call:
                yield call
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    # ------------------------------------------------------------------ text

    async def run_in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a computation in a thread, in the current caller's turn, so that the event loop goes on with streams."""
        job: Callable[[], T] = partial(function, *args, **kwargs)
        return await asyncio.wrap_future(self._threads.submit(CALLER.get(), job))

    def _tokenizing(self) -> AbstractContextManager[Any]:
        """The span of tokenizing in the trace of the current call."""
        return nullcontext() if self.tracing is None else self.tracing.span("tokenize")

    async def tokenize(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`run_in_thread` for a call's prompt: its trace shows how long it took."""
        with self._tokenizing():
            return await self.run_in_thread(function, *args, **kwargs)

    def require_tokenizer(self) -> Tokenizer:
        """Raises ApiError 400 for a model without one."""
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer: give prompts as token ids", "prompt", "no_tokenizer")
        return self.tokenizer

    async def encode(self, text: str, *, field: str = "prompt", add_special: bool = True) -> list[int]:
        """Raises ApiError 400 for a text far beyond the context length."""
        return (await self._encode([text], field, add_special))[0]

    async def _encode(self, texts: Sequence[str], field: str, add_special: bool) -> list[list[int]]:
        encode, tokenizer, limits = call_limits.encode_within, self.require_tokenizer(), self.limits
        with self._tokenizing():
            return [
                await self.run_in_thread(encode, tokenizer, text, limits, field=field, add_special=add_special)
                for text in texts
            ]

    async def encode_prompts(self, given: Any, *, field: str, add_special: bool = True) -> list[list[int]]:
        """A body's text, token ids, or list of either -> the token ids of each prompt. Raises ApiError 400."""
        if isinstance(given, str):
            given = [given]
        if isinstance(given[0], int):
            call_limits.check_num_tokens(len(given), self.limits, field=field)
        else:
            call_limits.check_num_prompts(len(given), self.settings, field=field)
        kinds = {type(item) for item in given}
        if len(kinds) > 1:
            raise bad_request(f"{field} mixes texts and token ids or lists of them; give one, not a mixture", field)
        if kinds == {int}:
            return [list(given)]
        if kinds == {list}:
            call_limits.check_num_tokens(max(map(len, given)), self.limits, field=field)
            return [list(ids) for ids in given]
        tokenizer = self.require_tokenizer()
        for text in given:
            call_limits.check_num_chars(len(text), self.limits, tokenizer, field=field)
        return await self._encode(given, field, add_special)

    async def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        tokenizer = self.require_tokenizer()
        return await self.run_in_thread(tokenizer.decode, ids, skip_special=skip_special)
