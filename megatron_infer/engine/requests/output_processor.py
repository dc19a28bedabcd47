"""Open requests, and how a committed step becomes outputs for their callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.metrics.engine_meter import MOVED, EngineMeter, outcome_of
from megatron_infer.engine.requests.input_processor import TextCodec
from megatron_infer.engine.requests.pooled_prompt import PooledPrompt
from megatron_infer.engine.requests.request_state import RequestState, SequenceState, StreamMode, logprob_entry
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import RequestMetrics, RequestOutput
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS, TokenOutput
from megatron_infer.runner.in_flight import PromptScores, RunnerOutput
from megatron_infer.runner.pooling import Pooled
from megatron_infer.runner.sampling.returned_details import ALONE, TokenDetailsBatch
from megatron_infer.scheduler.request import FinishReason, Request
from megatron_infer.scheduler.step_plan import StepPlan

FinishByText = Callable[[Request, FinishReason, str], None]
"""Called with a request whose last token completed a stop string: `Scheduler.finish_by_text`."""


class OutputProcessor:
    """Open requests by id, and the sequences that need work per token (text, stop strings, logprobs, token events)."""

    def __init__(self, tokenizer: TextCodec | None, *, token_events: bool, pause_events: bool) -> None:
        self.tokenizer = tokenizer
        self._token_events, self._pause_events = token_events, pause_events
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, SequenceState]] = {}
        self._watched: set[str] = set()
        """Ids of sequences that need work per token."""
        self.meter = EngineMeter()
        self.num_structured = 0
        """Open requests with structured output."""
        self.on_close: Callable[[RequestState], None] | None = None
        """Called with each request that is closed, before its last output is handed out."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[RequestState]:
        """The open requests, oldest first."""
        return list(self._requests.values())

    def get(self, request_id: str) -> RequestState | None:
        return self._requests.get(request_id)

    def sequences_of(self, request_ids: Collection[str]) -> set[Request]:
        """What the scheduler runs for these requests; an id that is not open has nothing."""
        found = (self._requests.get(one) for one in request_ids)
        return {sequence.request for state in found if state is not None for sequence in state.sequences}

    def state_of(self, request: Request) -> RequestState:
        """The open request that a sequence is of."""
        return self._sequences[request.id][0]

    # ------------------------------------------------------------------ coming and going

    def open(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        mode: StreamMode,
        requests: Sequence[Request],
    ) -> RequestState:
        """Open a caller's request, one sequence for each of `requests`."""
        sequences: list[SequenceState] = []
        for i, request in enumerate(requests):
            sequences.append(SequenceState(request, i, params, self.tokenizer, sequences[0] if sequences else None))
        state = RequestState(
            id=request_id,
            prompt=prompt,
            prompt_ids=ids,
            params=params,
            mode=mode,
            sequences=sequences,
            metrics=RequestMetrics(arrival_time=time.monotonic(), num_prompt_tokens=len(ids)),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            pooling=None if params.pooling is None else PooledPrompt(params.pooling, len(ids)),
        )
        state.event("ADD_ENGINE")
        self.add(state)
        return state

    def add(self, state: RequestState) -> bool:
        """Take in an open request, a new one or a loaded one -> whether its sequences need work per token."""
        assert state.id not in self._requests, f"request {state.id!r} is open already"
        self._requests[state.id] = state
        self.num_structured += state.params.structured is not None
        params, sequences = state.params, state.sequences
        per_token = state.mode != "final" or params.logprobs is not None or sequences[0].has_stops or self._token_events
        per_token = per_token or params.carries
        for sequence in sequences:
            self._sequences[sequence.request.id] = (state, sequence)
            if per_token:
                self._watched.add(sequence.request.id)
        return per_token

    def close(self, state: RequestState) -> RequestOutput:
        """Close a request whose sequences have ended -> its last output."""
        state.event("FINISH")
        if self.on_close is not None:
            self.on_close(state)
        output = state.output()
        outcome = "error" if state.error is not None else outcome_of(s.request.finish_reason for s in state.sequences)
        self.remove(state, outcome)
        return output

    def remove(self, state: RequestState, outcome: str) -> None:
        """Forget an open request: it has ended, or another engine goes on with it."""
        ids = [sequence.request.id for sequence in state.sequences]
        self.meter.end(outcome, state.metrics.latency_s or 0.0, ids)
        if (adapter := state.params.adapter) is not None and outcome != MOVED:
            self.meter.adapter_ended(adapter, sum(sequence.request.num_output for sequence in state.sequences))
        del self._requests[state.id]
        self.num_structured -= state.params.structured is not None
        for one in ids:
            del self._sequences[one]
            self._watched.discard(one)

    def on_event(self, request: Request, kind: str, payload: dict[str, Any]) -> None:
        """The scheduler reports what it did to a request."""
        found = self._sequences.get(request.id)
        if found is None:
            return
        state, sequence = found
        if kind == "admit":
            if state.metrics.first_scheduled_time is None:
                state.metrics.first_scheduled_time = time.monotonic()
            state.event("ADD_CONTEXT", sample=sequence.index, **payload)
        elif kind == "evict" or (kind in ("pause", "resume") and self._pause_events):
            state.event(kind.upper(), sample=sequence.index, **payload)

    def set_error(self, request: Request, error: InferenceError) -> None:
        found = self._sequences.get(request.id)
        if found is not None and found[0].error is None:
            found[0].error = error
            found[0].event("FAIL", message=str(error))

    # ------------------------------------------------------------------ a committed step

    def process(
        self,
        plan: StepPlan,
        output: RunnerOutput,
        taken: Sequence[int],
        touched: dict[str, RequestState],
        finish_by_text: FinishByText,
    ) -> None:
        """Take in a committed step; requests that have news are put into `touched`, for `outputs_of`.

        taken: indices into plan.sampled of requests that took their token.
        """
        requests = plan.sampled if len(taken) == len(plan.sampled) else [plan.sampled[index] for index in taken]
        if output.prompt_scores:
            self._add_prompt_scores(output.prompt_scores)
        for pooled in output.pooled:
            self._add_pooled(pooled)
        self._count(plan, requests)
        if self._watched:
            if output.logprobs is not None or output.token_details is not None:
                self._add_details(plan, output, set(taken))
            for one in TOKEN_OUTPUTS:
                if one.key in output.positions:
                    self._add_positions(plan, one, output.positions[one.key])
            for request in requests:
                if request.id in self._watched:
                    self._add_text(request, touched, finish_by_text)

    def outputs_of(
        self, ended: Iterable[Request], finish_by_text: FinishByText, touched: dict[str, RequestState] | None = None
    ) -> list[RequestOutput]:
        """Outputs of requests in `touched` that have news, and of those that have ended, which are closed."""
        touched = {} if touched is None else touched
        for request in ended:
            found = self._sequences.get(request.id)
            if found is not None:
                touched[found[0].id] = found[0]
        outputs: list[RequestOutput] = []
        for state in touched.values():
            self.end_texts(state, finish_by_text)
            if state.finished:
                outputs.append(self.close(state))
            elif state.mode != "final" and any(sequence.has_news() for sequence in state.sequences):
                outputs.append(state.output())
        return outputs

    def end_texts(self, state: RequestState, finish_by_text: FinishByText) -> None:
        """Complete the texts of sequences that have ended; the text held back until then may hold a stop string."""
        for sequence in state.sequences:
            if sequence.request.finish_reason is not None and (matched := sequence.end_text()) is not None:
                finish_by_text(sequence.request, FinishReason.STOP, matched)

    def _count(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Count first tokens, and the tokens of `requests`, which took one."""
        now, sequences = time.monotonic(), self._sequences
        for chunk in plan.prefill:
            found = sequences.get(chunk.request.id)
            if found is not None and chunk.samples and found[0].metrics.first_token_time is None:
                state = found[0]
                state.metrics.first_token_time = now
                cached = state.sequences[0].request.history.cached_tokens
                waited = now - state.metrics.arrival_time
                self.meter.first_token(waited, prompt=len(state.prompt_ids), cached=cached)
        error = FinishReason.ERROR
        self.meter.tokens([one.id for one in requests if one.id in sequences and one.finish_reason is not error], now)

    def _add_text(self, request: Request, touched: dict[str, RequestState], finish_by_text: FinishByText) -> None:
        state, sequence = self._sequences[request.id]
        if self._token_events:
            state.event("GENERATED_TOKEN", token=request.tokens[-1], sample=sequence.index)
        matched = sequence.advance()
        if matched is not None:
            finish_by_text(request, FinishReason.STOP, matched)
        touched[state.id] = state

    def _add_details(self, plan: StepPlan, output: RunnerOutput, taken: Collection[int]) -> None:
        """Logprobs and token details of tokens that were taken."""
        if (logprobs := output.logprobs) is not None:
            columns = (
                logprobs.index,
                logprobs.token_logprob,
                logprobs.token_rank,
                logprobs.counts,
                logprobs.top_ids,
                logprobs.top_logprobs,
            )
            for place, logprob, rank, count, ids, values in zip(*(one.tolist() for one in columns), strict=True):
                if place in taken:
                    self._add_logprob(plan.sampled[place], logprob, rank, ids[:count], values[:count])
        if output.token_details is not None:
            self._add_token_details(plan, output.token_details, taken)

    def _add_logprob(
        self, request: Request, logprob: float, rank: int, top_ids: Sequence[int], top_logprobs: Sequence[float]
    ) -> None:
        state, sequence = self._sequences[request.id]
        assert sequence.logprobs is not None, f"{request.id} has logprobs that were not requested"
        sequence.cumulative_logprob += logprob
        codec = self._codec_of(state)
        sequence.logprobs.append(logprob_entry(codec, request.tokens[-1], logprob, rank, top_ids, top_logprobs))

    def _add_token_details(self, plan: StepPlan, batch: TokenDetailsBatch, taken: Collection[int]) -> None:
        numbers = {key: values.tolist() for key, values in batch.values.items() if key not in batch.places}
        id_sets = [(key, rows.tolist(), batch.values[key].numpy()) for key, rows in batch.places.items()]
        for entry, place in enumerate(batch.index.tolist()):
            if place not in taken:
                continue
            request = plan.sampled[place]
            token_details = self._sequences[request.id][1].token_details
            assert token_details is not None, f"{request.id} has token details that were not requested"
            token_details.add_numbers(numbers, entry)
            for key, rows, bits_BY in id_sets:
                if key in token_details.entries:
                    bits = None if (row := rows[entry]) < 0 else bits_BY[row]
                    alone = request.tokens[-1] if row == ALONE else None
                    token_details.add_ids(key, bits, alone, batch.vocab_size)

    def _add_positions(self, plan: StepPlan, output: TokenOutput, rows: np.ndarray) -> None:
        """Values of each position of the step whose request asked, also of requests that have just ended."""
        for token, (request, start) in enumerate(zip(plan.decode, plan.decode_starts, strict=True)):
            self._add_positions_of(request, output, start, rows[token : token + 1])
        offset = len(plan.decode)
        for chunk in plan.prefill:
            self._add_positions_of(chunk.request, output, chunk.start, rows[offset : offset + chunk.n])
            offset += chunk.n

    def _add_positions_of(self, request: Request, output: TokenOutput, start: int, rows: np.ndarray) -> None:
        if not getattr(request.params, output.asked_by):
            return
        found = self._sequences.get(request.id)
        if found is not None and found[1].token_details is not None:
            found[1].token_details.add_positions(output.key, start, rows)

    def _add_pooled(self, pooled: Pooled) -> None:
        found = self._sequences.get(pooled.request.id)
        if found is not None and found[0].pooling is not None:
            found[0].pooling.take(pooled.start, pooled.end, pooled.values_D.numpy())

    def _add_prompt_scores(self, scored: list[PromptScores]) -> None:
        for scores in scored:
            found = self._sequences.get(scores.request.id)
            if found is None or found[0].prompt_logprobs is None:
                continue
            state = found[0]
            known = state.prompt_logprobs
            assert known is not None
            codec = self._codec_of(state)
            columns = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
            entries = zip(*(column.tolist() for column in columns), strict=True)
            for position, (logprob, rank, ids, values) in enumerate(entries, start=scores.first):
                if position == len(known):  # a recomputed prompt is scored once, not twice
                    known.append(logprob_entry(codec, state.prompt_ids[position], logprob, rank, ids, values))

    def _codec_of(self, state: RequestState) -> TextCodec | None:
        """Decodes the tokens of a request's log probabilities; None where the caller wants no text."""
        return self.tokenizer if state.params.detokenize else None
