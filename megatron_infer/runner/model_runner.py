"""Plan -> batch -> hidden states -> logits -> tokens. Never changes a request, never waits before it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.cuda_graphs.padded_step import StepGraphs
from megatron_infer.kernels.base import Ops, PagedModel, RoutingShape
from megatron_infer.memory.device import Device
from megatron_infer.memory.store import StateStore
from megatron_infer.parallel.tensor_parallel_sampler import TensorParallelSampler
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.runner.in_flight import InFlightStep, PromptScores
from megatron_infer.runner.pooling import pool
from megatron_infer.runner.warm_up import PROMPT_TOKENS, draw_padding, run_padding
from megatron_infer.sampling.logprobs import prompt_logprobs
from megatron_infer.sampling.row_params import RowFlags
from megatron_infer.sampling.sampler import Sampler, SamplerInput
from megatron_infer.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.step_plan import StepPlan

PROMPT_LOGPROB_CHUNK = 256
"""Positions scored at a time: the largest tensor is this many rows of the vocabulary."""


class ModelRunner:
    """Runs plans on one model; `forward` then `sample`, so that masks can be made while the forward runs."""

    def __init__(
        self,
        model: PagedModel,
        *,
        store: StateStore,
        builder: BatchBuilder,
        sampler: Sampler | TensorParallelSampler,
        device: Device,
        ops: Ops,
        graphs: StepGraphs | None = None,
    ) -> None:
        """graphs: None where every step runs as it is."""
        self.graphs = graphs
        self.store, self.builder, self.sampler, self._model = store, builder, sampler, model
        self._device, self._ops = device, ops
        self.routing = model.routing if model.routing is not None and model.routing.num_layers else None
        """What requests can be told of their tokens' experts; None: nothing."""

    @torch.inference_mode()
    def forward(self, plan: StepPlan, table_writes: Sequence[tuple[int, int, int]]) -> InFlightStep:
        """Enqueue the copies before the step, then its forward; logits exist only where one draws."""
        flight = InFlightStep(plan=plan)
        self._set_out(flight, table_writes)
        if flight.shape is None:
            self._arrive(flight, self._model.hidden(flight.batch))
        else:
            assert self.graphs is not None
            flight.replayed = self.graphs.launch(flight.shape, flight.batch, num_decode=len(plan.decode))
            self._arrive(flight, flight.replayed.hidden_TD)
        return flight

    @torch.inference_mode()
    def warm_up(self, max_tokens: int, token_counts: Sequence[int] = ()) -> None:
        """Launch what steps of up to max_tokens tokens launch, so that no request waits for a compiler; all ranks do.

        token_counts: the least tokens of steps that run other kernels than smaller ones. Before the first step: nothing
        may be in flight.
        """
        hidden_SD = run_padding(self.builder, self._layers_of, (min(PROMPT_TOKENS, max_tokens), *token_counts))
        if hidden_SD is None:
            return
        # weights may be anything yet; what is drawn from is not
        logits_V, sampler = torch.zeros_like(self._model.logits(hidden_SD, self._ops))[0], self.sampler
        draw_padding(
            self.builder,
            sampler.params,
            lambda inputs: sampler.sample(logits_V.repeat(len(inputs.rows), 1), inputs),
            dummy_row=self.builder.rows.dummy_row,
        )

    def _layers_of(self, batch: Batch) -> Tensor | None:
        """What the output layer takes in; None where there is none."""
        return self._model.hidden(batch)

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        """What the step will be padded to, on all ranks alike."""
        return None if self.graphs is None else self.graphs.shape_of(plan)

    def _set_out(self, flight: InFlightStep, table_writes: Sequence[tuple[int, int, int]]) -> None:
        """What comes before the layers."""
        self._set_rows(flight.plan)
        self.store.run_copies(flight.plan.copies_before)
        if self.graphs is not None:
            flight.shape = self.graphs.ready(flight.plan)
        flight.batch = self.builder.build(flight.plan, table_writes, shape=flight.shape)
        if self.sampler.params.num_routing:
            self._make_room_for_routing(flight)

    def _arrive(self, flight: InFlightStep, hidden_TD: Tensor | None, *, scores: bool = True) -> None:
        """What comes after the layers; logits and scores where hidden_TD is what the output layer takes in.

        hidden_TD: None of a padded step that only decodes.
        """
        plan, batch = flight.plan, flight.batch
        self.store.run_copies(plan.copies_after)
        if not scores:
            return
        if flight.replayed is not None:
            flight.logits_SV = flight.replayed.logits_SV
        elif plan.sampled:
            assert hidden_TD is not None
            hidden_SD = (
                hidden_TD if len(plan.decode) == plan.num_tokens else hidden_TD.index_select(0, batch.sample_token_S)
            )
            flight.logits_SV = self._model.logits(hidden_SD, self._ops)
        if hidden_TD is not None and plan.prefill:
            flight.prompt_scores = self._score_prompts(plan, hidden_TD)
            flight.pooled = pool(plan, hidden_TD)

    def _make_room_for_routing(self, flight: InFlightStep) -> None:
        """Where the layers note their choice, if one of the step's rows asks."""
        shape, batch = self.routing, flight.batch
        if shape is not None and (self.sampler.params.flags[batch.meta.table_row] & RowFlags.ROUTING).any():
            flight.routed_TLK = batch.routing_TLK = self._room_for_routing(batch.num_tokens, shape)

    def _room_for_routing(self, num_tokens: int, shape: RoutingShape) -> Tensor:
        dtype = torch.uint8 if shape.num_experts <= 256 else torch.int16
        return torch.empty((num_tokens, shape.num_layers, shape.top_k), dtype=dtype, device=self._device.torch)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn on this rank, or heard of."""
        return True

    def then(self, action: Callable[[], None]) -> None:
        """Do this once the steps launched so far have done what they do on the host."""
        action()

    @torch.inference_mode()
    def sample(self, flight: InFlightStep, masks: TokenMasks | None = None) -> None:
        """Draw the step's tokens on the device and start the way of all it leaves to the host."""
        if flight.logits_SV is None:
            flight.depart(self._device)
            return
        batch = flight.batch
        inputs = SamplerInput(
            rows=batch.sample_rows,
            positions=batch.sample_positions,
            token_pool=self.builder.token_pool,
            masks=masks,
        )
        replayed = flight.replayed
        is_static = replayed is not None and self.sampler.can_be_static(inputs.rows, inputs.positions)
        drawn = replayed.drawn if replayed is not None and is_static else None
        if drawn is not None:
            assert self.graphs is not None and self.graphs.sampler is not None
            out = self.graphs.sampler.after_static(flight.logits_SV, inputs, drawn)
        else:
            out = self.sampler.sample(flight.logits_SV, inputs)
            self.builder.store_drawn(batch, out.tokens_S)
        flight.depart(self._device, out)

    def _set_rows(self, plan: StepPlan) -> None:
        """Sampling parameters of rows that changed hands in this plan."""
        for request in plan.returned:
            assert request.lease is not None, f"{request.id} came back without a lease"
            self.sampler.params.set(request.lease.row, request)
        for chunk in plan.prefill:
            for request in (chunk.request, *chunk.forks) if chunk.first else chunk.forks:
                assert request.lease is not None, f"{request.id} is planned without a lease"
                self.sampler.params.set(request.lease.row, request)

    def _score_prompts(self, plan: StepPlan, hidden_TD: Tensor) -> list[PromptScores]:
        """Prompt log probabilities of the slices whose requests asked; the last position scores no prompt token."""
        scores: list[PromptScores] = []
        offset = len(plan.decode)
        for chunk in plan.prefill:
            request, begin = chunk.request, offset
            offset += chunk.n
            top = request.params.prompt_logprobs
            count = min(chunk.n, request.prompt_len - 1 - chunk.start)
            if top is None or count <= 0:
                continue
            targets = np.array(request.tokens[chunk.start + 1 : chunk.start + 1 + count], dtype=np.int64)
            scored = prompt_logprobs(
                hidden_TD[begin : begin + count],
                self._device.to_device(targets),
                lambda hidden: self._model.logits(hidden, self._ops),
                top=top,
                chunk=PROMPT_LOGPROB_CHUNK,
                vocab_size=self.sampler.vocab_size,
                score=self.sampler.score,
            )
            scores.append(PromptScores(request, chunk.start + 1, *scored))
        return scores
