"""A coordinator's command, carried out by the engine of a replica."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_infer.errors import RequestError, TransitionTimeout
from megatron_infer.parallel import wire
from megatron_infer.parallel.served import ServedEngine


def obey(
    engine: ServedEngine, commands: Mapping[str, Callable[..., Any]], command: wire.Command, came: float
) -> wire.Answer:
    """Carry out a command between two steps; an error of it is the answer.

    commands: those beside the engine's own, by name. came: when the command did, on time.monotonic's clock.
    """
    left = command.timeout_s - (time.monotonic() - came)
    try:
        if command.command not in wire.COMMANDS:
            raise RequestError(f"unknown command {command.command!r}")
        if left <= 0:
            raise TransitionTimeout(f"the engine did not get to it within {command.timeout_s:g} s")
        method = commands.get(command.command) or getattr(engine, command.command, None)
        if method is None:
            raise NotImplementedError(f"{type(engine).__name__} has no {command.command}()")
        args = command.args if command.command == "reset_prefix_cache" else {**command.args, "timeout_s": left}
        value = method(**args)
    except Exception as error:  # whatever it is, whoever asked is told, and the replica goes on
        return wire.Answer(ok=False, kind=type(error).__name__, message=str(error))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return wire.Answer(ok=True, value=value if isinstance(value, (dict, int, str)) else None)
