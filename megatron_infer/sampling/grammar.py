"""Structured output: grammars compiled once, a matcher a request, masks of what may come next. Over llguidance.

    compile (a thread of the pool, cached) --> template --copy--> matcher of a request --its tokens--> mask, or complete

A matcher follows from the request's tokens alone: whoever comes back, from wherever, is matched anew from its first.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.sampling.masks import TokenMasks
from megatron_infer.schedule.request import Request
from megatron_infer.schedule.structured import StructuredOutput
from megatron_infer.text.grammar import grammar_vocabulary

COMPILE_TIMEOUT_S = 30.0
"""Most a caller waits for a grammar; what it may cost is limited by llguidance's fuel, about a second."""
MAX_KEPT = 256
"""Compiled grammars, and refusals, that are kept: the least recently used go."""
PARALLEL_FROM = 8
"""Masks of fewer rows are made one after the other."""


class GrammarFailed(InferenceError):
    """A request's tokens left its grammar, or matching them went beyond its limits."""


@dataclass(slots=True)
class _Match:
    """How far a request's output has been matched."""

    request: Request
    matcher: Any
    num_seen: int = 0


class Grammars:
    """Structured output of one engine (or of a server that checks what it passes on).

    `compile` and `check` may be called from any thread, the rest from the engine's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, Future[Any]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Any = None
        self._executor: Any = None
        self._matches: dict[str, _Match] = {}

    # ------------------------------------------------------------------ grammars

    def compile(self, wanted: StructuredOutput) -> Future[Any]:
        """Begin to compile, in a thread; the result is for `Grammars` alone. Fails with RequestError."""
        with self._lock:
            found = self._compiled.get(wanted)
            if found is not None:
                self._compiled.move_to_end(wanted)
                return found
            if self._threads is None:
                self._threads = ThreadPoolExecutor(2, thread_name_prefix="megatron-infer-grammar")
            future = self._threads.submit(self._compile, wanted)
            self._compiled[wanted] = future
            while len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return future

    def check(self, wanted: StructuredOutput) -> None:
        """Wait for a grammar. Raises RequestError where it cannot be compiled, or not in COMPILE_TIMEOUT_S."""
        self._template(wanted)

    def _template(self, wanted: StructuredOutput) -> Any:
        try:
            return self.compile(wanted).result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(f"{wanted.kind}: not compiled within {COMPILE_TIMEOUT_S:g} s; make it smaller") from None

    def _compile(self, wanted: StructuredOutput) -> Any:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(self._tokenizer, self._vocab_size)
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _grammar_text(wanted)
        except Exception as error:  # of kinds of the library's own, for grammars that it cannot read
            raise RequestError(f"{wanted.kind}: {_one_line(str(error))}") from None
        template = LLMatcher(self._vocabulary, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if template.is_error():
            raise RequestError(f"{wanted.kind}: {_one_line(template.get_error())}")
        return template

    # ------------------------------------------------------------------ matching

    def masks(self, sampled: Sequence[Request]) -> TokenMasks | None:
        """Masks of a step's sampled positions; every token of their requests must be known here.

        A row is all zeros where nothing can be drawn.
        """
        self._forget_ended()
        index = [place for place, request in enumerate(sampled) if request.params.structured is not None]
        if not index:
            return None
        bits_GW = np.full((len(index), self._num_words(sampled[index[0]])), -1, dtype=np.int32)
        jobs: list[tuple[Any, int]] = []
        matched: list[tuple[_Match, int]] = []
        for row, place in enumerate(index):
            request = sampled[place]
            if request.finish_reason is None:  # what is drawn for others is dropped
                match = self._match(request)
                self._consume(match)
                jobs.append((match.matcher, row))
                matched.append((match, row))
        self._fill(jobs, bits_GW)
        for match, row in matched:
            self._settle_ends(match, bits_GW[row])
        return TokenMasks(np.array(index, dtype=np.int64), bits_GW)

    def advance(self, request: Request) -> bool:
        """Match what the request has drawn -> whether its text is complete: nothing can be added to it.

        Raises GrammarFailed.
        """
        if request.tokens[-1] in request.stop_ids:
            self._matches.pop(request.id, None)
            return False
        match = self._match(request)
        self._consume(match)
        if match.matcher.is_error():
            raise GrammarFailed(f"structured output: {_one_line(match.matcher.get_error())}")
        return bool(match.matcher.is_stopped())

    def _match(self, request: Request) -> _Match:
        found = self._matches.get(request.id)
        if found is None or found.request is not request:
            assert request.params.structured is not None, f"{request.id} draws freely"
            template = self._template(request.params.structured)
            found = self._matches[request.id] = _Match(request, template.deep_copy())
        return found

    def _consume(self, match: _Match) -> None:
        new = match.request.tokens[match.request.prompt_len + match.num_seen :]
        if new:
            match.num_seen += len(new)
            match.matcher.consume_tokens(new)

    def _num_words(self, request: Request) -> int:
        self._match(request)  # which makes the vocabulary
        return -(-int(self._vocabulary.vocab_size) // 32)

    def _fill(self, jobs: list[tuple[Any, int]], bits_GW: np.ndarray) -> None:
        if len(jobs) < PARALLEL_FROM:
            for matcher, row in jobs:
                mask = bits_GW[row]
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=min(4, os.cpu_count() or 1))
        self._executor.unsafe_compute_mask_ptr(jobs, bits_GW.ctypes.data, bits_GW.shape[1] * 4, len(bits_GW))

    def _settle_ends(self, match: _Match, mask_W: np.ndarray) -> None:
        """The request's stop ids where the text may end, and no other end of sequence."""
        matcher = match.matcher
        if matcher.is_error():
            mask_W[:] = 0
            return
        stop_ids = match.request.stop_ids
        ends = matcher.is_accepting()
        for token in self._vocabulary.eos_tokens:
            if token not in stop_ids:
                _put(mask_W, token, False)
        for token in stop_ids:
            _put(mask_W, token, ends)

    def _forget_ended(self) -> None:
        ended = [key for key, match in self._matches.items() if match.request.finish_reason is not None]
        for key in ended:
            del self._matches[key]


def _put(mask_W: np.ndarray, token: int, allowed: bool) -> None:
    bytes_B = mask_W.view(np.uint8)
    if allowed:
        bytes_B[token >> 3] |= 1 << (token & 7)
    else:
        bytes_B[token >> 3] &= 0xFF ^ (1 << (token & 7))


def _grammar_text(wanted: StructuredOutput) -> str:
    """In llguidance's own form; raises whatever llguidance raises."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    text: str
    if wanted.regex is not None:
        text = LLMatcher.grammar_from_regex(wanted.regex)
    elif wanted.grammar is not None:
        text = LLMatcher.grammar_from_lark(any_to_lark(wanted.grammar))
    elif wanted.choice is not None:
        text = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in wanted.choice))
    else:
        schema = '{"type": "object"}' if wanted.json_object else str(wanted.json_schema)
        if json.loads(schema) is False:
            raise ValueError("false is the schema that nothing meets")
        if json.loads(schema) is True:
            schema = "{}"
        # A schema's own "x-guidance" must not make keywords count for nothing.
        how = {"whitespace_flexible": not wanted.compact, "lenient": False, "coerce_one_of": False}
        text = LLMatcher.grammar_from_json_schema(schema, overrides=how)
    return text


def _one_line(text: str) -> str:
    """An error of the library as one line of bounded length."""
    shown = " ".join(text.split())
    return shown if len(shown) <= 400 else shown[:400] + " ..."
