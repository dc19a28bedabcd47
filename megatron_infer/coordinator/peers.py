"""What the coordinator knows of its clients, its replicas and their requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy
from megatron_infer.coordinator.protocol import MAX_MESSAGE, Kept, Piece, Register, Submit
from megatron_infer.coordinator.router import ReplicaView, Route
from megatron_infer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """How a coordinator serves; wrong values raise ConfigError."""

    policy: PrefixCachingCoordinatorPolicy | None = None
    """None: what the config of the first replica says, with its alpha."""
    alpha: float | None = None
    """None: that config's, too; 0.5 when the policy is given."""
    key: bytes | None = None
    """Shared secret that every peer must know. None: whoever reaches the port is served."""
    max_queue: int = 4096
    """Requests that may wait here for a replica; beyond, they are refused."""
    max_attempts: int = 4
    """Replicas a request may outlive before it is given up: it may be what kills them."""
    heartbeat_s: float = 0.5
    timeout_s: float = 5.0
    """A replica or client that was silent so long is dead."""
    step_timeout_s: float | None = 600.0
    """An engine that is in one step so long is dead, whatever its heartbeat says. None: never."""
    max_message: int = MAX_MESSAGE
    seed: int = 0
    """Requests without a seed get one derived from it, in the order they come."""

    def __post_init__(self) -> None:
        if self.policy is not None:
            try:
                object.__setattr__(self, "policy", PrefixCachingCoordinatorPolicy(self.policy))
            except ValueError:
                known = ", ".join(member.value for member in PrefixCachingCoordinatorPolicy)
                raise ConfigError(f"policy is {self.policy!r}; one of {known}") from None
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha is {self.alpha}, it must be between 0 and 1")
        for name in ("max_queue", "max_attempts", "max_message"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0 < self.heartbeat_s <= self.timeout_s / 2:
            raise ConfigError(
                f"heartbeat_s is {self.heartbeat_s} and timeout_s {self.timeout_s}: two heartbeats must fit a timeout"
            )
        if self.key is not None and not self.key:
            raise ConfigError("the key is empty; None means no key")


@dataclass(slots=True)
class Progress:
    """What a client has been sent of one sample, and where another replica goes on."""

    tokens: bytearray = field(default_factory=bytearray)
    num_chars: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.num_chars += len(piece.text)
        if piece.cumulative_logprob is not None:
            self.cumulative_logprob = piece.cumulative_logprob
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def kept(self) -> Kept:
        return Kept(bytes(self.tokens), self.num_chars, self.cumulative_logprob, self.finish_reason, self.stop_reason)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request from its submission to its last output."""

    client: ClientState
    submit: Submit
    seed: int
    samples: list[Progress]
    prompt: bytes | None
    """Its token ids; None until a replica has told those of a text."""
    number: int = 0
    """Its number on the replica it is on; 0 while it waits."""
    route: Route | None = None
    attempts: int = 0
    aborted: bool = False
    ended: bool = False

    @property
    def priority(self) -> int:
        """Smaller is sooner."""
        number: int = self.submit.params.get("priority", 0)
        return number

    def stand_in(self, line: deque[PendingRequest]) -> None:
        """Behind all of its priority, before those of larger ones."""
        index = len(line)
        while index and line[index - 1].priority > self.priority:
            index -= 1
        line.insert(index, self)


@dataclass(slots=True, eq=False)
class ClientState:
    peer: bytes
    name: str
    last_heard: float
    entries: dict[int, PendingRequest] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ReplicaState:
    """A live replica. It is seated by its Register; until then `view` is None."""

    peer: bytes
    name: str
    incarnation: int
    last_heard: float
    about: Register | None = None
    view: ReplicaView | None = None
    running: dict[int, PendingRequest] = field(default_factory=dict)
    """By number: sent to it and not ended."""
    backlog: deque[PendingRequest] = field(default_factory=deque)
    """Assigned to it, kept here while it is full."""
    free_rows: int = 0
    weight_version: int = 0
    state: str = "running"
    draining: bool = False
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """Requests to send it at once: a few more than it computes, so that it never waits for the next."""
        assert self.about is not None
        return self.about.capacity + max(1, self.about.capacity // 4)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "state": "draining" if self.draining else self.state,
            "weight_version": self.weight_version,
            "running": len(self.running),
            "waiting": sum(not entry.ended for entry in self.backlog),
            "capacity": 0 if self.about is None else self.about.capacity,
            "free_rows": self.free_rows,
            "cached_blocks": 0 if self.view is None else len(self.view.table),
            "model": "" if self.about is None else self.about.model,
            "limits": {} if self.about is None else self.about.limits,
            "dtype": "" if self.about is None else self.about.dtype,
            "stats": self.stats,
        }


@dataclass(slots=True)
class Counts:
    """Since the coordinator started."""

    submitted: int = 0
    finished: int = 0
    refused: int = 0
    """Not taken: the queue was full."""
    resent: int = 0
    """Sent once more because a replica was lost."""
    replicas_lost: int = 0
    fenced: int = 0
    """Messages dropped because their sender's incarnation was over."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of those, served from a replica's prefix cache."""
