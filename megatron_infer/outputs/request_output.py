"""The outputs of a request; field names follow vLLM's RequestOutput and CompletionOutput, so that scripts work here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_infer.errors import InferenceError
from megatron_infer.scheduler.request import VersionSpan

if TYPE_CHECKING:
    import numpy as np

    from megatron_infer.outputs.token_support import TokenSupport


@dataclass(slots=True)
class Logprob:
    """Log probability of one token, its rank in the vocabulary (1: most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestEvent:
    """An event of a request; `time_s` is wall-clock time (time.time), as that of megatron-core's events."""

    kind: str
    time_s: float
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the clock of time.monotonic, None until the event; ttft_s and latency_s are durations."""

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


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n sequences; text and token_ids are cumulative or new only, by the request's stream mode."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """None while running, else "stop", "length", "abort" or "error"."""
    spans: list[VersionSpan] = field(default_factory=list)
    """The weight versions that drew the tokens so far (all tokens, in delta mode too), and the versions of the keys and
    values they attended to: [(first_token, policy_version, kv_version_min, kv_version_max)]."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that matched; None for the end-of-sequence token."""
    raw_logprobs: list[float] | None = None
    """With return_sampled_logprobs: the log probability of each of token_ids under softmax of the model's logits."""
    processed_logprobs: list[float] | None = None
    """With return_sampled_logprobs: the log probability of each of token_ids under the distribution it was drawn from,
    after penalties, bias, allowed ids, temperature and filters; 0.0 where temperature is 0, since no other token could
    be drawn."""
    support: TokenSupport | None = None
    """With return_support: the ids that each of token_ids was drawn among."""
    routing: np.ndarray | None = None
    """With return_routing, once the sequence has ended: the experts of each computed position in each
    mixture-of-experts layer, ascending: uint8 (uint16 beyond 256 experts) [prompt + output - 1, layers, top-k]. Those
    of position p are from the forward that computed it first; the last token was never an input."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step."""

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
    """Why the request failed, when the finish_reason of a sequence is "error"."""
    pooled: list[float] | None = None
    """With SamplingParams.pooling, once the prompt is computed: its final hidden states as one vector, not
    normalised."""
