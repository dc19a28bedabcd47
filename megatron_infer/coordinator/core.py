"""What the coordinator decides, without sockets: messages in, messages out through `send`, time through `tick`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy as Policy
from megatron_infer.context.prefix_hash import DIGEST_SIZE
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.broadcast import Broadcasts
from megatron_infer.coordinator.dispatch import Dispatcher
from megatron_infer.coordinator.peers import ClientState, CoordinatorOptions, ReplicaState
from megatron_infer.coordinator.router import Availability, Router

log = logging.getLogger("megatron_infer.coordinator")


class CoordinatorCore:
    """Requests of clients, spread over replicas. A message to a peer that is gone is reported to `unreachable`."""

    def __init__(
        self,
        options: CoordinatorOptions,
        send: Callable[[bytes, protocol.Message], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options, self._send, self._clock = options, send, clock
        self._clients: dict[bytes, ClientState] = {}
        self._replicas: dict[bytes, ReplicaState] = {}
        self.dispatch = Dispatcher(options, send, self._replicas)
        self.counts = self.dispatch.counts
        self.broadcasts = Broadcasts(send, clock)
        self._num_entered = 0
        self._started = time.time()
        self._last_tick = clock()

    # ------------------------------------------------------------------ peers

    def knows(self, peer: bytes) -> bool:
        return peer in self._clients or peer in self._replicas

    def enter(self, peer: bytes, role: str, name: str) -> int:
        """A peer whose hello was accepted -> its incarnation. One that was here before is lost first."""
        self.unreachable(peer, "it said hello again")
        self._num_entered += 1
        if role == "client":
            self._clients[peer] = ClientState(peer, name, self._clock())
        else:
            self._replicas[peer] = ReplicaState(peer, name, self._num_entered, self._clock())
        return self._num_entered

    def unreachable(self, peer: bytes, why: str = "its connection is gone") -> None:
        """The peer is gone: a client's requests end, a replica's go elsewhere."""
        client, replica = self._clients.pop(peer, None), self._replicas.pop(peer, None)
        if client is not None:
            log.info("client %s left: %s", client.name, why)
            for entry in list(client.entries.values()):
                self.dispatch.drop(entry)
        if replica is not None:
            self._lose(replica, why)

    def receive(self, peer: bytes, message: protocol.Message) -> None:
        """A message of a peer that is known."""
        client, replica = self._clients.get(peer), self._replicas.get(peer)
        if client is not None:
            client.last_heard = self._clock()
            if self._from_client(client, message):
                return
        elif replica is not None:
            replica.last_heard = self._clock()
            if getattr(message, "incarnation", replica.incarnation) != replica.incarnation:
                self.counts.fenced += 1  # of an earlier life; the present one is welcome
                return
            if self._from_replica(replica, message):
                return
        role = "client" if client is not None else "replica"
        text = f"a {type(message).__name__} message is nothing a {role} sends"
        self._send(peer, protocol.Refused("role", text))

    def tick(self) -> None:
        """Time passes: who was silent for too long is lost, deadlines pass."""
        now, options = self._clock(), self.options
        asleep = now - self._last_tick - options.heartbeat_s
        self._last_tick = now
        seats: list[ClientState | ReplicaState] = [*self._clients.values(), *self._replicas.values()]
        if asleep > 0:  # this process stood still: what was said meanwhile is still to be read
            for seat in seats:
                seat.last_heard += asleep
        for seat in seats:
            silent = now - seat.last_heard
            if silent > options.timeout_s:
                self.unreachable(seat.peer, f"it was silent for {silent:.1f} s (limit {options.timeout_s:g} s)")
            elif silent > 1.5 * options.heartbeat_s:
                self._send(seat.peer, protocol.Ping())  # shows at once when the connection is gone
        self.broadcasts.tick(now)
        self._restand()

    # ------------------------------------------------------------------ clients

    def _from_client(self, client: ClientState, message: protocol.Message) -> bool:
        if isinstance(message, protocol.Submit):
            self.dispatch.submit(client, message)
        elif isinstance(message, protocol.Ping):
            self._send(client.peer, protocol.Pong())
        elif isinstance(message, protocol.Abort):
            self.dispatch.abort(client, message.id)
        elif isinstance(message, protocol.Control):
            self.broadcasts.start(client.peer, message, self._seated())
        elif isinstance(message, protocol.Query):
            self._send(client.peer, protocol.Report(message.id, self.stats()))
        elif isinstance(message, protocol.Goodbye):
            self.unreachable(client.peer, "goodbye")
        else:
            return False
        return True

    # ------------------------------------------------------------------ replicas

    def _from_replica(self, seat: ReplicaState, message: protocol.Message) -> bool:
        if isinstance(message, protocol.Output):
            if not self.dispatch.output(seat, message):
                self.unreachable(seat.peer, f"it sent tokens of request {message.number} out of turn")
                self._send(seat.peer, protocol.Refused("fenced", "an output was out of turn; say hello again"))
        elif isinstance(message, protocol.Beat):
            self._beat(seat, message)
        elif isinstance(message, protocol.PrefixNews):
            self._prefix_news(seat, message)
        elif isinstance(message, protocol.Done):
            self.broadcasts.answer(seat.peer, message.number, message.answer)
            self._restand()
        elif isinstance(message, protocol.Register):
            self._register(seat, message)
        elif isinstance(message, protocol.Goodbye):
            self._goodbye(seat, message)
        elif isinstance(message, protocol.Pong):
            pass
        else:
            return False
        return True

    def _register(self, seat: ReplicaState, about: protocol.Register) -> None:
        wrong = _what_is_wrong(seat, about)
        if wrong:
            self._send(seat.peer, protocol.Refused("message", f"this replica cannot register: {wrong}"))
            return
        router = self.dispatch.router
        if router is None:
            alpha = about.alpha if self.options.alpha is None else self.options.alpha
            router = self.dispatch.router = Router(Policy(about.policy), alpha)
            log.info("routing by %s, alpha %g, as replica %s asks", about.policy, alpha, seat.name)
        elif about.policy != router.policy.value:
            log.info("replica %s asks for %s; routing is by %s", seat.name, about.policy, router.policy.value)
        seat.about, seat.weight_version, seat.state = about, about.weight_version, about.state
        seat.free_rows = about.capacity
        seat.view = router.join(seat.peer, capacity=about.capacity, block_size=about.block_size, root=about.root)
        log.info("replica %s joined: %s, %d requests at once", seat.name, about.model, about.capacity)
        self.broadcasts.catch_up(seat)
        self._restand()
        self.dispatch.reopen(seat)

    def _beat(self, seat: ReplicaState, beat: protocol.Beat) -> None:
        self._send(seat.peer, protocol.Pong())
        if seat.view is None:
            return
        limit = self.options.step_timeout_s
        if limit is not None and beat.step_s > limit:
            self.unreachable(seat.peer, f"its engine is in one step for {beat.step_s:.0f} s (limit {limit:g} s)")
            return
        seat.free_rows, seat.view.foreign = beat.free_rows, beat.foreign
        seat.stats = beat.stats or seat.stats
        assert self.dispatch.router is not None
        self.dispatch.router.set_root(seat.peer, beat.root)
        if (beat.state, beat.weight_version) != (seat.state, seat.weight_version):
            seat.state, seat.weight_version = beat.state, beat.weight_version
            self._restand()

    def _prefix_news(self, seat: ReplicaState, news: protocol.PrefixNews) -> None:
        router = self.dispatch.router
        if seat.view is None or router is None:
            return
        router.set_root(seat.peer, news.root)
        router.report(
            seat.peer,
            reset=news.reset,
            forgotten=_digests(news.forgotten),
            published=_digests(news.published),
        )

    def _restand(self) -> None:
        """Who takes requests: not who leaves or has old weights, and who stands still only if all do."""
        opened, closed = False, []
        for seat in self._replicas.values():
            if seat.view is None:
                continue
            before = seat.view.standing
            if seat.draining or seat.weight_version < self.broadcasts.weight_version:
                seat.view.standing = Availability.CLOSED
            else:
                seat.view.standing = Availability.OPEN if seat.state == "running" else Availability.RESERVE
            opened |= before is Availability.CLOSED is not seat.view.standing
            if before is not Availability.CLOSED is seat.view.standing:
                closed.append(seat)
        for seat in closed:
            self.dispatch.clear_backlog(seat)
        if opened:
            self.dispatch.reopen()

    def _goodbye(self, seat: ReplicaState, goodbye: protocol.Goodbye) -> None:
        if not goodbye.draining:
            self.unreachable(seat.peer, goodbye.reason or "goodbye")
            return
        seat.draining = True
        self._restand()
        log.info("replica %s leaves once its %d requests have ended", seat.name, len(seat.running))

    def _lose(self, seat: ReplicaState, why: str) -> None:
        """Its requests go elsewhere with the tokens they have; what it still sends is not known any more."""
        self.broadcasts.lost(seat.peer, why)
        if seat.about is None:
            return
        if not seat.draining or seat.running:
            self.counts.replicas_lost += 1
            log.warning("replica %s is gone: %s; %d of its requests go elsewhere", seat.name, why, len(seat.running))
        self.dispatch.lose(seat)

    def _seated(self) -> list[ReplicaState]:
        return [seat for seat in self._replicas.values() if seat.view is not None]

    def stats(self) -> dict[str, Any]:
        """Counters, and every replica as it stands."""
        router = self.dispatch.router
        return {
            **asdict(self.counts),
            "started": self._started,
            "waiting": self.dispatch.num_waiting,
            "clients": len(self._clients),
            "policy": None if router is None else router.policy.value,
            "alpha": None if router is None else router.alpha,
            "replicas": [seat.describe() for seat in self._seated()],
        }

    def check(self) -> None:
        """Assert that the books agree."""
        self.dispatch.check(self._clients.values())


def _what_is_wrong(seat: ReplicaState, about: protocol.Register) -> str:
    if seat.view is not None:
        return "it has registered before"
    if about.capacity < 1 or about.block_size < 1:
        return f"capacity {about.capacity}, block size {about.block_size}; both are at least 1"
    if about.policy not in {policy.value for policy in Policy} or not 0.0 <= about.alpha <= 1.0:
        return f"policy {about.policy[:40]!r} with alpha {about.alpha}"
    return ""


def _digests(joined: bytes) -> list[bytes]:
    return [joined[start : start + DIGEST_SIZE] for start in range(0, len(joined), DIGEST_SIZE)]
