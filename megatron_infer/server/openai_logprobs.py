"""Logprobs in the forms of OpenAI's two routes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from megatron_infer.outputs.request_output import Logprob
from megatron_infer.text.detokenizer import token_bytes
from megatron_infer.text.tokenizer import Tokenizer

Entry = dict[int, Logprob] | None


class TokenTexts:
    """The bytes of single tokens, and these as text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(maxsize=1 << 16)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b"token_id:%d" % token
        return token_bytes(self._tokenizer, token)

    def text(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")


def chat_content(entries: Sequence[dict[int, Logprob]], texts: TokenTexts, *, num_top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat's choice: one object per token."""
    content = []
    for entry in entries:
        sampled = next(iter(entry))
        top = sorted(entry.items(), key=by_rank)[:num_top]
        shown = [_one(token, value, texts) for token, value in top]
        content.append({**_one(sampled, entry[sampled], texts), "top_logprobs": shown})
    return content


def _one(token: int, value: Logprob, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": value.logprob, "bytes": list(texts.bytes_of(token))}


def completion_logprobs(
    tokens: Sequence[int], entries: Sequence[Entry], texts: TokenTexts, *, num_top: int, offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice. offset: characters of the tokens before these.

    The first token of a prompt has no logprob (null). Of two tokens with the same text, top_logprobs has the larger.
    """
    shown = [texts.text(token) for token in tokens]
    offsets = []
    for text in shown:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": shown,
        "token_logprobs": [
            None if entry is None else entry[token].logprob for token, entry in zip(tokens, entries, strict=True)
        ],
        "top_logprobs": [_top(entry, texts, num_top) for entry in entries],
        "text_offset": offsets,
    }


def _top(entry: Entry, texts: TokenTexts, num_top: int) -> dict[str, float] | None:
    if entry is None:
        return None
    found: dict[str, float] = {}
    sampled = next(iter(entry))
    # As with OpenAI, the sampled token is included even where it is not among the top ones.
    chosen = [*sorted(entry.items(), key=by_rank)[:num_top], (sampled, entry[sampled])]
    for token, value in chosen:
        text = texts.text(token)
        found[text] = max(value.logprob, found.get(text, value.logprob))
    return found


def by_rank(item: tuple[int, Logprob]) -> tuple[int, float]:
    return (item[1].rank or 1 << 30, -item[1].logprob)


def by_id(entries: Sequence[Entry] | None) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs`: for each prompt token {id: {logprob, rank, decoded_token}}, null for the first."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in entry.items()
        }
        for entry in entries
    ]
