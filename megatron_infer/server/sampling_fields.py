"""What both text routes share: sampling fields to parameters, the server's limits, usage, a sample's growing text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.schemas import SAMPLING_FIELDS, SamplingBody
from megatron_infer.server.settings import ServerConfig


def sampling_of(body: SamplingBody, settings: ServerConfig) -> dict[str, Any]:
    """The fields of SamplingParams that were given. Raises ApiError 400 for what is beyond the server's limits."""
    values = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    check_limit("n", values.get("n", 1), settings.max_n, "max_n")
    check_limit("prompt_logprobs", values.get("prompt_logprobs", 0), settings.max_logprobs, "max_logprobs")
    stops = [values["stop"]] if isinstance(values.get("stop"), str) else values.get("stop", ())
    for name, items in (("stop", stops), ("stop_token_ids", values.get("stop_token_ids", ()))):
        if len(items) > settings.max_stop:
            raise bad_request(f"{name} has {len(items)} entries, the limit is {settings.max_stop} (max_stop)", name)
    longest = max(map(len, stops), default=0)
    if longest > settings.max_stop_chars:
        limit = settings.max_stop_chars
        raise bad_request(f"stop has a text of {longest:,} characters, the limit is {limit:,} (max_stop_chars)", "stop")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is given without stream: true; give both or none", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs comes with whole replies only; give no stream: true", "prompt_logprobs")
    return values


def check_limit(name: str, value: int, limit: int, option: str) -> None:
    """Raises ApiError 400 for a value beyond what the server allows."""
    if value > limit:
        raise bad_request(f"{name} is {value:,}, the limit here is {limit:,} ({option}); ask for less at once", name)


def usage_of(outputs: Iterable[RequestOutput], *, uncounted: int = 0) -> dict[str, Any]:
    """Tokens of a call. uncounted: tokens that had to be drawn and were not asked for."""
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_drawn = sum(len(one.token_ids) for output in outputs for one in output.outputs) - uncounted
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": num_prompt + num_drawn,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def spans_of(one: CompletionOutput) -> list[dict[str, int]]:
    """Which weights drew which tokens, and which weights' keys and values they attended to."""
    return [
        {
            "first_token": span.first_token,
            "policy_version": span.policy_version,
            "kv_version_min": span.kv_version_min,
            "kv_version_max": span.kv_version_max,
        }
        for span in one.spans
    ]


@dataclass(slots=True)
class Delta:
    """What is new of a sample since the last look."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    offset: int
    """Characters of text before it."""
    finish_reason: str | None
    stop_reason: int | str | None
    is_first: bool


class Reader:
    """Reads one growing sample: each piece of it once, however many came together."""

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
