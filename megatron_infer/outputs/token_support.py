"""The ids that a token was drawn among, which exact importance ratios under top-k, top-p and min-p need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class TokenSupport:
    """The ids that each token of a sequence was drawn among, after top_k, top_p, min_p, allowed and bad ids.

    Token i has the words ids[offsets[i] : offsets[i + 1]]: none where every id could be drawn; else its ids, ascending,
    where they are fewer than the W = ceil(vocab_size / 32) words of a bitset; else that bitset (id t is bit t % 32 of
    word t // 32). A token drawn with temperature 0 has only itself.
    """

    __slots__ = ("ids", "offsets", "vocab_size")

    def __init__(self, vocab_size: int, offsets: np.ndarray, ids: np.ndarray) -> None:
        """offsets: int32 [tokens + 1], from 0 to len(ids). ids: int32."""
        self.vocab_size, self.offsets, self.ids = vocab_size, offsets, ids

    @classmethod
    def of_rows(cls, vocab_size: int, rows: Sequence[np.ndarray]) -> TokenSupport:
        """rows: the words of each token, from `support_row`."""
        offsets: np.ndarray = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(vocab_size, offsets, np.concatenate([np.empty(0, np.int32), *rows]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenSupport)
            and self.vocab_size == other.vocab_size
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.ids, other.ids)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenSupport({len(self)} tokens, {len(self.ids)} words, vocabulary of {self.vocab_size})"

    def words(self, position: int) -> np.ndarray:
        """The stored words of one token; position -1 is the last."""
        if not -len(self) <= position < len(self):
            raise IndexError(f"token {position} of {len(self)}")
        position %= len(self)
        return self.ids[self.offsets[position] : self.offsets[position + 1]]

    def rows(self) -> list[np.ndarray]:
        """The words of every token, as `of_rows` takes them."""
        return [self.words(position) for position in range(len(self))]

    def joined(self, other: TokenSupport) -> TokenSupport:
        """The tokens of `self`, then those of `other`."""
        offsets = np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]])
        return TokenSupport(other.vocab_size or self.vocab_size, offsets, np.concatenate([self.ids, other.ids]))

    def fault(self) -> str:
        """Why these arrays are no support; "": they are one. For arrays that came from elsewhere."""
        vocab_size, offsets, words = self.vocab_size, self.offsets, self.ids
        counts = offsets[1:] - offsets[:-1]
        least, most = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
        if not 0 <= vocab_size < 1 << 31:
            return f"a vocabulary of {vocab_size} ids"
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(words) or least < 0:
            return f"offsets do not rise from 0 to its {len(words)} words"
        full = -(-vocab_size // 32)
        if most > full:
            return f"a token has {most} words, a vocabulary of {vocab_size} takes {full} at most"
        ids = words if most < full else words[np.repeat(counts < full, counts)]  # the others are bitsets
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            return f"an id is outside the vocabulary of {vocab_size}"
        return ""

    def is_whole(self, position: int) -> bool:
        """Whether every id could be drawn."""
        return len(self.words(position)) == 0

    def mask(self, position: int) -> np.ndarray:
        """bool [vocab_size]: which ids could be drawn."""
        words = self.words(position)
        if not len(words):
            whole: np.ndarray = np.ones(self.vocab_size, dtype=bool)
            return whole
        if len(words) == -(-self.vocab_size // 32):
            bits: np.ndarray = np.unpackbits(words.view(np.uint8), count=self.vocab_size, bitorder="little")
            return bits.astype(bool)
        mask: np.ndarray = np.zeros(self.vocab_size, dtype=bool)
        mask[words] = True
        return mask

    def ids_at(self, position: int) -> np.ndarray:
        """int32, ascending: the ids that could be drawn."""
        ids: np.ndarray = self.mask(position).nonzero()[0].astype(np.int32)
        return ids

    def renormalise(self, logits: Tensor, position: int, *, temperature: float = 1.0) -> Tensor:
        """Log probabilities of a token's distribution from logits [..., vocab_size or more], differentiable.

        -inf for ids that could not be drawn. The caller applies penalties and logit_bias before.
        """
        import torch

        mask = torch.from_numpy(self.mask(position)).to(logits.device)
        logits = logits[..., : self.vocab_size].masked_fill(~mask, -torch.inf)
        return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def support_row(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    """The words of a bitset (uint8, at least vocab_size bits, lowest first) in the shorter form: see TokenSupport."""
    num_words = -(-vocab_size // 32)
    ids = np.unpackbits(bits, count=vocab_size, bitorder="little").nonzero()[0]
    if len(ids) < num_words:
        few: np.ndarray = ids.astype(np.int32)
        return few
    whole: np.ndarray = bits[: 4 * num_words].copy().view(np.int32)
    return whole


def lone_row(token: int, vocab_size: int) -> np.ndarray:
    """The same as `support_row`, for a single id."""
    if vocab_size > 32:
        alone: np.ndarray = np.array([token], dtype=np.int32)
        return alone
    bit: np.ndarray = np.array([1 << token], dtype=np.uint32).view(np.int32)
    return bit
