"""Incremental detokenization: the text of a growing list of token ids in pieces, none with half a character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from encodings.utf_8 import IncrementalDecoder as UTF8Decoder
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_infer.text.tokenizer import Tokenizer  # imports packages that an engine without one does not need

# A UTF-8 character has at most four bytes, so at most three tokens can wait for its end.
_MAX_WAITING = 3
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one sequence as it grows.

    The joined results of `push` and `flush` are `tokenizer.decode(output ids)` as it stands behind the prompt: a
    character or a leading space that depends on the prompt's last tokens is as in the whole text. The amortized cost of
    a token is constant.
    """

    __slots__ = ("_impl",)

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special: bool = True) -> None:
        skipped = tokenizer.special_ids if skip_special else frozenset()
        tail = list(prompt_ids[-8:])
        self._impl: _Impl
        spelling = _spelling(tokenizer)
        if spelling is _Spelling.OTHER:
            self._impl = _Windowed(tokenizer, skip_special, skipped, tail)
        else:
            strips = spelling is _Spelling.PIECES_STRIPPED and all(id in skipped for id in prompt_ids)
            self._impl = _Bytes(_vocabulary_bytes(tokenizer), skipped, tail, strips=strips)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return self._impl.push(ids)

    def flush(self) -> str:
        """At the end of the output: the text held back, with replacement characters for incomplete ones."""
        return self._impl.flush()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of one token, which may be part of a character."""
    return _vocabulary_bytes(tokenizer)[token_id]


class _Impl(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class _Bytes:
    """Every token is some bytes (byte-level BPE, byte fallback), so text is one incremental UTF-8 decode."""

    __slots__ = ("_bytes_of", "_decoder", "_skipped", "_strips")

    def __init__(
        self, bytes_of: _VocabularyBytes, skipped: frozenset[int], prompt_tail: Sequence[int], *, strips: bool
    ) -> None:
        """strips: the output's first text loses a space at its beginning."""
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._decoder = UTF8Decoder("replace")
        self._strips = False
        self.push(prompt_tail)  # keeps the bytes of a character that the prompt ends within
        self._strips = strips

    def push(self, ids: Iterable[int]) -> str:
        bytes_of, skipped = self._bytes_of, self._skipped
        data, decoder = b"".join([bytes_of[id] for id in ids if id not in skipped]), self._decoder
        text = data.decode("ascii") if data.isascii() and not decoder.buffer else decoder.decode(data)
        if self._strips and text:
            self._strips, text = False, text.removeprefix(" ")
        return text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _Windowed:
    """Any other decoder: decode a short window twice, without and with the new tokens; the difference is new text.

    ids:  ... [context][shown last][pending]      the decoder needs context and shown last to decode pending
                      ^start       ^read    ^end
    """

    __slots__ = ("_ids", "_read", "_skip_special", "_skipped", "_tokenizer", "_waiting")

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, skipped: frozenset[int], prompt_tail: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._skipped = skipped
        self._ids = [id for id in prompt_tail if id not in skipped]
        self._read = len(self._ids)
        self._waiting = 0

    def push(self, ids: Iterable[int]) -> str:
        out: list[str] = []
        for id in ids:
            if id in self._skipped:
                continue
            self._ids.append(id)
            shown = self._decode(self._ids[: self._read])
            text = self._decode(self._ids)
            if len(text) <= len(shown):
                continue
            # When more tokens wait than a character can have, their bytes are invalid and stay so.
            if text.endswith(_REPLACEMENT) and self._waiting < _MAX_WAITING:
                self._waiting += 1
                continue
            self._waiting = 0
            out.append(text[len(shown) :])
            self._ids = self._ids[self._read :] if self._read else self._ids
            self._read = len(self._ids)
        return "".join(out)

    def flush(self) -> str:
        text = self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]
        self._read = len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


class _VocabularyBytes(dict[int, bytes]):
    """Bytes of each token of a vocabulary, computed at first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._of_token = _alphabet_bytes if _spelling(tokenizer) is _Spelling.BYTE_ALPHABET else _piece_bytes

    def __missing__(self, id: int) -> bytes:
        value = self[id] = self._of_token(self._tokenizer.token_str(id))
        return value


def _alphabet_bytes(token: str) -> bytes:
    byte_of = byte_level_alphabet()
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:  # an added token spelt outside the byte alphabet is plain text
        return token.encode("utf-8")


def _piece_bytes(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode("utf-8", "replace")


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's reversible byte alphabet: printable Latin-1 is itself, the rest follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


@lru_cache(maxsize=8)
def _vocabulary_bytes(tokenizer: Tokenizer) -> _VocabularyBytes:
    return _VocabularyBytes(tokenizer)


class _Spelling(Enum):
    """How the tokens of a vocabulary spell text."""

    BYTE_ALPHABET = auto()
    PIECES = auto()
    """As text with \u2581 for a space, or as <0x0A>: a byte."""
    PIECES_STRIPPED = auto()
    """As PIECES; a text loses the space that it begins with."""
    OTHER = auto()


@lru_cache(maxsize=8)
def _spelling(tokenizer: Tokenizer) -> _Spelling:
    decoder = getattr(getattr(tokenizer, "backend", None), "decoder", None)  # another library's tokenizer has none
    if decoder is None:
        return _Spelling.OTHER
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Spelling.BYTE_ALPHABET
    begins = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, *({"type": t} for t in _JOINED)]
    if steps == begins:
        return _Spelling.PIECES
    is_stripped = steps == [*begins, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return _Spelling.PIECES_STRIPPED if is_stripped else _Spelling.OTHER


_JOINED = ("ByteFallback", "Fuse")
