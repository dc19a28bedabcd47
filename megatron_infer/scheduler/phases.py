"""Orders of decode and prompts other than both in each step. No order changes a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from megatron_infer.scheduler.admitted_requests import AdmittedRequests
from megatron_infer.scheduler.prefill import PrefillDraft
from megatron_infer.scheduler.request import Request

MAX_PREFILLS_IN_A_ROW = 64
"""Steps of prompts alone past requests that decode; then one step decodes, so that a stream of prompts cannot keep
them waiting for ever."""


class Phase(NamedTuple):
    """What a step may plan."""

    decodes: bool = True
    prefills: bool = True
    among: Collection[Request] | None = None
    """The requests that may decode; None: all."""


class Phases(Protocol):
    """Decides between decode and prompts; deterministic in its calls, as the scheduler is."""

    def attempts(self, admitted_requests: AdmittedRequests) -> Sequence[Phase]:
        """What the next step tries, in order, until one of them plans a token. Decode and prompts are both among them,
        so that a step plans nothing only if nothing can run."""
        ...

    def planned(self, draft: PrefillDraft) -> None:
        """The step has this prompt part."""
        ...


_DECODE, _PREFILL = Phase(prefills=False), Phase(decodes=False)


class PrefillFirst:
    """Prompts alone while any of them can be computed, else decode alone."""

    def __init__(self) -> None:
        self._num_prefills = 0

    def attempts(self, admitted_requests: AdmittedRequests) -> Sequence[Phase]:
        if self._num_prefills < MAX_PREFILLS_IN_A_ROW:
            return _PREFILL, _DECODE
        return _DECODE, _PREFILL

    def planned(self, draft: PrefillDraft) -> None:
        self._num_prefills = self._num_prefills + 1 if draft.chunks else 0


class Phased:
    """Decode alone while at least `min_decoding` requests decode, else prompts alone; the other where nothing can run.

    prioritizes_first_decode: requests whose prompts ended in a step decode alone in the next one.
    """

    def __init__(self, *, min_decoding: int, prioritizes_first_decode: bool) -> None:
        self._min_decoding, self._prioritizes_first_decode = min_decoding, prioritizes_first_decode
        self._first: Sequence[Request] = ()

    def attempts(self, admitted_requests: AdmittedRequests) -> Sequence[Phase]:
        decodes_on = len(admitted_requests.decoding) >= self._min_decoding
        order = (_DECODE, _PREFILL) if decodes_on else (_PREFILL, _DECODE)
        return (Phase(prefills=False, among=self._first), *order) if self._first else order

    def planned(self, draft: PrefillDraft) -> None:
        self._first = draft.sampled if self._prioritizes_first_decode else ()
