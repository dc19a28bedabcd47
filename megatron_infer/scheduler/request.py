"""A request: its tokens and how far it is. Survives pause, eviction and restart unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megatron_infer.config.sampling_params import SamplingParams
    from megatron_infer.scheduler.context.leases import Lease


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


class VersionSpan(NamedTuple):
    """A run of output tokens drawn under the same weights from keys and values of the same weights."""

    first_token: int
    """Index into the output; the span ends where the next one begins."""
    policy_version: int
    """Version of the weights that drew the tokens."""
    kv_version_min: int
    """Oldest and newest weights that any key or value attended to was computed with."""
    kv_version_max: int
    adapter_version: int = 0
    """Version of the adapter that drew the tokens; 0: they were drawn without one."""


@dataclass(slots=True)
class History:
    """What has happened to a request so far; none of it decides what it draws."""

    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache or a fork since the latest admission."""
    num_pauses: int = 0
    num_evictions: int = 0
    """Times it lost its memory: recomputed or swapped in later."""
    num_swaps: int = 0
    """Evictions after which its keys and values came back from host memory."""
    num_accepted_drafts: int = 0
    """Output tokens that had been drafted."""
    is_synthetic: bool = False
    """Drafts were kept by `synthetic_acceptance_rate`: its tokens mean nothing."""
    spans: list[VersionSpan] = field(default_factory=list)
    """The last one may begin at a token that is not drawn yet."""
    adapter: tuple[int, str] | None = None
    """(version, digest) of the adapter that it computes with, or was computed with last; None: without one."""
    kv_versions: tuple[int, int] | None = None
    """(oldest, newest) weights of the keys and values it had when the last span began; None: it had none."""
    computed_at_mark: int = 0
    """Tokens it had computed then: weights under which nothing was computed leave no trace."""

    def restart(self, version: int, *, first_token: int, cached: int) -> None:
        """It is computed from the start with `version`, apart from `cached` tokens that were found computed with it."""
        self.kv_versions, self.computed_at_mark = ((version, version) if cached else None), cached
        self._mark(VersionSpan(first_token, version, version, version))

    def continue_with(self, version: int, *, first_token: int, computed: int) -> None:
        """From output token `first_token` on it is drawn with `version` and keeps the `computed` tokens it has."""
        if computed > self.computed_at_mark:
            last = self.spans[-1]
            self.kv_versions, self.computed_at_mark = (last.kv_version_min, last.kv_version_max), computed
        oldest, newest = self.kv_versions or (version, version)
        self._mark(VersionSpan(first_token, version, min(oldest, version), max(newest, version)))

    def fork_from(self, leader: History, *, first_token: int, computed: int) -> None:
        """From output token `first_token` on it attends to what `leader` has computed."""
        last, self.adapter = leader.spans[-1], leader.adapter
        self.kv_versions, self.computed_at_mark = (last.kv_version_min, last.kv_version_max), computed
        self._mark(last._replace(first_token=first_token))

    def _mark(self, span: VersionSpan) -> None:
        if self.adapter is not None:
            span = span._replace(adapter_version=self.adapter[0])
        if self.spans and self.spans[-1].first_token == span.first_token:
            self.spans.pop()
        if not self.spans or self.spans[-1][1:] != span[1:]:
            self.spans.append(span)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """How a request may use the prefix cache."""

    allowed: bool = True
    """False when every prompt position must be computed (prompt logprobs, routing): no prefix hit until a token is
    drawn."""
    salt: str = ""
    """Requests share with each other only if their salts are equal."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence. `tokens` is prompt and output in one list; starting over is `scheduled = 0`.

    scheduled: tokens whose computation has been planned (kept in KV once their step is done).
    in_flight: planned draws and chunks of this request that are not committed yet; one that verifies drafts counts for
    each of its draws.
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
    cache: CacheUse = CacheUse()
    caller: int = 0
    """Whose share of rows and steps it takes, see `CallerShares`; decides when it draws, not what."""
    grammar: Any = None
    """Its compiled grammar, which is kept as long as the request is."""
    siblings: tuple[Request, ...] = ()
    """Leader of an n > 1 group only: the others, which share its prompt and wait until they are forked from it."""
    status: Status = Status.WAITING
    lease: Lease | None = None
    scheduled: int = 0
    in_flight: int = 0
    arrival: int = -1
    """Order of `Scheduler.add`, given by the scheduler: smaller is older."""
    history: History = field(default_factory=History)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def sort_key(self) -> tuple[int, int]:
        """The request with the smaller one goes first: by priority and then by arrival."""
        return self.params.priority, self.arrival

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End it. Only the scheduler decides when and why, or the engine that it was continued from."""
        self.status, self.finish_reason, self.stop_reason = Status.FINISHED, reason, stop_reason

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def may_hit(self) -> bool:
        """Whether published blocks may stand for its tokens; once a token is drawn, prompt logprobs are complete.

        Not where positions have values: a request that was begun elsewhere has tokens that were never computed here.
        """
        return self.cache.allowed or (len(self.tokens) > self.prompt_len and not self.params.reads_positions)


sort_key_of = attrgetter("sort_key")
