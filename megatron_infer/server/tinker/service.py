"""What a server of the Tinker API holds: sessions, training clients, samplers, and the futures of its calls."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.server.http_errors import ApiError, api_error_of
from megatron_infer.server.tinker.training import LiveTrainer, TrainingClient

MAX_FUTURES, FUTURE_S = 4096, 600.0
"""Results that are held for clients, and for how long; the oldest that are done go first."""
MAX_SESSIONS, SILENT_S = 4096, 600.0
"""Sessions, and seconds without a heartbeat after which the clients of one make room for others."""
HOLD_S = 40.0
"""Most seconds that the question for a future is held."""
MAX_SAMPLERS, MAX_UNNAMED = 4096, 64
"""Samplers in all, and those with an adapter that has no name; the oldest goes first."""
ORDER_S = 300.0
"""Most seconds that an operation waits for those with lower numbers."""

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,255}")
"""Of a checkpoint's path: none leads out of the state directory."""

_R = TypeVar("_R")


@dataclass
class Model:
    """One training client of the API."""

    id: str
    client: TrainingClient
    next_seq: int = 1
    turn: asyncio.Condition = field(default_factory=asyncio.Condition)
    futures: dict[int, str] = field(default_factory=dict)
    """Of operations by their numbers: one that is sent again is the same."""


@dataclass
class Sampler:
    id: str
    adapter: str | None
    """Its adapter in the engine; None: the base model."""
    path: str | None = None
    futures: dict[int, str] = field(default_factory=dict)


def not_found(what: str, name: str) -> ApiError:
    return ApiError(404, f"there is no {what} {name[:80]!r}", code="not_found")


class TinkerService:
    """Calls of the event loop; operations on the model run in the engine's thread, by `LiveTrainer`."""

    def __init__(self, trainer: LiveTrainer, *, model_name: str, state_dir: Path, max_models: int = 64) -> None:
        self.trainer, self.model_name, self.state_dir, self._max_models = trainer, model_name, state_dir, max_models
        self._sessions: dict[str, float] = {}
        """When each was heard last, on the monotonic clock."""
        self._models: dict[str, Model] = {}
        self.calls: dict[tuple[str, str, int], str] = {}
        """Futures of models, and ids of samplers, by (kind, session, number): a call that is sent again makes no
        second one."""
        self.named: dict[str, str] = {}
        """Adapters in the engine by the path of what was saved."""
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self._futures: dict[str, tuple[asyncio.Task[Any], list[float]]] = {}
        """Tasks by id, and when each ended, on the monotonic clock."""

    # ------------------------------------------------------------------ sessions, models, samplers

    def new_session(self) -> str:
        for old in list(self._sessions)[: max(0, len(self._sessions) - MAX_SESSIONS + 1)]:
            self.end_session(old)
        self._sessions[id := secrets.token_hex(16)] = time.monotonic()
        return id

    def check_session(self, id: str) -> None:
        """It is heard. Raises ApiError 410 for one that is gone."""
        if id not in self._sessions:
            raise ApiError(410, f"there is no session {id[:80]!r} any more", code="session_gone")
        self._sessions[id] = time.monotonic()

    def end_session(self, id: str) -> None:
        """Forget it and its training clients; samplers and what was saved stay."""
        self._sessions.pop(id, None)
        for name in [name for name in self._models if name.partition(":")[0] == id]:
            del self._models[name]

    def check_base(self, name: str) -> None:
        if name != self.model_name:
            raise RequestError(f"base_model is {name[:80]!r}, this server has {self.model_name!r}")

    def model(self, id: str) -> Model:
        if id not in self._models:
            raise not_found("model", id)
        return self._models[id]

    def sampler(self, id: str) -> Sampler:
        if id not in self._samplers:
            raise not_found("sampling session", id)
        return self._samplers[id]

    async def create_model(self, session: str, number: int, *, rank: int, seed: int) -> Model:
        """Its id is what the SDK names the session's model of this number, before the server has told."""
        if len(self._models) >= self._max_models:
            silent = time.monotonic() - SILENT_S
            for old in [old for old, heard in self._sessions.items() if heard < silent]:
                self.end_session(old)
        if len(self._models) >= self._max_models:
            raise ApiError(429, f"{self._max_models} training clients are the most of this server", code="too_many")
        client = await self.run(lambda: TrainingClient(self.trainer, rank=rank, seed=seed))
        model = Model(f"{session}:train:{number}", client)
        self._models[model.id] = model
        return model

    def unload_model(self, id: str) -> None:
        self.model(id)
        del self._models[id]

    def new_sampler(self, adapter: str | None, path: str | None) -> Sampler:
        sampler = Sampler(secrets.token_hex(16), adapter, path)
        self._samplers[sampler.id] = sampler
        unnamed = [one for one in self._samplers.values() if one.path is None and one.adapter is not None]
        for one in unnamed[: max(0, len(unnamed) - MAX_UNNAMED)]:
            del self._samplers[one.id]
            self._unload(str(one.adapter))
        while len(self._samplers) > MAX_SAMPLERS:
            self._samplers.popitem(last=False)
        return sampler

    def _unload(self, adapter: str) -> None:
        engine = self.trainer.session.engine
        self.trainer.submit(lambda: engine.unload_adapter(adapter, abort=True))

    async def publish(self, model: Model, name: str) -> None:
        """Load the client's adapter, as it is now, into the engine under this name."""
        trainer = self.trainer

        def load() -> None:
            with trainer.on_model(model.client):
                adapter = trainer.adapter.to_adapter(name)
            trainer.session.engine.load_adapter(name, adapter, replace=True)

        await self.run(load)

    # ------------------------------------------------------------------ files

    def path_of(self, uri: str, kind: str) -> Path:
        """The file or directory of tinker://MODEL/KIND/NAME. Raises ApiError 404."""
        parts = uri.removeprefix("tinker://").split("/")
        safe = uri.startswith("tinker://") and len(parts) == 3 and parts[1] == kind
        if not safe or not all(_PART.fullmatch(part) for part in parts):
            raise not_found(f"checkpoint (tinker://MODEL/{kind}/NAME)", uri)
        path = self.state_dir / parts[0] / kind / parts[2]
        if not path.exists():
            raise not_found("checkpoint", uri)
        return path

    # ------------------------------------------------------------------ operations and futures

    async def run(self, work: Callable[[], _R]) -> _R:
        """Run in the engine's thread, between its steps."""
        return await asyncio.wrap_future(self.trainer.submit(work))

    async def in_order(self, model: Model, seq_id: int | None, work: Callable[[], Awaitable[_R]]) -> _R:
        """Run when the operations with lower numbers have ended, whatever became of them."""
        if seq_id is None:
            return await work()
        try:
            async with asyncio.timeout(ORDER_S), model.turn:
                await model.turn.wait_for(lambda: model.next_seq >= seq_id)
        except TimeoutError:
            text = (
                f"operation {model.next_seq} of this client has not come within {ORDER_S:g} s; {seq_id} waited for it"
            )
            raise RequestError(f"seq_id: {text}") from None
        try:
            return await work()
        finally:
            async with model.turn:
                model.next_seq = max(model.next_seq, seq_id + 1)
                model.turn.notify_all()

    def future(self, work: Awaitable[Any]) -> str:
        """Start an operation -> the id that `result` takes."""
        now = time.monotonic()
        for name, (task, ended) in list(self._futures.items()):
            if len(self._futures) < MAX_FUTURES and (not ended or now - ended[0] < FUTURE_S):
                break
            if task.done():
                del self._futures[name]
        task, ended = asyncio.ensure_future(work), list[float]()

        def note(done: asyncio.Task[Any]) -> None:
            ended.append(time.monotonic())
            if not done.cancelled():
                done.exception()  # it is the client's: whoever asks for the result gets it

        task.add_done_callback(note)
        self._futures[id := secrets.token_hex(16)] = task, ended
        return id

    async def result(self, id: str) -> Any:
        """What an operation gave; None: not yet. Raises ApiError: 410 for one that is gone, else the operation's."""
        task, _ = self._futures.get(id, (None, None))
        if task is None:
            raise ApiError(410, f"there is no request {id[:80]!r} any more", code="future_gone")
        deadline = time.monotonic() + HOLD_S
        await asyncio.wait([task], timeout=deadline - time.monotonic())
        if not task.done():
            return None
        if task.cancelled():
            raise ApiError(410, "the request was cancelled", code="cancelled")
        error = task.exception()
        if error is None:
            return task.result()
        raise error if isinstance(error, InferenceError) else api_error_of(error)

    def cancel(self, id: str) -> None:
        task, _ = self._futures.get(id, (None, None))
        if task is not None:
            task.cancel()
