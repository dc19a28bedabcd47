"""The outputs of a request; field names follow vLLM's RequestOutput and CompletionOutput, so that scripts work here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_infer.errors import ConfigError, InferenceError, unknown_name
from megatron_infer.outputs.token_outputs import SampleOutputs
from megatron_infer.scheduler.request import VersionSpan


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
class CompletionOutput(SampleOutputs):
    """One of a request's n sequences; text and token_ids are cumulative or new only, by the request's stream mode.

    The per-token outputs that were asked for are keyword arguments.
    """

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
    processed_logprobs: list[float] | None = field(default=None, kw_only=True)
    """With return_sampled_logprobs: the log probability of each of token_ids under the distribution it was drawn from,
    after penalties, bias, allowed ids, temperature and filters; 0.0 where temperature is 0, since no other token could
    be drawn."""
    num_accepted_drafts: int = 0
    """Tokens so far (in delta mode too) that had been drafted; 0 on an engine that drafts none."""
    is_synthetic: bool = False
    """Its tokens mean nothing: drafts were kept by SpeculativeConfig.synthetic_acceptance_rate."""

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
    metadata: Mapping[str, bool | int | float] | None = None
    """What the request brought for the engine's request_metadata_types; None: the engine has none."""
    pooled: list[float] | list[list[float]] | None = None
    """With SamplingParams.pooling, once the prompt is computed: its final hidden states as one vector, with "all" as
    one for each token; not normalised."""


OnError = Literal["raise", "return"]
"""What a call does about requests that failed: raise an error that names them once all have ended, or return them."""


class GenerationError(InferenceError, RuntimeError):
    """Requests of a call failed. `outputs`: those of all its requests, in order; the failed ones have `error`, and the
    tokens that were drawn before."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        failed = [
            (f"prompt {index} (request {output.request_id})", output.error)
            for index, output in enumerate(outputs)
            if output.error is not None
        ]
        super().__init__(
            f"{described_failures('request', failed, len(outputs))}; `outputs` of this error has what was drawn, "
            "on_error='return' returns it"
        )
        self.outputs = list(outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outputs,)


def checked_outputs(outputs: list[RequestOutput], on_error: OnError) -> list[RequestOutput]:
    """`outputs`. Raises GenerationError if any failed, unless on_error is "return"."""
    if on_error == "raise" and any(output.error is not None for output in outputs):
        raise GenerationError(outputs)
    return outputs


def described_failures(what: str, failed: Sequence[tuple[str, InferenceError]], total: int) -> str:
    """ "2 of 8 requests failed: <name>: <error>; ...", five of them at most; failed: names and errors."""
    named = "; ".join(f"{name}: {error}" for name, error in failed[:5])
    more = f"; and {len(failed) - 5} more" if len(failed) > 5 else ""
    return f"{len(failed)} of {total} {what}{'' if total == 1 else 's'} failed: {named}{more}"


def check_on_error(on_error: str, known: Iterable[str] = ("raise", "return")) -> None:
    """Raise ConfigError for an unknown choice."""
    known = list(known)
    if on_error not in known:
        choices = " or ".join(map(repr, known))
        raise ConfigError(f"on_error: {unknown_name('choice', str(on_error), known)}; it is {choices}")
