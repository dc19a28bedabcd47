"""Compiles grammars of structured output with llguidance: once each, in threads, against the bytes of the tokens.

Imports no torch, so that the HTTP process can check requests.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import RequestError
from megatron_infer.text.json_schema import plain
from megatron_infer.utils.panics import LibraryPanic, panics_as_errors
from megatron_infer.utils.turn_pool import TurnPool

COMPILE_TIMEOUT_S = 30.0
"""Longest wait for a grammar; llguidance's fuel limits the work of one to about a second."""
LIMITS = {
    "max_grammar_size": 500_000,
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 250_000,
    "max_items_in_row": 2_000,
    "step_max_items": 50_000,
    "step_lexer_fuel": 200_000,
}
"""llguidance's `LLParserLimits`. The first two end a compilation after about a second. The others end a request whose
next mask or token would take more than about 50 ms of a processor; they count work, so that all ranks end it alike."""
SLOW_MASK_S, QUICK_MASKS = 0.002, 64
"""Masks of a grammar are made next to the steps once one has taken SLOW_MASK_S of a processor, until so many in a row
take less; until twice as many each further time."""
WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})"
"""What may stand between two parts of JSON, as llama.cpp has it: without a bound a model may write nothing else."""
MAX_KEPT = 256
"""Most compiled grammars, and compile errors, that are kept while nothing needs them; the least recently used are
dropped."""


def grammar_vocabulary(tokenizer: Any, vocab_size: int) -> Any:
    """llguidance's tokenizer for a `text.Tokenizer`, with ids for the padding of the vocabulary.

    Special tokens match themselves and no text. Takes a second for a large vocabulary. Raises RequestError without a
    tokenizer, for tokens without bytes of their own, or without llguidance.
    """
    backend = getattr(tokenizer, "backend", None)
    if backend is None:
        raise RequestError("structured: needs a tokenizer, and this engine has none")
    try:
        import llguidance
    except ImportError:
        raise RequestError("structured: needs llguidance; pip install 'megatron-infer[structured]'") from None
    ends = list(tokenizer.eos_ids) or None
    try:
        with panics_as_errors:
            return llguidance.LLTokenizer(
                backend.to_str(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=ends
            )
    except (ValueError, LibraryPanic) as error:
        raise RequestError(f"structured: the tokenizer's tokens have no bytes of their own: {error}") from None


@dataclass(slots=True)
class MaskCosts:
    """What a grammar has cost so far, in seconds of a processor."""

    compile_s: float = COMPILE_TIMEOUT_S
    """The latest compilation; COMPILE_TIMEOUT_S until one has ended."""
    longest_mask_s: float = 0.0
    quick_masks: int = QUICK_MASKS // 2
    """Quick masks in a row after which masks are made in the steps again; doubled each time that one is slow."""


class GrammarCache:
    """The compiled grammars of one vocabulary; usable from any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.RLock()
        """Also of the callbacks of futures, which may be cancelled within it."""
        self._compiled: WeakValueDictionary[StructuredOutput, Future[Any]] = WeakValueDictionary()
        """A grammar is there as long as anything holds its future: a request, who waits for it, or `_used`."""
        self._used: OrderedDict[StructuredOutput, Future[Any]] = OrderedDict()
        """The last one used latest."""
        self._num_waiting: Counter[Future[Any]] = Counter()
        """Calls that wait for a grammar."""
        self._pool: TurnPool | None = None
        self._vocabulary_lock = threading.Lock()
        self.slow: dict[StructuredOutput, int] = {}
        """Grammars whose masks are made next to the steps -> quick masks until that ends."""
        self._costs: OrderedDict[StructuredOutput, MaskCosts] = OrderedDict()
        """The last one used latest; at most MAX_KEPT."""
        self.vocabulary: Any = None
        """See `grammar_vocabulary`; None until the first grammar is compiled."""

    def compile(self, wanted: StructuredOutput, caller: Hashable = 0) -> Future[Any]:
        """Compile in a thread, callers in turn -> a future of llguidance's matcher, to be copied; it fails with
        RequestError. Who waits no longer says so by `leave`."""
        with self._lock:
            future = self._compiled.get(wanted)
            if future is None or future.cancelled():
                future = self._compiled[wanted] = Future()
                future.add_done_callback(self._forget_waiting)
            self._used[wanted] = future
            self._used.move_to_end(wanted)
            while len(self._used) > MAX_KEPT:
                self._used.popitem(last=False)
            if future.done():
                return future
            self._num_waiting[future] += 1
            if not future.running():
                if self._pool is None:
                    self._pool = TurnPool(2, "megatron-infer-grammar", most_each=1)
                self._pool.submit(caller, partial(self._compile, wanted), future)
        return future

    def _forget_waiting(self, future: Future[Any]) -> None:
        with self._lock:
            self._num_waiting.pop(future, None)

    def leave(self, future: Future[Any]) -> None:
        """One call less waits for `future`, which `compile` returned; a grammar that no call waits for is not begun."""
        with self._lock:
            if not future.done():
                self._num_waiting[future] -= 1
                if not self._num_waiting[future]:
                    future.cancel()

    def check(self, wanted: StructuredOutput) -> None:
        """Compile and wait. Raises RequestError if it fails, or takes longer than COMPILE_TIMEOUT_S."""
        self.template(wanted)

    def template(self, wanted: StructuredOutput) -> Any:
        """The compiled matcher, to be copied; waits and raises as `check` does."""
        future = self.compile(wanted)
        try:
            return future.result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise timed_out(wanted) from None
        finally:
            self.leave(future)

    def costs(self, wanted: StructuredOutput) -> MaskCosts:
        """What a grammar has cost, as long as it is among the MAX_KEPT that were used last."""
        with self._lock:
            found = self._costs.setdefault(wanted, MaskCosts())
            self._costs.move_to_end(wanted)
            if len(self._costs) > MAX_KEPT:
                dropped, _ = self._costs.popitem(last=False)
                self.slow.pop(dropped, None)
        return found

    def took(self, wanted: StructuredOutput, seconds: float) -> None:
        """A mask of `wanted` has taken so many seconds of a processor."""
        with self._lock:
            costs = self.costs(wanted)
            costs.longest_mask_s = max(costs.longest_mask_s, seconds)
            if seconds > SLOW_MASK_S:
                if wanted not in self.slow:
                    costs.quick_masks *= 2
                self.slow[wanted] = costs.quick_masks
            elif (left := self.slow.get(wanted)) is not None:
                self.slow[wanted] = left - 1
                if left <= 1:
                    del self.slow[wanted]

    def matcher(self, wanted: StructuredOutput) -> Any:
        """A matcher that shares nothing with another; compiles here. Copies share a lock, which each of them holds
        while it computes. Raises RequestError as `template` does."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            with panics_as_errors:
                text = _grammar_text(wanted)
                limits = LLParserLimits(verbose_errors=False, **LIMITS)
                matcher = LLMatcher(self.vocabulary, text, log_level=0, limits=limits)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"{wanted.kind}: {one_line(str(error))}") from None
        if matcher.is_error():
            raise RequestError(f"{wanted.kind}: {one_line(matcher.get_error())}")
        return matcher

    def _compile(self, wanted: StructuredOutput) -> Any:
        with self._vocabulary_lock:
            if self.vocabulary is None:
                self.vocabulary = grammar_vocabulary(self._tokenizer, self._vocab_size)
        began = time.thread_time()
        template = self.matcher(wanted)
        self.costs(wanted).compile_s = time.thread_time() - began
        first, began = template.deep_copy(), time.thread_time()
        first.compute_bitmask()
        self.took(wanted, time.thread_time() - began)
        if first.is_error():
            reason = one_line(first.get_error())
            what = "nothing can begin with it, as with references in a circle"
            if "(limit " in reason:
                what = "its first mask takes too much work, as where a text can be read in many ways; make it smaller"
            raise RequestError(f"{wanted.kind}: {what} ({reason})")
        return template


def timed_out(wanted: StructuredOutput) -> RequestError:
    return RequestError(f"{wanted.kind}: not compiled within {COMPILE_TIMEOUT_S:g} s; make it smaller")


def _grammar_text(wanted: StructuredOutput) -> str:
    """The grammar in llguidance's format; raises llguidance's own errors."""
    from llguidance import LLMatcher

    text: str
    if wanted.regex is not None:
        text = LLMatcher.grammar_from_regex(wanted.regex)
    elif wanted.grammar is not None or wanted.choice is not None:
        text = LLMatcher.grammar_from_lark(lark_of(wanted) + (_NO_FORCING if wanted.grammar else ""))
    else:
        # Overrides a schema's own "x-guidance", which could have keywords ignored.
        overrides = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": not wanted.compact}
        overrides |= {} if wanted.compact else {"whitespace_pattern": WHITE_SPACE}
        text = LLMatcher.grammar_from_json_schema(json.dumps(_schema_of(wanted)), overrides=overrides)
    return text


def lark_of(wanted: StructuredOutput, spacing: Mapping[str, Any] | None = None) -> str:
    """The grammar in Lark, to be part of another; its rule is `start`. spacing: of JSON, as llguidance's x-guidance.

    Raises RequestError for a schema that no value meets.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.grammar is not None:
        return str(any_to_lark(wanted.grammar))
    if wanted.regex is not None:
        (one,) = json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"]
        return str(one["lark_grammar"])
    if wanted.choice is not None:
        return "start: " + " | ".join(json.dumps(choice) for choice in wanted.choice)
    return f"start: {inline_schema({**_schema_of(wanted), 'x-guidance': spacing or {}})}"


def inline_schema(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a term of a Lark grammar."""
    return "%json " + json.dumps(schema).replace("::=", "::\\u003d")  # llguidance would take it for GBNF


def _schema_of(wanted: StructuredOutput) -> dict[str, Any]:
    """The schema of JSON output. Raises RequestError for one that no value meets."""
    schema = {"type": "object"} if wanted.json_object else plain(json.loads(str(wanted.json_schema)))
    if schema is False:
        raise RequestError("json_schema: the schema false allows no value")
    return {} if schema is True else schema


_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The last of several such lines counts. llguidance looks ahead for text that a grammar forces: in one whose text never
ends, such as `/a+/ /a/`, without end."""


_COERCION = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""Advice about an option that no caller has."""


def one_line(text: str) -> str:
    """An error of llguidance as one line of bounded length."""
    shown = " ".join(text.split()).replace(_COERCION, "; use anyOf")
    return shown if len(shown) <= 400 else shown[:400] + " ..."
