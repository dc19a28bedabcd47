"""Executes a coordinator's command on the engine of a replica."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.broadcast import CommandsInForce
from megatron_infer.coordinator.served_engine import ServedEngine, meet_ranks
from megatron_infer.engine.lifecycle_commands import COMMANDS, Group, names_of
from megatron_infer.errors import ConfigError, RequestError, TransitionTimeout

ADAPTER_COMMANDS = names_of(Group.ADAPTERS)
PROFILE_VARIABLE = "MEGATRON_INFER_PROFILE_DIR"
"""Folder of the traces of `profile`. A path is never taken from a client, which could write anywhere with it."""
MAX_READINGS = 8
"""Adapters that are being read or wait to be loaded at once; further loads wait for one of these."""


class ReplicaCommands:
    """What a replica does for commands, and which of them are in force."""

    def __init__(
        self,
        further: Mapping[str, Callable[..., Any]] | None,
        adapter_commands: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """further: commands besides the engine's methods, by name. None: every command is refused but
        adapter_commands, which are taken in any case."""
        self._further = further
        self._adapter_commands = adapter_commands or {}
        self._own = {**(further or {}), **self._adapter_commands}
        """All commands besides the engine's methods."""
        self._queues: dict[str, deque[_Queued]] = {}
        """Commands for an adapter, in order; the first one waits for its directory to be read. By name."""
        self.in_force = CommandsInForce()

    @property
    def are_taken(self) -> bool:
        """Whether commands other than those for adapters are taken."""
        return self._further is not None

    def execute(
        self, engine: ServedEngine, command: protocol.Command, came: float, again: Callable[[], None]
    ) -> protocol.Answer | None:
        """Run a command between two steps -> its answer, also if it fails. came: on time.monotonic's clock.

        None: it waits for an adapter that a thread reads, or for such a command; `again` is called, from any thread,
        when the same command is to be executed again.
        """
        if command.command not in ADAPTER_COMMANDS:
            answer = _execute(engine, self._further, command, came)
        elif not self._adapter_commands:
            answer = _execute(engine, None, command, came)
        else:
            queued = self._adapter_command(engine, command, came, again)
            if queued is None:
                return None
            answer = queued
        if answer.ok:
            self.in_force.record(command.command, command.args, answer.value, stamp=command.stamp)
        return answer

    def _adapter_command(
        self, engine: ServedEngine, command: protocol.Command, came: float, again: Callable[[], None]
    ) -> protocol.Answer | None:
        own, name = self._own, str(command.args.get("name"))
        queue = self._queues.setdefault(name, deque())
        mine = next((one for one in queue if one.command is command), None)
        if mine is None:
            mine = _Queued(command, came, again)
            queue.append(mine)
        if queue[0] is not mine:
            return None
        answer = None
        if (read := own.get("read_adapter")) is not None and command.command == "load_adapter" and mine.reading is None:
            if sum(one[0].reading is not None for one in self._queues.values()) >= MAX_READINGS:
                mine.waits_to_read = True
                return None
            try:
                mine.reading = read(**command.args)
                mine.reading.on_done(again)
                return None
            except Exception as error:
                answer = _failed(error)
        if answer is None:
            answer = _execute(engine, own, command, mine.came, {} if mine.reading is None else {"source": mine.reading})
        self._forget(mine)
        queue.popleft()
        if queue:
            queue[0].again()
        else:
            del self._queues[name]
        if (waiting := next((one[0] for one in self._queues.values() if one[0].waits_to_read), None)) is not None:
            waiting.waits_to_read = False
            waiting.again()
        return answer

    def forget_waiting(self) -> None:
        """The coordinator whose commands wait is gone: none of them is carried out, and what was read is given up."""
        queues = list(self._queues.values())
        self._queues.clear()
        for queued in (one for queue in queues for one in queue):
            self._forget(queued)

    def _forget(self, queued: _Queued) -> None:
        """What was read is loaded, or will not be."""
        if queued.reading is not None:
            self._own["forget_reading"](queued.reading)


@dataclass(slots=True, eq=False)
class _Queued:
    command: protocol.Command
    came: float
    again: Callable[[], None]
    reading: Any = None
    """What `read_adapter` has begun."""
    waits_to_read: bool = False
    """It is the first of its adapter, and MAX_READINGS others are read."""


def _execute(
    engine: ServedEngine,
    commands: Mapping[str, Callable[..., Any]] | None,
    command: protocol.Command,
    came: float,
    more: Mapping[str, Any] | None = None,
) -> protocol.Answer:
    try:
        if commands is None:
            option = "--lora-root" if command.command in ADAPTER_COMMANDS else "--control (control=True)"
            text = f"this replica takes no commands ({command.command}): start it with {option}"
            raise protocol.AccessRefused(text)
        if command.command not in COMMANDS:
            raise RequestError(f"unknown command {command.command!r}")
        waited_s = time.monotonic() - came
        have_met = meet_ranks(engine, command.command, deadline=came + command.timeout_s)
        left = command.timeout_s - (0.0 if have_met else waited_s)  # the same on ranks of one engine
        if left <= 0:
            raise TransitionTimeout(f"the engine did not get to it within {command.timeout_s:g} s")
        if command.command == "profile":
            return protocol.Answer(ok=True, value=_profile(engine, **command.args))
        method = commands.get(command.command) or getattr(engine, command.command, None)
        if method is None:
            raise NotImplementedError(f"{type(engine).__name__} has no {command.command}()")
        deadline = {"timeout_s": left} if COMMANDS[command.command].has_deadline else {}
        value = method(**{**command.args, **(more or {}), **deadline})
    except Exception as error:  # the error is the answer, and the replica goes on
        return _failed(error)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return protocol.Answer(ok=True, value=value if isinstance(value, (dict, int, str)) else None)


def _failed(error: Exception) -> protocol.Answer:
    # An error may quote a file whose names are no UTF-8, which a message to the coordinator cannot hold.
    text = str(error).encode("utf-8", "backslashreplace").decode()
    return protocol.Answer(ok=False, kind=type(error).__name__, message=text)


def _profile(engine: Any, *, steps: int) -> dict[str, Any]:
    """Trace the engine's next `steps` steps into a new file of the folder -> its path; 0: end the trace now."""
    folder = os.environ.get(PROFILE_VARIABLE)
    if not folder:
        raise ConfigError(f"profiles need a folder: start the server with {PROFILE_VARIABLE}=FOLDER in its environment")
    if not steps:
        engine.profile(None)
        return {}
    path = Path(folder) / f"profile-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{time.time_ns() % 10**9:09d}.json"
    engine.profile(path, steps=steps)
    return {"path": str(path)}
