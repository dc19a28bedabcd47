"""A request as its caller sees it: text, logprobs, events, times. Kept beside the scheduler; survives evictions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.requests.input_processor import TextCodec
from megatron_infer.engine.requests.pooled_prompt import PooledPrompt
from megatron_infer.engine.requests.token_details import token_details_of
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestEvent, RequestMetrics, RequestOutput
from megatron_infer.scheduler.request import Request
from megatron_infer.text.detokenizer import IncrementalDetokenizer
from megatron_infer.text.stop_strings import StopStrings

StreamMode = Literal["cumulative", "delta", "final"]


class SequenceState:
    """One sequence as its caller sees it: its text so far, its logprobs, and how much of them was handed out."""

    def __init__(
        self,
        request: Request,
        index: int,
        params: SamplingParams,
        tokenizer: TextCodec | None,
        first: SequenceState | None = None,
    ) -> None:
        """first: the first sequence of the same request; None for the first itself."""
        self.request, self.index = request, index
        self.token_details = token_details_of(
            params, request.prompt_len, request.max_total, None if first is None else first.token_details
        )
        self.logprobs: list[dict[int, Logprob]] | None = [] if params.logprobs is not None else None
        self.cumulative_logprob = 0.0
        self.stop_string: str | None = None
        self._text = ""
        self._num_seen = 0
        self._sent_tokens = self._sent_chars = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops: StopStrings | None = None
        self._shows_text, self._min_tokens = params.detokenize, params.min_tokens
        if tokenizer is not None and (params.detokenize or params.stop):
            prompt_ids = request.tokens[: request.prompt_len]
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special=params.skip_special_tokens)
            if params.stop:
                self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)

    @property
    def has_stops(self) -> bool:
        return self._stops is not None

    def advance(self) -> str | None:
        """Take in the tokens committed since the last call -> the stop string that matched, if one did."""
        new = self.request.tokens[self.request.prompt_len + self._num_seen :]
        early = max(0, self._min_tokens - self._num_seen)
        self._num_seen += len(new)
        if self._detokenizer is None or not new:
            return None
        if self._hides_last_token():
            new = new[:-1]
        if self._stops is None:
            self._text += self._detokenizer.push(new)
            return None
        if early:  # min_tokens of the output are not there yet
            self._text += self._stops.feed(self._detokenizer.push(new[:early]), counts=False)[0]
        released, self.stop_string = self._stops.feed(self._detokenizer.push(new[early:]))
        self._text += released
        return self.stop_string

    def end_text(self) -> str | None:
        """The sequence has ended: release text that was held back and incomplete characters.

        Returns the stop string that this text completes, if one does. May be called again.
        """
        self.advance()
        if self._detokenizer is None or self.stop_string is not None:
            return None
        tail = self._detokenizer.flush()
        if self._stops is None:
            self._text += tail
            return None
        counts = self._num_seen > self._min_tokens
        released, self.stop_string = self._stops.feed(tail, finished=True, counts=counts)
        self._text += released
        return self.stop_string

    def output(self, mode: StreamMode) -> CompletionOutput:
        """The sequence as it is now; in delta mode only what was not handed out before."""
        request = self.request
        token_ids = request.tokens[request.prompt_len : request.prompt_len + self._num_seen]
        text, logprobs, first = self._text if self._shows_text else "", self.logprobs, 0
        if mode == "delta":
            first = self._sent_tokens
            token_ids, text = token_ids[self._sent_tokens :], text[self._sent_chars :]
            logprobs = None if logprobs is None else logprobs[self._sent_tokens :]
            self._sent_tokens, self._sent_chars = self._num_seen, len(self._text)
        reason = request.finish_reason
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=None if logprobs is None else list(logprobs),
            finish_reason=None if reason is None else reason.value,
            spans=[span for span in request.history.spans if span.first_token < self._num_seen],
            stop_reason=request.stop_reason,
            num_accepted_drafts=request.history.num_accepted_drafts,
            is_synthetic=request.history.is_synthetic,
        )
        if self.token_details is not None:
            num_positions = None if reason is None else request.prompt_len + self._num_seen - 1
            self.token_details.fill(output, first, self._num_seen, num_positions=num_positions)
        return output

    @property
    def sent(self) -> tuple[int, int]:
        """(tokens, characters) that were handed out in delta mode."""
        return self._sent_tokens, self._sent_chars

    def resume_at(self, sent: tuple[int, int], *, watched: bool) -> None:
        """After a load: detokenize the tokens again and hand out in delta mode only what is not `sent`.

        Text does not depend on how tokens are grouped, so a stop string may span the load. watched: the sequence needs
        work per token.
        """
        if self.request.finish_reason is not None:
            self.end_text()  # a stop string found here was found, and is the reason, where the sequence ended
        elif watched:
            self.advance()
        self._sent_tokens, self._sent_chars = sent

    def has_news(self) -> bool:
        """Whether a delta output would have content."""
        return self._num_seen > self._sent_tokens or self.request.finish_reason is not None

    def _hides_last_token(self) -> bool:
        """Whether the last token is a stop token that ended the sequence: part of token_ids, not of the text."""
        request = self.request
        return (
            request.finish_reason is not None
            and request.finish_reason.value == "stop"
            and self.stop_string is None
            and len(request.tokens) > request.prompt_len
            and request.tokens[-1] in request.stop_ids
            and not request.params.include_stop_str_in_output
        )


@dataclass(slots=True)
class RequestState:
    """A caller's request: one prompt, n sequences."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    mode: StreamMode
    sequences: list[SequenceState]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooling: PooledPrompt | None = None
    events: list[RequestEvent] = field(default_factory=list)
    error: InferenceError | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.request.finish_reason is not None for sequence in self.sequences)

    def event(self, kind: str, **payload: object) -> None:
        self.events.append(RequestEvent(kind, time.time(), payload))

    def output(self, mode: StreamMode | None = None) -> RequestOutput:
        """The request as it is now, in its own mode (a delta is handed out once); "cumulative" repeats everything."""
        finished = self.finished
        first = self.sequences[0].request
        pooled = None if self.pooling is None else self.pooling.result()
        self.metrics.num_output_tokens = sum(sequence.request.num_output for sequence in self.sequences)
        self.metrics.num_pauses = sum(sequence.request.history.num_pauses for sequence in self.sequences)
        self.metrics.num_evictions = sum(sequence.request.history.num_evictions for sequence in self.sequences)
        self.metrics.num_cached_tokens = first.history.cached_tokens
        if finished and self.metrics.finished_time is None:
            self.metrics.finished_time = time.monotonic()
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[sequence.output(mode or self.mode) for sequence in self.sequences],
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=first.history.cached_tokens,
            metadata=self.params.metadata,
            events=self.events,
            error=self.error,
            pooled=None if pooled is None else pooled.tolist(),
        )


def logprob_entry(
    tokenizer: TextCodec | None,
    token: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
) -> dict[int, Logprob]:
    """Logprobs of one position: the drawn (or prompt) token first, then the top ones by rank."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_str(token_id)

    entry = {token: Logprob(logprob, rank, text(token))}
    for place, (token_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
        if token_id not in entry:
            entry[token_id] = Logprob(value, place, text(token_id))
    return entry
