"""One request of a client: the coordinator's messages about it as cumulative outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec

from megatron_infer.coordinator import protocol
from megatron_infer.outputs.embeddings import unflattened
from megatron_infer.outputs.request_output import CompletionOutput, RequestEvent, RequestMetrics, RequestOutput
from megatron_infer.outputs.schema import append, bytes_to_floats, bytes_to_ids, ids_to_bytes, prompt_logprobs_of
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS

Sink = Callable[[RequestOutput | BaseException], None]
"""Takes the outputs of a request, or its error."""


MAX_AGE_S = 1e9
"""Most seconds since a stage of a request."""


class RequestReceiver:
    """Builds one request's cumulative output from messages, and passes it to `sink`."""

    def __init__(self, submit: protocol.Submit, prompt: str | None, sink: Sink) -> None:
        self._submit, self._sink = submit, sink
        self._returned = [output.name for output in TOKEN_OUTPUTS if submit.params.get(output.asked_by)]
        """The per-token outputs that it asks for."""
        self.is_aborted = False
        self._attempt = 0
        """`StageTimes.attempt` of the replica that draws now; 0: none has drawn yet."""
        ids = [] if submit.prompt is None else bytes_to_ids(submit.prompt)
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
        """Add a message and pass the output on -> whether it is the last: also one that makes no sense, an error."""
        if news.refused is not None:
            self._sink(protocol.error_of(news.refused))
            return True
        try:
            self._take(news)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # its fields do not fit together
            self._sink(protocol.BadMessage(f"an output of request {news.number} makes no sense: {error}"))
            return True
        if news.finished or self._submit.stream:
            self._sink(self._copy())
        return news.finished

    def _take(self, news: protocol.Output) -> None:
        output, metrics, now = self._output, self._metrics, time.monotonic()
        if news.seed is not None:
            self._submit.seed = news.seed
        if news.prompt is not None:
            output.prompt_token_ids = bytes_to_ids(news.prompt)
            metrics.num_prompt_tokens = len(output.prompt_token_ids)
        for piece in news.pieces:
            one = output.outputs[piece.index]
            if piece.offset != len(one.token_ids):
                raise protocol.BadMessage(f"token {piece.offset} came, {len(one.token_ids)} was next")
            append(one, piece)
        metrics.num_output_tokens = sum(len(one.token_ids) for one in output.outputs)
        if metrics.first_token_time is None and metrics.num_output_tokens:
            metrics.first_token_time = now
        if news.times is not None:
            self._add_times(news.times, now)
        if news.prompt_logprobs is not None:
            output.prompt_logprobs = prompt_logprobs_of(news.prompt_logprobs)
        if news.pooled is not None:
            pooling = self._submit.params.get("pooling")
            output.pooled = unflattened(bytes_to_floats(news.pooled), pooling, len(output.prompt_token_ids))
        output.num_cached_tokens = metrics.num_cached_tokens = max(output.num_cached_tokens, news.num_cached)
        output.error = None if news.error is None else protocol.error_of(news.error)
        output.finished = news.finished
        if news.finished and metrics.finished_time is None:
            metrics.finished_time = now

    def _add_times(self, times: protocol.StageTimes, now: float) -> None:
        """A replica's times on this clock: late by the way of the fastest message, of several replicas the first."""
        metrics = self._metrics
        ages = (times.arrived, times.scheduled, times.first_token, times.finished)
        if not all(age is None or abs(age) <= MAX_AGE_S for age in ages):
            raise protocol.BadMessage(f"times {ages}")
        if times.attempt != self._attempt:
            is_again = any(event.kind == "ASSIGN" for event in self._output.events)
            payload = {"replica": times.replica}
            self._add_event("REASSIGN" if is_again else "ASSIGN", time.time() - times.arrived, payload)
            self._attempt = times.attempt
        if times.scheduled is not None:
            metrics.first_scheduled_time = _earlier(metrics.first_scheduled_time, now - times.scheduled)
        if times.first_token is not None:
            metrics.first_token_time = _earlier(metrics.first_token_time, now - times.first_token)
        if times.finished is not None:
            metrics.finished_time = now - times.finished
        metrics.num_pauses, metrics.num_evictions = times.num_pauses, times.num_evictions

    def _add_event(self, kind: str, time_s: float, payload: dict[str, Any]) -> None:
        self._output.events = [*self._output.events, RequestEvent(kind, time_s, payload)]

    def fail(self, error: BaseException) -> None:
        self._sink(error)

    def abort(self) -> None:
        """End the request here, with the output that has come."""
        for one in self._output.outputs:
            one.finish_reason = one.finish_reason or "abort"
        self._output.finished = True
        self._sink(self._copy())

    def _copy(self) -> RequestOutput:
        """The output as it is now, for the sink. `dataclasses.replace` takes four times as long."""
        outputs = []
        for one in self._output.outputs:
            copied = CompletionOutput(*_sequence_fields(one))
            for name in self._returned:
                setattr(copied, name, getattr(one, name))
            outputs.append(copied)
        values = list(_request_fields(self._output))
        values[_OUTPUTS] = outputs
        return RequestOutput(*values)

    def handed_in_again(self) -> protocol.Submit:
        """The request with the output that has come, for a coordinator that does not know it."""
        self._add_event("HAND_IN_AGAIN", time.time(), {"why": "the coordinator was lost"})
        self._attempt = 0
        kept = [
            protocol.Kept(
                bytearray(ids_to_bytes(one.token_ids)),
                len(one.text),
                one.cumulative_logprob or 0.0,
                one.finish_reason,
                one.stop_reason,
            )
            for one in self._output.outputs
        ]
        submit = msgspec.structs.replace(self._submit, kept=[])
        if any(one.tokens for one in kept):  # then its prompt's ids have come, too
            submit.prompt, submit.text = ids_to_bytes(self._output.prompt_token_ids), None
            submit.kept = kept
        return submit


def _earlier(known: float | None, new: float) -> float:
    return new if known is None else min(known, new)


_sequence_fields = attrgetter(*(one.name for one in fields(CompletionOutput) if not one.kw_only))
_request_fields = attrgetter(*(one.name for one in fields(RequestOutput)))
_OUTPUTS = [one.name for one in fields(RequestOutput)].index("outputs")
