"""Samples with their log probabilities, weight versions, loss mask, support and routing, and groups of samples."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import (
    CompletionOutput,
    OnError,
    RequestOutput,
    check_on_error,
    described_failures,
)
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS, SampleOutputs, values_in
from megatron_infer.scheduler.request import VersionSpan

(LOGPROBS,) = (output for output in TOKEN_OUTPUTS if output.name == "processed_logprobs")
"""The output that is `RolloutSample.logprobs`."""
SAMPLE_OUTPUTS = tuple(output for output in TOKEN_OUTPUTS if output is not LOGPROBS)
"""The outputs that are fields of RolloutSample under their own names."""


@dataclass(slots=True, kw_only=True)
class RolloutSample(SampleOutputs):
    """One sequence. `logprobs`, `raw_logprobs`, `loss_mask` and `support` have one entry for each of `token_ids`."""

    prompt_ids: list[int]
    token_ids: list[int]
    """All tokens after the prompt: those the model drew and, between turns, those it was given."""
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    """Under the distribution each token was drawn from (after temperature, top-k, top-p, ...); 0.0 for given tokens."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Which weights drew which tokens, attending to keys and values of which weights; a span lasts until the next."""
    finish_reason: str = "stop"
    """"stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    loss_mask: list[int] = field(default_factory=list)
    """1: drawn by the model; 0: given (the answer of a tool)."""
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """The whole sequence."""
        return self.prompt_ids + self.token_ids

    @property
    def num_drawn(self) -> int:
        return sum(self.loss_mask)

    def staleness(self, version: int) -> list[int]:
        """For each drawn token: versions between the weights that drew it and `version`, which trains on it."""
        return [version - span.policy_version for span, drawn in self._spanned() if drawn]

    def kv_staleness(self, version: int) -> list[int]:
        """The same for the oldest keys and values that each drawn token attended to."""
        return [version - span.kv_version_min for span, drawn in self._spanned() if drawn]

    def _spanned(self) -> list[tuple[VersionSpan, int]]:
        """Each token's span and mask. Tokens given before any was drawn have the first span."""
        pairs, place = [], 0
        for token, drawn in enumerate(self.loss_mask if self.spans else []):
            while place + 1 < len(self.spans) and self.spans[place + 1].first_token <= token:
                place += 1
            pairs.append((self.spans[place], drawn))
        return pairs


@dataclass(slots=True, kw_only=True)
class RolloutGroup:
    """All samples of one prompt."""

    group_id: str
    """Unique within an engine."""
    prompt_ids: list[int]
    samples: list[RolloutSample]
    info: dict[str, Any] = field(default_factory=dict)
    """The caller's data that came with the prompt."""
    index: int = 0
    """Index of the prompt in the call that began it."""
    begun_version: int = 0
    """Weight version when it was submitted."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: InferenceError | None = None
    """Why it failed, when a sample's finish_reason is "error"."""

    @property
    def num_tokens(self) -> int:
        """Tokens drawn in all samples."""
        return sum(sample.num_drawn for sample in self.samples)

    def staleness(self, version: int) -> int:
        """Staleness of its stalest token, when `version` trains on it."""
        return max((age for sample in self.samples for age in sample.staleness(version)), default=0)


class RolloutError(InferenceError, RuntimeError):
    """Requests of a rollout failed: their samples are cut off, and nothing may train on them.

    `groups`: all that the call delivers, the finished and the failed ones, which have `error`; `failed`: those alone.
    Nothing of them is left in the engine.
    """

    def __init__(self, groups: Sequence[RolloutGroup]) -> None:
        self.groups = list(groups)
        self.failed = [group for group in groups if group.error is not None]
        failed = [
            (f"prompt {group.index} (group {group.group_id})", group.error)
            for group in self.failed
            if group.error is not None
        ]
        super().__init__(
            f"{described_failures('group', failed, len(self.groups))}; `groups` of this error has the finished ones too"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.groups,)


def checked_groups(groups: list[RolloutGroup], on_error: str = "raise") -> list[RolloutGroup]:
    """`groups`. Raises RolloutError if any failed, unless on_error is "return"."""
    if on_error == "raise" and any(group.error is not None for group in groups):
        raise RolloutError(groups)
    return groups


async def checked_stream(groups: AsyncGenerator[RolloutGroup], on_error: OnError) -> AsyncGenerator[RolloutGroup]:
    """`groups`, which are closed when it is left, and at their end what `checked_groups` raises for those that failed.
    on_error "return": it gives these, too."""
    check_on_error(on_error)
    found = []
    async with aclosing(groups):
        async for group in groups:
            found.append(group)
            if group.error is None or on_error == "return":
                yield group
    checked_groups(found, on_error)


def sample_of(prompt_ids: Sequence[int], drawn: CompletionOutput) -> RolloutSample:
    """A finished (or aborted) sample of the engine, all of whose tokens were drawn."""
    return RolloutSample(
        prompt_ids=list(prompt_ids),
        token_ids=list(drawn.token_ids),
        text=drawn.text,
        logprobs=list(getattr(drawn, LOGPROBS.name) or ()),
        spans=list(drawn.spans),
        finish_reason=drawn.finish_reason or "abort",
        stop_reason=drawn.stop_reason,
        loss_mask=[1] * len(drawn.token_ids),
        **{output.name: value for output, value in values_in(drawn) if output in SAMPLE_OUTPUTS},
    )


def group_of(
    output: RequestOutput, *, index: int = 0, info: Mapping[str, Any] | None = None, begun_version: int = 0
) -> RolloutGroup:
    """A request's output as a group."""
    return RolloutGroup(
        group_id=output.request_id,
        prompt_ids=list(output.prompt_token_ids),
        samples=[sample_of(output.prompt_token_ids, drawn) for drawn in output.outputs],
        info=dict(info or {}),
        index=index,
        begun_version=begun_version,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )
