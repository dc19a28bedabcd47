"""The control states of the engines, and the commands that are allowed in each.

            pause                       sleep (release)
SERVING -----------> PAUSED      SERVING, PAUSED, ASLEEP ------> ASLEEP(tags)
   ^  ^---- resume ----+            ^                               | wake_up of the last tag
   |                                +-------------------------------+
   |   start                     finish, cancel
   +---------> UPDATING ------------------------> state before (SERVING, PAUSED, ASLEEP without the tag weights)

SPOILED: the weights are incomplete; the next update that finishes leads to the state before
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatron_infer.engine.lifecycle_commands import WEIGHTS


class ControlState(str, Enum):
    SERVING = "SERVING"
    PAUSED = "PAUSED"
    """Requests are frozen or have ended; new ones wait. Memory is kept."""
    ASLEEP = "ASLEEP"
    """Memory of some tags is released; new requests are refused."""
    UPDATING = "UPDATING"
    """Weights are being written; no step runs, new requests wait."""
    SPOILED = "SPOILED"
    """The weights are incomplete; no step runs, new requests wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    """The control state of all engines together."""

    state: ControlState = ControlState.SERVING
    detail: str = ""
    """The pause mode, when PAUSED."""
    tags: tuple[str, ...] = ()
    """The released tags, when ASLEEP; () where only scheduling is stopped (level 0)."""
    before: ControlStatus | None = None
    """The status that the last wake_up or the end of the update leads to, when ASLEEP, UPDATING or SPOILED."""

    @property
    def name(self) -> str:
        inner = self.detail or ", ".join(self.tags)
        return f"{self.state.value}({inner})" if inner else self.state.value

    @property
    def refuses_requests(self) -> bool:
        return self.state is ControlState.ASLEEP and bool(self.tags)

    @property
    def has_weights(self) -> bool:
        return not (self.state is ControlState.ASLEEP and WEIGHTS in self.tags)


SERVING = ControlStatus()

_AWAKE = (ControlState.SERVING, ControlState.PAUSED)
ALLOWED: dict[str, tuple[ControlState, ...]] = {
    "pause": _AWAKE,
    "resume": _AWAKE,
    "sleep": (*_AWAKE, ControlState.ASLEEP),
    "wake_up": (ControlState.ASLEEP,),
    "reset_prefix_cache": (*_AWAKE, ControlState.ASLEEP),
    "set_version": (*_AWAKE, ControlState.ASLEEP),
    "start_update": (*_AWAKE, ControlState.ASLEEP, ControlState.SPOILED),
    "join_group": tuple(ControlState),
    "leave_group": tuple(ControlState),
    "load_adapter": (*_AWAKE, ControlState.ASLEEP),
    "receive_weights": (ControlState.PAUSED, ControlState.UPDATING, ControlState.SPOILED),
    "write_weights": (ControlState.UPDATING,),
    "finish_update": (ControlState.UPDATING,),
    "cancel_update": (ControlState.UPDATING,),
    "load_update": (*_AWAKE, ControlState.ASLEEP, ControlState.SPOILED),
    "check_weights": (*_AWAKE, ControlState.ASLEEP, ControlState.SPOILED),
    "spoil_weights": (*_AWAKE, ControlState.ASLEEP, ControlState.SPOILED),
}
"""Command -> the states it is allowed in. Requests, aborts and queries are allowed in every state."""
NEEDS_WEIGHTS = ("start_update", "load_update", "load_adapter", "check_weights", "spoil_weights", "set_version")
"""Not allowed while the memory of the weights is released."""
REMEDY = {
    ControlState.SERVING: "pause, sleep or start a weight update first",
    ControlState.PAUSED: "resume (continue_generation), or go to sleep first",
    ControlState.ASLEEP: "wake up (resume_memory_occupation) first",
    ControlState.UPDATING: "finish or cancel the weight update first",
    ControlState.SPOILED: "finish an update that writes every tensor first",
}


def refusal(command: str, status: ControlStatus) -> str | None:
    """Why `command` is not allowed now, with the remedy; None: it is allowed."""
    if status.state not in ALLOWED[command]:
        return f"{command} while the engines are {status.name}: {REMEDY[status.state]}"
    if command in NEEDS_WEIGHTS and not status.has_weights:
        return f"{command} while the engines are {status.name}: wake up (resume) the tag weights first"
    return None
