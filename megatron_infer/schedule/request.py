"""A request: its tokens and where it stands. Survives pause, eviction and restart unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_infer.context.context import Lease
    from megatron_infer.schedule.params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence. `tokens` is prompt and output in one list; starting over is `scheduled = 0`.

    scheduled: tokens whose computation has been planned (kept in KV once their step is done).
    in_flight: planned steps of this request whose result is not committed yet.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    max_total: int
    """len(tokens) at which it finishes with LENGTH."""
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end it (model EOS ids unless ignore_eos, plus stop_token_ids), from min_tokens on."""
    cacheable: bool = True
    """False when every prompt position must be computed (prompt logprobs): no prefix hit until a token is drawn."""
    siblings: tuple[Request, ...] = ()
    """Leader of an n > 1 group only: the others, which share its prompt and wait until it forks them."""
    status: Status = Status.WAITING
    lease: Lease | None = None
    scheduled: int = 0
    in_flight: int = 0
    arrival: int = -1
    """Order of `Scheduler.add`, given by the scheduler: smaller is older."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache or a fork at the latest admission."""
    num_pauses: int = 0
    num_evictions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len
