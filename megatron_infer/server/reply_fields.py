"""Parts of replies that several routes share: usage, weight versions, and what is new in a growing output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server.openai_protocol import StreamOptions


def usage_of(outputs: Iterable[RequestOutput], *, num_hidden: int = 0, shows_cached: bool) -> dict[str, Any]:
    """`usage` of a call.

    num_hidden: sampled tokens that the reply leaves out, and that do not count. shows_cached: with the number of prompt
    tokens that were cached.
    """
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    num_completion = num_output_tokens(outputs) - num_hidden
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached} if shows_cached else None,
    }


def num_output_tokens(outputs: Iterable[RequestOutput]) -> int:
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


def version_spans_of(one: CompletionOutput) -> list[dict[str, int]]:
    """Which weight version sampled which tokens, and the weight versions of the keys and values they attended to; the
    version of the adapter where there is one."""
    return [
        {
            "first_token": span.first_token,
            "policy_version": span.policy_version,
            "kv_version_min": span.kv_version_min,
            "kv_version_max": span.kv_version_max,
            **({"adapter_version": span.adapter_version} if span.adapter_version else {}),
        }
        for span in one.spans
    ]


def sampled_logprobs(entries: Iterable[dict[int, Logprob]]) -> list[float]:
    """The log probability of each sampled token, which is the first of its entry."""
    return [next(iter(entry.values())).logprob for entry in entries]


class CallUsage:
    """`usage` of a call's reply, and of the chunks of its stream as its stream_options ask."""

    def __init__(self, options: StreamOptions | None, *, shows_cached: bool, hides_output: bool = False) -> None:
        """shows_cached: see `usage_of`. hides_output: no sampled token is in the reply, and none counts."""
        self._shows_cached, self._hides_output = shows_cached, hides_output
        self.at_end = options is not None and bool(options.include_usage)
        """Whether a last chunk without choices has the usage of the call."""
        self._in_every = self.at_end and options is not None and bool(options.continuous_usage_stats)

    def of(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        outputs = list(outputs)
        num_hidden = num_output_tokens(outputs) if self._hides_output else 0
        return usage_of(outputs, num_hidden=num_hidden, shows_cached=self._shows_cached)

    def of_chunk(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """The field of a chunk before the last. outputs: the newest of each request."""
        if self._in_every:
            return {"usage": self.of(outputs)}
        return {"usage": None} if self.at_end else {}


@dataclass(slots=True)
class Delta:
    """What is new in a sequence since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    offset: int
    """Characters of the sequence's text before `text`."""
    finish_reason: str | None
    stop_reason: int | str | None
    is_first: bool


class DeltaReader:
    """Turns the cumulative outputs of one sequence into deltas; outputs may be left out."""

    def __init__(self) -> None:
        self._num_chars = self._num_tokens = 0
        self.finished = False

    def read(self, one: CompletionOutput) -> Delta | None:
        """None: nothing is new."""
        if self.finished:
            return None
        text, tokens = one.text[self._num_chars :], one.token_ids[self._num_tokens :]
        self.finished = one.finish_reason is not None
        if not (text or tokens or self.finished):
            return None
        logprobs = None if one.logprobs is None else one.logprobs[self._num_tokens : len(one.token_ids)]
        delta = Delta(text, tokens, logprobs, self._num_chars, one.finish_reason, one.stop_reason, not self._num_tokens)
        self._num_chars, self._num_tokens = len(one.text), len(one.token_ids)
        return delta
