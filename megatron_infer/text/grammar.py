"""Compiles grammars of structured output with llguidance: once each, in threads, against the bytes of the tokens.

Imports no torch, so that the HTTP process can check requests.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import RequestError
from megatron_infer.utils.panics import LibraryPanic, panics_as_errors

COMPILE_TIMEOUT_S = 30.0
"""Longest wait for a grammar; llguidance's fuel limits the work of one to about a second."""
MAX_KEPT = 256
"""Most compiled grammars, and compile errors, that are kept; the least recently used are dropped."""


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


class GrammarCache:
    """The compiled grammars of one vocabulary; usable from any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, Future[Any]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary_lock = threading.Lock()
        self.vocabulary: Any = None
        """See `grammar_vocabulary`; None until the first grammar is compiled."""

    def compile(self, wanted: StructuredOutput) -> Future[Any]:
        """Compile in a thread -> a future of llguidance's matcher, to be copied; it fails with RequestError."""
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
        """Compile and wait. Raises RequestError if it fails, or takes longer than COMPILE_TIMEOUT_S."""
        self.template(wanted)

    def template(self, wanted: StructuredOutput) -> Any:
        """The compiled matcher, to be copied; waits and raises as `check` does."""
        try:
            return self.compile(wanted).result(COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise timed_out(wanted) from None

    def _compile(self, wanted: StructuredOutput) -> Any:
        with self._vocabulary_lock:
            if self.vocabulary is None:
                self.vocabulary = grammar_vocabulary(self._tokenizer, self._vocab_size)
        from llguidance import LLMatcher, LLParserLimits

        try:
            with panics_as_errors:
                text = _grammar_text(wanted)
                template = LLMatcher(self.vocabulary, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        except Exception as error:
            raise RequestError(f"{wanted.kind}: {one_line(str(error))}") from None
        if template.is_error():
            raise RequestError(f"{wanted.kind}: {one_line(template.get_error())}")
        first = template.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            reason = one_line(first.get_error())
            raise RequestError(f"{wanted.kind}: nothing can begin with it, as with references in a circle ({reason})")
        return template


def timed_out(wanted: StructuredOutput) -> RequestError:
    return RequestError(f"{wanted.kind}: not compiled within {COMPILE_TIMEOUT_S:g} s; make it smaller")


def _grammar_text(wanted: StructuredOutput) -> str:
    """The grammar in llguidance's format; raises llguidance's own errors."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    text: str
    if wanted.regex is not None:
        text = LLMatcher.grammar_from_regex(wanted.regex)
    elif wanted.grammar is not None:
        text = LLMatcher.grammar_from_lark(any_to_lark(wanted.grammar) + _NO_FORCING)
    elif wanted.choice is not None:
        text = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in wanted.choice))
    else:
        schema = '{"type": "object"}' if wanted.json_object else str(wanted.json_schema)
        if json.loads(schema) is False:
            raise ValueError("the schema false allows no value")
        if json.loads(schema) is True:
            schema = "{}"
        # Overrides a schema's own "x-guidance", which could have keywords ignored.
        overrides = {"whitespace_flexible": not wanted.compact, "lenient": False, "coerce_one_of": False}
        text = LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
    return text


_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The last of several such lines counts. llguidance looks ahead for text that a grammar forces: in one whose text never
ends, such as `/a+/ /a/`, without end."""


def one_line(text: str) -> str:
    """An error of llguidance as one line of bounded length."""
    shown = " ".join(text.split())
    return shown if len(shown) <= 400 else shown[:400] + " ..."
