"""Executes a coordinator's command on the engine of a replica."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.broadcast import CommandsInForce
from megatron_infer.coordinator.engine_adapter import EngineAdapter
from megatron_infer.coordinator.profiles import profile
from megatron_infer.errors import RequestError, TransitionTimeout


class ReplicaCommands:
    """What a replica does for commands, and which of them are in force."""

    def __init__(
        self,
        further: Mapping[str, Callable[..., Any]] | None,
        adapter_commands: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """further: commands besides the engine's methods, by name. None: every command is refused but
        adapter_commands, which are taken in any case."""
        self._further, self._adapter_commands = further, adapter_commands or {}
        self.in_force = CommandsInForce()

    def execute(self, engine: EngineAdapter, command: protocol.Command, came: float) -> protocol.Answer:
        """Run a command between two steps -> its answer, also if it fails. came: on time.monotonic's clock."""
        commands, own = self._further, self._adapter_commands
        if command.command in own:
            commands = {**(commands or {}), **own}
        elif command.command in protocol.ADAPTER_COMMANDS:
            commands = None
        answer = _execute(engine, commands, command, came)
        if answer.ok:
            self.in_force.record(command.command, command.args)
        return answer


def _execute(
    engine: EngineAdapter, commands: Mapping[str, Callable[..., Any]] | None, command: protocol.Command, came: float
) -> protocol.Answer:
    left = command.timeout_s - (time.monotonic() - came)
    try:
        if commands is None:
            option = "--lora-root" if command.command in protocol.ADAPTER_COMMANDS else "--control (control=True)"
            text = f"this replica takes no commands ({command.command}): start it with {option}"
            raise protocol.AccessRefused(text)
        if command.command not in protocol.COMMANDS:
            raise RequestError(f"unknown command {command.command!r}")
        if left <= 0:
            raise TransitionTimeout(f"the engine did not get to it within {command.timeout_s:g} s")
        if command.command == "profile":
            return protocol.Answer(ok=True, value=profile(engine, **command.args))
        method = commands.get(command.command) or getattr(engine, command.command, None)
        if method is None:
            raise NotImplementedError(f"{type(engine).__name__} has no {command.command}()")
        args = command.args if command.command == "reset_prefix_cache" else {**command.args, "timeout_s": left}
        value = method(**args)
    except Exception as error:  # the error is the answer, and the replica goes on
        return protocol.Answer(ok=False, kind=type(error).__name__, message=_text_of(error))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return protocol.Answer(ok=True, value=value if isinstance(value, (dict, int, str)) else None)


def _text_of(error: Exception) -> str:
    """An error may quote a file whose names are no UTF-8, which a message to the coordinator cannot hold."""
    return str(error).encode("utf-8", "backslashreplace").decode()
