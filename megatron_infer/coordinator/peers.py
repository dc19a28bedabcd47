"""The coordinator's state of its clients, its replicas and their requests, and its counters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.coordinator.fair_queue import FairQueue
from megatron_infer.coordinator.protocol import EngineInfo, EngineNow, Kept, ParcelPlace, Register, Submit
from megatron_infer.coordinator.router import ReplicaView, Route
from megatron_infer.distributed.wire import Silence

CHARS_OF_A_TOKEN = 4
"""About as many characters a token of a prompt that is not tokenized yet has."""


def caller_share(max_queue: int) -> int:
    """Most waiting requests of one caller: an eighth of the queue is left to others."""
    return max_queue - max_queue // 8


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request from its submission to its last output."""

    client: ClientState
    submit: Submit
    seed: int
    sequences: list[Kept]
    prompt: bytes | None
    """Its token ids; of a text None, until a replica has tokenized it."""
    number: int = 0
    """Its number at its replica; 0 while it waits."""
    route: Route | None = None
    attempts: int = 0
    num_moves: int = 0
    """Attempts that another replica handed on."""
    leaving: bytes | None = None
    """The replica that it is at while `route` keeps a place at another one: a prefill_only one, or one that lacks
    blocks."""
    is_relieved: bool = False
    """It has left a replica that lacked blocks."""
    parcel: ParcelPlace | None = None
    """Where its memory waits, for the next attempt."""
    is_moving: bool = False
    """Its replica was told to hand it out."""
    aborted: bool = False
    ended: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """An estimate where the prompt is not tokenized yet."""
        text = self.submit.text or ""
        return len(text) // CHARS_OF_A_TOKEN if self.prompt is None else len(self.prompt) // 4

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and output tokens that the client has."""
        return self.num_prompt_tokens + sum(len(one.tokens) // 4 for one in self.sequences)

    @property
    def priority(self) -> int:
        """A smaller value is scheduled sooner."""
        number: int = self.submit.params.get("priority", 0)
        return number

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter that it names."""
        name = self.submit.params.get("adapter")
        return name if isinstance(name, str) else None

    @property
    def caller(self) -> tuple[bytes | str, str]:
        """Whose turn it takes."""
        return self.client.caller(self.submit.caller)

    @property
    def caller_number(self) -> int:
        """The caller for an engine; not 0, the caller of requests that come from elsewhere."""
        return 1 + int.from_bytes(hashlib.blake2b(repr(self.caller).encode(), digest_size=6).digest(), "little")


@dataclass(slots=True, eq=False)
class PeerState:
    peer: bytes
    name: str
    incarnation: int
    nonce: bytes
    """The nonce of its hello; the same hello again changes nothing."""
    silence: Silence


@dataclass(slots=True, eq=False)
class ClientState(PeerState):
    requests: dict[int, PendingRequest] = field(default_factory=dict)

    def caller(self, named: str) -> tuple[bytes | str, str]:
        """Whose turn a request takes: a caller that it names is the same in all clients of one name, such as the HTTP
        processes of a server; without one it is this client's."""
        return (self.name, named) if named else (self.peer, "")


@dataclass(slots=True, eq=False)
class ReplicaState(PeerState):
    """A connected replica; `register` and `view` are None until it registers."""

    register: Register | None = None
    view: ReplicaView | None = None
    running: dict[int, PendingRequest] = field(default_factory=dict)
    """Requests sent to it and not ended, by number."""
    backlog: FairQueue = field(default_factory=FairQueue)
    """Requests assigned to it and not sent yet, as it is full."""
    free_rows: int = 0
    now: EngineNow = field(default_factory=EngineNow)
    is_outdated: bool = False
    """Its weights are not those in force: it takes no requests."""
    is_restoring: bool = False
    """It reads the weights in force again."""
    why_outdated: str = ""
    """Why it cannot get the weights in force before the next update; "" unless that is so."""
    draining: bool = False
    is_drained_by_client: bool = False
    """A client's `Drain` is in force."""
    moves: bool = False
    """And its requests go elsewhere."""
    placed: set[PendingRequest] = field(default_factory=set)
    """Requests that it keeps a place for while they leave another replica."""
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def info(self) -> EngineInfo:
        assert self.register is not None, f"replica {self.name} has not registered"
        return self.register.info

    @property
    def role(self) -> ReplicaRole:
        return ReplicaRole.BOTH if self.register is None else self.register.role

    def place_of(self, parcel_id: str | None) -> ParcelPlace | None:
        """Where one of its parcels is fetched."""
        address = "" if self.register is None else self.register.parcels
        return ParcelPlace(address, parcel_id) if address and parcel_id is not None else None

    @property
    def num_taken(self) -> int:
        """Requests that it has or keeps a place for."""
        return len(self.running) + len(self.placed)

    @property
    def limit(self) -> int:
        """Most requests at the replica: a few more than it computes at once, so that it never waits for the next."""
        return self.info.capacity + max(1, self.info.capacity // 4)

    def describe(self) -> dict[str, Any]:
        """For `CoordinatorCore.stats`, once it has registered."""
        info, view = self.info, self.view
        assert view is not None
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "state": "draining" if self.draining or self.is_drained_by_client else self.now.state,
            "role": self.role.value,
            "weight_version": self.now.weight_version,
            "restoring": self.is_restoring,
            "outdated": self.why_outdated,
            "running": len(self.running),
            "waiting": sum(not request.ended for request in self.backlog),
            "capacity": info.capacity,
            "limit": self.limit,
            "free_rows": self.free_rows,
            "cached_blocks": len(view.table),
            "model": info.model,
            "limits": info.limits,
            "dtype": info.dtype,
            "adapters": sorted({*self.now.adapters, *view.loading}),
            "stats": self.stats,
        }


@dataclass(slots=True)
class Counts:
    """Counters since the coordinator started."""

    submitted: int = 0
    finished: int = 0
    refused: int = 0
    """Refused because the queue was full."""
    moved: int = 0
    """Handed from replica to replica."""
    relieved: int = 0
    """Those of `moved` that left a replica which would have evicted them."""
    resent: int = 0
    """Sent again because a replica was lost."""
    replicas_lost: int = 0
    fenced: int = 0
    """Messages of earlier incarnations, dropped."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Those of `prompt_tokens` that a replica's prefix cache served."""
