"""How requests enter an engine, are continued from another one, and are aborted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from megatron_infer.config.request_metadata import Scalar
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.command_relay import Outbox
from megatron_infer.engine.durable.snapshot_manager import SnapshotManager
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.engine.requests.input_processor import InputProcessor, Prompt, is_single_prompt, salt_of
from megatron_infer.engine.requests.output_processor import OutputProcessor
from megatron_infer.engine.requests.request_state import StreamMode
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import DuplicateRequest, InferenceError, InvalidPrompt, RequestError, UnknownRequest
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.scheduler.request import FinishReason
from megatron_infer.scheduler.scheduler import Scheduler


class RequestIntake:
    """Checks requests and queues them; a request that cannot be served raises and leaves nothing behind."""

    def __init__(
        self,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        scheduler: Scheduler,
        loop: StepLoop,
        snapshots: SnapshotManager,
        outbox: Outbox,
        rank: int,
    ) -> None:
        """rank: this one's among those that share the engine's requests."""
        self._input, self._output, self._scheduler = input_processor, output_processor, scheduler
        self._loop, self._snapshots, self._outbox = loop, snapshots, outbox
        self._rank = rank

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        stream: StreamMode,
        metadata: Mapping[str, Scalar] | None = None,
        caller: int = 0,
    ) -> str:
        """See `DynamicInferenceEngine.add_request`."""
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidPrompt(
                f"params is a {type(params).__name__}, not SamplingParams; see SamplingParams.from_dict"
            )
        if metadata is not None:
            params = replace(params, metadata=metadata)
        if stream not in get_args(StreamMode):
            raise InvalidPrompt(f"stream is 'cumulative', 'delta' or 'final', got {stream!r}")
        if request_id is None:
            request_id = self._new_id()
        elif not isinstance(request_id, str) or not request_id:
            raise InvalidPrompt(f"a request id is a non-empty str, got {request_id!r}")
        elif self._is_taken(request_id):
            remedy = "abort it" if request_id in self._output else "acknowledge its output"
            raise DuplicateRequest(
                f"request id {request_id!r} is already in the engine; choose another or {remedy} first"
            )
        text, ids = self._input.tokenize(prompt)
        return self.queue(request_id, text, ids, params, stream, salt_of(prompt), caller)

    def add_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[str]:
        """Queue all prompts or, when one cannot be served, none -> their ids. Other ranks than the leader submit."""
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        params_of = _params_for(batch, params)
        checked = [
            self._checked(prompt, one, index, len(batch))
            for index, (prompt, one) in enumerate(zip(batch, params_of, strict=True))
        ]
        found = []
        for (text, ids), one, prompt in zip(checked, params_of, batch, strict=True):
            if self._rank == 0:
                found.append(self.queue(self._new_id(), text, ids, one, "final", salt_of(prompt)))
            else:
                found.append(f"{self._rank}/{self._new_id()}")
                self.submit(found[-1], text, ids, one, salt_of(prompt))
        return found

    def submit(self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, salt: str) -> None:
        """On ranks other than the leader: a request that all ranks queue with the next call.

        The request is checked here. Its draws depend on this rank's requests alone.
        """
        if params.seed is None:
            params = replace(params, seed=self._input.own_seed(self._rank))
        self._input.build(request_id, ids, params, salt=salt)
        self._outbox.add(request_id, text, ids, params, stream="final", salt=salt, caller=0)

    def queue(
        self,
        request_id: str,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        stream: StreamMode,
        salt: str,
        caller: int = 0,
    ) -> str:
        """Queue a request under a free id -> the id. Every rank of an engine calls it for each request."""
        requests = self._input.build(request_id, ids, params, salt=salt, caller=caller)
        state = self._output.open(request_id, text, ids, params, stream, requests)
        self._scheduler.add(requests[0])
        self._snapshots.accepted(state)
        self._outbox.add(request_id, text, ids, params, stream=stream, salt=salt, caller=caller)
        for listener in self._loop.listeners:
            listener.on_add(request_id, ids, params, self._loop.num_steps)
        return request_id

    def continue_from(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        drawn: Sequence[DrawnSequence],
        *,
        salt: str,
        caller: int,
    ) -> None:
        """See `DynamicInferenceEngine.continue_request`. Every rank of an engine calls it for each request."""
        requests = self._input.build(request_id, ids, params, salt=salt, caller=caller)
        if len(drawn) != len(requests):
            raise RequestError(f"{len(drawn)} sequences to continue, the request has n={len(requests)}")
        requests[0].siblings = ()  # each sequence begins with tokens of its own
        for request, one in zip(requests, drawn, strict=True):
            request.tokens += one.token_ids
            if one.finish_reason is not None:
                request.finish(FinishReason(one.finish_reason), one.stop_reason)
            elif len(request.tokens) >= request.max_total:
                raise RequestError(
                    f"a sequence of {len(request.tokens):,} tokens cannot continue, its limit is {request.max_total:,}"
                )
        state = self._output.open(request_id, None, ids, params, "delta", requests)
        for sequence, one in zip(state.sequences, drawn, strict=True):
            if sequence.logprobs is not None:
                sequence.logprobs = [{} for _ in one.token_ids]
                sequence.cumulative_logprob = one.cumulative_logprob
            if sequence.token_details is not None:
                sequence.token_details.fill_up(len(one.token_ids))
            sequence.resume_at((len(one.token_ids), one.num_chars), watched=True)
        for request in requests:
            if request.finish_reason is None:
                self._scheduler.add(request)
        self._snapshots.accepted(state)
        self._outbox.continue_from(request_id, ids, params, drawn, salt=salt, caller=caller)

    def abort(self, request_id: str) -> RequestOutput:
        """See `DynamicInferenceEngine.abort`."""
        if request_id not in self._output:
            raise UnknownRequest(f"no request {request_id!r} in the engine: it has finished or was never added")
        output = self._loop.abort(request_id)
        self._outbox.abort(request_id)
        self._snapshots.flush()
        return output

    def _new_id(self) -> str:
        return self._input.new_id(self._is_taken)

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._output or request_id in self._snapshots.owed

    def _checked(self, prompt: Prompt, params: SamplingParams, index: int, count: int) -> tuple[str | None, list[int]]:
        """(text, ids) of a prompt that can be served; an error names its index when there are several."""
        try:
            text, ids = self._input.tokenize(prompt)
            self._input.check(ids, params)
        except InferenceError as error:
            if count > 1:
                error.args = (f"prompt {index}: {error}",)
            raise
        return text, ids


def _params_for(batch: list[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params if params is not None else SamplingParams()] * len(batch)
    if len(params) != len(batch):
        raise InvalidPrompt(f"{len(batch)} prompts but {len(params)} SamplingParams; pass one, or one for each prompt")
    return list(params)
