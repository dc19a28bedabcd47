"""What every caller is owed: groups of samples, and how a committed step becomes outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError
from megatron_infer.metrics.engine_meter import EngineMeter, outcome_of
from megatron_infer.outputs.request_output import RequestMetrics, RequestOutput
from megatron_infer.requests.input_processor import TextCodec
from megatron_infer.requests.pooled_prompt import PooledPrompt
from megatron_infer.requests.request_state import RequestState, SequenceState, StreamMode, logprob_entry
from megatron_infer.runner.in_flight import PromptScores, RunnerOutput
from megatron_infer.runner.pooling import Pooled
from megatron_infer.sampling.returned_details import ALONE, TokenDetailsBatch
from megatron_infer.scheduler.request import FinishReason, Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan


class OutputProcessor:
    """Open requests by id, and the sequences that want work per token (text, stop strings, logprobs, token events)."""

    def __init__(self, tokenizer: TextCodec | None, *, token_events: bool, pause_events: bool) -> None:
        self._tokenizer = tokenizer
        self._token_events, self._pause_events = token_events, pause_events
        self._groups: dict[str, RequestState] = {}
        self._members: dict[str, tuple[RequestState, SequenceState]] = {}
        self._watched: set[str] = set()
        self.meter = EngineMeter()
        self.num_structured = 0
        """Open accounts of structured output."""
        self.on_retire: Callable[[RequestState], None] | None = None
        """Told of every account that is closed, before its last output is handed out."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def tokenizer(self) -> TextCodec | None:
        return self._tokenizer

    @property
    def groups(self) -> list[RequestState]:
        """The open accounts, in the order they were opened."""
        return list(self._groups.values())

    def get(self, request_id: str) -> RequestState | None:
        return self._groups.get(request_id)

    def open(
        self,
        request_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        mode: StreamMode,
        members: Sequence[Request],
    ) -> None:
        """Start an account for a request of len(members) samples."""
        samples: list[SequenceState] = []
        for i, request in enumerate(members):
            samples.append(SequenceState(request, i, params, self._tokenizer, samples[0] if samples else None))
        group = RequestState(
            id=request_id,
            prompt=prompt,
            prompt_ids=ids,
            params=params,
            mode=mode,
            samples=samples,
            metrics=RequestMetrics(arrival_time=time.monotonic(), num_prompt_tokens=len(ids)),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            pooling=None if params.pooling is None else PooledPrompt(params.pooling, len(ids)),
        )
        group.event("ADD_ENGINE")
        self.enter(group)

    def enter(self, group: RequestState) -> bool:
        """Take an account in, a new one or a loaded one -> whether its samples want work per token."""
        assert group.id not in self._groups, f"request {group.id!r} has an account already"
        self._groups[group.id] = group
        self.num_structured += group.params.structured is not None
        params, samples = group.params, group.samples
        per_token = group.mode != "final" or params.logprobs is not None or samples[0].has_stops or self._token_events
        per_token = per_token or params.carries
        for sample in samples:
            self._members[sample.request.id] = (group, sample)
            if per_token:
                self._watched.add(sample.request.id)
        return per_token

    def retire(self, group: RequestState) -> RequestOutput:
        """Close the account -> its last output."""
        group.event("FINISH")
        if self.on_retire is not None:
            self.on_retire(group)
        output = group.output()
        ids = [sample.request.id for sample in group.samples]
        outcome = "error" if group.error is not None else outcome_of(s.request.finish_reason for s in group.samples)
        self.meter.end(outcome, group.metrics.latency_s or 0.0, ids)
        del self._groups[group.id]
        self.num_structured -= group.params.structured is not None
        for one in ids:
            del self._members[one]
            self._watched.discard(one)
        return output

    def on_event(self, request: Request, kind: str, payload: dict[str, Any]) -> None:
        """The scheduler's account of what it did to a request."""
        member = self._members.get(request.id)
        if member is None:
            return
        group, sample = member
        if kind == "admit":
            if group.metrics.first_scheduled_time is None:
                group.metrics.first_scheduled_time = time.monotonic()
            group.event("ADD_CONTEXT", sample=sample.index, **payload)
        elif kind == "evict" or (kind in ("pause", "resume") and self._pause_events):
            group.event(kind.upper(), sample=sample.index, **payload)

    def set_error(self, request: Request, error: InferenceError) -> None:
        member = self._members.get(request.id)
        if member is not None and member[0].error is None:
            member[0].error = error
            member[0].event("FAIL", message=str(error))

    def take(
        self, plan: StepPlan, drawn: RunnerOutput, taken: Sequence[int], ended: Iterable[Request], scheduler: Scheduler
    ) -> list[RequestOutput]:
        """A committed step -> outputs with news. Stop strings found here end their request in the scheduler.

        taken: indices into plan.sampled whose requests took their tokens.
        """
        if drawn.prompt_scores:
            self._take_prompt_scores(drawn.prompt_scores)
        for pooled in drawn.pooled:
            self._take_pooled(pooled)
        ended = tuple(ended)
        self._count(plan, ended)
        touched: dict[str, RequestState] = {}
        if self._watched:
            if drawn.logprobs is not None:
                self._take_logprobs(plan, drawn, taken)
            if drawn.token_details is not None:
                self._take_token_details(plan, drawn.token_details, taken)
            if drawn.routing is not None:
                self._take_routing(plan, drawn.routing)
            self._take_tokens(plan, taken, touched, scheduler)
        return self.close(ended, touched)

    def _count(self, plan: StepPlan, ended: Sequence[Request]) -> None:
        """Tokens that were taken, not those dropped because their request had ended before."""
        now = time.monotonic()
        for chunk in plan.prefill:
            member = self._members.get(chunk.request.id)
            if member is not None and chunk.samples and member[0].metrics.first_token_time is None:
                group = member[0]
                group.metrics.first_token_time = now
                cached = group.samples[0].request.history.cached_tokens
                waited = now - group.metrics.arrival_time
                self.meter.first_token(waited, prompt=len(group.prompt_ids), cached=cached)
        just_ended = {request.id for request in ended if request.finish_reason is not FinishReason.ERROR}
        members = self._members
        taken = [
            request.id
            for request in plan.sampled
            if request.id in members and (request.finish_reason is None or request.id in just_ended)
        ]
        self.meter.tokens(taken, now)

    def close(self, ended: Iterable[Request], touched: dict[str, RequestState] | None = None) -> list[RequestOutput]:
        """Outputs of groups that ended or have news."""
        touched = {} if touched is None else touched
        for request in ended:
            member = self._members.get(request.id)
            if member is not None:
                touched[member[0].id] = member[0]
        outputs: list[RequestOutput] = []
        for group in touched.values():
            for sample in group.samples:
                if sample.request.finish_reason is not None:
                    sample.close()
            if group.finished:
                outputs.append(self.retire(group))
            elif group.mode != "final" and any(sample.has_news() for sample in group.samples):
                outputs.append(group.output())
        return outputs

    def _take_tokens(
        self, plan: StepPlan, taken: Sequence[int], touched: dict[str, RequestState], scheduler: Scheduler
    ) -> None:
        for request in map(plan.sampled.__getitem__, taken):
            if request.id not in self._watched:
                continue
            group, sample = self._members[request.id]
            if self._token_events:
                group.event("GENERATED_TOKEN", token=request.tokens[-1], sample=sample.index)
            matched = sample.advance()
            if matched is not None:
                if request.finish_reason is None:
                    scheduler.finish(request, FinishReason.STOP, stop_reason=matched)
                else:  # the same token also was the last one allowed: the text decides
                    request.finish_reason, request.stop_reason = FinishReason.STOP, matched
            touched[group.id] = group

    def _take_logprobs(self, plan: StepPlan, drawn: RunnerOutput, taken: Sequence[int]) -> None:
        batch = drawn.logprobs
        assert batch is not None
        columns = (batch.index, batch.token_logprob, batch.token_rank, batch.counts, batch.top_ids, batch.top_logprobs)
        for place, logprob, rank, count, ids, values in zip(*(column.tolist() for column in columns), strict=True):
            if place not in taken:
                continue
            request = plan.sampled[place]
            group, sample = self._members[request.id]
            assert sample.logprobs is not None, f"{request.id} has logprobs nobody asked for"
            sample.cumulative_logprob += logprob
            codec = self._codec_of(group)
            sample.logprobs.append(logprob_entry(codec, request.tokens[-1], logprob, rank, ids[:count], values[:count]))

    def _take_token_details(self, plan: StepPlan, batch: TokenDetailsBatch, taken: Sequence[int]) -> None:
        bits_BY = batch.bits_BY.numpy()
        columns = (batch.index, batch.raw, batch.processed, batch.support)
        for place, raw, processed, told in zip(*(column.tolist() for column in columns), strict=True):
            if place not in taken:
                continue
            request = plan.sampled[place]
            token_details = self._members[request.id][1].token_details
            assert token_details is not None, f"{request.id} carries what nobody asked for"
            token_details.take_logprobs(raw, processed)
            if token_details.support is not None:
                bits = None if told < 0 else bits_BY[told]
                token_details.take_support(bits, request.tokens[-1] if told == ALONE else None, batch.vocab_size)

    def _take_routing(self, plan: StepPlan, routing: np.ndarray) -> None:
        """Of every position of the step whose request asked, those of requests that have just ended included."""
        for token, (request, start) in enumerate(zip(plan.decode, plan.decode_starts, strict=True)):
            if request.params.return_routing:
                self._note_routing(request, start, routing[token : token + 1])
        offset = len(plan.decode)
        for chunk in plan.prefill:
            if chunk.request.params.return_routing:
                self._note_routing(chunk.request, chunk.start, routing[offset : offset + chunk.n])
            offset += chunk.n

    def _note_routing(self, request: Request, start: int, rows: np.ndarray) -> None:
        member = self._members.get(request.id)
        if member is not None and member[1].token_details is not None:
            member[1].token_details.take_routing(start, rows)

    def _take_pooled(self, pooled: Pooled) -> None:
        member = self._members.get(pooled.request.id)
        if member is not None and member[0].pooling is not None:
            member[0].pooling.take(pooled.start, pooled.end, pooled.values_D.numpy())

    def _take_prompt_scores(self, scored: list[PromptScores]) -> None:
        for scores in scored:
            member = self._members.get(scores.request.id)
            if member is None or member[0].prompt_logprobs is None:
                continue
            group = member[0]
            known = group.prompt_logprobs
            assert known is not None
            codec = self._codec_of(group)
            columns = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
            entries = zip(*(column.tolist() for column in columns), strict=True)
            for position, (logprob, rank, ids, values) in enumerate(entries, start=scores.first):
                if position == len(known):  # a recomputed prompt is scored once, not twice
                    known.append(logprob_entry(codec, group.prompt_ids[position], logprob, rank, ids, values))

    def _codec_of(self, group: RequestState) -> TextCodec | None:
        """What spells the tokens of its log probabilities; None where nobody asked for text."""
        return self._tokenizer if group.params.detokenize else None
