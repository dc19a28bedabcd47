"""The runner of one pipeline stage: launches without waiting, so that every stage has a step to work on.

host:    launch k    launch k+1    read k ..................  launch k+2
thread:      [copies, batch, receive, layers, send or draw] k  [...] k+1         one stage, in order
inbox:                                     receive the result of step k         stages before the last
                                           read step k, send its result         the last stage

A model that drafts runs on the last stage. Where a plan has drafts of it, the last stage draws them at the beginning of
the step and sends them to the others, whose part of the step begins with receiving them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.distributed.collective_errors import CollectiveAbandoned, has_abandoned_collective, is_of_collective
from megatron_infer.distributed.stage_link import OrderedThread, StageFailure, StageLink, StepMessage
from megatron_infer.kernels.base import RoutingShape
from megatron_infer.memory.device import is_out_of_memory
from megatron_infer.runner.in_flight import LocalStep, PromptScores, RunnerOutput, arrays_of, with_arrays
from megatron_infer.runner.model_runner import ModelRunner
from megatron_infer.runner.pooling import pooled_as, pooled_chunks
from megatron_infer.runner.routing import asks_routing, routing_buffer
from megatron_infer.runner.sampling.logprobs import LogprobBatch
from megatron_infer.runner.sampling.returned_details import TokenDetailsBatch
from megatron_infer.runner.sampling.token_masks import TokenMasks
from megatron_infer.runner.step_padding import RankSizes
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan, StepResult

log = logging.getLogger("megatron_infer")

WAIT_S = 0.2
"""How often a wait checks whether the other stages are alive."""


@dataclass(slots=True)
class StageStep:
    """A step on its way through the stages: `runner.in_flight.InFlightStep`."""

    local: LocalStep
    """This stage's part."""
    on_wait: Callable[[], None]
    """Called every WAIT_S while `read` waits; may raise."""
    failure: StageFailure | None = None
    """This stage's, where its part raised."""
    cause: str = ""
    """What was raised, where that was on this rank and not by a collective."""
    broken: Exception | None = None
    """What a collective within this stage raised, or left its other ranks waiting: `read` raises it."""
    computed: Future[None] | None = None
    """Done with this stage's part."""
    result: Future[RunnerOutput] | None = None

    @property
    def plan(self) -> StepPlan:
        return self.local.plan

    def is_done(self) -> bool:
        return self.computed is None or self.result is None or (self.computed.done() and self.result.done())

    def read(self) -> RunnerOutput:
        """Wait for this stage and for the last stage's result.

        Raises StageLost when a stage cannot be reached, what a collective among the ranks of this stage raised, and
        CollectiveAbandoned where this rank alone of its stage has raised.
        """
        assert self.computed is not None and self.result is not None, "the step was not sampled"
        self._wait(self.computed)
        if self.broken is not None:  # its messages, and the last stage's result, may have failed by that
            raise self.broken
        self.computed.result()
        self._wait(self.result)
        output = self.result.result()
        if self.broken is not None:
            raise self.broken
        return output

    def _wait(self, future: Future[Any]) -> None:
        while not wait([future], timeout=WAIT_S).done:
            self.on_wait()


class StageRunner:
    """Runs one stage of a model (`runner.model_runner.Runner`). The last stage draws; all receive its result.

    A step that raises on any stage fails on all of them, with `RunnerOutput.error`, or is retracted on all of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        link: StageLink,
        *,
        on_wait: Callable[[], None] = lambda: None,
        whole_stage_raises: Callable[[], bool] = lambda: True,
    ) -> None:
        """runner: computes this stage's part. on_wait: raises when other stages are not to be waited for any longer.
        whole_stage_raises: see `RankGroup.whole_stage_raises`.
        """
        self.link, self.draws = link, link.is_last
        self.store, self.builder, self.sampler = runner.store, runner.builder, runner.sampler
        self.graphs, self.model = runner.graphs, runner.model
        self.received = None if link.is_first else link.nothing_received
        self._runner = runner
        self._on_wait = on_wait
        self._whole_stage_raises = whole_stage_raises
        self._broken: StageStep | None = None
        """The first step after which this rank meets the other ranks of its stage in no further collective."""
        self._thread = OrderedThread(f"stage {link.rank}")
        self._thread.submit(runner.device.make_current)
        self._inbox = OrderedThread(f"stage {link.rank} {'outbox' if link.is_last else 'inbox'}")
        self._inbox.submit(runner.device.make_current)
        self._routed, self.routing = self._compare_routing(runner.model.routing_of_chunks)
        """Mixture-of-experts layers before each chunk of this rank, and with its own; routing of all layers up to the
        last chunk's (None: unknown)."""

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        return self._runner.shape_of(plan)

    def forward(
        self,
        plan: StepPlan,
        table_writes: Sequence[tuple[int, int, int]],
        ranks: RankSizes | None = None,
    ) -> StageStep:
        step = StageStep(LocalStep(plan, ranks), self._on_wait)
        step.computed = self._thread.submit(partial(self._compute, step, table_writes))
        if plan.readmitted:  # nothing of such a request is in flight: it may have ended before the thread gets here
            step.computed.exception()
        return step

    def sample(self, step: StageStep, masks: TokenMasks | None = None) -> None:
        if self.draws:  # read in a thread of its own: this one launches the next step meanwhile
            drawn = self._thread.submit(partial(self._draw, step, masks))
            step.result = self._inbox.submit(partial(self._send_result, step, drawn))
        else:
            step.result = self._inbox.submit(partial(self._receive_result, step))

    def then(self, action: Callable[[], None]) -> None:
        self._thread.submit(action)

    def sizes(self, plan: StepPlan) -> list[int]:
        return self._runner.sizes(plan)

    def serve(self, ranks: RankSizes) -> None:
        done = self._thread.submit(partial(self._serve, ranks))
        while not wait([done], timeout=WAIT_S).done:
            self._on_wait()
        done.result()

    def _serve(self, ranks: RankSizes) -> None:
        if self._broken is not None:
            raise CollectiveAbandoned("this rank raised in an earlier step") from self._broken.broken
        self._runner.serve(ranks)

    def _compare_routing(self, own: Sequence[RoutingShape] | None) -> tuple[list[tuple[int, int]], RoutingShape | None]:
        """Exchange shapes with the other stages: a step's routing is sent with its residual stream, and each stage adds
        that of its own layers. own: of each chunk; None: unknown."""
        num_chunks, num_stages = self.link.num_chunks, self.link.num_stages
        if own is None:
            numbers = [-1] * (3 * num_chunks)
        else:
            numbers = [number for one in own for number in (one.num_layers, one.top_k, one.num_experts)]
        shapes = self.link.compare(numbers).reshape(num_stages, num_chunks, 3)
        ends = shapes[:, :, 0].T.cumsum().tolist()  # chunk 0 of each stage, then chunk 1 of each
        at = [chunk * num_stages + self.link.rank for chunk in range(num_chunks)]
        if not ends[-1] or (shapes < 0).any():
            return [(0, 0)] * num_chunks, None
        routed = [(ends[one - 1] if one else 0, ends[one]) for one in at]
        top_k, num_experts = int(shapes[..., 1].max()), int(shapes[..., 2].max())
        return routed, RoutingShape(num_layers=routed[-1][1], top_k=top_k, num_experts=num_experts)

    @torch.inference_mode()
    def _compute(self, step: StageStep, table_writes: Sequence[tuple[int, int, int]]) -> None:
        """This stage's part of a step. For each chunk it receives one message and sends one, whatever raises.

        It does not look whether a stage before has failed. It computes with zeros then, and writes to blocks and states
        that are given up with the step; the last stage finds out when it reads the step's outputs.
        """
        local, plan, link = step.local, step.plan, self.link
        if self._broken is not None:
            step.failure, step.broken = self._broken.failure, self._broken.broken
        # from the plan alone: the messages have the same size on every stage, one that failed included
        routing = self.routing if self.routing is not None and asks_routing(plan) else None
        shape = self._runner.shape_of(plan) if local.ranks is None else local.ranks.shape
        num_tokens = plan.num_tokens if shape is None else shape.num_tokens
        num_drafts = sum(len(chunk.drafts) for chunk in plan.prefill if chunk.drafts_on_device)
        if num_drafts and not link.is_last:
            local.plan = _with_drafts(plan, link.receive_drafts(num_drafts))
        try:
            self._runner.prepare(local, table_writes)
            if routing is not None:
                local.routed_TLK = routing_buffer(num_tokens, routing, self._runner.device)
        except Exception as error:
            self._note_failure(step, error)
        if num_drafts and link.is_last:
            link.send_drafts(self._drafts_of(step, num_drafts))
        for chunk in range(link.num_chunks):
            self._compute_chunk(step, chunk, num_tokens, 0 if routing is None else routing.top_k)

    def _compute_chunk(self, step: StageStep, chunk: int, num_tokens: int, top_k: int) -> None:
        """top_k: experts of a token whose routing is sent along; 0: none is."""
        local, link = step.local, self.link
        num_before, num_routed = self._routed[chunk]
        received_TD, routing_TN, failed_before = link.receive(num_tokens, routing_width=num_before * top_k, chunk=chunk)
        local.also_read = () if failed_before is None else (failed_before,)
        if local.routed_TLK is not None:
            if routing_TN is not None:
                routed_before_TLK = routing_TN.view(num_tokens, num_before, top_k)
                local.routed_TLK[:, :num_before] = routed_before_TLK.to(local.routed_TLK.dtype)
            local.batch.routing_TLK = local.routed_TLK[:, num_before:]
        hidden_TD = None
        if step.failure is None:
            try:
                hidden_TD = self._runner.run_layers(local, received_TD, chunk=chunk)
                if link.is_last and chunk == link.num_chunks - 1:
                    self._runner.finish(local, hidden_TD)
            except Exception as error:
                self._note_failure(step, error)
        link.send(
            hidden_TD,
            num_tokens,
            failure=step.failure,
            routing_width=num_routed * top_k,
            routing_TN=None if local.routed_TLK is None else local.routed_TLK[:, :num_routed].flatten(1),
            failed_before=failed_before,
            chunk=chunk,
        )

    def _drafts_of(self, step: StageStep, num_drafts: int) -> np.ndarray:
        """What the last stage has drafted for a step, int64 [num_drafts]; zeros where that raised."""
        if step.failure is None:
            try:
                assert step.local.drafts_N is not None, "the plan has drafts, and none were drawn"
                return self._runner.device.begin_read(step.local.drafts_N).wait()[0].numpy()
            except Exception as error:
                self._note_failure(step, error)
        return np.zeros(num_drafts, dtype=np.int64)

    def _draw(self, step: StageStep, masks: TokenMasks | None) -> None:
        """On the last stage: enqueue the draws and the copy of the outputs to the host."""
        if step.failure is None:
            try:
                self._runner.sample(step.local, masks)
            except Exception as error:
                self._note_failure(step, error)

    def _send_result(self, step: StageStep, drawn: Future[None]) -> RunnerOutput:
        """On the last stage: wait for the outputs, and send the result to the others."""
        drawn.result()
        failed = step.failure
        if failed is None:
            try:
                output = step.local.read()
                failed = next(
                    (found for code in output.also_read if (found := StageFailure.of_code(float(code)))), None
                )
            except Exception as error:
                self._note_failure(step, error)
                failed = step.failure
        if failed is not None:
            self.link.send_result(StepMessage(np.zeros(len(step.plan.sampled), np.int64), failed))
            return self._failure(step, failed)
        tokens = np.array(output.result.tokens, dtype=np.int64)
        tokens[output.bad] = -1
        self.link.send_result(StepMessage(tokens, None, _arrays_of(output)))
        return output

    def _receive_result(self, step: StageStep) -> RunnerOutput:
        """On the other stages: receive the result, and store its tokens on the device for the steps that need them."""
        message = self.link.receive_result(len(step.plan.sampled))
        if message.failure is not None:
            return self._failure(step, message.failure)
        bad = np.flatnonzero(message.tokens < 0)
        tokens = message.tokens.copy()
        tokens[bad] = 0
        if len(tokens):
            self._thread.submit(partial(self._store, step, tokens))
        outputs = _outputs_in(step.plan, message.arrays)
        return RunnerOutput(StepResult(tokens.tolist()), bad=bad.tolist(), **outputs)

    @torch.inference_mode()
    def _store(self, step: StageStep, tokens: np.ndarray) -> None:
        self.builder.store_received(step.local.batch, tokens)

    def _note_failure(self, step: StageStep, error: Exception) -> None:
        step.failure = StageFailure(self.link.rank, is_out_of_memory(error))
        if not step.failure.is_out_of_memory:  # else it is tried again
            log.error("step %d failed on pipeline stage %d", step.plan.step, self.link.rank, exc_info=error)
        if is_of_collective(error) or has_abandoned_collective(error):
            step.broken = error
        else:
            step.cause = f"{type(error).__name__}: {error}"
            if not self._whole_stage_raises():
                step.broken = CollectiveAbandoned(step.cause)
        if step.broken is not None:
            self._broken = step

    def _failure(self, step: StageStep, failure: StageFailure) -> RunnerOutput:
        """The same on all ranks, except for its cause."""
        lacks_memory = failure.is_out_of_memory
        what = "ran out of memory on" if lacks_memory else "raised on"
        text = f"the forward of step {step.plan.step} {what} pipeline stage {failure.stage}"
        if not lacks_memory:
            text += "; its log says what"
        return RunnerOutput(StepResult(()), None, [], [], error=text, is_out_of_memory=lacks_memory, cause=step.cause)


def _with_drafts(plan: StepPlan, drafts: Iterable[int]) -> StepPlan:
    """The plan with these in the place of drafts that a model on another stage has drawn, chunk by chunk."""
    left = iter(drafts)
    chunks = [
        replace(chunk, drafts=tuple(islice(left, len(chunk.drafts)))) if chunk.drafts_on_device else chunk
        for chunk in plan.prefill
    ]
    return replace(plan, prefill=tuple(chunks))


def _scored(plan: StepPlan) -> Iterator[PrefillChunk]:
    """Chunks with prompt logprobs, in order (see `ModelRunner._score_prompts`)."""
    for chunk in plan.prefill:
        if chunk.request.params.prompt_logprobs is not None and chunk.start < chunk.request.prompt_len - 1:
            yield chunk


def _arrays_of(output: RunnerOutput) -> dict[str, Any]:
    """Logprobs, token details, positions, prompt scores, pooled states as arrays by name; {} where there are none."""
    parts: dict[str, Any] = {"logprobs": output.logprobs, "details": output.token_details}
    parts |= {f"scores {i}": scores for i, scores in enumerate(output.prompt_scores)}
    parts |= {f"pooled {i}": pooled for i, pooled in enumerate(output.pooled)}
    found = {
        f"{part}/{name}": array
        for part, one in parts.items()
        if one is not None
        for name, array in arrays_of(one).items()
    }
    if output.token_details is not None:
        found["details/vocab_size"] = np.array(output.token_details.vocab_size)
    return found | {f"positions/{key}": rows for key, rows in output.positions.items()}


def _outputs_in(plan: StepPlan, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a RunnerOutput that `_arrays_of` packed on the last stage."""
    parts: dict[str, dict[str, Any]] = {}
    for path, array in arrays.items():
        part, _, name = path.partition("/")
        parts.setdefault(part, {})[name] = array
    outputs: dict[str, Any] = {"logprobs": None, "prompt_scores": []}
    if "logprobs" in parts:
        outputs["logprobs"] = with_arrays(LogprobBatch, parts["logprobs"])
    if (details := parts.get("details")) is not None:
        make_details = partial(TokenDetailsBatch, vocab_size=int(details.pop("vocab_size")))
        outputs["token_details"] = with_arrays(make_details, details)
    outputs["positions"] = parts.get("positions", {})
    if arrays:
        for i, chunk in enumerate(_scored(plan)):
            make_scores = partial(PromptScores, chunk.request, chunk.start + 1)
            outputs["prompt_scores"].append(with_arrays(make_scores, parts[f"scores {i}"]))
        pooled = enumerate(pooled_chunks(plan))
        outputs["pooled"] = [pooled_as(chunk, parts[f"pooled {i}"]["values_D"]) for i, (chunk, _) in pooled]
    return outputs
