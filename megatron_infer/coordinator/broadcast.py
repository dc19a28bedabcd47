"""Commands to all replicas: collects their answers, and answers for those that do not in time."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from msgspec.structs import replace

from megatron_infer.coordinator.peers import ReplicaState
from megatron_infer.coordinator.protocol import (
    Answer,
    Command,
    Control,
    ControlResult,
    Message,
)
from megatron_infer.coordinator.weights_in_force import WeightsInForce, are_sources
from megatron_infer.engine.lifecycle_commands import COMMANDS, ENDED_BY, Group

LOST = "ReplicaLost"
MAX_CHANGES = 64
"""Changes of adapters that are neither undone nor settled, as in an engine."""
MAX_UNLOADED = 1024
"""Names of unloaded adapters that are kept, so that replicas which were away unload them, too."""
AdapterChange = tuple[float, dict[str, Any] | None]
"""The stamp of an adapter's last change (`CommandsInForce.stamp`), and the arguments that loaded it; None: it was
unloaded."""
log = logging.getLogger("megatron_infer.coordinator")
CATCH_UP_S = 300.0
"""Seconds that a replica that joins has for each of them."""


class CommandsInForce:
    """The commands in force, and the newest version that was set. Replicas keep them, too: for the next coordinator."""

    def __init__(self) -> None:
        self.commands: dict[str, dict[str, Any]] = {}
        """Those of ENDED_BY, with their arguments."""
        self.weight_version = 0
        """Replicas below it have old weights."""
        self.is_version_set = False
        self.weights = WeightsInForce()
        self.adapters: dict[str, AdapterChange] = {}
        """The latest change last."""
        self.undone: deque[str] = deque(maxlen=MAX_CHANGES)
        """Changes of adapters that were undone."""
        self._before: dict[str, tuple[str, AdapterChange | None]] = {}
        """Change of an adapter -> its name, and what `adapters` had of it."""
        self.decided: set[str] = set()
        """Those of ENDED_BY that were carried out or ended."""
        self._adopted: set[str] = set()
        """Adapters whose change is one of an earlier coordinator's commands."""
        self._last_stamp = 0.0

    def stamp(self) -> float:
        """A stamp for a change that a coordinator begins, above those of all changes it knows of. Clocks of replicas do
        not matter."""
        self._last_stamp = max(time.time(), math.nextafter(self._last_stamp, math.inf))
        return self._last_stamp

    def adopt(
        self, commands: dict[str, dict[str, Any]], version: int, adapters: Mapping[str, AdapterChange]
    ) -> list[str]:
        """Take those of a replica that were neither carried out nor ended here; of an adapter's changes the latest.

        -> adapters that the replicas which are here already have otherwise.
        """
        held = {name: args for name, args in commands.items() if name in ENDED_BY}
        self.commands |= {name: args for name, args in held.items() if name not in self.decided}
        if not self.is_version_set:
            self.weight_version = max(self.weight_version, version)
        stamps = [self.weights.now.stamp, *(at for at, _ in adapters.values())]
        self._last_stamp = max(self._last_stamp, *stamps)
        newer = [name for name, change in adapters.items() if self._is_newer(name, change)]
        self.adapters |= {name: adapters[name] for name in newer}
        self._adopted.update(newer)
        self._forget_unloaded()
        return [name for name in newer if name in self.adapters]

    def adopt_undone(self, undone: Iterable[str]) -> list[tuple[str, str]]:
        """Take changes that a replica has undone for an earlier coordinator -> (adapter, change) of those that were
        adopted of another replica, which have to be undone there."""
        self.undone += [change for change in undone if change not in self.undone]
        adopted = ((name, (self.adapters[name][1] or {}).get("change")) for name in self._adopted)
        found = [(name, change) for name, change in adopted if change is not None and change in self.undone]
        for name, _ in found:
            self._put_adapter(name, None)
        return found

    def is_outdated(self, name: str, digest: str) -> bool:
        """Whether an adapter is in force with another content."""
        _, loaded = self.adapters.get(name, (0.0, None))
        return loaded is not None and loaded.get("digest") not in (None, digest)

    def _is_newer(self, name: str, change: AdapterChange) -> bool:
        at, loaded = change
        if loaded is not None and loaded.get("change") in self.undone:
            return False
        if (known := self.adapters.get(name)) is None:
            return True
        is_same = (loaded or {}).get("digest") == (known[1] or {}).get("digest")
        return name in self._adopted and at > known[0] and not is_same

    def record(self, command: str, args: dict[str, Any], value: Any = None, *, stamp: float = 0.0) -> None:
        """A command was carried out. value: of a replica that did."""
        row = COMMANDS[command]
        if row.group is Group.ADAPTERS:
            self._record_adapter(command, args, value, stamp)
        if row.ended_by is not None:
            self.commands[command] = args
            self.decided.add(command)
        for one, end in ENDED_BY.items():
            if command == end:
                self.commands.pop(one, None)
                self.decided.add(one)
        if row.group is Group.WEIGHTS:
            self.weights.record(command, args, value, stamp)
        if command == "settle_weights" and value is not None:
            self._record_received_adapter(value, stamp)
        version = args.get("version")
        if not isinstance(version, int):
            return
        if command == "set_weight_version":
            if version > self.weight_version:
                self.weights.forget_sources()
            self.weight_version, self.is_version_set = max(self.weight_version, version), True
        elif command in ("finish_weights", "restore_weights", "cancel_weights"):  # a cancel restores the old version
            self.weight_version, self.is_version_set = version, True

    def _record_adapter(self, command: str, args: dict[str, Any], value: Any, stamp: float) -> None:
        name, change, known = str(args.get("name")), args.get("change"), self.adapters.get(str(args.get("name")))
        if command == "undo_adapter":
            if change is not None:  # None is that of all that are settled
                self.undone.append(str(change))
            name, known = self._before.pop(str(change), (name, known))
            self._put_adapter(name, None if known is None else (stamp, known[1]))
            return
        if command == "settle_adapter":
            self._before.pop(str(change), None)
            if known is not None and known[1] is not None and known[1].get("change") == change:
                self.adapters[name] = known[0], known[1] | {"change": None}
            return
        if change is not None:
            self._before.setdefault(str(change), (name, known))
        if len(self._before) > MAX_CHANGES:
            del self._before[next(iter(self._before))]
        loaded = None
        if command == "load_adapter":
            # A replica that joins has to find the same content in the directory.
            digest = value.get("digest") if isinstance(value, dict) else None
            loaded = args | {"replace": True, "digest": digest}
        self._put_adapter(name, (stamp, loaded))

    def _record_received_adapter(self, value: dict[str, Any], stamp: float) -> None:
        """An update of an adapter has ended. A replica that has missed the tensors cannot load them."""
        name, retires = str(value["name"]), value["retires"]
        self._put_adapter(name, (stamp, {"name": name, "digest": value["digest"]}))
        if retires is not None:
            self._put_adapter(str(retires), (stamp, None))

    def _put_adapter(self, name: str, change: AdapterChange | None) -> None:
        self.adapters.pop(name, None)
        self._adopted.discard(name)
        if change is not None:
            self.adapters[name] = change
        self._forget_unloaded()

    def _forget_unloaded(self) -> None:
        unloaded = [one for one, (_, loaded) in self.adapters.items() if loaded is None]
        for name in unloaded[:-MAX_UNLOADED]:
            del self.adapters[name]
            self._adopted.discard(name)


@dataclass(slots=True, eq=False)
class _Broadcast:
    client: bytes
    control: Control
    stamp: float
    deadline: float
    waiting: dict[bytes, str]
    """Replicas that have not answered, by peer, with their names."""
    answers: dict[str, Answer]
    carried_out: set[bytes] = field(default_factory=set)
    """Replicas whose answers have a value."""
    joined: list[ReplicaState] = field(default_factory=list)
    """Replicas that have joined meanwhile; they get the command when it is in force."""


class Broadcasts:
    """Running broadcasts. Each ends with the last answer, or at its deadline."""

    def __init__(
        self,
        send: Callable[[bytes, Message], None],
        clock: Callable[[], float],
        replicas: Callable[[], list[ReplicaState]],
    ) -> None:
        """replicas: those that have registered."""
        self._send, self._clock, self._replicas = send, clock, replicas
        self._running: dict[int, _Broadcast] = {}
        self._num_started = 0
        self._catching_up: dict[int, tuple[ReplicaState, Control]] = {}
        """Number of a command that a replica missed -> the replica and the command."""
        self._updating: dict[bytes, str] | None = None
        """The replicas that take part in the weight update, by peer, with their names; None: none is under way."""
        self._version_before = 0
        self._clients: dict[str, bytes] = {}
        """Which client has begun the weight update (`begin`), and which has paused the engines (`pause`)."""
        self._lost_in_update: dict[str, str] = {}
        """Those of them that were lost -> why."""
        self.in_force = CommandsInForce()

    def start(self, client: bytes, control: Control) -> None:
        """Send the command to every replica; the client gets one result.

        A weight update goes to the replicas that were there when it began. One that was lost since then fails the
        rest of it: it has not got all tensors.
        """
        message = ""
        if control.command not in COMMANDS:
            message = f"unknown command {control.command[:40]!r}; one of {', '.join(COMMANDS)}"
        elif control.command == "restore_weights" and not are_sources(control.args.get("sources")):
            message = "restore_weights: sources are pairs of a path and a fingerprint"
        elif COMMANDS[control.command].group is Group.ADAPTERS and not isinstance(control.args.get("name"), str):
            message = f"{control.command}: the name of an adapter is missing"
        if message:
            answer = Answer(ok=False, kind="ConfigError", message=message)
            self._send(client, ControlResult(control.id, {"coordinator": answer}))
            return
        self._num_started += 1
        number = self._num_started
        timeout_s = max(0.0, control.timeout_s)
        stamp = self.in_force.stamp()
        broadcast = _Broadcast(client, control, stamp, self._clock() + timeout_s, {}, {})
        self._running[number] = broadcast
        replicas = self._replicas()
        if COMMANDS[control.command].within_update:
            is_again = control.command == "begin_weights" and self._clients.get("begin") == client
            if self._updating is None or is_again:  # another client's begin is refused by the replicas
                self._updating = {one.peer: one.name for one in replicas}
                self._lost_in_update = {}
                self.in_force.weights.is_open = False
                self._clients["begin"] = client
                self._version_before = self.in_force.weight_version
            replicas = [replica for replica in replicas if replica.peer in self._updating]
            for name, why in self._lost_in_update.items():
                broadcast.answers[name] = Answer(ok=False, kind=LOST, message=f"lost in this update: {why}")
        elif control.command in ("settle_weights", "cancel_weights"):
            self._updating = None
        for replica in replicas:
            broadcast.waiting[replica.peer] = replica.name
            self._send_command(replica, number, control, stamp)
        self._finish_if_answered(number)

    def client_lost(self, client: bytes) -> None:
        """Undo a weight update that a client leaves half done, and end its pause: the engines would wait for ever."""
        if self._updating is None or self._clients["begin"] != client:
            return
        self.start(client, Control(0, "cancel_weights", {"version": self._version_before}, CATCH_UP_S))
        if "pause" in self.in_force.commands and self._clients.get("pause") == client:
            self.start(client, Control(0, "unpause", {}, CATCH_UP_S))

    def catch_up(self, replica: ReplicaState) -> bool:
        """Send a replica that has just joined the commands in force, and the end of those that ended while it was away.
        What the replica carries out of an earlier coordinator's commands is in force until one is given here, and the
        other replicas get the adapters that it has by them.

        -> whether that has changed what is in force.
        """
        assert replica.register is not None
        carried, in_force, changes = replica.register.in_force, self.in_force, replica.register.adapter_changes
        weights = WeightsInForce.from_dict(replica.register.weights)
        replica.now = replace(replica.now, weights=weights.now.stamp)
        before = in_force.weights.now, in_force.weight_version
        in_force.weights.adopt(weights)
        undone = in_force.adopt_undone(replica.register.undone)
        newer = in_force.adopt(carried, replica.register.set_version, changes)
        missed = [one for one in in_force.commands.items() if one[0] not in carried or replica.now.state == "running"]
        if replica.now.state != "running":
            ended = [one for one in carried if one in ENDED_BY and one not in in_force.commands]
            missed += [(ENDED_BY[one], {}) for one in reversed(ended)]
        for name, (_, loaded) in changes.items():
            if loaded is not None and loaded.get("change") in in_force.undone:
                missed.append(("undo_adapter", {"name": name, "change": loaded["change"]}))
        self._send_missed(replica, missed + self._missed_adapters(replica, in_force.adapters))
        undos = [("undo_adapter", {"name": name, "change": change}) for name, change in undone]
        is_new = bool(newer or undone) or before != (in_force.weights.now, in_force.weight_version)
        for other in self._replicas():
            if other is not replica and (is_new or other.is_outdated):
                self._send_missed(other, undos + self._missed_adapters(other, newer))
                self._bring_weights(other, other.now.weights)
        self._end_update_of(replica, weights)
        for broadcast in self._running.values():
            broadcast.joined.append(replica)
        return is_new

    # ------------------------------------------------------------------ weights of replicas that come or come back

    def _end_update_of(self, replica: ReplicaState, weights: WeightsInForce) -> None:
        """A replica may come back within an update, or with one whose end it has missed: it is ended there, too."""
        in_force, has = self.in_force.weights, weights.now.stamp
        if not weights.is_settled:
            if weights.is_open or has != in_force.now.stamp:
                self._send_missed(replica, [("cancel_weights", {"version": self.in_force.weight_version})])
                has = weights.if_cancelled.stamp
            elif in_force.is_settled:
                self._send_missed(replica, [("settle_weights", {})])
        self._bring_weights(replica, has)

    def _bring_weights(self, replica: ReplicaState, has: float) -> None:
        """Have a replica read the weights in force again, unless it has them, or an update is under way, whose end
        decides. Where they cannot be read, that is said once. has: the stamp of the weights that it has."""
        weights, version = self.in_force.weights, self.in_force.weight_version
        if not weights.is_settled or replica.is_restoring or replica.draining:
            return
        if has != weights.now.stamp and weights.now.sources:
            replica.is_restoring, replica.why_outdated = True, ""
            args = {"sources": weights.now.sources, "version": version}
            self._send_missed(replica, [("restore_weights", args)])
        elif has != weights.now.stamp or replica.now.weight_version < version:
            self._is_outdated(replica, "they did not come from files, or not from files alone")

    def _is_outdated(self, replica: ReplicaState, why: str, detail: str = "") -> None:
        version = self.in_force.weight_version
        text = f"the weights in force (version {version}) cannot be read again: {why}; finish a weight update"
        if text != replica.why_outdated:
            replica.why_outdated = text
            log.warning("replica %s takes no requests: %s%s", replica.name, text, detail and f" ({detail})")

    def _missed_adapters(self, replica: ReplicaState, names: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
        """What brings a replica's adapters of these names to what is in force."""
        missed: list[tuple[str, dict[str, Any]]] = []
        for name in names:
            (_, loaded), has = self.in_force.adapters[name], replica.now.adapters.get(name)
            is_same = loaded is not None and has is not None and has == loaded.get("digest")
            if _is_from_files(loaded) and not is_same:
                missed.append(("load_adapter", loaded))
            elif has is not None and not is_same:
                missed.append(("unload_adapter", {"name": name, "abort": True}))
        return missed

    def _send_missed(self, replica: ReplicaState, missed: Iterable[tuple[str, dict[str, Any]]]) -> None:
        for command, args in missed:
            if command == "load_adapter" and replica.view is not None:
                replica.view.loading.append(str(args["name"]))
            stamp, _ = self.in_force.adapters.get(str(args.get("name")), (0.0, None))
            if command == "restore_weights":
                stamp = self.in_force.weights.now.stamp
            self._catch_up_with(replica, Control(0, command, args, CATCH_UP_S), stamp)

    def _catch_up_with(self, replica: ReplicaState, control: Control, stamp: float) -> None:
        self._num_started += 1
        self._catching_up[self._num_started] = replica, control
        self._send_command(replica, self._num_started, control, stamp)

    def _drop_outdated(self, replica: ReplicaState, name: str) -> None:
        """A replica cannot load what is in force: it unloads an older content, so that requests find none there."""
        if (digest := replica.now.adapters.get(name)) is not None and self.in_force.is_outdated(name, digest):
            control = Control(0, "unload_adapter", {"name": name, "abort": True}, CATCH_UP_S)
            self._catch_up_with(replica, control, 0.0)  # is no decision: any other one is newer

    def answer(self, peer: bytes, number: int, answer: Answer) -> bool:
        """-> whether the broadcast has ended with this answer."""
        broadcast, catching_up = self._running.get(number), self._catching_up.get(number)
        if catching_up is not None and catching_up[0].peer == peer:
            del self._catching_up[number]
            self._caught_up(*catching_up, answer)
        if broadcast is None or peer not in broadcast.waiting:
            return False  # past the deadline: the client has its result
        broadcast.answers[_free_name(broadcast.waiting.pop(peer), broadcast.answers)] = answer
        if answer.ok and answer.value is not None:
            broadcast.carried_out.add(peer)
        self._finish_if_answered(number)
        return number not in self._running

    def _caught_up(self, replica: ReplicaState, control: Control, answer: Answer) -> None:
        """A replica has answered a command that it had missed."""
        if control.command == "restore_weights":
            replica.is_restoring = False
            if answer.ok:
                self._bring_weights(replica, replica.now.weights)  # there may have been an update meanwhile
            else:
                self._is_outdated(replica, "reading them failed", f"{answer.kind}: {answer.message}")
            return
        if not answer.ok:
            log.warning("replica %s does not do what the others have done: %s", replica.name, answer.message)
        if control.command == "load_adapter" and replica.view is not None:
            replica.view.loading.remove(str(control.args["name"]))
            if not answer.ok:
                self._drop_outdated(replica, str(control.args["name"]))

    def lost(self, peer: bytes, why: str) -> bool:
        """Answer for a replica that is gone -> whether a broadcast has ended."""
        if self._updating is not None and peer in self._updating:
            self._lost_in_update[self._updating.pop(peer)] = why
        self._catching_up = {n: one for n, one in self._catching_up.items() if one[0].peer != peer}
        has_ended = False
        for number, broadcast in list(self._running.items()):
            broadcast.joined = [replica for replica in broadcast.joined if replica.peer != peer]
            has_ended |= self.answer(peer, number, Answer(ok=False, kind=LOST, message=why))
        return has_ended

    def tick(self, now: float) -> bool:
        """End broadcasts at their deadlines -> whether one has ended."""
        num_running = len(self._running)
        for number, broadcast in list(self._running.items()):
            if now < broadcast.deadline:
                continue
            control = broadcast.control
            for peer in list(broadcast.waiting):
                message = f"no answer to {control.command} within {control.timeout_s:g} s"
                self.answer(peer, number, Answer(ok=False, kind="TransitionTimeout", message=message))
        return len(self._running) != num_running

    def _send_command(self, replica: ReplicaState, number: int, control: Control, stamp: float) -> None:
        command = Command(number, replica.incarnation, control.command, control.args, control.timeout_s, stamp)
        self._send(replica.peer, command)

    def _finish_if_answered(self, number: int) -> None:
        broadcast = self._running[number]
        if broadcast.waiting:
            return
        del self._running[number]
        self._record(broadcast)
        self._send(broadcast.client, ControlResult(broadcast.control.id, broadcast.answers))

    def _record(self, broadcast: _Broadcast) -> None:
        """Update what is in force, and replicas that joined meanwhile, if a replica carried the command out, or there
        was none."""
        control, row = broadcast.control, COMMANDS[broadcast.control.command]
        done = [answer.value for answer in broadcast.answers.values() if answer.ok]
        there = [one for one in broadcast.answers.values() if one.kind != LOST or not row.ends_another]
        if there and not done:
            return
        value = _received_adapter(done) if control.command == "settle_weights" else next(iter(done), None)
        self.in_force.record(control.command, control.args, value, stamp=broadcast.stamp)
        if control.command == "pause":
            self._clients["pause"] = broadcast.client
        for replica in broadcast.joined:
            if control.command in (*ENDED_BY, *ENDED_BY.values()):
                self._send_missed(replica, [(control.command, control.args)])
            elif row.group is Group.ADAPTERS:
                self._send_missed(replica, self._missed_change(control))
        if control.command in ("settle_weights", "cancel_weights"):
            for replica in self._replicas():
                self._bring_weights(replica, replica.now.weights)
        if control.command == "settle_weights" and value is not None:
            names = [str(value[key]) for key in ("name", "retires") if value[key] is not None]
            for replica in self._replicas():
                if replica.peer not in broadcast.carried_out:
                    self._send_missed(replica, self._missed_adapters(replica, names))

    def _missed_change(self, control: Control) -> list[tuple[str, dict[str, Any]]]:
        """What a replica that joined meanwhile misses of a change of an adapter, under the name that undoes it."""
        if control.command == "settle_adapter":
            return []
        _, loaded = self.in_force.adapters.get(str(control.args.get("name")), (0.0, None))
        missed = [("load_adapter", loaded)] if _is_from_files(loaded) else []
        if control.command == "unload_adapter":
            missed = [(control.command, control.args | {"abort": True})]
        elif control.command == "undo_adapter":
            missed = [(control.command, control.args), *missed]
        return missed


def _received_adapter(values: Iterable[Any]) -> dict[str, Any] | None:
    """What replicas say of the adapter whose update has ended; None: it was of the model. A replica that joined within
    the update says nothing, and one that was started again before it knows no adapter to retire."""
    keys = {"name", "digest", "retires"}
    given = [value for value in values if isinstance(value, dict) and keys <= value.keys()]
    return max(given, key=lambda value: value["retires"] is not None, default=None)


def _is_from_files(loaded: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether a replica can load the adapter now. One that came as tensors comes again with its next update."""
    return loaded is not None and "path" in loaded


def _free_name(name: str, taken: dict[str, Answer]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}#{number}"
    return free
