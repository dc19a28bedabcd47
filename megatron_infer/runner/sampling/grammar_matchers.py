"""Structured output: one matcher for each request, masks of the tokens that may come next, and whether any may.

    GrammarCache --template, copied--> matcher of a request --its tokens--> mask, or complete

Masks are made in the step that needs them. Those of a grammar that has had a slow one are made in threads next to the
steps, as soon as the token before is known; until its mask is there a request is held out of the steps.

A matcher's state follows from the request's tokens alone: a request that was away is matched again from its first.
Where drafts are verified, the matcher walks them, a mask for each position, and is rolled back.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.runner.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import PrefillChunk
from megatron_infer.text.grammar import GrammarCache, one_line
from megatron_infer.utils.turn_pool import TurnPool

MOMENT_S = 0.02
MAX_APART = 128
"""Most requests at once that have their grammar compiled for themselves."""
NUM_TIMED, PARALLEL_S = 4, 0.005
"""The first NUM_TIMED masks are made in turn; threads share the others if they would take longer than PARALLEL_S."""


@dataclass(slots=True)
class _Match:
    """How far a request's output has been matched."""

    request: Request
    matcher: Any
    num_seen: int = 0
    """Output tokens of the request that the matcher has consumed."""
    is_copy: bool = True
    """Whether the matcher is a copy of the grammar's template. Copies wait for each other's masks."""
    mask_s: float = 0.0
    """CPU seconds of the request's masks."""
    made: tuple[int, Future[np.ndarray]] | None = None
    """The mask that is made next to the steps, and the tokens of the request that it follows."""


class Grammars:
    """The matchers of one engine's requests; for the engine's thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.cache = GrammarCache(tokenizer, vocab_size)
        self._executor: Any = None
        num_threads = min(2, os.cpu_count() or 1)
        self._pool = TurnPool(num_threads, "megatron-infer-masks", most_each=num_threads)
        self._matches: dict[str, _Match] = {}

    def prepare(self, wanted: StructuredOutput | None, caller: int) -> Future[Any] | None:
        """Begin to compile what a request needs; None: nothing. From any thread.

        The future is one request's alone, and keeps the grammar. Who waits no longer cancels it.
        """
        if wanted is None:
            return None
        shared, own = self.cache.compile(wanted, caller), Future[Any]()
        own.add_done_callback(lambda own: self.cache.leave(shared) if own.cancelled() else None)
        shared.add_done_callback(partial(_pass_on, weakref.ref(own)))
        return own

    # ------------------------------------------------------------------ masks made next to the steps

    def may_hold(self) -> bool:
        """Whether a mask is made next to the steps, or may soon be."""
        begun = [one.made[1] for one in self._matches.values() if one.made is not None]
        return bool(self.cache.slow) or not all(mask.done() for mask in begun)

    def without_held(
        self, requests: Iterable[tuple[str, Sequence[Request]]], among: Collection[str] | None, *, waits: bool
    ) -> Collection[str] | None:
        """`among` (ids; None: all of `requests`) less those whose next mask is still being made.

        requests: (id, sequences). waits: for a moment, where none is left.
        """
        left: set[str] = set()
        all_making: list[Future[Any]] = []
        for request_id, sequences in requests:
            if among is not None and request_id not in among:
                continue
            held = [making for one in sequences if (making := self._held(one)) is not None]
            all_making += held
            if not held:
                left.add(request_id)
        if waits and all_making and not left:
            wait(all_making, timeout=MOMENT_S, return_when=FIRST_COMPLETED)
        return left if all_making else among

    def _held(self, request: Request) -> Future[Any] | None:
        """What a request waits for before it may be in a step; None: nothing.

        A mask that was begun is waited for even after its grammar has become quick.
        """
        if request.params.structured is None or request.finish_reason is not None:
            return None
        if request.params.structured not in self.cache.slow:
            match = self._matches.get(request.id)
            begun = match.made[1] if match is not None and match.made is not None else None
            return None if begun is None or begun.done() else begun
        if request.in_flight:
            return Future()
        made = self._make(request)
        return None if made.done() else made

    def _make(self, request: Request) -> Future[np.ndarray]:
        """Have the mask behind the request's tokens made in a thread, in its caller's turn; all are on the host."""
        match = self._match(request)
        if match.made is None or match.made[0] != len(request.tokens):
            self._consume(match)
            match.made = len(request.tokens), self._pool.submit(request.caller, partial(self._mask_behind, match))
        return match.made[1]

    def _mask_behind(self, match: _Match) -> np.ndarray:
        mask_W: np.ndarray = np.full(self._num_words, -1, dtype=np.int32)
        costs = self.cache.costs(self._structured(match))
        # While a copy computes, a step that matches tokens of another copy waits: for the longest mask, at worst.
        if match.is_copy and max(match.mask_s, costs.longest_mask_s) > costs.compile_s:
            with contextlib.suppress(RequestError):  # the copy goes on
                self._set_apart(match)
        self._compute(match, mask_W)
        return mask_W

    def _set_apart(self, match: _Match) -> None:
        """Give a request a matcher that shares no lock, so that steps can match tokens of others while it is used."""
        if sum(not one.is_copy for one in list(self._matches.values())) >= MAX_APART:
            return
        request, matcher = match.request, self.cache.matcher(self._structured(match))
        matcher.consume_tokens(request.tokens[request.prompt_len : request.prompt_len + match.num_seen])
        match.matcher, match.is_copy = matcher, False

    def _compute(self, match: _Match, mask_W: np.ndarray) -> None:
        began = time.thread_time()
        match.matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        seconds = time.thread_time() - began
        match.mask_s += seconds
        self.cache.took(self._structured(match), seconds)

    @staticmethod
    def _structured(match: _Match) -> StructuredOutput:
        structured = match.request.params.structured
        assert structured is not None
        return structured

    @property
    def _num_words(self) -> int:
        return -(-int(self.cache.vocabulary.vocab_size) // 32)

    # ------------------------------------------------------------------ in a step

    def masks(self, sampled: Sequence[Request], chunks: Sequence[PrefillChunk] = ()) -> TokenMasks | None:
        """Masks of a step's sampled positions; all tokens of their requests must be on the host.

        chunks: of the step; a request is sampled once more behind each of its drafts. A mask is all zeros where nothing
        can be drawn, and allows everything behind drafts that end the text or do not follow the grammar.
        """
        self._drop_ended()
        index = [place for place, request in enumerate(sampled) if request.params.structured is not None]
        if not index:
            return None
        drafts = {chunk.request: chunk.drafts for chunk in chunks if chunk.drafts}
        matched: list[tuple[_Match, int]] = []
        failed: list[int] = []
        walks: dict[Request, tuple[_Match, list[int]]] = {}
        for row, place in enumerate(index):
            request = sampled[place]
            if request.finish_reason is not None:
                continue  # its token is dropped
            if request in walks:
                walks[request][1].append(row)
                continue
            try:
                match = self._match(request)
                self._consume(match)
                if request in drafts:
                    walks[request] = match, [row]
                else:
                    matched.append((match, row))
            except InferenceError:  # its grammar was dropped from the cache and no longer compiles
                failed.append(row)
        bits_GW = np.full((len(index), self._num_words), -1, dtype=np.int32)
        self._fill(matched, bits_GW)
        for match, row in matched:
            self._allow_ends(match, bits_GW[row])
        for match, rows in walks.values():
            self._walk(match, drafts[match.request], rows, bits_GW)
        bits_GW[failed] = 0
        return TokenMasks(np.array(index, dtype=np.int64), bits_GW)

    def advance(self, request: Request) -> bool:
        """Match the request's new tokens -> whether its text is complete: no token can follow.

        Raises RequestError where matching them went beyond the grammar's limits.
        """
        if request.tokens[-1] in request.stop_ids:
            self._matches.pop(request.id, None)
            return False
        match = self._match(request)
        self._consume(match)
        if match.matcher.is_error():
            raise _failed(match)
        ends = bool(match.matcher.is_stopped())
        if not ends and request.params.structured in self.cache.slow:
            self._make(request)
        return ends

    def num_allowed(self, request: Request, tokens: Sequence[int], *, skips_slow: bool) -> int:
        """How many of `tokens` may follow the request's and do not end its text; all of its tokens are on the host.

        skips_slow: none where masks are slow: those behind drafts are made in the step. Not where several ranks draft:
        they draft alike, and measure their masks each for themselves.
        """
        if skips_slow and request.params.structured in self.cache.slow:
            return 0
        matcher = self._matcher_of(request)
        ends = next((place for place, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
        return 0 if matcher is None else int(matcher.validate_tokens(list(tokens[:ends])))

    def forced(self, request: Request) -> list[int]:
        """Tokens that must follow the request's, as the tokenizer would split their text; none where several may."""
        matcher = self._matcher_of(request)
        return [] if matcher is None else list(matcher.compute_ff_tokens())

    def refusal(self, request: Request) -> RequestError | None:
        """Why a request's own parameters leave no token to draw next; None: they leave one."""
        match = self._match(request)
        _wait_for(match)
        if match.matcher.is_error():
            return _failed(match)
        params = request.params
        mask: np.ndarray = np.zeros(self._num_words, dtype=np.int32)
        match.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if match.matcher.is_error():
            return _failed(match)
        self._allow_ends(match, mask)
        left = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        left -= set(params.bad_token_ids or ())
        if params.allowed_token_ids is not None:
            left &= set(params.allowed_token_ids)
        if len(request.tokens) - request.prompt_len < params.min_tokens:
            left -= request.stop_ids
        if left:
            return None
        text = "bad_token_ids, allowed_token_ids, stop_token_ids or min_tokens leave none of what it allows next"
        return RequestError(f"structured output has no token to draw: {text}")

    def _matcher_of(self, request: Request) -> Any:
        """The request's matcher behind its tokens; None: it can match no more."""
        try:
            match = self._match(request)
        except InferenceError:  # its grammar was dropped from the cache and no longer compiles
            return None
        self._consume(match)
        _wait_for(match)
        return None if match.matcher.is_error() or match.matcher.is_stopped() else match.matcher

    def _match(self, request: Request) -> _Match:
        found = self._matches.get(request.id)
        if found is None or found.request is not request:
            assert request.params.structured is not None, f"{request.id} has no structured output"
            template = self.cache.template(request.params.structured)
            found = self._matches[request.id] = _Match(request, template.deep_copy())
        return found

    def _consume(self, match: _Match) -> None:
        new = match.request.tokens[match.request.prompt_len + match.num_seen :]
        if new:
            _wait_for(match)
            match.num_seen += len(new)
            match.matcher.consume_tokens(new)

    def _walk(self, match: _Match, drafts: Sequence[int], rows: Sequence[int], bits_GW: np.ndarray) -> None:
        """Fill the masks `rows`: the first of the position behind the last token, the others behind a draft each."""
        _wait_for(match)
        matcher, num_walked = match.matcher, 0
        for place, row in enumerate(rows):
            if place:
                num_walked += matcher.try_consume_tokens([drafts[place - 1]])
                if num_walked < place or matcher.is_stopped():
                    break
            if place or not _take_made(match, bits_GW[row]):
                self._compute(match, bits_GW[row])
            self._allow_ends(match, bits_GW[row])
        if num_walked:
            matcher.rollback(num_walked)

    def _fill(self, matched: list[tuple[_Match, int]], bits_GW: np.ndarray) -> None:
        jobs = [(match, row) for match, row in matched if not _take_made(match, bits_GW[row])]
        begun = time.perf_counter()
        for done, (match, row) in enumerate(jobs):
            if done == NUM_TIMED and (time.perf_counter() - begun) * (len(jobs) - done) > PARALLEL_S * done:
                self._fill_in_threads([(match.matcher, row) for match, row in jobs[done:]], bits_GW)
                return
            self._compute(match, bits_GW[row])

    def _fill_in_threads(self, jobs: list[tuple[Any, int]], bits_GW: np.ndarray) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=min(4, os.cpu_count() or 1))
        self._executor.unsafe_compute_mask_ptr(jobs, bits_GW.ctypes.data, bits_GW.shape[1] * 4, len(bits_GW))

    def _allow_ends(self, match: _Match, mask_W: np.ndarray) -> None:
        """Allow the request's stop ids where the text may end, and no other end-of-sequence token."""
        matcher = match.matcher
        if matcher.is_error():
            mask_W[:] = 0
            return
        stop_ids = match.request.stop_ids
        ends = matcher.is_accepting()
        for token in self.cache.vocabulary.eos_tokens:
            if token not in stop_ids:
                _put(mask_W, token, False)
        for token in stop_ids:
            _put(mask_W, token, ends)

    def _drop_ended(self) -> None:
        ended = [key for key, match in self._matches.items() if match.request.finish_reason is not None]
        for key in ended:
            del self._matches[key]


def _pass_on(to: weakref.ref[Future[Any]], done: Future[Any]) -> None:
    """A weak reference, for the other future holds this one."""
    future = to()
    if future is not None and future.set_running_or_notify_cancel():
        future.set_result(done)


def _wait_for(match: _Match) -> None:
    """Until no thread uses the matcher. All ranks draft alike, so that one that drafts cannot do without."""
    if match.made is not None:
        match.made[1].result()


def _take_made(match: _Match, mask_W: np.ndarray) -> bool:
    """Fill the mask behind the request's tokens if a thread makes it; False: none does."""
    if match.made is None or match.made[0] != len(match.request.tokens):
        return False
    mask_W[:] = match.made[1].result()
    return True


def _failed(match: _Match) -> RequestError:
    return RequestError(f"structured output: {one_line(match.matcher.get_error())}")


def _put(mask_W: np.ndarray, token: int, allowed: bool) -> None:
    bytes_B = mask_W.view(np.uint8)
    if allowed:
        bytes_B[token >> 3] |= 1 << (token & 7)
    else:
        bytes_B[token >> 3] &= 0xFF ^ (1 << (token & 7))
