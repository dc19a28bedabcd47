"""A replica: an engine behind a coordinator. The caller's thread steps the engine, another one owns the connection.

    with Replica(engine, "tcp://127.0.0.1:5757") as replica:
        replica.run()                      # until stop(), or drain() and the last request has ended

Heartbeats come from the connection's thread, so that a long step does not count as death, but a stopped process does.
When the coordinator has removed it, the replica aborts its requests, which others continue, and registers again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.coordinator import access, protocol
from megatron_infer.coordinator.commands import ReplicaCommands
from megatron_infer.coordinator.connection import CoordinatorConnection
from megatron_infer.coordinator.parcel_transfer import MAX_WAITING_BYTES, ParcelTransfer
from megatron_infer.coordinator.served_engine import (
    ServedEngine,
    ServedRequest,
    can_step,
    info_of,
    max_parcel_bytes,
    meet_ranks,
    moves_memory,
    num_published,
    params_of,
    serves_others,
    stats_of,
)
from megatron_infer.errors import (
    ConfigError,
    InferenceError,
    LockstepError,
    OtherRankFailed,
    RankFailure,
    UnknownRequest,
    WrongState,
)
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.outputs.schema import failure_of
from megatron_infer.scheduler.context.prefix_events import PrefixReport

if TYPE_CHECKING:
    from megatron_infer.engine.durable.parcel import Parcel

log = logging.getLogger("megatron_infer.coordinator")

HOLD_S = 0.25
"""Seconds that tokens for a client that does not stream are held back; if lost, they are sampled again."""
BRIEF_S = 0.003
"""Most seconds that a step waits for what new requests need, such as grammars: with it they are in this step, and
without it in the next. Only the first request of a caller is waited for."""
LOOK_S = 0.1
"""Seconds until a paused rank of several that are replicas of their own looks again whether another one has a command
or outputs; what comes for the rank itself wakes it."""
MAX_DIGESTS = 1 << 14
"""Most digests in one message."""


class Replica:
    """Serves a coordinator's requests with `engine`. `run` raises AccessRefused if the coordinator refuses it."""

    def __init__(
        self,
        engine: ServedEngine,
        coordinator: str,
        *,
        name: str = "",
        key: bytes | None = None,
        timeout_s: float = 10.0,
        control: bool = False,
        commands: Mapping[str, Callable[..., Any]] | None = None,
        adapter_commands: Mapping[str, Callable[..., Any]] | None = None,
        role: ReplicaRole | str = ReplicaRole.BOTH,
    ) -> None:
        """control: take commands (pause, suspend, weights, ...) of every client that holds the coordinator's key.
        commands: further ones than the engine's methods, by name (`Group.WEIGHTS`). adapter_commands: those of
        `AdapterCommands`, taken without `control` too. role: what it does of a request. Raises ConfigError.
        """
        if commands and not control:
            raise ConfigError("commands for a replica that takes none; give control=True")
        if role not in list(ReplicaRole):
            raise ConfigError(f"role {role!r}; one of {', '.join(one.value for one in ReplicaRole)}")
        self.engine = engine
        self.role = ReplicaRole(role)
        self._commands = ReplicaCommands(dict(commands or {}) if control else None, adapter_commands)
        self._prefix_events = engine.prefix_events()
        self._requests: dict[str, ServedRequest] = {}
        self._numbers: dict[int, ServedRequest] = {}
        self._preparing: dict[int, ServedRequest | None] = {}  # None: cancelled, not yet ended
        self._arrived: deque[protocol.Run] = deque()
        """Those of them that have all but rows for the memory that came with them, in their order, and all later
        requests: rows come free for the first one, however many rows it takes."""
        self._brief_until = 0.0
        """Until when new requests are waited for, on the monotonic clock."""
        self._incarnation = self._welcomed_as = 0  # as the engine's thread and the connection's thread know it
        self._num_foreign = 0
        self._info = info_of(engine)
        self._step_began: float | None = None
        self._inbox: deque[tuple[float, protocol.Message | int | None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._draining = False
        self._failure: BaseException | None = None
        self._next_flush = self._next_stats = 0.0
        self._next_look = 0.0
        """When another replica is asked for room again; at once after a request was handed out."""
        self._stats: dict[str, Any] = {}
        self.connection = CoordinatorConnection(
            coordinator, self, role="replica", name=name, key=key, timeout_s=timeout_s
        )
        self._parcels: ParcelTransfer | None = None
        if moves_memory(engine) and not coordinator.startswith("inproc://"):
            self._parcels = ParcelTransfer(coordinator, access.peer_key(coordinator, key))

    # ------------------------------------------------------------------ for the caller

    def run(self) -> None:
        """Serve until `stop`, or until `drain` is done. An error of the engine's loop passes through."""
        reason = "it was stopped"
        try:
            if self._parcels is not None:
                self._parcels.start()
            self.connection.start()
            while self._take_messages():
                if can_step(self.engine):
                    self._step()
                elif serves_others(self.engine):
                    self.engine.serve_step()
                self._flush(time.monotonic())
                if self._may_end():
                    reason = "it has drained"
                    break
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            reason = f"its engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._abort_all()
            self.connection.close(protocol.Goodbye(reason=reason))
            if self._parcels is not None:
                self._parcels.close()
        meet_ranks(self.engine, "the end of run()")

    def stop(self) -> None:
        """End after the present step; others continue its requests. From any thread or a signal handler."""
        self._stopping = True
        self.connection.wake()
        self._post(None)

    def wake(self) -> None:
        """Look again whether the engine can step; from any thread."""
        self._post(None)

    def drain(self) -> None:
        """Take no more requests, and end when the running ones have; from any thread."""
        self._draining = True
        self.connection.send(protocol.Goodbye(draining=True))
        self._post(None)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def step_s(self) -> float:
        """Seconds that the engine has been in its present step; 0 outside a step. From any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    # ------------------------------------------------------------------ the connection's thread

    def on_welcome(self, welcome: protocol.Welcome) -> Sequence[protocol.Message]:
        self.connection.drop_unsent()
        self._welcomed_as = welcome.incarnation  # at once: the engine may be in a long step
        self._post(welcome.incarnation)
        return ()

    def on_message(self, message: protocol.Message) -> None:
        self._post(message)

    def on_lost(self, error: protocol.CoordinatorError, final: bool) -> None:
        log.warning("%s", error)
        if final:
            self._failure, self._stopping = error, True
        self._post(0)

    def beat(self) -> protocol.Message:
        info = self._info
        free_rows, stats = max(0, info.capacity - info.num_requests), self._stats
        if stats and self._parcels is not None:
            stats = stats | {"parcels": self._parcels.counts()}
        return protocol.Beat(self._welcomed_as, info.now, free_rows, self._num_foreign, self.step_s, stats)

    def _post(self, message: protocol.Message | int | None) -> None:
        """Pass a message or a new incarnation to the engine's thread; None only wakes it."""
        with self._wake:
            self._inbox.append((time.monotonic(), message))
            self._wake.notify()

    # ------------------------------------------------------------------ the engine's thread

    def _take_messages(self) -> bool:
        """Apply the messages, waiting for one if there is no step to run -> False when it is time to end."""
        while not self._stopping:
            self._begin_arrived()  # the last step may have freed rows, and no message may come
            with self._wake:
                if not self._inbox and not can_step(self.engine) and not self._may_end():
                    held_s = HOLD_S if self._has_held() or self._draining else None
                    self._wake.wait(LOOK_S if serves_others(self.engine) else held_s)
                messages = list(self._inbox)
                self._inbox.clear()
            self._brief_until = time.monotonic() + BRIEF_S
            for came, message in messages:
                self._apply(came, message)
            if messages:
                self._report_changes()
            if can_step(self.engine) or serves_others(self.engine) or self._has_held() or self._may_end():
                return not self._stopping
        return False

    def _may_end(self) -> bool:
        is_empty = not self._requests and not self._preparing
        return self._draining and is_empty and (self._parcels is None or not self._parcels.num_waiting)

    def _apply(self, came: float, message: protocol.Message | int | None) -> None:
        if isinstance(message, int):
            self._abort_all()
            self._commands.forget_waiting()
            self._incarnation = message
            if message:
                self._register()
        elif isinstance(message, protocol.Run) and message.incarnation == self._incarnation:
            self._begin(message)
        elif isinstance(message, protocol.Cancel):
            self._cancel(message)
        elif isinstance(message, protocol.HandOut):
            self._hand_out(message.number)
        elif isinstance(message, protocol.Command) and message.incarnation == self._incarnation:
            answer = self._commands.execute(self.engine, message, came, again=lambda: self._post(message))
            if answer is not None:
                self._report_changes()  # before the answer, so that the coordinator has the new state with it
                self.connection.send(protocol.Done(message.number, message.incarnation, answer))
        elif isinstance(message, protocol.Refused):
            log.error("the coordinator refuses a message of this replica: %s", message.message)

    def _register(self) -> None:
        self._info, in_force = _described(self.engine, self._commands), self._commands.in_force
        register = protocol.Register(
            self._incarnation,
            self._info,
            in_force.commands,
            in_force.weight_version,
            in_force.adapters,
            list(in_force.undone),
            in_force.weights.to_dict(),
            self.role,
            "" if self._parcels is None else self._parcels.address,
            self._commands.are_taken,
        )
        self.connection.send(register)
        if self._prefix_events is not None:
            self._send_prefix_news(self._prefix_events.everything())
        if self._draining:
            self.connection.send(protocol.Goodbye(draining=True))

    def _begin(self, run: protocol.Run) -> None:
        try:
            if run.number in self._preparing:
                request = self._preparing.pop(run.number)  # what was prepared is kept as long as this is
                if request is None:
                    return
            else:
                request = ServedRequest(run, params_of(run))
                request.prepare(self.engine, self._fetch(run))
                self._wait_briefly(request)
            if (awaited := request.awaited()) is not None:
                # posted again when it is prepared; steps go on meanwhile
                self._preparing[run.number] = request
                awaited.add_done_callback(lambda _: self._post(run))
                return
            if not (self._is_next(run) and request.has_rows(self.engine)):
                self._let_wait(run, request)
                return
            if (parcel := request.memory) is None or not self._takes_in(request, parcel):
                request.begin(self.engine)
        except (RankFailure, LockstepError):  # of the engine, not of the request
            raise
        except (InferenceError, NotImplementedError) as error:
            self.connection.send(protocol.Output(run.number, run.incarnation, [], True, refused=failure_of(error)))
            return
        self._requests[request.id] = self._numbers[run.number] = request

    def _let_wait(self, run: protocol.Run, request: ServedRequest) -> None:
        self._preparing[run.number] = request
        self._arrived.append(run)
        parcels = [one.memory for one in self._preparing.values() if one is not None]
        if sum(parcel.num_bytes for parcel in parcels if parcel is not None) > MAX_WAITING_BYTES:
            request.drop_memory()

    def _is_next(self, run: protocol.Run) -> bool:
        return not self._arrived or self._arrived[0] is run

    def _begin_arrived(self) -> None:
        while self._arrived:
            run = self._arrived[0]
            request = self._preparing.get(run.number)
            if request is not None and not request.has_rows(self.engine):
                return
            self._begin(run)
            self._arrived.popleft()

    def _fetch(self, run: protocol.Run) -> Future[Parcel | None] | None:
        """Begin to fetch a request's parcel; None: it has none, or this engine cannot use it."""
        if run.parcel is None or self._parcels is None:
            return None
        num_here = num_published(self.engine, run)
        return self._parcels.fetch(run.parcel, num_published=num_here, max_bytes=max_parcel_bytes(self.engine))

    def _takes_in(self, request: ServedRequest, parcel: Parcel) -> bool:
        try:
            request.take_in(self.engine, parcel)
        except (RankFailure, LockstepError):
            raise
        except InferenceError as error:
            log.warning("request %s goes on from its tokens: %s", request.id, error)
            return False
        return True

    def _hand_out(self, number: int) -> None:
        """Let a request go, with what is computed of it where the engine can; its outputs so far are sent before."""
        if (preparing := self._preparing.get(number)) is not None:
            self._preparing[number] = None
            preparing.give_up()
            self.connection.send(protocol.HandedOut(number, self._incarnation))
        request = self._numbers.get(number)
        if request is None:
            return
        try:
            parcel_id = self._offer(request.id)
        except UnknownRequest:  # it has just ended; the next step returns its output
            return
        if (held := request.take_held()) is not None:
            self._send(held)
        del self._requests[request.id], self._numbers[number]
        self._next_look = 0.0
        self.connection.send(protocol.HandedOut(number, self._incarnation, parcel_id))

    def _offer(self, request_id: str) -> str | None:
        """Take a request out of the engine -> the id of the parcel that waits; None: its tokens move alone."""
        if self._parcels is not None and moves_memory(self.engine):
            try:
                began = time.monotonic()
                parcel = self.engine.hand_out(request_id, whole=True)
                return self._parcels.offer(parcel, copy_s=time.monotonic() - began)
            except (WrongState, OtherRankFailed) as error:
                log.info("request %s moves by its tokens: %s", request_id, error)
        self.engine.abort(request_id)
        return None

    def _wait_briefly(self, request: ServedRequest) -> None:
        """Wait a moment for what a new request needs."""
        others = (one.run.caller for one in self._preparing.values() if one is not None)
        if request.preparing and request.run.caller not in others:
            wait(request.preparing, timeout=max(0.0, self._brief_until - time.monotonic()))

    def _cancel(self, cancel: protocol.Cancel) -> None:
        if (preparing := self._preparing.get(cancel.number)) is not None:
            self._preparing[cancel.number] = None
            preparing.give_up()
            if not cancel.silent:
                self.connection.send(preparing.aborted())
        request = self._numbers.get(cancel.number)
        if request is None:
            return
        try:
            output = self.engine.abort(request.id)
        except UnknownRequest:  # a pause has ended it; the next step returns its output
            return
        if cancel.silent:
            del self._requests[request.id], self._numbers[cancel.number]
        else:
            self._deliver(request, output)

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            outputs = self.engine.step()
        finally:
            self._step_began = None
        with self.connection.one_batch():
            for output in outputs:
                request = self._requests.get(output.request_id)
                if request is not None:
                    self._deliver(request, output)
                    if request.run.hands_out and not output.finished and any(one.token_ids for one in output.outputs):
                        self._hand_out(request.run.number)
            self._look_for_room()
            self._report_changes()

    def _look_for_room(self) -> None:
        """Ask whether another replica has room for one of the requests that this one would evict next."""
        engine = self.engine
        if (now := time.monotonic()) < self._next_look:
            return
        if self._parcels is None or not moves_memory(engine) or not engine.is_short_of_blocks:
            return
        self._next_look = now + HOLD_S
        found = map(self._requests.get, engine.next_to_move(self._parcels.s_per_byte))
        numbers = list(islice((one.run.number for one in found if one is not None), protocol.MAX_NAMED))
        if numbers:
            self.connection.send(protocol.EvictsNext(numbers, self._incarnation))

    def _deliver(self, request: ServedRequest, output: RequestOutput) -> None:
        message = request.message(output)
        if message is None:
            return
        if request.held is not None or not (request.run.stream or message.finished):
            message = request.hold(message)
        if not (request.run.stream or message.finished):
            return
        if message.finished:
            del self._requests[request.id], self._numbers[request.run.number]
        self._send(message)

    def _send(self, message: protocol.Output) -> None:
        try:
            self.connection.send(message)
        except protocol.MessageTooLarge as error:  # such as hundreds of logprobs for thousands of tokens
            refused = failure_of(error)
            self.connection.send(protocol.Output(message.number, message.incarnation, [], True, error=refused))
            request = self._numbers.pop(message.number, None)
            if request is not None:
                self._requests.pop(request.id, None)
                with contextlib.suppress(InferenceError):
                    self.engine.abort(request.id)

    def _has_held(self) -> bool:
        return any(request.held is not None for request in self._requests.values())

    def _flush(self, now: float) -> None:
        """Send what is held, every HOLD_S seconds: sent tokens survive the loss of this replica."""
        if now < self._next_flush:
            return
        self._next_flush = now + HOLD_S
        for request in list(self._requests.values()):
            if (held := request.take_held()) is not None:
                self._send(held)

    def _report_changes(self) -> None:
        """Send what a step or command has changed: state, weight version, prefixes."""
        if not self._incarnation:
            return
        before, info = self._info, _described(self.engine, self._commands)
        self._info, self._num_foreign = info, max(0, info.num_requests - len(self._requests))
        now = time.monotonic()
        if now >= self._next_stats or not info.num_requests or before.now.state != info.now.state:
            self._next_stats, self._stats = now + HOLD_S, stats_of(self.engine)
        if before.now != info.now:
            self.connection.send(self.beat())
        if self._prefix_events is not None:
            report = self._prefix_events.take()
            if report is not None:
                self._send_prefix_news(report)

    def _send_prefix_news(self, report: PrefixReport) -> None:
        for news in _prefix_news(self._incarnation, self._info.now.root, report):
            self.connection.send(news)

    def _abort_all(self) -> None:
        """Abort every request: other replicas continue it, or its client is gone."""
        for request_id in list(self._requests):
            with contextlib.suppress(InferenceError):
                self.engine.abort(request_id)
        self._requests.clear()
        self._numbers.clear()
        self._preparing.clear()
        self._arrived.clear()


def _prefix_news(incarnation: int, root: bytes, report: PrefixReport) -> Iterator[protocol.PrefixNews]:
    reset, forgotten, published = report.reset, list(report.forgotten), list(report.published)
    while reset or forgotten or published:
        parts = [b"".join(digests[:MAX_DIGESTS]) for digests in (forgotten, published)]
        yield protocol.PrefixNews(incarnation, root, reset, *parts)
        reset, forgotten, published = False, forgotten[MAX_DIGESTS:], published[MAX_DIGESTS:]


def _described(engine: ServedEngine, commands: ReplicaCommands) -> protocol.EngineInfo:
    info = info_of(engine)
    return replace(info, now=replace(info.now, weights=commands.in_force.weights.now.stamp))
