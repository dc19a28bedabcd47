"""StepPlan -> batch -> hidden states -> logits -> tokens. Changes no request; the host does not wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.kernels.base import PagedModel, RoutingShape
from megatron_infer.memory.store import CacheStore
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.runner.in_flight import InFlightStep, LocalStep, PromptScores
from megatron_infer.runner.pooling import pool
from megatron_infer.runner.routing import asks_index_choices, asks_routing, routing_buffer
from megatron_infer.runner.sampling.logprobs import prompt_logprobs
from megatron_infer.runner.sampling.sampler import SamplerInput, SamplerOutput, StepSampler
from megatron_infer.runner.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from megatron_infer.runner.step_padding import PaddedSteps, RankSizes

PROMPT_LOGPROB_CHUNK = 256
"""Positions scored at a time: the largest tensor is this many rows of the vocabulary."""


def reads_all_hidden(request: Request) -> bool:
    """Whether what a request returns of its prompt is made from hidden states that no token is drawn from."""
    return request.params.prompt_logprobs is not None or request.params.pooling is not None


class EditLogits(Protocol):
    """What changes logits before tokens are drawn: `engine.logits_hooks.LogitsHooks`."""

    hooks: Sequence[Any]
    """Empty: nothing does."""

    def apply(self, logits_SV: Tensor, sampled: Sequence[Request]) -> Tensor | None:
        """Logits and the requests that draw from them -> logits to draw from instead; None: from those."""
        ...


class Drafter(Protocol):
    """A model that drafts, before each step: `runner.speculative.model_drafter.ModelDrafter`."""

    def sizes(self, plan: StepPlan) -> list[int]: ...

    def serve(self, tokens_of_forwards: Iterable[Sequence[int]]) -> None: ...

    def run(
        self,
        plan: StepPlan,
        table_writes: Sequence[tuple[int, int, int]],
        tokens_of_forwards: Sequence[Sequence[int]] | None = None,
    ) -> Tensor | None: ...


class Runner(Protocol):
    """What an engine runs its steps with: `ModelRunner`, or `runner.parallel.stage_runner.StageRunner`."""

    model: PagedModel
    store: CacheStore
    builder: BatchBuilder
    sampler: StepSampler
    graphs: PaddedSteps | None
    """None where every step runs as it is."""
    routing: RoutingShape | None
    """What requests may return of their tokens' experts; None: nothing."""
    draws: bool
    """Whether tokens are drawn on this rank, or received from another."""
    received: Callable[[int], Tensor] | None
    """received(num_tokens): a residual stream as a pipeline stage receives it, of zeros; None in the first."""

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        """The shape that the step is padded to, the same on every rank; None: it runs as it is."""
        ...

    def forward(
        self,
        plan: StepPlan,
        table_writes: Sequence[tuple[int, int, int]],
        ranks: RankSizes | None = None,
    ) -> InFlightStep:
        """Enqueue the copies before the step, then the step's forward.

        table_writes: (row, column, block) of the block table that changed since the last step. ranks: what those
        that have requests of their own agreed on, see `StepInputs.tokens_of_ranks`; None: they share their requests.
        """
        ...

    def sample(self, step: Any, masks: TokenMasks | None = None) -> None:
        """Enqueue the draws of `step`, which the last `forward` gave, and the copy of its outputs to the host.

        A call of its own, so that masks can be made while the device runs the forward.
        """
        ...

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` once the host work of all steps launched so far is done."""
        ...

    def sizes(self, plan: StepPlan) -> list[int]:
        """The tokens of each forward of a step: those that draft, then the model's."""
        ...

    def serve(self, ranks: RankSizes) -> None:
        """This rank's part of a step in which only other ranks have tokens, as `then` calls it; waits for it."""
        ...


class ModelRunner:
    """Runs the steps of a model on this rank; of one pipeline stage, where a `StageRunner` drives it."""

    draws, received = True, None

    def __init__(
        self,
        model: PagedModel,
        builder: BatchBuilder,
        sampler: StepSampler,
        *,
        graphs: PaddedSteps | None = None,
        edit_logits: EditLogits | None = None,
        load_adapter: Callable[[int, str], None] | None = None,
        draft: Drafter | None = None,
        chooses_keys: bool = False,
    ) -> None:
        """load_adapter(slot, name): writes an adapter into its slot on the device; None: the engine has none.
        draft: None: no model drafts. chooses_keys: layers have indexers."""
        self._edit_logits, self.load_adapter, self._draft = edit_logits, load_adapter, draft
        self.store, self.builder, self.sampler, self.graphs = builder.store, builder, sampler, graphs
        self.routing = model.routing if model.routing is not None and model.routing.num_layers else None
        self.model, self.device, self._chooses_keys = model, builder.device, chooses_keys
        self.num_chunks: int = getattr(model, "num_chunks", 1)
        """Parts of the model on this rank, between which other ranks run theirs."""

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        return None if self.graphs is None else self.graphs.shape_of(plan)

    @torch.inference_mode()
    def forward(
        self,
        plan: StepPlan,
        table_writes: Sequence[tuple[int, int, int]],
        ranks: RankSizes | None = None,
    ) -> LocalStep:
        step = LocalStep(plan, ranks)
        self.prepare(step, table_writes)
        if step.shape is None and self.routing is not None and asks_routing(plan):
            step.routed_TLK = routing_buffer(plan.num_tokens, self.routing, self.device)
            step.batch.routing_TLK = step.routed_TLK
        choices: list[Tensor] | None = [] if self._chooses_keys and asks_index_choices(plan) else None
        step.batch.index_choices = choices
        hidden_TD = self.run_layers(step)
        if choices is not None:
            step.chosen_TLC = torch.stack(choices, 1)
        self.finish(step, hidden_TD)
        return step

    def prepare(self, step: LocalStep, table_writes: Sequence[tuple[int, int, int]]) -> None:
        """Everything before the layers: row parameters, copies, and the step's batch on the device."""
        self._set_rows(step.plan)
        self.store.run_copies(step.plan.copies_before)
        for slot, name in step.plan.adapter_loads:
            assert self.load_adapter is not None, f"adapter {name!r} in an engine without any"
            self.load_adapter(slot, name)
        if self.graphs is not None:
            step.shape = self.graphs.ready(step.plan, step.ranks)
        if self._draft is not None:
            started = time.perf_counter()
            others = None if step.ranks is None else step.ranks.forwards[:-1]
            step.drafts_N = self._draft.run(step.plan, table_writes, others)
            step.seconds_drafting, table_writes = time.perf_counter() - started, ()
        drafts = self._draft is not None
        step.batch = self.builder.build(step.plan, table_writes, shape=step.shape, rows_are_written=drafts)
        step.batch.tokens_of_ranks = None if step.ranks is None else step.ranks.forwards[-1]

    def run_layers(self, step: LocalStep, received_TD: Tensor | None = None, *, chunk: int = 0) -> Tensor | None:
        """Run the layers, then the plan's copies of blocks and states -> final hidden states [T, D].

        A padded step that only decodes gives None. A pipeline stage that is not the last gives its residual stream.
        Where the batch `is_narrow` afterwards, a row for each sample.
        received_TD: the residual stream of the stage before; None in the first. chunk: which part of the model runs, of
        several on this rank; the copies follow the last.
        """
        plan, batch = step.plan, step.batch
        if step.shape is not None:
            assert self.graphs is not None
            num_decode = len(plan.decode)
            step.padded = self.graphs.launch(step.shape, batch, num_decode=num_decode, received_TD=received_TD)
            hidden_TD = step.padded.hidden_TD
        else:
            batch.only_sampled = not any(reads_all_hidden(chunk.request) for chunk in plan.prefill)
            arguments = () if received_TD is None else (received_TD,)
            if self.num_chunks == 1:
                hidden_TD = self.model.hidden(batch, *arguments)
            else:
                hidden_TD = self.model.hidden(batch, *arguments, chunk=chunk)
        if chunk == self.num_chunks - 1:
            self.store.run_copies(plan.copies_after)
        return hidden_TD

    def finish(self, step: LocalStep, hidden_TD: Tensor | None) -> None:
        """Everything between layers and draws: logits of the tokens that draw, prompt logprobs, pooled states."""
        plan = step.plan
        if step.padded is not None:
            step.logits_SV = step.padded.logits_SV
        elif plan.sampled:
            assert hidden_TD is not None
            draws_all = len(plan.sampled) == plan.num_tokens and not any(chunk.forks for chunk in plan.prefill)
            is_whole = draws_all or step.batch.is_narrow
            hidden_SD = hidden_TD if is_whole else hidden_TD.index_select(0, step.batch.sample_token_S)
            step.greedy = self._greedy(hidden_SD, step.batch)
            if step.greedy is None:
                step.logits_SV = self.model.logits(hidden_SD, step.batch.ops)
        if hidden_TD is not None and plan.prefill and not step.batch.is_narrow:
            step.prompt_scores = self._score_prompts(step, hidden_TD)
            step.pooled = pool(plan, hidden_TD)

    @torch.inference_mode()
    def sample(self, step: LocalStep, masks: TokenMasks | None = None) -> None:
        batch = step.batch
        if step.greedy is not None:
            self.builder.store_sampled(batch, step.greedy.tokens_S)
        if step.logits_SV is None:
            step.begin_read(self.device, step.greedy)
            return
        inputs = SamplerInput(
            rows=batch.sample_rows,
            positions=batch.sample_positions,
            token_pool=self.builder.token_pool,
            masks=masks,
        )
        sampled, edited_SV = None, None
        if self._edit_logits is not None:
            edited_SV = self._edit_logits.apply(step.logits_SV, step.plan.sampled)
        if edited_SV is None and step.padded is not None:
            assert self.graphs is not None
            sampled = self.graphs.sampled(step.padded, inputs)
        if sampled is None:
            sampled = self.sampler.sample(step.logits_SV if edited_SV is None else edited_SV, inputs)
            self.builder.store_sampled(batch, sampled.tokens_S)
        step.begin_read(self.device, sampled)

    def then(self, action: Callable[[], None]) -> None:
        action()

    def sizes(self, plan: StepPlan) -> list[int]:
        return [*([] if self._draft is None else self._draft.sizes(plan)), plan.num_tokens]

    @torch.inference_mode()
    def serve(self, ranks: RankSizes) -> None:
        *others, own = ranks.forwards
        if self._draft is not None:
            self._draft.serve(others)
        if ranks.shape is not None:
            assert self.graphs is not None
            self.graphs.serve(ranks.shape)
        else:
            self.model.serve(self.builder.ops, own)

    def _set_rows(self, plan: StepPlan) -> None:
        """Set the sampling parameters of rows that have a new request in this plan."""
        for request in plan.readmitted:
            assert request.lease is not None, f"{request.id} came back without a lease"
            self.sampler.params.set(request.lease.row, request)
        for chunk in plan.prefill:
            for request in (chunk.request, *chunk.forks) if chunk.first else chunk.forks:
                assert request.lease is not None, f"{request.id} is planned without a lease"
                self.sampler.params.set(request.lease.row, request)

    def _greedy(self, hidden_SD: Tensor, batch: Batch) -> SamplerOutput | None:
        """The tokens of a step whose rows are all greedy and want nothing but a token; None: it takes all logits."""
        sampler, edits = self.sampler, self._edit_logits
        if (edits is not None and edits.hooks) or sampler.params.flags[batch.sample_rows].any():
            return None
        found = self.model.argmax(hidden_SD, batch.ops, sampler.vocab_size)
        return None if found is None else SamplerOutput(*found, None)

    def _score_prompts(self, step: LocalStep, hidden_TD: Tensor) -> list[PromptScores]:
        """Prompt logprobs of chunks whose requests return them; a prompt's last position scores no prompt token."""
        scores: list[PromptScores] = []
        offset = len(step.plan.decode)
        for chunk in step.plan.prefill:
            request, begin = chunk.request, offset
            offset += chunk.n
            top = request.params.prompt_logprobs
            count = min(chunk.n, request.prompt_len - 1 - chunk.start)
            if top is None or count <= 0:
                continue
            targets = np.array(request.tokens[chunk.start + 1 : chunk.start + 1 + count], dtype=np.int64)
            scored = prompt_logprobs(
                hidden_TD[begin : begin + count],
                self.device.to_device(targets),
                lambda hidden: self.model.logits(hidden, step.batch.ops),
                top=top,
                chunk=PROMPT_LOGPROB_CHUNK,
                vocab_size=self.sampler.vocab_size,
                score=self.sampler.score,
            )
            scores.append(PromptScores(request, chunk.start + 1, *scored))
        return scores
