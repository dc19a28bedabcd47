"""Commands for all replicas: who was asked, who has answered, and what is said of those that did not in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_infer.coordinator.peers import ReplicaState
from megatron_infer.coordinator.protocol import COMMANDS, Answer, Command, Control, ControlResult, Message

STANDSTILLS = {"pause": "unpause", "suspend": "resume"}
"""Commands that hold until another one: a replica that joins meanwhile gets them, too."""


@dataclass(slots=True, eq=False)
class _Round:
    client: bytes
    control: Control
    deadline: float
    waiting: dict[bytes, str]
    answers: dict[str, Answer]


class Broadcasts:
    """Controls under way. Every one ends: by the last answer, or at its deadline."""

    def __init__(self, send: Callable[[bytes, Message], None], clock: Callable[[], float]) -> None:
        self._send, self._clock = send, clock
        self._rounds: dict[int, _Round] = {}
        self._num_rounds = 0
        self.standing: dict[str, Control] = {}
        """Standstills in force, by command."""
        self.weight_version = 0
        """Newest version that was asked for: replicas below it compute with old weights."""

    def start(self, client: bytes, control: Control, seats: Iterable[ReplicaState]) -> None:
        """Ask every replica; the client hears once."""
        if control.command not in COMMANDS:
            message = f"unknown command {control.command[:40]!r}; one of {', '.join(COMMANDS)}"
            answer = Answer(ok=False, kind="ConfigError", message=message)
            self._send(client, ControlResult(control.id, {"coordinator": answer}))
            return
        self._num_rounds += 1
        number = self._num_rounds
        timeout_s = max(0.0, control.timeout_s)
        one = _Round(client, control, self._clock() + timeout_s, {}, {})
        self._rounds[number] = one
        for seat in seats:
            one.waiting[seat.peer] = seat.name
            self._ask(seat, number, control)
        self._settle(number)

    def catch_up(self, seat: ReplicaState) -> None:
        """A replica that has just joined stands still like the others."""
        for control in self.standing.values():
            self._ask(seat, 0, control)

    def answer(self, peer: bytes, number: int, answer: Answer) -> None:
        one = self._rounds.get(number)
        if one is None or peer not in one.waiting:
            return  # past its deadline: the client was told so
        one.answers[_free_name(one.waiting.pop(peer), one.answers)] = answer
        self._settle(number)

    def lost(self, peer: bytes, why: str) -> None:
        """A replica is gone: it answers nothing any more."""
        for number in list(self._rounds):
            self.answer(peer, number, Answer(ok=False, kind="ReplicaLost", message=why))

    def tick(self, now: float) -> None:
        for number, one in list(self._rounds.items()):
            if now < one.deadline:
                continue
            for peer in list(one.waiting):
                message = f"no answer to {one.control.command} within {one.control.timeout_s:g} s"
                self.answer(peer, number, Answer(ok=False, kind="TransitionTimeout", message=message))

    def _ask(self, seat: ReplicaState, number: int, control: Control) -> None:
        command = Command(number, seat.incarnation, control.command, control.args, control.timeout_s)
        self._send(seat.peer, command)

    def _settle(self, number: int) -> None:
        one = self._rounds[number]
        if one.waiting:
            return
        del self._rounds[number]
        self._note(one)
        self._send(one.client, ControlResult(one.control.id, one.answers))

    def _note(self, one: _Round) -> None:
        """What is in force from now on: a command that somebody carried out, or that nobody was there for."""
        control = one.control
        if one.answers and not any(answer.ok for answer in one.answers.values()):
            return
        if control.command in STANDSTILLS:
            self.standing[control.command] = control
        for command, end in STANDSTILLS.items():
            if control.command == end:
                self.standing.pop(command, None)
        version = control.args.get("version")
        if not isinstance(version, int):
            return
        if control.command == "set_weight_version":
            self.weight_version = max(self.weight_version, version)
        elif control.command in ("finish_weights", "cancel_weights"):  # one that is taken back brings the old one again
            self.weight_version = version


def _free_name(name: str, taken: dict[str, Answer]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}#{number}"
    return free
