"""One step's work, decided on the host and immutable afterwards, and what its commit did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_infer.scheduler.context.copies import Copy
    from megatron_infer.scheduler.request import Request


ON_DEVICE = -1
"""In the place of a draft's id: a draft model draws it in the step itself, and only the device has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A run of a request's known tokens to compute, of a prompt or again: positions start .. start+n-1."""

    request: Request
    start: int
    n: int
    samples: bool
    """True when the chunk ends at the last known token, so that its last position draws a token."""
    forks: tuple[Request, ...] = ()
    """Siblings (n > 1) that draw their own first token from this chunk's last position; their leases exist already."""
    first: bool = False
    """True for the first chunk after an admission or swap-in: the row's tokens are not on the device yet."""
    drafts: tuple[int, ...] = ()
    """Guesses of the n - 1 tokens behind the one at `start`, which is the last known one: each of the n positions draws
    a token. They are kept as far as they equal what was drawn before them. All of them are ids, or all `ON_DEVICE`."""
    captures: tuple[tuple[int, int], ...] = ()
    """(position, state slot): the recurrent state behind that many tokens of the request is kept there, while the step
    computes them; start < position < start + n, ascending."""

    @property
    def drafts_on_device(self) -> bool:
        return bool(self.drafts) and self.drafts[0] == ON_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Token order: every decode request (one token each), then the prefill chunks in order, those with drafts
    first.

    decode_starts[i] is the position of decode[i]'s query token; its id may still be on the device only (overlap).
    """

    step: int
    decode: Sequence[Request] = ()
    decode_starts: Sequence[int] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    copies_before: tuple[Copy, ...] = ()
    """Swaps and loads of recurrent states, to run in order before this step's forward."""
    copies_after: tuple[Copy, ...] = ()
    """Blocks and then recurrent states, to run after this step's forward: forks (n > 1), and states kept where a chunk
    ends. No destination comes twice, none is a source."""
    readmitted: tuple[Request, ...] = ()
    """Requests that were readmitted with their keys and values: their tokens and parameters go to the device first."""
    adapter_loads: tuple[tuple[int, str], ...] = ()
    """(slot, adapter) to write on the device before this step's forward."""
    num_tokens: int = 0
    sampled: Sequence[Request] = ()
    """The requests that draw a token, in the order of StepResult.tokens: decode, then for each chunk that samples its
    request, once more for each draft, and its forks."""
    num_prompt_tokens: int = 0
    """Tokens of chunks without drafts."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew: tokens[i] belongs to plan.sampled[i]."""

    tokens: Sequence[int] = field(default_factory=tuple)


class Committed(NamedTuple):
    """What the commit of a step did."""

    taken: Sequence[int]
    """Indices into plan.sampled (and StepResult.tokens) whose request took its token, ascending. The others had
    finished before: their tokens were dropped."""
    ended: list[Request]
    """Requests that finished by the token they took."""
