"""Commands to all replicas: collects their answers, and answers for those that do not in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.coordinator.peers import ReplicaState
from megatron_infer.coordinator.protocol import (
    ADAPTER_COMMANDS,
    COMMANDS,
    Answer,
    Command,
    Control,
    ControlResult,
    Message,
)

INVERSE = {"pause": "unpause", "suspend": "resume"}
"""Commands that hold until their inverse: replicas that join meanwhile get them too."""
HELD = (*INVERSE, *INVERSE.values())
"""Commands that replicas which joined meanwhile get as they are."""
CATCH_UP = 0
"""Number of the commands that a replica gets when it joins."""
MAX_CHANGES = 8
"""Changes of adapters that can be undone, as in an engine."""
log = logging.getLogger("megatron_infer.coordinator")
CATCH_UP_S = 300.0
"""Seconds that a replica that joins has for each of them."""


class CommandsInForce:
    """The commands in force, and the newest version that was set. Replicas keep them, too: for the next coordinator."""

    def __init__(self) -> None:
        self.commands: dict[str, dict[str, Any]] = {}
        """Those of INVERSE, with their arguments."""
        self.weight_version = 0
        """Replicas below it have old weights."""
        self.is_version_set = False
        self.adapters: dict[str, dict[str, Any] | None] = {}
        """Adapter -> the arguments that loaded it, None: it was unloaded."""
        self._before: dict[str, tuple[str, tuple[dict[str, Any] | None, ...]]] = {}
        """Change of an adapter -> its name, and what `adapters` had of it, if anything; the latest MAX_CHANGES."""
        self.decided: set[str] = set()
        """Those of INVERSE that were carried out or ended."""

    def adopt(self, commands: dict[str, dict[str, Any]], version: int) -> None:
        """Take those of a replica that were neither carried out nor ended here."""
        self.commands |= {name: args for name, args in commands.items() if name in INVERSE and name not in self.decided}
        if not self.is_version_set:
            self.weight_version = max(self.weight_version, version)

    def record(self, command: str, args: dict[str, Any], value: Any = None) -> None:
        """A command was carried out. value: of a replica that did."""
        if command in ADAPTER_COMMANDS:
            self._record_adapter(command, args, value)
        if command in INVERSE:
            self.commands[command] = args
            self.decided.add(command)
        for one, inverse in INVERSE.items():
            if command == inverse:
                self.commands.pop(one, None)
                self.decided.add(one)
        version = args.get("version")
        if not isinstance(version, int):
            return
        if command == "set_weight_version":
            self.weight_version, self.is_version_set = max(self.weight_version, version), True
        elif command in ("finish_weights", "cancel_weights"):  # a cancel restores the old version
            self.weight_version, self.is_version_set = version, True

    def _record_adapter(self, command: str, args: dict[str, Any], value: Any) -> None:
        name, change = str(args.get("name")), str(args.get("change"))
        if command == "undo_adapter":
            if change in self._before:
                name, before = self._before.pop(change)
                self.adapters.pop(name, None)
                self.adapters.update((name, loaded) for loaded in before)
            return
        self._before[change] = name, (self.adapters[name],) if name in self.adapters else ()
        if len(self._before) > MAX_CHANGES:
            del self._before[next(iter(self._before))]
        self.adapters[name] = None
        if command == "load_adapter":
            # A replica that joins has to find the same content in the directory.
            digest = value.get("digest") if isinstance(value, dict) else None
            self.adapters[name] = args | {"replace": True, "digest": digest}


@dataclass(slots=True, eq=False)
class _Broadcast:
    client: bytes
    control: Control
    deadline: float
    waiting: dict[bytes, str]
    """Replicas that have not answered, by peer, with their names."""
    answers: dict[str, Answer]
    joined: list[ReplicaState] = field(default_factory=list)
    """Replicas that have joined meanwhile; they get the command when it is in force."""


class Broadcasts:
    """Running broadcasts. Each ends with the last answer, or at its deadline."""

    def __init__(self, send: Callable[[bytes, Message], None], clock: Callable[[], float]) -> None:
        self._send, self._clock = send, clock
        self._running: dict[int, _Broadcast] = {}
        self._num_started = 0
        self.in_force = CommandsInForce()

    def start(self, client: bytes, control: Control, replicas: Iterable[ReplicaState]) -> None:
        """Send the command to every replica; the client gets one result."""
        if control.command not in COMMANDS:
            message = f"unknown command {control.command[:40]!r}; one of {', '.join(COMMANDS)}"
            answer = Answer(ok=False, kind="ConfigError", message=message)
            self._send(client, ControlResult(control.id, {"coordinator": answer}))
            return
        self._num_started += 1
        number = self._num_started
        timeout_s = max(0.0, control.timeout_s)
        broadcast = _Broadcast(client, control, self._clock() + timeout_s, {}, {})
        self._running[number] = broadcast
        for replica in replicas:
            broadcast.waiting[replica.peer] = replica.name
            self._send_command(replica, number, control)
        self._finish_if_answered(number)

    def catch_up(self, replica: ReplicaState) -> None:
        """Send a replica that has just joined the commands in force, and the end of those that ended while it was away.
        What the replica carries out of an earlier coordinator's commands is in force until one is given here."""
        assert replica.register is not None
        carried, in_force = replica.register.in_force, self.in_force
        in_force.adopt(carried, replica.register.set_version)
        missed = [one for one in in_force.commands.items() if one[0] not in carried or replica.state == "running"]
        if replica.state != "running":
            ended = [one for one in carried if one in INVERSE and one not in in_force.commands]
            missed += [(INVERSE[one], {}) for one in reversed(ended)]
        for name, loaded in in_force.adapters.items():
            if loaded is not None:
                missed.append(("load_adapter", loaded))
            elif name in replica.register.adapters:
                missed.append(("unload_adapter", {"name": name, "abort": True}))
        self._send_missed(replica, missed)
        for broadcast in self._running.values():
            broadcast.joined.append(replica)

    def _send_missed(self, replica: ReplicaState, missed: Iterable[tuple[str, dict[str, Any]]]) -> None:
        for command, args in missed:
            self._send_command(replica, CATCH_UP, Control(CATCH_UP, command, args, CATCH_UP_S))

    def answer(self, peer: bytes, number: int, answer: Answer) -> None:
        broadcast = self._running.get(number)
        if number == CATCH_UP and not answer.ok:
            log.warning("a replica that has joined does not do what the others have done: %s", answer.message)
        if broadcast is None or peer not in broadcast.waiting:
            return  # past the deadline: the client has its result
        broadcast.answers[_free_name(broadcast.waiting.pop(peer), broadcast.answers)] = answer
        self._finish_if_answered(number)

    def lost(self, peer: bytes, why: str) -> None:
        """Answer for a replica that is gone."""
        for number, broadcast in list(self._running.items()):
            broadcast.joined = [replica for replica in broadcast.joined if replica.peer != peer]
            self.answer(peer, number, Answer(ok=False, kind="ReplicaLost", message=why))

    def tick(self, now: float) -> None:
        for number, broadcast in list(self._running.items()):
            if now < broadcast.deadline:
                continue
            control = broadcast.control
            for peer in list(broadcast.waiting):
                message = f"no answer to {control.command} within {control.timeout_s:g} s"
                self.answer(peer, number, Answer(ok=False, kind="TransitionTimeout", message=message))

    def _send_command(self, replica: ReplicaState, number: int, control: Control) -> None:
        command = Command(number, replica.incarnation, control.command, control.args, control.timeout_s)
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
        control = broadcast.control
        done = [answer.value for answer in broadcast.answers.values() if answer.ok]
        if broadcast.answers and not done:
            return
        self.in_force.record(control.command, control.args, done[0] if done else None)
        for replica in broadcast.joined:
            if control.command in HELD:
                self._send_missed(replica, [(control.command, control.args)])
            elif control.command in ADAPTER_COMMANDS:
                self._send_missed(replica, self._missed_change(control))

    def _missed_change(self, control: Control) -> list[tuple[str, dict[str, Any]]]:
        """What a replica that joined meanwhile misses of a change of an adapter, under the name that undoes it."""
        loaded = self.in_force.adapters.get(str(control.args.get("name")))
        missed = [] if loaded is None else [("load_adapter", loaded)]
        if control.command == "unload_adapter":
            missed = [(control.command, control.args | {"abort": True})]
        elif control.command == "undo_adapter":
            missed = [(control.command, control.args), *missed]
        return missed


def _free_name(name: str, taken: dict[str, Answer]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}#{number}"
    return free
