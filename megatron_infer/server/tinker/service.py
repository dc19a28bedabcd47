"""What a server of the Tinker API holds: sessions, training clients, samplers, and the futures of its calls."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from megatron_infer.engine.durable.file_format import read_manifest
from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.server.http_errors import ApiError, api_error_of
from megatron_infer.server.tinker.figures import ClientFigures, Row
from megatron_infer.server.tinker.kept_clients import KeptClients, Operations
from megatron_infer.server.tinker.training import BASE, LiveTrainer, TrainingClient

MAX_FUTURES, MAX_RESULT_BYTES, FUTURE_S = 4096, 1 << 30, 600.0
"""Results that are held for clients, their bytes, and for how long; the oldest that are done go first."""
MAX_SESSIONS, SILENT_S = 4096, 600.0
"""Sessions, and seconds without a heartbeat after which the clients of one make room for others."""
HOLD_S = 40.0
"""Most seconds that the question for a future is held."""
MAX_SAMPLERS, MAX_ADAPTERS = 4096, 64
"""Samplers, and adapters in the engine that have no path, and those that have one; the oldest goes first."""
ORDER_S = 300.0
"""Most seconds that an operation waits for those with lower numbers."""

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,255}")
"""Of a checkpoint's path: none leads out of the state directory."""

_K = TypeVar("_K")
_R = TypeVar("_R")


class Sent(NamedTuple):
    """A call that has a number: one that is sent again is the same."""

    future: str
    digest: bytes
    """Hash of the body: another call with the same number is refused."""


@dataclass
class Held:
    """A future, and its result."""

    task: asyncio.Task[Any]
    on_dropped: Callable[[], object]
    ended: float | None = None
    """When, on the monotonic clock."""
    num_bytes: int = 0


@dataclass
class Model:
    """One training client of the API."""

    id: str
    client: TrainingClient
    next_seq: int = 1
    waiting: dict[int, asyncio.Event] = field(default_factory=dict)
    """Operations whose turn has not come, by their numbers."""
    futures: dict[int, Sent] = field(default_factory=dict)
    """Operation by sequence number."""
    dropped: int = 0
    """The largest number of an operation whose result is not held any more."""
    gradients: list[int] = field(default_factory=list)
    """Operations whose gradients wait for optim_step."""
    lost: list[int] = field(default_factory=list)
    """Operations of an earlier server whose gradients are gone."""
    settled: int = 0
    """Number of the last operation that used or dropped gradients: a batch with a lower one comes too late."""
    changed: tuple[int, Any] = (0, None)
    """The largest number of an operation that changed adapter or optimizer, and its reply."""
    kept: tuple[int, Any] = (0, None)
    """`changed` as an earlier server has left it."""
    noted: Operations | None = None
    """What a durable server that is started again knows of the operations; None: that is not known here."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of the operation that runs: those without a number take turns too."""
    figures: ClientFigures = field(default_factory=ClientFigures)

    @property
    def label(self) -> str:
        """Names it to those who watch: its id is what a caller needs to train it."""
        return f"{self.id[:8]}-{self.id.rpartition(':')[2]}"

    def pass_on(self, seq_id: int) -> None:
        """The operation of this number has ended, whatever became of it."""
        self.next_seq = max(self.next_seq, seq_id + 1)
        for number in [number for number in self.waiting if number <= self.next_seq]:
            self.waiting.pop(number).set()


@dataclass
class Sampler:
    id: str
    adapter: str | None
    """Its adapter in the engine, if that has no path; None: the base model's, or that of the path."""
    path: str | None = None
    """The path of what was saved, from which the adapter is loaded when it is needed."""
    model: str = ""
    """The id of the training client whose weights were saved."""
    content: str = BASE
    """The weights that the engine must have, where all weights train and the sampler has no path."""
    futures: dict[int | None, Sent] = field(default_factory=dict)
    """Of samples by their numbers."""


def model_of(path: str | None) -> str:
    """The id of the training client in tinker://MODEL/KIND/NAME."""
    return (path or "").removeprefix("tinker://").partition("/")[0]


def not_found(what: str, name: str) -> ApiError:
    return ApiError(404, f"there is no {what} {name[:80]!r}", code="not_found")


class TinkerService:
    """Calls of the event loop; operations on the model run in the engine's thread, by `LiveTrainer`."""

    def __init__(
        self,
        trainer: LiveTrainer,
        *,
        model_name: str,
        state_dir: Path,
        max_models: int = 64,
        durable: bool = False,
        num_tenants: int = 1,
    ) -> None:
        """durable: training clients are in state_dir as each operation that changes them leaves them; see `load`.
        num_tenants: of the server; each has a service, and an equal part of each limit."""
        self.trainer = trainer
        self.model_name = model_name
        self.state_dir = state_dir
        self._num_tenants = num_tenants
        self._max_models = self._part(max_models)
        self._kept = KeptClients(state_dir) if durable else None
        self._sessions: dict[str, float] = {}
        """When each was heard last, on the monotonic clock."""
        self.models: dict[str, Model] = {}
        self._num_coming = 0
        """Models that are being made."""
        self.made: dict[str, Sent] = {}
        """Futures of models, by their ids."""
        self._named: OrderedDict[str, str] = OrderedDict()
        """Adapters in the engine by the path of what was saved; the last is the one used last."""
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self._futures: dict[str, Held] = {}

    def load(self) -> None:
        """The clients that an earlier server has left in state_dir go on; in the engine's thread. Raises ConfigError
        for one that cannot."""
        for kept in () if self._kept is None else self._kept.load(self.trainer):
            self._sessions[kept.id.partition(":")[0]] = time.monotonic()
            self.models[kept.id] = Model(
                kept.id,
                kept.client,
                next_seq=kept.operations.next_seq,
                lost=kept.operations.gradients,
                settled=kept.operations.settled,
                changed=kept.changed,
                kept=kept.changed,
                noted=kept.operations,
            )

    def close(self) -> None:
        """Another server may have the state directory."""
        if self._kept is not None:
            self._kept.close()

    def _part(self, limit: int) -> int:
        """A tenant's part of a limit of the server."""
        return max(1, limit // self._num_tenants)

    # ------------------------------------------------------------------ sessions, models, samplers

    def new_session(self) -> str:
        """Raises ApiError 429 where each of the sessions has a training client."""
        if len(self._sessions) >= (most := self._part(MAX_SESSIONS)):
            in_use = {name.partition(":")[0] for name in self.models}
            idle = [id for id in self._sessions if id not in in_use]
            if not idle:
                raise ApiError(429, f"{most} sessions are the most of this server", code="too_many")
            self.end_session(min(idle, key=self._sessions.__getitem__))
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
        for name in [name for name in self.models if name.partition(":")[0] == id]:
            self.unload_model(name)

    def check_base(self, name: str) -> None:
        if name != self.model_name:
            raise RequestError(f"base_model is {name[:80]!r}, this server has {self.model_name!r}")

    def model(self, id: str) -> Model:
        if id not in self.models:
            raise not_found("model", id)
        return self.models[id]

    def sampler(self, id: str) -> Sampler:
        if id not in self._samplers:
            raise not_found("sampling session", id)
        return self._samplers[id]

    def model_id(self, session: str, number: int) -> str:
        """Of a session's training client, as the SDK names it before the server has told. Raises ApiError 410."""
        self.check_session(session)
        return f"{session}:train:{number}"

    async def create_model(self, id: str, *, rank: int, seed: int | None) -> Model:
        """One that is there is as it is. id: `model_id`."""
        session = id.partition(":")[0]
        if id in self.models:
            return self.models[id]
        if len(self.models) + self._num_coming >= self._max_models:
            silent = time.monotonic() - SILENT_S
            for old in [old for old, heard in self._sessions.items() if heard < silent]:
                self.end_session(old)
        if len(self.models) + self._num_coming >= self._max_models:
            raise ApiError(429, f"{self._max_models} training clients are the most of this server", code="too_many")
        self._num_coming += 1
        try:
            client = await self.run(lambda: self.trainer.create(id, rank=rank, seed=seed))
        except BaseException:
            self._submit(lambda: self.trainer.model.forget(id))  # after the creation, which may run now
            raise
        finally:
            self._num_coming -= 1
        model = self.models[id] = Model(id, client)
        if session not in self._sessions:
            self.unload_model(id)
        self.check_session(session)
        try:
            await self.change(model, 0, lambda: None)
        except BaseException:
            self.unload_model(id)
            raise
        return model

    def unload_model(self, id: str) -> None:
        self.model(id)
        del self.models[id]

        def forget() -> None:
            self.trainer.model.forget(id)
            if self._kept is not None:
                self._kept.forget(id)

        self._submit(forget)  # after the operation that runs now, which may write its files

    def new_sampler(
        self, adapter: str | None, path: str | None, *, model: str = "", content: str = BASE, id: str | None = None
    ) -> Sampler:
        """id: of a call that may be sent again; None: a new one."""
        sampler = Sampler(id or secrets.token_hex(16), adapter, path, model or model_of(path), content)
        if sampler.id in self._samplers:
            return self._samplers[sampler.id]
        self._samplers[sampler.id] = sampler
        unnamed = [one for one in self._samplers.values() if one.adapter is not None]
        old = [one.id for one in unnamed[: max(0, len(unnamed) - self._part(MAX_ADAPTERS))]]
        for id in old or list(self._samplers)[: max(0, len(self._samplers) - self._part(MAX_SAMPLERS))]:
            self._unload(self._samplers.pop(id).adapter)
        return sampler

    async def publish(self, model: Model, path: str | None) -> Sampler:
        """A sampler of the client as it is now: its adapter is loaded into the engine, all weights are there. path: of
        its files, if it has."""
        if self.trainer.local.adapter is None:
            await self.run(model.client.check_whole)
            return self.new_sampler(None, path, model=model.id, content=self.trainer.local.content)
        name = self._new_name()
        await self.run_for(model, lambda: model.client.publish(name))
        if path is not None:
            self._name(path, name)
        return self.new_sampler(None if path else name, path, model=model.id)

    async def adapter_of(self, sampler: Sampler) -> str | None:
        """The name of its adapter in the engine, loaded from its files if need be; None: the model's own weights.

        Raises RequestError where all weights train and are others now than those of the sampler.
        """
        if self.trainer.local.adapter is None:
            self._check_content(sampler)
            return None
        if sampler.path is None:
            return sampler.adapter
        if sampler.path not in self._named:
            folder, name = self.path_of(sampler.path, "sampler_weights"), self._new_name()
            await self.run(lambda: self.trainer.model.load_adapter(name, folder))
            self._name(sampler.path, name)
        self._named.move_to_end(sampler.path)
        return self._named[sampler.path]

    def _check_content(self, sampler: Sampler) -> None:
        wanted = sampler.content
        if sampler.path is not None:
            wanted = read_manifest(self.path_of(sampler.path, "sampler_weights")).get("content", "")
        if wanted != self.trainer.local.content:
            raise RequestError(
                "the sampler is of another version of the weights than the model has now, and there is one at a time "
                "(--full): save_weights_for_sampler again, or load the state of that version"
            )

    def _new_name(self) -> str:
        return f"tinker-{secrets.token_hex(8)}"

    def _name(self, path: str, adapter: str) -> None:
        """The path has this adapter from now on."""
        self._unload(self._named.pop(path, None))
        self._named[path] = adapter
        while len(self._named) > self._part(MAX_ADAPTERS):
            self._unload(self._named.popitem(last=False)[1])

    def _unload(self, adapter: str | None) -> None:
        """From the engine, if there is one."""
        if adapter is not None:
            self._submit(lambda: self.trainer.model.unload(adapter))

    # ------------------------------------------------------------------ figures

    def rows(self) -> dict[str, Row]:
        """Figures of the training clients that exist, by their labels."""
        return {model.label: model.figures.row() for model in list(self.models.values())}

    def sampled(self, sampler: Sampler, *, num_tokens: int, seconds: float) -> None:
        """Samples have been drawn; they count for the sampler's training client, if that exists."""
        if (model := self.models.get(sampler.model)) is not None:
            model.figures.sampled_tokens += num_tokens
            model.figures.sampling_seconds += seconds

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
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Callable[[], _R]) -> Future[_R]:
        return self.trainer.submit(work, caller=str(self.state_dir))

    async def run_for(self, model: Model, work: Callable[[], _R]) -> _R:
        """`run`; its seconds are in the figures of the training client."""

        def timed() -> _R:
            began = time.monotonic()
            try:
                return work()
            finally:
                model.figures.training_seconds += time.monotonic() - began

        return await self.run(timed)

    async def change(self, model: Model, seq_id: int, work: Callable[[], Any]) -> Any:
        """`run_for` an operation that changes adapter or optimizer; a durable server has them on the disk when it ends.
        work: gives its reply."""

        def kept() -> Any:
            reply = work()
            if self._kept is not None and model.id in self.models:
                changed = max((seq_id, reply), model.changed, key=lambda one: one[0])
                self._kept.keep(model.id, model.client, seq_id=changed[0], reply=changed[1])
                model.changed = changed
            return reply

        reply = await self.run_for(model, kept)
        self.settle(model, seq_id)
        if seq_id:  # the client's file says it
            model.noted = self._operations(model, seq_id)
        return reply

    async def count_batch(self, model: Model, seq_id: int) -> None:
        """The gradients of the batch that was computed last are the client's. Raises ApiError where a durable server
        could not name the batch after a kill: they do not count then."""
        lost, gradients = [number for number in model.lost if number != seq_id], [*model.gradients, seq_id]
        await self._note(model, msgspec.structs.replace(self._operations(model, seq_id), gradients=lost + gradients))
        model.lost, model.gradients = lost, gradients
        self._submit(model.client.take_batch)  # before the client's next operation

    def drop_batch(self, model: Model) -> None:
        """The gradients of the batch that was computed last, or is now, do not count."""
        self._submit(model.client.drop_batch)  # after a piece that runs now, before the client's next operation

    def settle(self, model: Model, seq_id: int) -> None:
        """The operation of this number has used the client's gradients, or dropped them."""
        model.gradients, model.lost = [], []
        model.settled = max(model.settled, seq_id)

    def _operations(self, model: Model, seq_id: int) -> Operations:
        """Those of the client when the operation of this number has ended."""
        gradients = model.lost + model.gradients
        return Operations(next_seq=max(model.next_seq, seq_id + 1), gradients=gradients, settled=model.settled)

    async def _note(self, model: Model, operations: Operations) -> None:
        """A durable server has them on the disk when it ends. Raises ApiError."""
        if self._kept is None or model.id not in self.models or operations == model.noted:
            return
        model.noted = None
        await asyncio.shield(asyncio.wrap_future(self._kept.note(model.id, operations)))
        model.noted = operations

    def once(self, made: dict[_K, Sent], key: _K, digest: bytes, start: Callable[[], str]) -> str:
        """The future of a call, which `start` gives. Raises RequestError where another call has the number."""
        if key not in made:
            made[key] = Sent(start(), digest)
        if made[key].digest != digest:
            raise RequestError(f"another call has the number {key}; give each its own")
        return made[key].future

    def in_order(
        self,
        model: Model,
        seq_id: int,
        digest: bytes,
        work: Callable[[], Awaitable[Any]],
        *,
        room: contextlib.ExitStack,
    ) -> str:
        """Start an operation when those with lower numbers have ended -> see `once`. seq_id 0: at once. room: of the
        call's body, which an operation that is started gives back when it ends."""
        held = contextlib.ExitStack()

        async def run() -> Any:
            number, reply = model.kept
            if 0 < seq_id <= number:
                if seq_id == number:
                    return reply
                raise RequestError(f"seq_id: operation {seq_id} was computed before the server was started again")
            turn = asyncio.ensure_future(self._turn(model, seq_id))
            try:
                try:
                    await asyncio.shield(turn)
                except asyncio.CancelledError:
                    await turn  # what is given up keeps its place
                    raise
                async with model.turn:
                    return await work()
            finally:
                await self._note(model, self._operations(model, seq_id))

        def ended() -> None:
            model.figures.queue -= 1
            model.pass_on(seq_id)
            held.close()

        def dropped() -> None:
            model.futures.pop(seq_id, None)
            model.dropped = max(model.dropped, seq_id)

        def start() -> str:
            id = self.future(run(), on_ended=ended, on_dropped=dropped)
            model.figures.queue += 1
            held.push(room.pop_all())
            return id

        if not seq_id:
            return start()
        if seq_id not in model.futures and seq_id not in model.lost and seq_id <= model.dropped:
            raise ApiError(410, f"the result of operation {seq_id} is not held any more", code="future_gone")
        return self.once(model.futures, seq_id, digest, start)

    async def _turn(self, model: Model, seq_id: int) -> None:
        """Wait for the operations with lower numbers. Raises RequestError where one does not come."""
        if model.next_seq >= seq_id:
            return
        try:
            await asyncio.wait_for(model.waiting.setdefault(seq_id, asyncio.Event()).wait(), ORDER_S)
        except TimeoutError:
            text = f"seq_id: operation {model.next_seq} of this client has not come within {ORDER_S:g} s"
            raise RequestError(f"{text}; {seq_id} waited for it") from None

    def future(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        on_ended: Callable[[], None] = lambda: None,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> str:
        """Start an operation -> the id that `result` takes. on_ended: called whatever becomes of it; on_dropped: when
        the result is held no more. Raises ApiError 429, without either: the call is sent again."""
        if not self._has_room():
            work.close()
            raise ApiError(429, f"{self._part(MAX_FUTURES)} calls are waited for, the most of this server", code="full")
        held = Held(asyncio.ensure_future(work), on_dropped)

        def note(done: asyncio.Task[Any]) -> None:
            held.ended = time.monotonic()
            on_ended()
            if not done.cancelled() and done.exception() is None:  # an error is the client's: whoever asks gets it
                held.num_bytes = _num_bytes(done.result())

        held.task.add_done_callback(note)
        self._futures[id := secrets.token_hex(16)] = held
        return id

    def _has_room(self) -> bool:
        """Whether another future can be held; results that are old, or too many, are dropped."""
        now, most = time.monotonic(), self._part(MAX_FUTURES)
        num_bytes = sum(held.num_bytes for held in self._futures.values())
        for id, held in list(self._futures.items()):
            is_full = len(self._futures) >= most or num_bytes > self._part(MAX_RESULT_BYTES)
            if held.ended is not None and (is_full or now - held.ended >= FUTURE_S):
                num_bytes -= held.num_bytes
                self._futures.pop(id).on_dropped()
        return len(self._futures) < most

    async def result(self, id: str) -> Any:
        """What an operation gave; None: not yet. Raises ApiError: 410 for one that is gone, else the operation's."""
        if id not in self._futures:
            raise ApiError(410, f"there is no request {id[:80]!r} any more", code="future_gone")
        task = self._futures[id].task
        await asyncio.wait([task], timeout=HOLD_S)
        if not task.done():
            return None
        if task.cancelled():
            raise ApiError(410, "the request was cancelled", code="cancelled")
        error = task.exception()
        if error is None:
            return task.result()
        raise error if isinstance(error, InferenceError) else api_error_of(error)

    def cancel(self, id: str) -> None:
        """Give up a call. A training client that is not made yet is made when its call is sent again."""
        for model in [model for model, sent in self.made.items() if sent.future == id]:
            del self.made[model]
        if id in self._futures and not (task := self._futures[id].task).cancelling():
            task.cancel()  # once: another would end what the first has to wait for


def _num_bytes(result: Any) -> int:
    """Of a result; one that is JSON is small."""
    return 0 if isinstance(result, dict) else result.ByteSize()
