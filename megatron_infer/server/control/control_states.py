"""The states that engines are in as a loop sees them, and what may be asked in each: one table.

            pause                       sleep (release)
SERVING -----------> PAUSED      SERVING, PAUSED, ASLEEP ------> ASLEEP(tags)
   ^  ^---- resume ----+            ^                               | wake_up: of the last tag
   |                                +-------------------------------+
   |   start                     finish, cancel
   +---------> UPDATING ------------------------> where it was (SERVING, PAUSED, ASLEEP without its weights' tag)

SPOILED: the weights are not whole; the next update that is finished leads to where it was before
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(str, Enum):
    SERVING = "SERVING"
    PAUSED = "PAUSED"
    """Requests stand still or have ended; new ones wait. Memory is untouched."""
    ASLEEP = "ASLEEP"
    """Memory of some tags is given back; new requests are refused."""
    UPDATING = "UPDATING"
    """Weights are being written; nothing is computed, new requests wait."""
    SPOILED = "SPOILED"
    """The weights are not whole; nothing is computed, new requests wait."""


WEIGHTS, GRAPHS, KV_CACHE = "weights", "graphs", "kv_cache"
TAGS = (WEIGHTS, GRAPHS, KV_CACHE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStatus:
    """Where all engines stand."""

    state: State = State.SERVING
    detail: str = ""
    """Of PAUSED: the mode."""
    tags: tuple[str, ...] = ()
    """Of ASLEEP: whose memory is away; () where only the scheduling stands still (level 0)."""
    before: ControlStatus | None = None
    """Of ASLEEP, UPDATING and SPOILED: where the last wake_up or the end of the update leads."""

    @property
    def name(self) -> str:
        inner = self.detail or ", ".join(self.tags)
        return f"{self.state.value}({inner})" if inner else self.state.value

    @property
    def refuses_requests(self) -> bool:
        return self.state is State.ASLEEP and bool(self.tags)

    @property
    def has_weights(self) -> bool:
        return not (self.state is State.ASLEEP and WEIGHTS in self.tags)


SERVING = ControlStatus()

_STILL = (State.SERVING, State.PAUSED)
ALLOWED: dict[str, tuple[State, ...]] = {
    "pause": _STILL,
    "resume": _STILL,
    "sleep": (*_STILL, State.ASLEEP),
    "wake_up": (State.ASLEEP,),
    "reset_prefix_cache": (*_STILL, State.ASLEEP),
    "set_version": (*_STILL, State.ASLEEP),
    "start_update": (*_STILL, State.ASLEEP, State.SPOILED),
    "write_weights": (State.UPDATING,),
    "finish_update": (State.UPDATING,),
    "cancel_update": (State.UPDATING,),
    "load_update": (*_STILL, State.ASLEEP, State.SPOILED),
    "check_weights": (*_STILL, State.ASLEEP, State.SPOILED),
    "spoil_weights": (*_STILL, State.ASLEEP, State.SPOILED),
}
"""What changes something -> the states it may be asked in; requests, aborts and questions: in every state."""
NEEDS_WEIGHTS = ("start_update", "load_update", "check_weights", "spoil_weights", "set_version")
"""Not while the weights' memory is given back."""
WAY_OUT = {
    State.SERVING: "pause, sleep or start a weight update first",
    State.PAUSED: "resume (continue_generation), or go to sleep first",
    State.ASLEEP: "wake up (resume_memory_occupation) first",
    State.UPDATING: "finish or cancel the weight update first",
    State.SPOILED: "finish an update that writes every tensor first",
}


def refusal(command: str, standing: ControlStatus) -> str | None:
    """Why `command` cannot be done now, and what to do first; None: it can."""
    if standing.state not in ALLOWED[command]:
        return f"{command} while the engines are {standing.name}: {WAY_OUT[standing.state]}"
    if command in NEEDS_WEIGHTS and not standing.has_weights:
        return f"{command} while the engines are {standing.name}: wake up (resume) the tag weights first"
    return None
