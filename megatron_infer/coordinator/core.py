"""What the coordinator decides, without sockets: messages come to `receive`, leave through `send`; `tick` checks time.

CoordinatorCore           peers, their heartbeats, which replicas take requests
    |--> Dispatcher       a request from its submission to its last output
    |        |--> Router  which replica it goes to
    '--> Broadcasts       commands to all replicas
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from megatron_infer.config.coordinator_options import CoordinatorOptions, ReplicaRole
from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy as Policy
from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.broadcast import Broadcasts
from megatron_infer.coordinator.dispatch import Dispatcher
from megatron_infer.coordinator.peers import ClientState, PeerState, ReplicaState
from megatron_infer.coordinator.router import Availability, ReplicaView, Router
from megatron_infer.coordinator.weights_in_force import WeightsInForce
from megatron_infer.distributed.wire import Silence
from megatron_infer.scheduler.context.block_digest import DIGEST_SIZE

log = logging.getLogger("megatron_infer.coordinator")

MAX_SIZE = 1 << 24
"""Most requests at once, and tokens of a block, that a replica can claim."""
MAX_LISTED = 20
"""Names of replicas in a message."""
MAX_LOST_DRAINED = 1024
"""Names of lost replicas for which a drain stays in force: those that were lost last."""


class CoordinatorCore:
    """Spreads the requests of clients over replicas. The owner reports peers it cannot send to with `unreachable`."""

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
        self.broadcasts = Broadcasts(send, clock, self._registered)
        self._drained: dict[str, bool] = {}
        """Replicas for which a client's `Drain` is in force: name -> whether their requests go elsewhere. A loss of the
        replica leaves its name here, as its last one; the replica's goodbye removes the name."""
        self._next_look = -math.inf
        """When peers are looked at for silence again."""
        self._num_entered = 0
        self._started = time.time()

    # ------------------------------------------------------------------ peers

    def knows(self, peer: bytes) -> bool:
        return peer in self._clients or peer in self._replicas

    def enter(self, peer: bytes, role: str, name: str, nonce: bytes) -> int:
        """Add a peer whose hello was accepted -> its incarnation. Its earlier incarnation is lost first.

        The same hello again (nonce) changes nothing: the peer waits for a welcome that is on its way.
        """
        known = self._clients.get(peer) or self._replicas.get(peer)
        if known is not None and known.nonce == nonce:
            known.silence.heard()
            return known.incarnation
        self.unreachable(peer, "it said hello again")
        self._num_entered += 1
        silence = Silence(self.options.heartbeat_s, clock=self._clock)
        if role == "client":
            self._clients[peer] = ClientState(peer, name, self._num_entered, nonce, silence)
        else:
            self._replicas[peer] = ReplicaState(peer, name, self._num_entered, nonce, silence)
        return self._num_entered

    def unreachable(self, peer: bytes, why: str = "its connection is gone") -> None:
        """Remove a peer: a client's requests are cancelled, a replica's go to others."""
        client, replica = self._clients.pop(peer, None), self._replicas.pop(peer, None)
        if client is not None:
            log.info("client %s left: %s", client.name, why)
            for request in list(client.requests.values()):
                self.dispatch.cancel(request)
            self.broadcasts.client_lost(peer)
            self._update_availability()
        if replica is not None:
            self._lose(replica, why)

    def receive(self, peer: bytes, message: protocol.Message) -> None:
        """Handle a message of a known peer."""
        client, replica = self._clients.get(peer), self._replicas.get(peer)
        if client is not None:
            client.silence.heard()
            if self._from_client(client, message):
                return
        elif replica is not None:
            replica.silence.heard()
            if getattr(message, "incarnation", replica.incarnation) != replica.incarnation:
                self.counts.fenced += 1  # sent by an earlier incarnation
                return
            if self._from_replica(replica, message):
                return
        role = "client" if client is not None else "replica"
        text = f"a {type(message).__name__} message is nothing a {role} sends"
        self._send(peer, protocol.Refused("role", text))

    def tick(self) -> None:
        """Remove peers that were silent for too long, and end broadcasts at their deadlines."""
        now = self._clock()
        if now >= self._next_look:  # with thousands of replicas a look takes milliseconds
            self._next_look = now + self.options.heartbeat_s / 2
            self._look_for_silence()
        if self.broadcasts.tick(now):
            self._update_availability()
        self._move_on()

    def _look_for_silence(self) -> None:
        options = self.options
        states: list[PeerState] = [*self._clients.values(), *self._replicas.values()]
        for state in states:
            silent = state.silence.seconds()
            limit = options.timeout_s if state.peer in self._replicas else options.client_timeout_s
            if silent > limit:
                self.unreachable(state.peer, f"it was silent for {silent:.1f} s (limit {limit:g} s)")
            elif silent > 1.5 * options.heartbeat_s:
                self._send(state.peer, protocol.Ping())  # fails at once if the connection is gone

    def _move_on(self) -> None:
        """Replicas that are emptied hand out what others have room for by now."""
        for replica in list(self._replicas.values()):
            if replica.moves and replica.running:
                self.dispatch.move_away(replica)

    # ------------------------------------------------------------------ clients

    def _from_client(self, client: ClientState, message: protocol.Message) -> bool:
        if isinstance(message, protocol.Submit):
            self.dispatch.submit(client, message)
        elif isinstance(message, protocol.Ping):
            self._send(client.peer, protocol.Pong())
        elif isinstance(message, protocol.Abort):
            self.dispatch.abort(client, message.id)
        elif isinstance(message, protocol.Control):
            self.broadcasts.start(client.peer, message)
            self._update_availability()  # where no replica takes part it has ended
        elif isinstance(message, protocol.Drain):
            self._drain(client, message)
        elif isinstance(message, protocol.Query):
            self._send(client.peer, protocol.Report(message.id, self.stats()))
        elif isinstance(message, protocol.Goodbye):
            self.unreachable(client.peer, "goodbye")
        else:
            return False
        return True

    # ------------------------------------------------------------------ replicas

    def _from_replica(self, replica: ReplicaState, message: protocol.Message) -> bool:
        if isinstance(message, protocol.Output):
            if not self.dispatch.output(replica, message):
                self.unreachable(replica.peer, f"it sent tokens of request {message.number} out of turn")
                self._send(replica.peer, protocol.Refused("fenced", "an output was out of turn; say hello again"))
        elif isinstance(message, protocol.HandedOut):
            self.dispatch.handed_out(replica, message)
        elif isinstance(message, protocol.EvictsNext):
            self.dispatch.relieve(replica, message.numbers)
        elif isinstance(message, protocol.Beat):
            self._beat(replica, message)
        elif isinstance(message, protocol.PrefixNews):
            self._prefix_news(replica, message)
        elif isinstance(message, protocol.Done):
            has_ended = self.broadcasts.answer(replica.peer, message.number, message.answer)
            self._update_availability(None if has_ended else [replica])
            self.dispatch.reopen()  # requests may wait for an adapter that a replica now has
        elif isinstance(message, protocol.Register):
            self._register(replica, message)
        elif isinstance(message, protocol.Goodbye):
            self._goodbye(replica, message)
        elif isinstance(message, protocol.Pong):
            pass
        else:
            return False
        return True

    def _register(self, replica: ReplicaState, register: protocol.Register) -> None:
        wrong = _what_is_wrong(replica, register)
        if wrong:
            self._send(replica.peer, protocol.Refused("message", f"this replica cannot register: {wrong}"))
            return
        router, info = self.dispatch.router, register.info
        if router is None:
            alpha = info.alpha if self.options.alpha is None else self.options.alpha
            router = self.dispatch.router = Router(Policy(info.policy), alpha)
            log.info("routing by %s, alpha %g, from the config of replica %s", info.policy, alpha, replica.name)
        elif info.policy != router.policy.value:
            policy = router.policy.value
            log.info("replica %s is configured for %s; routing is by %s", replica.name, info.policy, policy)
        replica.register = register
        replica.now = info.now
        if register.takes_commands and replica.name in self._drained:
            replica.is_drained_by_client, replica.moves = True, self._drained[replica.name]
        replica.free_rows = info.capacity
        replica.view = router.join(
            replica.peer,
            capacity=info.capacity,
            block_size=info.block_size,
            root=info.now.root,
            num_blocks=info.limits.get("num_blocks"),
        )
        log.info("replica %s joined: %s, %d requests at once", replica.name, info.model, info.capacity)
        is_new = self.broadcasts.catch_up(replica)
        self._update_availability(None if is_new else [replica])
        self.dispatch.reopen(replica)

    def _beat(self, replica: ReplicaState, beat: protocol.Beat) -> None:
        self._send(replica.peer, protocol.Pong())
        if replica.view is None:
            return
        limit = self.options.step_timeout_s
        if limit is not None and beat.step_s > limit:
            self.unreachable(replica.peer, f"its engine is in one step for {beat.step_s:.0f} s (limit {limit:g} s)")
            return
        replica.free_rows = beat.free_rows
        replica.stats = beat.stats or replica.stats
        assert self.dispatch.router is not None
        self.dispatch.router.set_foreign(replica.peer, beat.foreign)
        self.dispatch.router.set_root(replica.peer, beat.now.root)
        if beat.now != replica.now:
            replica.now = beat.now
            self._update_availability([replica])

    def _prefix_news(self, replica: ReplicaState, news: protocol.PrefixNews) -> None:
        router = self.dispatch.router
        if replica.view is None or router is None:
            return
        router.set_root(replica.peer, news.root)
        router.report(
            replica.peer,
            reset=news.reset,
            forgotten=_digests(news.forgotten),
            published=_digests(news.published),
        )

    def _update_availability(self, replicas: Sequence[ReplicaState] | None = None) -> None:
        """A replica that drains or has other weights than those in force takes no requests; a paused one, only if none
        is running; one with an older content of an adapter none of that adapter.

        replicas: those that have changed; None: what is in force may have.
        """
        opened, closed = False, []
        router = self.dispatch.router
        for replica in list(self._replicas.values()) if replicas is None else replicas:
            if replica.view is None or router is None:
                continue
            gained, lost = self._update_adapters(replica, replica.view)
            before, in_force = replica.view.availability, self.broadcasts.in_force
            is_older = replica.now.weight_version < in_force.weight_version
            replica.is_outdated = is_older or replica.now.weights != in_force.weights.now.stamp
            if not replica.is_outdated:
                replica.why_outdated = ""
            is_running, only_prompts = replica.now.state == "running", replica.role is ReplicaRole.PREFILL
            is_closed = replica.draining or replica.is_drained_by_client or replica.is_outdated
            replica.view.takes_prompts = only_prompts and is_running and not is_closed
            self.dispatch.rank_prefill(replica)
            availability = Availability.OPEN if is_running and not only_prompts else Availability.RESERVE
            router.set_availability(replica.peer, Availability.CLOSED if is_closed else availability)
            opened |= gained or before is Availability.CLOSED is not replica.view.availability
            if lost or before is not Availability.CLOSED is replica.view.availability:
                closed.append(replica)
        for replica in closed:
            self.dispatch.clear_backlog(replica)
        if opened or closed:
            self.dispatch.reopen()

    def _update_adapters(self, replica: ReplicaState, view: ReplicaView) -> tuple[bool, bool]:
        """-> whether the replica may take requests of more adapters than before, and of fewer."""
        is_outdated, had, old = self.broadcasts.in_force.is_outdated, view.adapters, view.outdated
        view.outdated = {name for name, digest in replica.now.adapters.items() if is_outdated(name, digest)}
        view.adapters = {name: digest for name, digest in replica.now.adapters.items() if name not in view.outdated}
        gained = not (view.adapters.items() <= had.items() and old <= view.outdated)
        return gained, not (had.items() <= view.adapters.items() and view.outdated <= old)

    def _drain(self, client: ClientState, drain: protocol.Drain) -> None:
        name = drain.replica
        found = [replica for replica in self._registered() if replica.name == name]
        is_known = bool(found) or (drain.end and name in self._drained)  # a drained one may be lost for now
        if not is_known:
            there = [replica.name for replica in self._registered()]
            more = f" and {len(there) - MAX_LISTED:,} more" if len(there) > MAX_LISTED else ""
            text = f"no replica {name[:60]!r}; there are: {', '.join(there[:MAX_LISTED]) or 'none'}{more}"
            answer = protocol.Answer(ok=False, kind="ConfigError", message=text)
        elif not all(replica.register is not None and replica.register.takes_commands for replica in found):
            text = f"replica {name} takes no commands (drain): start it with --control (control=True)"
            answer = protocol.Answer(ok=False, kind="AccessRefused", message=text)
        else:
            if drain.end:
                self._drained.pop(name, None)
            else:
                self._drained[name] = drain.move
            for replica in found:
                replica.is_drained_by_client, replica.moves = not drain.end, drain.move and not drain.end
            self._update_availability(found)
            self._move_on()
            answer = protocol.Answer(ok=True, value={"running": sum(len(replica.running) for replica in found)})
        answers = {name if is_known else "coordinator": answer}
        self._send(client.peer, protocol.ControlResult(drain.id, answers))

    def _goodbye(self, replica: ReplicaState, goodbye: protocol.Goodbye) -> None:
        if not goodbye.draining:
            if not any(one is not replica and one.name == replica.name for one in self._replicas.values()):
                self._drained.pop(replica.name, None)
            self.unreachable(replica.peer, goodbye.reason or "goodbye")
            return
        replica.draining = True
        self._update_availability([replica])
        log.info("replica %s leaves once its %d requests have ended", replica.name, len(replica.running))

    def _lose(self, replica: ReplicaState, why: str) -> None:
        """Its requests go to other replicas with the tokens they have; further messages of it are refused."""
        has_ended = self.broadcasts.lost(replica.peer, why)
        if replica.register is None:
            return
        if not replica.draining or replica.running:
            self.counts.replicas_lost += 1
            num_running = len(replica.running)
            log.warning("replica %s is gone: %s; %d of its requests go elsewhere", replica.name, why, num_running)
        if self.dispatch.router is not None:
            self.dispatch.router.leave(replica.peer)
        if replica.is_drained_by_client and replica.name in self._drained:
            self._drained[replica.name] = self._drained.pop(replica.name)
            self._forget_drained()
        if has_ended:
            self._update_availability()  # a command that waited for its answer alone is in force now
        self.dispatch.lose(replica)
        self.dispatch.reopen()  # requests may have waited for an adapter that it was about to have

    def _forget_drained(self) -> None:
        """Keep the newest drains of lost replicas: a pod that was killed never comes back under its name."""
        if len(self._drained) > MAX_LOST_DRAINED:  # else a loss looks at no other replica
            names = {replica.name for replica in self._replicas.values()}
            lost = [name for name in self._drained if name not in names]
            for name in lost[:-MAX_LOST_DRAINED]:
                del self._drained[name]

    def _registered(self) -> list[ReplicaState]:
        return [replica for replica in self._replicas.values() if replica.view is not None]

    def stats(self) -> dict[str, Any]:
        """Counters, and the state of every replica."""
        router = self.dispatch.router
        return {
            **asdict(self.counts),
            "started": self._started,
            "waiting": self.dispatch.num_waiting,
            "max_queue": self.options.max_queue,
            "clients": len(self._clients),
            "policy": None if router is None else router.policy.value,
            "alpha": None if router is None else router.alpha,
            "weight_version": self.broadcasts.in_force.weight_version,
            "replicas": [replica.describe() for replica in self._registered()],
        }

    def check(self) -> None:
        """Assert that every request is in one place."""
        self.dispatch.check(self._clients.values())


def _what_is_wrong(replica: ReplicaState, register: protocol.Register) -> str:
    if replica.view is not None:
        return "it has registered before"
    info = register.info
    try:
        WeightsInForce.from_dict(register.weights)
    except (TypeError, ValueError, KeyError):
        return "its weights are described as none can be"
    if not (1 <= info.capacity <= MAX_SIZE and 1 <= info.block_size <= MAX_SIZE):
        return f"capacity {info.capacity}, block size {info.block_size}; both are 1 to {MAX_SIZE:,}"
    limits = ("max_sequence_length", "vocab_size", "num_blocks")
    if info.limits and not all(info.limits.get(name, 0) > 0 for name in limits):
        return f"limits without {', '.join(limits)}, which are at least 1"
    if not all(_is_change(name, *change) for name, change in register.adapter_changes.items()):
        return "changes of adapters whose stamps are no finite numbers, or whose arguments have another name"
    if info.policy not in {policy.value for policy in Policy} or not 0.0 <= info.alpha <= 1.0:
        return f"policy {info.policy[:40]!r} with alpha {info.alpha}"
    if register.parcels and not register.parcels.startswith(("tcp://", "ipc://")):
        return f"parcels at {register.parcels[:60]!r}, which is neither tcp:// nor ipc://"
    return ""


def _is_change(adapter: str, stamp: float, loaded: dict[str, Any] | None) -> bool:
    return math.isfinite(stamp) and (loaded is None or loaded.get("name") == adapter)


def _digests(joined: bytes) -> list[bytes]:
    return [joined[start : start + DIGEST_SIZE] for start in range(0, len(joined), DIGEST_SIZE)]
