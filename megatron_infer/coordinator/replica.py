"""A replica: an engine behind a coordinator. The caller's thread steps the engine, another one talks.

    with Replica(engine, "tcp://127.0.0.1:5757") as replica:
        replica.run()                      # until stop(), or drain() and the last request has ended

Heartbeats come from the talking thread: a long step is not death, a stopped process is. When the coordinator has lost
sight of it, the replica aborts what it was given (others go on with it) and registers anew.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_infer.context.prefix_events import PrefixReport
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.commands import obey
from megatron_infer.coordinator.connection import CoordinatorLink
from megatron_infer.coordinator.engine_adapter import (
    EngineAdapter,
    EngineFacts,
    ServedRequest,
    can_step,
    facts_of,
    params_of,
    stats_of,
)
from megatron_infer.errors import InferenceError, UnknownRequest
from megatron_infer.outputs.request_output import RequestOutput

log = logging.getLogger("megatron_infer.coordinator")

HOLD_S = 0.25
"""How long tokens for a client that does not stream may wait here for more; they would be drawn again if lost."""


MAX_NEWS = 1 << 14
"""Digests in one message."""


class Replica:
    """Serves a coordinator's requests with `engine`. Raises AccessRefused from `run` when it is not let in."""

    def __init__(
        self,
        engine: EngineAdapter,
        coordinator: str,
        *,
        name: str = "",
        key: bytes | None = None,
        timeout_s: float = 10.0,
        commands: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """commands: what it obeys beside the engine's own controls, by name (`wire.COMMANDS`)."""
        self.engine = engine
        self._commands = dict(commands or {})
        self._changes = engine.prefix_events()
        self._requests: dict[str, ServedRequest] = {}
        self._numbers: dict[int, ServedRequest] = {}
        self._preparing: dict[int, protocol.Cancel | None] = {}  # wait for their grammars, perhaps cancelled meanwhile
        self._incarnation = self._welcomed_as = 0  # what the engine's thread knows of, and the talking one
        self._num_foreign = 0
        self._facts: EngineFacts = facts_of(engine)
        self._step_began: float | None = None
        self._inbox: deque[tuple[float, protocol.Message | int | None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._draining = False
        self._failure: BaseException | None = None
        self._next_flush = self._next_stats = 0.0
        self._stats: dict[str, Any] = {}
        self.link = CoordinatorLink(coordinator, self, role="replica", name=name, key=key, timeout_s=timeout_s)

    # ------------------------------------------------------------------ for the caller

    def run(self) -> None:
        """Serve until `stop`, or until `drain` is done. An error of the engine's loop passes through."""
        self.link.start()
        reason = "it was stopped"
        try:
            while self._take_messages():
                if can_step(self.engine):
                    self._step()
                self._flush(time.monotonic())
                if self._may_end():
                    reason = "it has drained"
                    return
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            reason = f"its engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._abort_all()
            self.link.close(protocol.Goodbye(reason=reason))

    def stop(self) -> None:
        """End after the step under way; others go on with its requests. From any thread or a signal handler."""
        self._stopping = True
        self.link.ring()
        self._post(None)

    def drain(self) -> None:
        """Take no more requests and end when those under way have; from any thread."""
        self._draining = True
        self.link.send(protocol.Goodbye(draining=True))
        self._post(None)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ the talking thread

    def on_welcome(self, welcome: protocol.Welcome) -> Sequence[protocol.Message]:
        self._welcomed_as = welcome.incarnation  # the engine may be in a long step: it is alive all the same
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
        facts, began = self._facts, self._step_began
        return protocol.Beat(
            self._welcomed_as,
            max(0, facts.capacity - facts.num_requests),
            self._num_foreign,
            facts.root,
            facts.weight_version,
            facts.state,
            0.0 if began is None else time.monotonic() - began,
            self._stats,
        )

    def _post(self, message: protocol.Message | int | None) -> None:
        """To the engine's thread: a message, a new incarnation, or just a nudge."""
        with self._wake:
            self._inbox.append((time.monotonic(), message))
            self._wake.notify()

    # ------------------------------------------------------------------ the engine's thread

    def _take_messages(self) -> bool:
        """Apply what has come, waiting while there is nothing to compute -> False when it is time to end."""
        while not self._stopping:
            with self._wake:
                if not self._inbox and not can_step(self.engine) and not self._may_end():
                    self._wake.wait(HOLD_S if self._held() else None)
                messages = list(self._inbox)
                self._inbox.clear()
            for came, message in messages:
                self._apply(came, message)
            if messages:
                self._look()
            if can_step(self.engine) or self._held() or self._may_end():
                return not self._stopping
        return False

    def _may_end(self) -> bool:
        return self._draining and not self._requests and not self._preparing

    def _apply(self, came: float, message: protocol.Message | int | None) -> None:
        if isinstance(message, int):
            self._abort_all()
            self._incarnation = message
            if message:
                self._register()
        elif isinstance(message, protocol.Run) and message.incarnation == self._incarnation:
            self._begin(message)
        elif isinstance(message, protocol.Cancel):
            self._cancel(message)
        elif isinstance(message, protocol.Command) and message.incarnation == self._incarnation:
            answer = obey(self.engine, self._commands, message, came)
            self._look()  # first: whoever has the answer sees the state that it led to
            self.link.send(protocol.Done(message.number, message.incarnation, answer))
        elif isinstance(message, protocol.Refused):
            log.error("the coordinator refuses what this replica said: %s", message.message)

    def _register(self) -> None:
        facts = self._facts = facts_of(self.engine)
        self.link.send(
            protocol.Register(
                self._incarnation,
                facts.block_size,
                facts.capacity,
                facts.root,
                facts.weight_version,
                facts.state,
                facts.model,
                facts.policy,
                facts.alpha,
                facts.limits,
                facts.dtype,
            )
        )
        if self._changes is not None:
            self._tell_prefixes(self._changes.everything())
        if self._draining:
            self.link.send(protocol.Goodbye(draining=True))

    def _begin(self, run: protocol.Run) -> None:
        try:
            request = ServedRequest(run, params_of(run))
            preparing = request.prepare(self.engine)
            if preparing is not None:  # it comes again, so that steps go on meanwhile
                self._preparing.setdefault(run.number)
                preparing.add_done_callback(lambda _: self._post(run))
                return
            request.begin(self.engine)
        except (InferenceError, NotImplementedError) as error:
            self._preparing.pop(run.number, None)
            self.link.send(protocol.Output(run.number, run.incarnation, [], True, refused=protocol.failure_of(error)))
            return
        self._requests[request.id] = self._numbers[run.number] = request
        cancel = self._preparing.pop(run.number, None)
        if cancel is not None:
            self._cancel(cancel)

    def _cancel(self, cancel: protocol.Cancel) -> None:
        if cancel.number in self._preparing:
            self._preparing[cancel.number] = cancel
        request = self._numbers.get(cancel.number)
        if request is None:
            return
        try:
            output = self.engine.abort(request.id)
        except UnknownRequest:  # a pause has ended it, and the next step hands it out
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
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is not None:
                self._deliver(request, output)
        self._look()

    def _deliver(self, request: ServedRequest, output: RequestOutput) -> None:
        try:
            news = request.news(output)
        except InferenceError as error:
            if not output.finished:
                self.engine.abort(request.id)
            run = request.run
            news = protocol.Output(run.number, run.incarnation, [], True, error=protocol.failure_of(error))
        if news is None:
            return
        if request.held is not None or not (request.run.stream or news.finished):
            news = request.hold(news)
        if not (request.run.stream or news.finished):
            return
        if news.finished:
            del self._requests[request.id], self._numbers[request.run.number]
        self._send(news)

    def _send(self, news: protocol.Output) -> None:
        try:
            self.link.send(news)
        except protocol.MessageTooLarge as error:  # hundreds of logprobs for each of many thousand tokens
            refused = protocol.failure_of(error)
            self.link.send(protocol.Output(news.number, news.incarnation, [], True, error=refused))
            request = self._numbers.pop(news.number, None)
            if request is not None:
                self._requests.pop(request.id, None)
                with contextlib.suppress(InferenceError):
                    self.engine.abort(request.id)

    def _held(self) -> bool:
        return any(request.held is not None for request in self._requests.values())

    def _flush(self, now: float) -> None:
        """Send what is held, now and then: those tokens are kept should this replica be lost."""
        if now < self._next_flush:
            return
        self._next_flush = now + HOLD_S
        for request in list(self._requests.values()):
            held, request.held = request.held, None
            if held is not None:
                self._send(held)

    def _look(self) -> None:
        """After a step or commands: tell what has changed."""
        if not self._incarnation:
            return
        before, facts = self._facts, facts_of(self.engine)
        self._facts, self._num_foreign = facts, max(0, facts.num_requests - len(self._requests))
        now = time.monotonic()
        if now >= self._next_stats or not facts.num_requests or before.state != facts.state:
            self._next_stats, self._stats = now + HOLD_S, stats_of(self.engine)
        if (before.root, before.weight_version, before.state) != (facts.root, facts.weight_version, facts.state):
            self.link.send(self.beat())
        if self._changes is not None:
            report = self._changes.take()
            if report is not None:
                self._tell_prefixes(report)

    def _tell_prefixes(self, report: PrefixReport) -> None:
        root, reset = self._facts.root, report.reset
        forgotten, published = list(report.forgotten), list(report.published)
        while reset or forgotten or published:
            parts = [b"".join(digests[:MAX_NEWS]) for digests in (forgotten, published)]
            self.link.send(protocol.PrefixNews(self._incarnation, root, reset, *parts))
            reset, forgotten, published = False, forgotten[MAX_NEWS:], published[MAX_NEWS:]

    def _abort_all(self) -> None:
        """Others go on with them, or nobody waits."""
        for request_id in list(self._requests):
            with contextlib.suppress(InferenceError):
                self.engine.abort(request_id)
        self._requests.clear()
        self._numbers.clear()
        self._preparing.clear()
