"""One request of a client: the coordinator's messages about it as cumulative outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from megatron_infer.coordinator import protocol
from megatron_infer.outputs.embeddings import unflattened
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from megatron_infer.outputs.token_outputs import (
    TOKEN_OUTPUTS,
    Kind,
    Packed,
    TokenOutput,
    extended,
    offsets_of,
    unpack,
)
from megatron_infer.scheduler.request import VersionSpan

Sink = Callable[[RequestOutput | BaseException], None]
"""Takes the outputs of a request, or its error."""


class RequestReceiver:
    """Builds one request's cumulative output from messages, and passes it to `sink`."""

    def __init__(self, submit: protocol.Submit, prompt: str | None, sink: Sink) -> None:
        self._submit, self._sink = submit, sink
        self.is_aborted = False
        ids = [] if submit.prompt is None else protocol.bytes_to_ids(submit.prompt)
        self._metrics = RequestMetrics(arrival_time=time.monotonic(), num_prompt_tokens=len(ids))
        self._output = RequestOutput(
            request_id=str(submit.id),
            prompt=prompt,
            prompt_token_ids=ids,
            prompt_logprobs=None,
            outputs=[CompletionOutput(index=i, text="", token_ids=[]) for i in range(submit.params.get("n", 1))],
            finished=False,
            metrics=self._metrics,
            metadata=submit.params.get("metadata"),
        )

    def add(self, news: protocol.Output) -> bool:
        """Add a message and pass the output on -> whether it was the last."""
        if news.refused is not None:
            self._sink(protocol.error_of(news.refused))
            return True
        output, metrics, now = self._output, self._metrics, time.monotonic()
        if news.seed is not None:
            self._submit.seed = news.seed
        if news.prompt is not None:
            output.prompt_token_ids = protocol.bytes_to_ids(news.prompt)
            metrics.num_prompt_tokens = len(output.prompt_token_ids)
        for piece in news.pieces:
            one = output.outputs[piece.index]
            if piece.offset != len(one.token_ids):
                text = f"token {piece.offset} of request {news.number} came, {len(one.token_ids)} was next"
                self._sink(protocol.BadMessage(text))
                return True
            _append(one, piece)
        metrics.num_output_tokens = sum(len(one.token_ids) for one in output.outputs)
        if metrics.first_token_time is None and metrics.num_output_tokens:
            metrics.first_token_time = now
        if news.prompt_logprobs is not None:
            output.prompt_logprobs = [_unpacked(one) for one in news.prompt_logprobs]
        if news.pooled is not None:
            pooling = self._submit.params.get("pooling")
            output.pooled = unflattened(protocol.bytes_to_floats(news.pooled), pooling, len(output.prompt_token_ids))
        output.num_cached_tokens = metrics.num_cached_tokens = max(output.num_cached_tokens, news.num_cached)
        output.error = None if news.error is None else protocol.error_of(news.error)
        output.finished = news.finished
        if news.finished:
            metrics.finished_time = now
        if news.finished or self._submit.stream:
            self._sink(_copy(output))
        return news.finished

    def fail(self, error: BaseException) -> None:
        self._sink(error)

    def abort(self) -> None:
        """End the request here, with the output that has come."""
        for one in self._output.outputs:
            one.finish_reason = one.finish_reason or "abort"
        self._output.finished = True
        self._sink(_copy(self._output))

    def handed_in_again(self) -> protocol.Submit:
        """The request with the output that has come, for a coordinator that does not know it."""
        kept = [
            protocol.Kept(
                protocol.ids_to_bytes(one.token_ids),
                len(one.text),
                one.cumulative_logprob or 0.0,
                one.finish_reason,
                one.stop_reason,
            )
            for one in self._output.outputs
        ]
        submit = msgspec.structs.replace(self._submit, kept=[])
        if any(one.tokens for one in kept):  # then its prompt's ids have come, too
            submit.prompt, submit.text = protocol.ids_to_bytes(self._output.prompt_token_ids), None
            submit.kept = kept
        return submit


def _append(one: CompletionOutput, piece: protocol.Piece) -> None:
    one.token_ids = one.token_ids + protocol.bytes_to_ids(piece.tokens)
    one.text += piece.text
    one.finish_reason, one.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.cumulative_logprob is not None:
        one.cumulative_logprob = piece.cumulative_logprob
    if piece.logprobs is not None:
        one.logprobs = [*(one.logprobs or []), *(_unpacked(entry) or {} for entry in piece.logprobs)]
    for output in TOKEN_OUTPUTS if piece.token_outputs else ():
        if (values := piece.token_outputs.get(output.name)) is not None:
            setattr(one, output.name, extended(output, getattr(one, output.name), _value_of(output, values)))
    if piece.spans:  # a replica that took over has spans of its own tokens only
        first = piece.spans[0][0]
        one.spans = [span for span in one.spans if span.first_token < first]
        one.spans += [VersionSpan(*span) for span in piece.spans]


def _value_of(output: TokenOutput, values: protocol.TokenValues) -> Any:
    """What `engine_adapter` packed."""
    if output.kind is Kind.NUMBER:
        return protocol.bytes_to_floats(values.content)
    import numpy as np  # imported here: other clients do not need it

    content = np.frombuffer(values.content, values.dtype)
    if output.kind is Kind.POSITION:
        return unpack(output, Packed(content.reshape(-1, *values.shape)))
    return unpack(output, Packed(content, offsets_of(np.frombuffer(values.counts, np.int32)), values.vocab_size))


def _unpacked(entry: list[tuple[int, float, int | None, str | None]] | None) -> dict[int, Logprob] | None:
    return None if entry is None else {token: Logprob(value, rank, text) for token, value, rank, text in entry}


def _copy(output: RequestOutput) -> RequestOutput:
    """A snapshot for the sink: the receiver changes its own output."""
    return replace(output, outputs=[replace(one) for one in output.outputs])
