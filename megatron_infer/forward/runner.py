"""Plan -> batch -> hidden states -> logits -> tokens. Never changes a request, never waits before it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_infer.context.host import Move
from megatron_infer.context.store import StateStore
from megatron_infer.forward.batch import Batch, BatchBuilder
from megatron_infer.forward.device import Device, HostRead
from megatron_infer.forward.pooling import Pooled, pool
from megatron_infer.forward.step_graphs import Replayed, StepGraphs
from megatron_infer.graph_shapes import GraphShape
from megatron_infer.kernels.base import Ops, PagedModel, RoutingShape
from megatron_infer.sampling.carried import CarriedBatch
from megatron_infer.sampling.logprobs import LogprobBatch, prompt_logprobs
from megatron_infer.sampling.masks import TokenMasks
from megatron_infer.sampling.params import Wants
from megatron_infer.sampling.sampler import SampleInputs, SampleOutput, Sampler
from megatron_infer.sampling.tensor_parallel import TensorParallelSampler
from megatron_infer.schedule.plan import Plan, StepResult
from megatron_infer.schedule.request import Request

PROMPT_LOGPROB_CHUNK = 256
"""Positions scored at a time: the largest tensor is this many rows of the vocabulary."""


@dataclass(slots=True)
class PromptScores:
    """Log probabilities of prompt tokens first .. first+len-1 of one request, as the model gives them (raw)."""

    request: Request
    first: int
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(slots=True)
class Drawn:
    """A step's result on the host."""

    result: StepResult
    logprobs: LogprobBatch | None
    bad: list[int]
    """Indices into plan.sampled whose logits were not finite: no token was drawn for them."""
    prompt_scores: list[PromptScores]
    carried: CarriedBatch | None = None
    routing: np.ndarray | None = None
    """uint8 or uint16 [T, layers, top-k]: the experts of every token of the step, where some request asks."""
    error: str = ""
    """The step failed after its launch (on another pipeline stage, say), and drew nothing."""
    cause: str = ""
    """What raised, where that was on this rank; `error` is every rank's."""
    pooled: list[Pooled] = field(default_factory=list)


@dataclass(slots=True)
class Flight:
    """A step that was launched and whose result has not been read."""

    plan: Plan
    batch: Batch = None  # type: ignore[assignment]
    """Made by the forward."""
    logits_SV: Tensor | None = None
    prompt_scores: list[PromptScores] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    logprobs: LogprobBatch | None = None
    carried: CarriedBatch | None = None
    shape: GraphShape | None = None
    """What the step is padded to; None: it runs as it is."""
    replayed: Replayed | None = None
    routed_TLK: Tensor | None = None
    """What the layers, of this stage and those before, note of their choice."""
    routing: HostRead | None = None
    _drawn: HostRead | None = None
    """Tokens, and which are bad."""

    def drawn_as(self, drawn: HostRead, out: SampleOutput) -> None:
        self._drawn, self.logprobs, self.carried = drawn, out.logprobs, out.carried
        self.logits_SV = self.replayed = None

    def is_done(self) -> bool:
        """Whether `read` would not have to wait."""
        return all(part is None or part.is_done() for part in (self._drawn, self.routing))

    def read(self) -> Drawn:
        """Wait for the device and give the tokens."""
        routing = None if self.routing is None else as_ids(self.routing.wait()[0])
        if self._drawn is None:
            return Drawn(StepResult(()), None, [], self.prompt_scores, routing=routing, pooled=self.pooled)
        tokens, bad = self._drawn.wait()
        return Drawn(
            StepResult(tokens.tolist()),
            self.logprobs,
            bad.nonzero().flatten().tolist() if bool(bad.any()) else [],
            self.prompt_scores,
            self.carried,
            routing,
            pooled=self.pooled,
        )


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
    def forward(self, plan: Plan, table_writes: Sequence[tuple[int, int, int]], moves: Sequence[Move] = ()) -> Flight:
        """Enqueue the moves between device and host, then the step's forward; logits exist only where one draws."""
        flight = Flight(plan=plan)
        self._set_out(flight, table_writes, moves)
        if flight.shape is None:
            self._arrive(flight, self._model.hidden(flight.batch))
        else:
            assert self.graphs is not None
            flight.replayed = self.graphs.launch(flight.shape, flight.batch, num_decode=len(plan.decode))
            self._arrive(flight, flight.replayed.hidden_TD)
        return flight

    def _set_out(self, flight: Flight, table_writes: Sequence[tuple[int, int, int]], moves: Sequence[Move]) -> None:
        """What comes before the layers."""
        self._set_rows(flight.plan)
        self.store.run_moves(moves)
        if self.graphs is not None:
            flight.shape = self.graphs.ready(flight.plan)
        flight.batch = self.builder.build(flight.plan, table_writes, shape=flight.shape)
        if self.sampler.params.num_routing:
            self._make_room_for_routing(flight)

    def _arrive(self, flight: Flight, hidden_TD: Tensor | None, *, scores: bool = True) -> None:
        """What comes after the layers; logits and scores where hidden_TD is what the output layer takes in.

        hidden_TD: None of a padded step that only decodes.
        """
        plan, batch = flight.plan, flight.batch
        self.store.copy_blocks(plan.copies)
        self.store.copy_states(plan.state_copies)
        if flight.routed_TLK is not None:
            flight.routing = self._device.begin_read(flight.routed_TLK)
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

    def _make_room_for_routing(self, flight: Flight) -> None:
        """Where the layers note their choice, if one of the step's rows asks."""
        shape, batch = self.routing, flight.batch
        if shape is not None and (self.sampler.params.flags[batch.meta.table_row] & Wants.ROUTING).any():
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
    def sample(self, flight: Flight, masks: TokenMasks | None = None) -> None:
        """Draw the step's tokens on the device and start their way to the host."""
        if flight.logits_SV is None:
            return
        batch = flight.batch
        drawn = None if flight.replayed is None or masks is not None else flight.replayed.drawn
        if drawn is not None and self._drawn_as_wanted(batch):
            out = SampleOutput(*drawn, None)
        else:
            inputs = SampleInputs(
                rows=batch.sample_rows,
                positions=batch.sample_positions,
                token_pool=self.builder.token_pool,
                masks=masks,
            )
            out = self.sampler.sample(flight.logits_SV, inputs)
            self.builder.store_drawn(batch, out.tokens_S)
        flight.drawn_as(self._device.begin_read(out.tokens_S, out.bad_S), out)

    def _drawn_as_wanted(self, batch: Batch) -> bool:
        """Whether the draw within a padded step gives its rows all they want."""
        return self.sampler.can_be_static(batch.sample_rows, batch.sample_positions)

    def _set_rows(self, plan: Plan) -> None:
        """Sampling parameters of rows that changed hands in this plan."""
        for request in plan.returned:
            assert request.lease is not None, f"{request.id} came back without a lease"
            self.sampler.params.set(request.lease.row, request)
        for piece in plan.prefill:
            for request in (piece.request, *piece.forks) if piece.first else piece.forks:
                assert request.lease is not None, f"{request.id} is planned without a lease"
                self.sampler.params.set(request.lease.row, request)

    def _score_prompts(self, plan: Plan, hidden_TD: Tensor) -> list[PromptScores]:
        """Prompt log probabilities of the slices whose requests asked; the last position scores no prompt token."""
        scores: list[PromptScores] = []
        offset = len(plan.decode)
        for piece in plan.prefill:
            request, begin = piece.request, offset
            offset += piece.n
            top = request.params.prompt_logprobs
            count = min(piece.n, request.prompt_len - 1 - piece.start)
            if top is None or count <= 0:
                continue
            targets = torch.tensor(request.tokens[piece.start + 1 : piece.start + 1 + count], dtype=torch.int64)
            scored = prompt_logprobs(
                hidden_TD[begin : begin + count],
                targets.to(self._device.torch),
                lambda hidden: self._model.logits(hidden, self._ops),
                top=top,
                chunk=PROMPT_LOGPROB_CHUNK,
                vocab_size=self.sampler.vocab_size,
                score=self.sampler.score,
            )
            scores.append(PromptScores(request, piece.start + 1, *scored))
        return scores


def as_ids(routing: Tensor) -> np.ndarray:
    """Expert ids on the host: uint8, or uint16 where int16 stood for it."""
    ids: np.ndarray = routing.numpy()
    return ids if ids.dtype == np.uint8 else ids.view(np.uint16)
