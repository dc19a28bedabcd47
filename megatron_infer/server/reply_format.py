"""How a dialect shows outputs, and parts of replies that several dialects share: usage, versions, what is new."""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from megatron_infer.server.body_types import StreamOptions

if TYPE_CHECKING:
    from megatron_infer.server.generation import PreparedCall


def usage_of(outputs: Iterable[RequestOutput], *, shows_cached: bool, hides_output: bool = False) -> dict[str, Any]:
    """`usage` of a call.

    shows_cached: with the number of prompt tokens that were cached. hides_output: the reply has no sampled token, and
    none counts.
    """
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    sequences = [] if hides_output else [one for output in outputs for one in output.outputs]
    num_completion = sum(len(one.token_ids) for one in sequences)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached} if shows_cached else None,
    }


def as_base64(values: Any, dtype: str) -> str:
    """An array, or numbers, in this dtype, one after the other, as base64."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode("ascii")


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


@dataclass(slots=True)
class Delta:
    """What is new in a sequence since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_first: bool

    def without_output(self) -> Delta:
        """Of a sequence whose tokens the reply leaves out."""
        reason = None if self.finish_reason is None else "length"
        return Delta("", [], None if self.logprobs is None else [], reason, None, self.is_first)


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
        delta = Delta(text, tokens, logprobs, one.finish_reason, one.stop_reason, not self._num_tokens)
        self._num_chars, self._num_tokens = len(one.text), len(one.token_ids)
        return delta


def whole_delta(one: CompletionOutput) -> Delta:
    """All of a sequence that has ended."""
    delta = DeltaReader().read(one)
    assert delta is not None
    return delta


class ReplyFormat(ABC):
    """How a dialect shows the outputs of one call. Outputs are cumulative.

    A dialect overrides `whole`, and `chunks` where it streams.
    """

    def __init__(self, prepared: PreparedCall, id: str) -> None:
        """id: of the reply."""
        self.id = id
        self.model = prepared.model
        self.shows_cached = prepared.shows_cached
        self._version_name = prepared.version_name
        self.abort_ids: Iterable[str] = {id, prepared.id, prepared.asked.request_id or id}
        """See `EngineClient.abort`."""
        self.latest: dict[int, RequestOutput] = {}
        """The newest output of each request of a stream."""
        self._readers = [[DeltaReader() for _ in range(one.params.n)] for one in prepared.requests]

    def weight_version(self, one: CompletionOutput) -> int | str | None:
        """The weights that sampled the last token, as the trainer names them."""
        return self._version_name(one.spans[-1].policy_version if one.spans else None)

    @abstractmethod
    def whole(self, outputs: list[RequestOutput]) -> Any:
        """The reply, of every request's last output in the order of the requests. Of a long one in a thread."""

    def first_events(self) -> Iterable[Any]:
        """Events of a stream before the first output."""
        return ()

    def events(self, index: int, output: RequestOutput) -> Iterable[Any]:
        """Events for a new output of request `index`."""
        self.latest[index] = output
        for one in output.outputs:
            delta = self._readers[index][one.index].read(one)
            if delta is not None:
                yield from self.chunks(index, output, one, delta)

    def chunks(self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta) -> Iterable[Any]:
        """Events for what is new in one sequence. Nobody asks a dialect without streams."""
        raise NotImplementedError

    def last_events(self) -> Iterable[Any]:
        """Events of a stream after the last output."""
        return ()


class OpenAIReply(ReplyFormat):
    """The head of completions and chat completions, and the chunks of their streams."""

    def __init__(self, prepared: PreparedCall, *, prefix: str, chunk_kind: str, hides_output: bool = False) -> None:
        """prefix: of the reply's id. chunk_kind: `object` of a chunk. hides_output: see `usage_of`."""
        super().__init__(prepared, f"{prefix}-{prepared.asked.request_id or uuid.uuid4().hex}")
        self._created, self._chunk_kind = int(time.time()), chunk_kind
        self.token_texts = prepared.token_texts
        self.hides_output = hides_output
        options = prepared.asked.stream_options or StreamOptions()
        self._has_usage = bool(options.include_usage)
        """Whether a last chunk without choices has the usage of the call."""
        self._has_usage_in_all = self._has_usage and bool(options.continuous_usage_stats)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model}

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        return usage_of(outputs, shows_cached=self.shows_cached, hides_output=self.hides_output)

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self.head(self._chunk_kind), "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = self.usage(self.latest.values()) if self._has_usage_in_all else None
        return chunk

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._has_usage:
            yield {**self.head(self._chunk_kind), "choices": [], "usage": self.usage(self.latest.values())}
