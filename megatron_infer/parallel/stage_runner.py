"""A runner of one pipeline stage: launches without waiting, so that every stage has a step to work on.

host:    launch k    launch k+1    read k ..................  launch k+2
lane:        [moves, batch, receive, layers, send] k  [...] k+1                 one stage, in order
inbox:                                     receive what step k drew             stages before the last
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_infer.comm.stage_link import BrokenOff, Message, OrderedThread, StageLink, is_broken_off, is_of_collective
from megatron_infer.cuda_graphs.padded_step import asks_routing
from megatron_infer.kernels.base import RoutingShape
from megatron_infer.runner.batch import Batch
from megatron_infer.runner.in_flight import InFlightStep, PromptScores, RunnerOutput
from megatron_infer.runner.model_runner import ModelRunner
from megatron_infer.runner.pooling import Pooled, pooled_as, pooled_slices
from megatron_infer.sampling.logprobs import LogprobBatch
from megatron_infer.sampling.returned_details import TokenDetailsBatch
from megatron_infer.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan, StepResult

log = logging.getLogger("megatron_infer")

WAIT_S = 0.2
"""Between two looks whether the other stages are still there."""


@dataclass(slots=True)
class InFlightStageStep(InFlightStep):
    """A step on its way through the stages."""

    failed_stage: int | None = None
    """This stage, where its forward raised."""
    cause: str = ""
    """What raised, where that was on this rank and no collective."""
    broken: Exception | None = None
    """What a collective within this stage raised, or left its other ranks waiting: `read` raises it."""
    computed: Future[None] | None = None
    """This stage's part."""
    arrived: Future[RunnerOutput] | None = None
    on_wait: Callable[[], None] = lambda: None
    """Called every now and then while `read` waits; may raise."""
    alone_s: float | None = None
    """How long to wait for what was drawn where this rank raised and others of its stage may wait for it."""

    def is_done(self) -> bool:
        return self.computed is None or self.arrived is None or (self.computed.done() and self.arrived.done())

    def read(self) -> RunnerOutput:
        """Wait for this stage and for what the last one drew.

        Raises StageLost when a stage cannot be reached, what a collective among the ranks of this stage raised, and
        BrokenOff where this rank alone of its stage has raised.
        """
        assert self.computed is not None and self.arrived is not None, "the step was not sampled"
        self._wait(self.computed)
        self.computed.result()
        if self.broken is not None:  # what the last stage draws may be waiting for this rank
            raise self.broken
        if not self._wait(self.arrived, self.alone_s if self.cause else None) or (
            self.cause and self.arrived.exception() is not None
        ):  # else all of its stage's ranks had raised, and the last stage had heard of it from each
            raise BrokenOff(self.cause)
        drawn = self.arrived.result()
        if self.broken is not None:
            raise self.broken
        return drawn

    def _wait(self, future: Future[Any], limit_s: float | None = None) -> bool:
        """Whether it came in time."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not wait([future], timeout=WAIT_S).done:
            self.on_wait()
            if deadline is not None and time.monotonic() > deadline:
                return False
        return True


class StageRunner(ModelRunner):
    """As ModelRunner, of a model that is one stage; the last one draws, all know what was drawn.

    A forward that raises, on whichever stage, is told to all of them: `Drawn.error`.
    """

    def __init__(
        self,
        *args: Any,
        link: StageLink,
        on_wait: Callable[[], None] = lambda: None,
        alone_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        """on_wait: raises when the other stages are not to be waited for any longer. alone_s: see `InFlightStageStep`;
        None: a stage of one rank.
        """
        super().__init__(*args, **kwargs)
        self.link, self._on_wait, self._alone_s = link, on_wait, alone_s
        self._lane = OrderedThread(f"stage {link.rank}")
        self._lane.submit(self._device.make_current)
        self._inbox = self._lane if link.is_last else OrderedThread(f"stage {link.rank} inbox")
        self._routing_before, self.routing = self._all_routing()
        """Mixture-of-experts layers of the stages before; what is gathered up to this stage (None: nothing)."""

    def forward(self, plan: StepPlan, table_writes: Sequence[tuple[int, int, int]]) -> InFlightStep:
        flight = InFlightStageStep(plan=plan, on_wait=self._on_wait, alone_s=self._alone_s)
        flight.computed = self._lane.submit(partial(self._compute, flight, table_writes))
        if plan.returned:  # such a request may be gone before the lane gets here: nothing of it is in flight
            flight.computed.exception()
        return flight

    def sample(self, flight: InFlightStep, masks: TokenMasks | None = None) -> None:
        assert isinstance(flight, InFlightStageStep)
        then = partial(self._draw, flight, masks) if self.link.is_last else partial(self._hear, flight)
        flight.arrived = self._inbox.submit(then)

    def _layers_of(self, batch: Batch) -> torch.Tensor | None:
        received_TD = None if self.link.is_first else self.link.nothing_received(batch.num_tokens)
        hidden_TD = self._model.hidden(batch, received_TD)
        return hidden_TD if self.link.is_last else None

    @property
    def draws(self) -> bool:
        return self.link.is_last

    def then(self, action: Callable[[], None]) -> None:
        self._lane.submit(action)

    def _all_routing(self) -> tuple[int, RoutingShape | None]:
        """Compare stages: a step's routing travels with its residual stream, and each stage adds its layers'."""
        own = self._model.routing
        unseen = (-1, -1, -1)
        shapes = self.link.compare(unseen if own is None else (own.num_layers, own.top_k, own.num_experts))
        layers, top_k, num_experts = shapes[:, 0].cumsum().tolist(), int(shapes[:, 1].max()), int(shapes[:, 2].max())
        before = layers[self.link.rank - 1] if self.link.rank else 0
        if not layers[-1] or (shapes < 0).any():
            return 0, None
        return before, RoutingShape(num_layers=layers[self.link.rank], top_k=top_k, num_experts=num_experts)

    def _asks_routing(self, plan: StepPlan) -> bool:
        """From the plan alone: every stage says the same, one that failed included."""
        if self.routing is None:
            return False
        return asks_routing(plan)

    def _make_room_for_routing(self, flight: InFlightStep) -> None:
        if self._asks_routing(flight.plan):
            assert self.routing is not None
            flight.routed_TLK = self._room_for_routing(flight.plan.num_tokens, self.routing)
            flight.batch.routing_TLK = flight.routed_TLK[:, self._routing_before :]

    @torch.inference_mode()
    def _compute(self, flight: InFlightStageStep, table_writes: Sequence[tuple[int, int, int]]) -> None:
        """This stage's part of a step; whatever happens, one message is taken in and one handed on.

        Whether a stage before failed, this one does not look: it computes with zeros then, into blocks and states that
        are given up with the step, and the last stage finds out when it reads what was drawn.
        """
        link, residual_TD = self.link, None
        num_tokens = self._num_sent(flight.plan)
        try:
            self._set_out(flight, table_writes)
        except Exception as error:
            self._note_failure(flight, error)
        asks = self._asks_routing(flight.plan)
        top_k, upto = (0, 0) if not asks or self.routing is None else (self.routing.top_k, self.routing.num_layers)
        received_TD, notes_TN, flight.failed_before = link.receive(num_tokens, notes=self._routing_before * top_k)
        if notes_TN is not None and flight.routed_TLK is not None:
            before_TLK = notes_TN.view(num_tokens, self._routing_before, top_k)
            flight.routed_TLK[:, : self._routing_before] = before_TLK.to(flight.routed_TLK.dtype)
        if flight.failed_stage is None:
            try:
                residual_TD = self._run_layers(flight, received_TD)
            except Exception as error:
                self._note_failure(flight, error)
                residual_TD = None
        notes_TN = None if flight.routed_TLK is None else flight.routed_TLK.flatten(1)
        link.send(residual_TD, num_tokens, notes=upto * top_k, notes_TN=notes_TN, failed_before=flight.failed_before)

    def _num_sent(self, plan: StepPlan) -> int:
        """Tokens of the residual stream between stages: the shape's where the step is padded, on all of them."""
        shape = None if self.graphs is None else self.graphs.shape_of(plan)
        return plan.num_tokens if shape is None else shape.num_tokens

    def _run_layers(self, flight: InFlightStageStep, received_TD: torch.Tensor | None) -> torch.Tensor | None:
        """-> the residual stream to hand on."""
        is_last, shape = self.link.is_last, flight.shape
        if shape is None:
            hidden_TD = self._model.hidden(flight.batch, received_TD)
            self._arrive(flight, hidden_TD, scores=is_last)
            return None if is_last else hidden_TD
        assert self.graphs is not None
        num_decode = len(flight.plan.decode)
        flight.replayed = self.graphs.launch(shape, flight.batch, num_decode=num_decode, received_TD=received_TD)
        self._arrive(flight, flight.replayed.hidden_TD, scores=is_last)
        return None if is_last else self.graphs.residual_TD(shape)

    def _draw(self, flight: InFlightStageStep, masks: TokenMasks | None) -> RunnerOutput:
        """On the last stage: draw, and tell everyone."""
        if flight.failed_stage is None:
            try:
                super().sample(flight, masks)
                drawn = InFlightStep.read(flight)
            except Exception as error:
                self._note_failure(flight, error)
        failed = drawn.failed_stage if flight.failed_stage is None else flight.failed_stage
        if failed is not None:
            self.link.send_drawn(Message(np.zeros(len(flight.plan.sampled), np.int64), failed))
            return self._failure(flight, failed)
        tokens = np.array(drawn.result.tokens, dtype=np.int64)
        tokens[drawn.bad] = -1
        self.link.send_drawn(Message(tokens, None, _told(flight.plan, drawn)))
        return drawn

    def _hear(self, flight: InFlightStageStep) -> RunnerOutput:
        """On the other stages: take in what was drawn; the next step that needs it finds it on the device."""
        message = self.link.receive_drawn(len(flight.plan.sampled))
        if message.failed_stage is not None:
            return self._failure(flight, message.failed_stage)
        bad = np.flatnonzero(message.tokens < 0)
        tokens = message.tokens.copy()
        tokens[bad] = 0
        if len(tokens):
            self._lane.submit(partial(self._store, flight.batch, tokens))
        logprobs, token_details, routing, scores, pooled = _heard(flight.plan, message.extra)
        return RunnerOutput(
            StepResult(tokens.tolist()), logprobs, bad.tolist(), scores, token_details, routing, pooled=pooled
        )

    @torch.inference_mode()
    def _store(self, batch: Batch, tokens: np.ndarray) -> None:
        self.builder.store_heard(batch, tokens)

    def _note_failure(self, flight: InFlightStageStep, error: Exception) -> None:
        log.error("step %d failed on pipeline stage %d", flight.plan.step, self.link.rank, exc_info=error)
        flight.failed_stage = self.link.rank
        if is_of_collective(error) or is_broken_off(error):
            flight.broken = error
        else:
            flight.cause = f"{type(error).__name__}: {error}"

    def _failure(self, flight: InFlightStageStep, stage: int) -> RunnerOutput:
        text = f"the forward of step {flight.plan.step} raised on pipeline stage {stage}; its log says what"
        return RunnerOutput(StepResult(()), None, [], [], error=text, cause=flight.cause)


def _scored(plan: StepPlan) -> Iterator[PrefillChunk]:
    """Slices whose prompts are scored, in order (see `ModelRunner._score_prompts`)."""
    for chunk in plan.prefill:
        if chunk.request.params.prompt_logprobs is not None and chunk.start < chunk.request.prompt_len - 1:
            yield chunk


def _told(plan: StepPlan, drawn: RunnerOutput) -> list[np.ndarray]:
    """Logprobs, what tokens carry, routing, prompt scores and pooled states as arrays; none when nobody asked."""
    logprobs, token_details, routing, arrays = drawn.logprobs, drawn.token_details, drawn.routing, []
    if logprobs is None and token_details is None and routing is None and not drawn.prompt_scores and not drawn.pooled:
        return []
    vocab_size = 0 if token_details is None else token_details.vocab_size
    has = [logprobs is not None, token_details is not None, routing is not None]
    arrays.append(np.array([*has, vocab_size], dtype=np.int64))
    if logprobs is not None:
        tensors = (logprobs.token_logprob, logprobs.token_rank, logprobs.top_ids, logprobs.top_logprobs)
        arrays += [logprobs.index, logprobs.counts, *(tensor.numpy() for tensor in tensors)]
    if token_details is not None:
        tensors = (token_details.raw, token_details.processed, token_details.bits_BY)
        arrays += [token_details.index, token_details.support, *(tensor.numpy() for tensor in tensors)]
    if routing is not None:
        arrays.append(routing)
    for scores in drawn.prompt_scores:
        arrays += [part.numpy() for part in (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)]
    return [*arrays, *(pooled.values_D.numpy() for pooled in drawn.pooled)]


def _heard(
    plan: StepPlan, arrays: Sequence[np.ndarray]
) -> tuple[LogprobBatch | None, TokenDetailsBatch | None, np.ndarray | None, list[PromptScores], list[Pooled]]:
    """What `_told` said, on another rank."""
    if not arrays:
        return None, None, None, [], []
    at, logprobs, token_details, routing = 1, None, None, None
    has_logprobs, has_carried, has_routing, vocab_size = arrays[0].tolist()
    if has_logprobs:
        index, counts = arrays[1:3]
        token_logprob, token_rank, top_ids, top_logprobs = map(torch.from_numpy, arrays[3:7])
        logprobs = LogprobBatch(index, token_logprob, token_rank, top_ids, top_logprobs, counts)
        at = 7
    if has_carried:
        index, support = arrays[at : at + 2]
        raw, processed, bits_BY = map(torch.from_numpy, arrays[at + 2 : at + 5])
        token_details = TokenDetailsBatch(index, raw, processed, support, bits_BY, vocab_size)
        at += 5
    if has_routing:
        routing, at = arrays[at], at + 1
    scores = []
    for chunk in _scored(plan):
        scores.append(PromptScores(chunk.request, chunk.start + 1, *map(torch.from_numpy, arrays[at : at + 4])))
        at += 4
    pooled = []
    for chunk, _ in pooled_slices(plan):
        pooled.append(pooled_as(chunk, torch.from_numpy(arrays[at])))
        at += 1
    assert at == len(arrays), f"{len(arrays)} arrays, {at} expected"
    return logprobs, token_details, routing, scores, pooled
