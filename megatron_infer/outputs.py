"""What a caller gets back; field names follow vLLM's RequestOutput and CompletionOutput so that scripts move over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_infer.errors import InferenceError
from megatron_infer.schedule.request import VersionSpan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Logprob:
    """Log probability of one token: its rank among the vocabulary (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestEvent:
    """Something that happened to a request; `time_s` on time.monotonic's clock."""

    kind: str
    time_s: float
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on time.monotonic's clock; None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_pauses: int = 0
    num_evictions: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


class TokenSupport:
    """The ids that each token of a sample was drawn among, after top_k, top_p, min_p, allowed and bad ids.

    Token i has the words ids[offsets[i] : offsets[i + 1]]: none where nothing was cut and every id could be drawn;
    else its ids, ascending, where they are fewer than the W = ceil(vocab_size / 32) words of a bitset; else that bitset
    (id t is bit t % 32 of word t // 32). A token drawn with temperature 0 has itself alone.
    """

    __slots__ = ("ids", "offsets", "vocab_size")

    def __init__(self, vocab_size: int, offsets: np.ndarray, ids: np.ndarray) -> None:
        """offsets: int32 [tokens + 1], from 0 to len(ids). ids: int32."""
        self.vocab_size, self.offsets, self.ids = vocab_size, offsets, ids

    @classmethod
    def of_rows(cls, vocab_size: int, rows: Sequence[np.ndarray]) -> TokenSupport:
        """rows: the words of each token, as `support_row` makes them."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
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
        """What is stored of one token; position -1 is the last."""
        if not -len(self) <= position < len(self):
            raise IndexError(f"token {position} of {len(self)}")
        position %= len(self)
        return self.ids[self.offsets[position] : self.offsets[position + 1]]

    def rows(self) -> list[np.ndarray]:
        """The words of every token: what `of_rows` takes."""
        return [self.words(position) for position in range(len(self))]

    def is_whole(self, position: int) -> bool:
        """Whether every id could be drawn."""
        return len(self.words(position)) == 0

    def mask(self, position: int) -> np.ndarray:
        """bool [vocab_size]: which ids could be drawn."""
        words = self.words(position)
        if not len(words):
            return np.ones(self.vocab_size, dtype=bool)
        if len(words) == -(-self.vocab_size // 32):
            return np.unpackbits(words.view(np.uint8), count=self.vocab_size, bitorder="little").astype(bool)
        mask = np.zeros(self.vocab_size, dtype=bool)
        mask[words] = True
        return mask

    def ids_at(self, position: int) -> np.ndarray:
        """int32, ascending: the ids that could be drawn."""
        return self.mask(position).nonzero()[0].astype(np.int32)

    def renormalise(self, logits: Tensor, position: int, *, temperature: float = 1.0) -> Tensor:
        """Log probabilities of a token's distribution from logits [..., vocab_size or more], differentiable.

        -inf for what could not be drawn. Penalties and logit_bias are the caller's to apply before.
        """
        import torch

        mask = torch.from_numpy(self.mask(position)).to(logits.device)
        logits = logits[..., : self.vocab_size].masked_fill(~mask, -torch.inf)
        return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def support_row(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    """A bitset (uint8, at least vocab_size bits, lowest first) in its smaller form: see TokenSupport."""
    num_words = -(-vocab_size // 32)
    ids = np.unpackbits(bits, count=vocab_size, bitorder="little").nonzero()[0]
    if len(ids) < num_words:
        return ids.astype(np.int32)
    whole: np.ndarray = bits[: 4 * num_words].copy().view(np.int32)
    return whole


def lone_row(token: int, vocab_size: int) -> np.ndarray:
    """As `support_row`, of one id."""
    if vocab_size > 32:
        return np.array([token], dtype=np.int32)
    bit: np.ndarray = np.array([1 << token], dtype=np.uint32).view(np.int32)
    return bit


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n samples; text and token_ids are cumulative or new only, as its stream mode says."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """None while running, else "stop", "length", "abort" or "error"."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Which weights drew which of all tokens so far (in delta mode too), and which weights' keys and values they
    attended to: [(first_token, policy_version, kv_version_min, kv_version_max)]."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that matched; None for end of sequence."""
    raw_logprobs: list[float] | None = None
    """return_sampled_logprobs: of each of token_ids under softmax of the model's logits."""
    processed_logprobs: list[float] | None = None
    """return_sampled_logprobs: of each of token_ids under the distribution it was drawn from, after penalties, bias,
    allowed ids, temperature and filters; 0.0 where temperature is 0, as nothing else could be drawn."""
    support: TokenSupport | None = None
    """return_support: the ids that each of token_ids was drawn among."""
    routing: np.ndarray | None = None
    """return_routing, once the sample has ended: the experts of each computed position in each mixture-of-experts
    layer, ascending: uint8 (uint16 beyond 256 experts) [prompt + output - 1, layers, top-k]. Position p's are those of
    the forward that computed it first; the last token was never an input."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request as it stands after a step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    events: list[RequestEvent] = field(default_factory=list)
    error: InferenceError | None = None
    """Why the request failed, when a sample's finish_reason is "error"."""
    pooled: list[float] | None = None
    """SamplingParams.pooling, once the prompt is computed: its final hidden states as one vector, not normalised."""
