"""A tokenizer's vocabulary as the bytes that each token stands for: what grammars are matched against."""

from __future__ import annotations

from typing import Any

from megatron_infer.errors import RequestError


def grammar_vocabulary(tokenizer: Any, vocab_size: int) -> Any:
    """llguidance's tokenizer of a `text.Tokenizer`, ids beyond its tokens (a padded vocabulary) included.

    Special tokens stand for themselves and for no text. Takes a second for a large vocabulary. Raises RequestError
    where there is no tokenizer, its tokens are no bytes, or llguidance is not installed.
    """
    backend = getattr(tokenizer, "backend", None)
    if backend is None:
        raise RequestError("structured: needs a tokenizer, whose tokens' texts are known, and this engine has none")
    try:
        import llguidance
    except ImportError:
        raise RequestError("structured: needs llguidance; pip install 'megatron-infer[structured]'") from None
    ends = list(tokenizer.eos_ids) or None
    try:
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=ends)
    except ValueError as error:
        raise RequestError(f"structured: the tokenizer's tokens have no bytes of their own: {error}") from None
