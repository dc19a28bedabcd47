"""An engine without a model: its tokens are a function of those before, its prefix cache has the real one's blocks.

It has what a replica needs of an engine. It sleeps a given time for each prompt token that is not cached and for each
step; nothing is computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from echo_controls import EchoControls

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.protocol import EngineInfo, EngineNow
from megatron_infer.engine.lifecycle_commands import COMMANDS
from megatron_infer.engine.metrics.engine_meter import EngineMeter
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.errors import InvalidPrompt, RequestError, UnknownRequest
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from megatron_infer.outputs.schema import ids_to_bytes
from megatron_infer.scheduler.context.block_digest import root_of, salted
from megatron_infer.scheduler.context.build_context import build_context
from megatron_infer.scheduler.context.leases import Lease
from megatron_infer.scheduler.context.prefix_events import PrefixEvents
from megatron_infer.scheduler.request import VersionSpan

VOCAB = 1000
MAX_TOKENS = 16


def echo_tokens(prompt: Sequence[int], count: int, *, seed: int | None = None, index: int = 0) -> list[int]:
    """The `count` tokens that follow `prompt`; every one depends on all before it. seed: None where greedy."""
    state = crc32(ids_to_bytes(prompt), _first_state(seed, index))
    drawn = []
    for _ in range(count):
        drawn.append(state % VOCAB)
        state = crc32(ids_to_bytes(drawn[-1:]), state)
    return drawn


def _first_state(seed: int | None, index: int) -> int:
    return 0 if seed is None else crc32(f"{seed} {index}".encode())


@dataclass(slots=True, eq=False)
class _Sequence:
    tokens: list[int]
    num_prompt: int
    num_total: int
    state: int
    lease: Lease | None = None
    num_cached: int = 0
    num_sent: int = 0
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.num_total


@dataclass(slots=True, eq=False)
class _EchoRequest:
    id: str
    prompt: list[int]
    salt: str
    sequences: list[_Sequence]
    logprobs: bool = False
    text: bool = True
    pooled: Any = None
    aborted: bool = False
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))

    @property
    def finished(self) -> bool:
        return self.aborted or all(one.finished for one in self.sequences)


class EchoEngine:
    """Serves `max_requests` sequences at once, one token each a step, from a cache of `num_blocks` blocks."""

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_blocks: int = 4096,
        max_requests: int = 64,
        prefill_s_per_token: float = 0.0,
        step_s: float = 0.0,
        prefix_caching: bool = True,
        policy: str = "longest_prefix",
        alpha: float = 0.5,
    ) -> None:
        self.controls = EchoControls(abort_all=self._abort_all)
        self.context = build_context(
            num_blocks=num_blocks,
            block_size=block_size,
            num_rows=max_requests,
            max_blocks_per_row=num_blocks,
            prefix_caching=prefix_caching,
            keep_cached=True,
        )
        self.prefill_s_per_token, self.step_s = prefill_s_per_token, step_s
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.meter = EngineMeter()
        self._policy, self._alpha = policy, alpha
        self._requests: dict[str, _EchoRequest] = {}
        self._waiting: deque[tuple[_EchoRequest, _Sequence]] = deque()
        self._running: list[tuple[_EchoRequest, _Sequence]] = []
        self._ended: list[RequestOutput] = []

    def __getattr__(self, name: str) -> Any:
        """The lifecycle commands are the controls'."""
        if name in COMMANDS:
            return getattr(self.controls, name)
        raise AttributeError(name)

    @property
    def state(self) -> str:
        return self.controls.state

    def prefix_events(self) -> PrefixEvents | None:
        return PrefixEvents(self.context.pool) if self.context.prefix_caching else None

    def reset_prefix_cache(self, *, timeout_s: float | None = None) -> int:
        return self.context.forget_all()

    def replica_info(self) -> EngineInfo:
        return EngineInfo(
            block_size=self.context.block_size,
            capacity=self.context.num_rows,
            model="echo",
            policy=self._policy,
            alpha=self._alpha,
            num_requests=len(self._requests),
            limits={
                "max_sequence_length": self.context.max_stored_tokens,
                "vocab_size": VOCAB,
                "num_blocks": self.context.pool.num_blocks,
            },
            now=EngineNow(
                root=self._root(),
                weight_version=self.controls.weight_version,
                state=self.state,
                adapters=dict(self.controls.adapters),
            ),
        )

    def stats(self) -> dict[str, int]:
        return {
            "num_requests": len(self._requests),
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            "num_blocks": self.context.pool.num_blocks,
            "num_free_blocks": self.context.num_free_blocks,
        }

    def figures(self) -> EngineSnapshot:
        pool = self.context.pool
        return EngineSnapshot(
            state=self.state,
            weight_version=self.controls.weight_version,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            capacity=self.context.num_rows,
            blocks_used=pool.num_blocks - pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free - pool.num_cached,
            **self.meter.as_figures(),
        )

    def add_request(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: Any = "delta",
        caller: int = 0,
    ) -> str:
        """Queue a prompt of token ids. Of `params` act: tokens, n, seed, temperature, logprobs, detokenize, pooling."""
        params = SamplingParams() if params is None else params
        salt = ""
        if isinstance(prompt, Mapping):
            prompt, salt = prompt.get("prompt_token_ids"), prompt.get("cache_salt", "")
        if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
            raise InvalidPrompt("an echo engine takes token ids, one at least")
        if request_id is None:
            request_id = str(len(self._requests))
        self._queue(request_id, list(prompt), params, [[] for _ in range(params.n)], salt)
        return request_id

    def continue_request(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        drawn: Sequence[DrawnSequence],
        *,
        salt: str = "",
        caller: int = 0,
    ) -> None:
        """Go on after tokens that another engine drew."""
        self._queue(request_id, ids, params, [list(one.token_ids) for one in drawn], salt)

    def _queue(
        self, request_id: str, prompt: list[int], params: SamplingParams, drawn: list[list[int]], salt: str
    ) -> None:
        count = MAX_TOKENS if params.max_tokens is None else params.max_tokens
        capacity = self.context.max_stored_tokens
        if len(prompt) + count > capacity:
            raise RequestError(f"{len(prompt)} and {count} tokens do not fit; the cache holds {capacity}")
        sequences = []
        for index, tokens in enumerate(drawn):
            first = _first_state(None if params.greedy else params.seed, index)
            all_tokens = prompt + tokens
            sequences.append(
                _Sequence(
                    all_tokens,
                    len(prompt),
                    len(prompt) + count,
                    crc32(ids_to_bytes(all_tokens), first),
                    num_sent=len(tokens),
                )
            )
        pooled: Any = None if params.pooling is None else [float(len(prompt)), float(prompt[-1])]
        if params.pooling == "all":
            pooled = [[float(len(prompt)), float(token)] for token in prompt]
        logprobs = params.logprobs is not None
        request = _EchoRequest(request_id, prompt, salt, sequences, logprobs, params.detokenize, pooled)
        request.metrics.num_prompt_tokens = len(prompt)
        self._requests[request_id] = request
        self._waiting.extend((request, one) for one in sequences if not one.finished)

    def abort(self, request_id: str) -> RequestOutput:
        request = self._requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"no request {request_id!r}")
        request.aborted = True
        for one in request.sequences:
            self._release(one)
        self._waiting = deque(pair for pair in self._waiting if pair[0] is not request)
        self._running = [pair for pair in self._running if pair[0] is not request]
        return self._output(request)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def can_step(self) -> bool:
        return bool(self._ended) or (self.controls.can_run and bool(self._requests))

    def step(self) -> list[RequestOutput]:
        """Admit what fits, draw one token each, and sleep as long as that takes."""
        if self._ended:
            ended, self._ended = self._ended, []
            return ended
        seconds = self.step_s
        while self._waiting:
            request, one = self._waiting[0]
            if not self._admit(request, one):
                break
            self._waiting.popleft()
            request.metrics.first_scheduled_time = request.metrics.first_scheduled_time or time.monotonic()
            self._running.append((request, one))
            seconds += (len(one.tokens) - one.num_cached) * self.prefill_s_per_token
        if seconds:
            time.sleep(seconds)
        outputs: dict[str, RequestOutput] = {}
        touched: dict[str, _EchoRequest] = {}
        drawn: list[str] = []
        for request, one in self._running:
            token = one.state % VOCAB
            one.tokens.append(token)
            version = self.controls.weight_version
            if not one.spans or one.spans[-1].policy_version != version:
                first = len(one.tokens) - 1 - one.num_prompt
                oldest = one.spans[0].policy_version if one.spans else version
                one.spans.append(VersionSpan(first, version, oldest, version))
            one.state = crc32(ids_to_bytes([token]), one.state)
            assert one.lease is not None
            self.context.publish_computed(one.lease, one.tokens, len(one.tokens) - 1)
            if one.finished:
                self._release(one)
            touched[request.id] = request
            drawn.append(f"{request.id} {id(one)}")
        self._running = [pair for pair in self._running if not pair[1].finished]
        now = time.monotonic()
        self.meter.tokens(drawn, now)
        for request in touched.values():
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
                cached = request.sequences[0].num_cached
                waited = now - request.metrics.arrival_time
                self.meter.first_token(waited, prompt=len(request.prompt), cached=cached)
            outputs[request.id] = self._output(request)
        return list(outputs.values())

    def _abort_all(self) -> None:
        """The outputs come with the next step."""
        self._ended = [self.abort(request_id) for request_id in list(self._requests)]

    def _root(self) -> bytes:
        return root_of(model="echo", weight_version=self.controls.weight_version)

    def _admit(self, request: _EchoRequest, one: _Sequence) -> bool:
        lease = self.context.admit(one.tokens, root=salted(self._root(), request.salt))
        if lease is None:
            return False
        if not self.context.extend(lease, one.num_total):
            self.context.release(lease)
            return False
        one.lease, one.num_cached = lease, lease.cached
        self.num_prompt_tokens += len(one.tokens)
        self.num_cached_tokens += lease.cached
        return True

    def _release(self, one: _Sequence) -> None:
        if one.lease is not None:
            self.context.release(one.lease)
            one.lease = None

    def _output(self, request: _EchoRequest) -> RequestOutput:
        outputs = []
        for index, one in enumerate(request.sequences):
            reason = "length" if one.finished else "abort" if request.aborted else None
            new = one.tokens[one.num_prompt + one.num_sent :]
            one.num_sent += len(new)
            text = "".join(f"{token} " for token in new) if request.text else ""
            logprobs = None
            if request.logprobs:
                logprobs = [{t: Logprob(-t / VOCAB, 1, f"{t} " if request.text else None)} for t in new]
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=new,
                    finish_reason=reason,
                    logprobs=logprobs,
                    spans=list(one.spans),
                )
            )
        if request.finished:
            del self._requests[request.id]
            ids = [f"{request.id} {id(one)}" for one in request.sequences]
            outcome = "abort" if request.aborted else "length"
            request.metrics.finished_time = time.monotonic()
            self.meter.end(outcome, request.metrics.finished_time - request.metrics.arrival_time, ids)
        return RequestOutput(
            request_id=request.id,
            prompt=None,
            prompt_token_ids=request.prompt,
            prompt_logprobs=None,
            outputs=outputs,
            finished=request.finished,
            metrics=request.metrics,
            num_cached_tokens=request.sequences[0].num_cached,
            pooled=request.pooled if request.finished else None,
        )
