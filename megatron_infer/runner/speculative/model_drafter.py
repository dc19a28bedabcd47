"""A draft model's steps: it computes every token that the model computes, and draws the drafts before the model does.

    step 0    the plan's chunks and decode rows, a chunk with drafts as the one token before them     -> draft 1
    step 1    the rows that have drafts, at draft 1                                                   -> draft 2
      ...
    step k    the same, at draft k: its keys and values alone

An MTP layer (`runner.speculative.mtp`) draws its drafts in the same way, and computes all the rest behind the model:
its first step is the rows that draft alone, and it has no last one.

Its keys and values lie under the block ids of the model's, and of each block both models have computed the same tokens.
So a block that is shared, copied, swapped or saved is one for both. Drafts are drawn with the parameters, seed and
position of the draw that verifies them: a draft model like the model proposes what the model will draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import Ops, PagedModel
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.runner.sampling.returned_details import TOKEN_DETAILS
from megatron_infer.runner.sampling.row_params import RowFlags
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput, SamplerOutput, StepSampler
from megatron_infer.runner.speculative.residual import Proposals, ResidualSampler
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan

RETURNED = RowFlags.LOGPROBS | TOKEN_DETAILS
"""What a request returns of its tokens, and not of its drafts."""
FORGETTING = 0.99
LEAST_SEEN = 16
LEAST_COVERED = 0.9
"""See `LowTokens`: tokens seen before any are left out, and the share of them that is drafted among."""


class DraftingModel(PagedModel, Protocol):
    """A model that drafts."""

    def first_logits(self, hidden_SD: Tensor, ops: Ops, count: int) -> Tensor | None:
        """`logits` of the lowest `count` tokens; None where they cost as much as all."""
        ...


class LowTokens:
    """How many of the lowest token ids cover nearly all that is drawn: byte-pair vocabularies number the frequent
    tokens first. Drafts among these read a part of the output layer, most of what one of an MTP layer reads."""

    def __init__(self, vocab_size: int) -> None:
        self._parts = (vocab_size // 4, vocab_size // 2)
        self._seen, self._below = 0.0, [0.0] * len(self._parts)

    def saw(self, tokens: Iterable[int]) -> None:
        """A request drew `tokens`; what was seen long ago counts less."""
        for token in tokens:
            self._seen = FORGETTING * self._seen + 1
            self._below = [
                FORGETTING * below + (token < part) for below, part in zip(self._below, self._parts, strict=True)
            ]

    @property
    def count(self) -> int | None:
        """None: all of them."""
        if self._seen < LEAST_SEEN:
            return None
        pairs = zip(self._parts, self._below, strict=True)
        return next((part for part, below in pairs if below >= LEAST_COVERED * self._seen), None)


class ModelDrafter:
    """Runs a draft model on the rows, blocks and token pool of the model's builder."""

    def __init__(
        self,
        model: DraftingModel,
        builder: BatchBuilder,
        sampler: StepSampler,
        *,
        kept: list[tuple[Tensor, Tensor]] | None = None,
        target: PagedModel | None = None,
    ) -> None:
        """builder: shares the rows of the model's. sampler: draws by the parameters of these rows. kept: where it puts
        the distributions that it draws from, see `residual.DraftSampler`; None: it does not. target: the model,
        with what it computes for the drafts behind each step; None: `model` computes all tokens of a step itself."""
        self.target = target
        self._model, self._builder, self._sampler, self._kept = model, builder, sampler, kept
        self._low_tokens = LowTokens(sampler.vocab_size)
        self.proposals: Proposals | None = None
        """The drafts of the last run with their distributions, where these are kept."""
        self._of_others: Iterator[Sequence[int]] = iter(())
        """See `run`, of the forwards to come."""

    @property
    def verifying_sampler(self) -> Callable[..., Sampler]:
        """The class of the sampler that draws what verifies the drafts."""
        return Sampler if self._kept is None else partial(ResidualSampler, proposals=lambda: self.proposals)

    def sizes(self, plan: StepPlan) -> list[int]:
        """The tokens of each forward of `run`."""
        drafting = [len(chunk.drafts) for chunk in plan.prefill if chunk.drafts_on_device]
        later = [sum(count > place for count in drafting) for place in range(max(drafting, default=0))]
        if self.target is not None:
            return [len(drafting), *later[:-1]] if drafting else []
        return [plan.num_tokens - sum(drafting), *later] if plan.num_tokens else []

    @torch.inference_mode()
    def serve(self, tokens_of_forwards: Iterable[Sequence[int]]) -> None:
        """This rank's part of forwards in which only other ranks have tokens."""
        for counts in tokens_of_forwards:
            self._model.serve(self._builder.ops, counts)

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        table_writes: Sequence[tuple[int, int, int]],
        tokens_of_forwards: Sequence[Sequence[int]] | None = None,
    ) -> Tensor | None:
        """Write the step's block-table entries and tokens, compute its keys and values, and put the drafts of chunks
        that have them `ON_DEVICE` into the token pool -> all of these, int64, chunk by chunk; None: there are none.

        tokens_of_forwards: where ranks have requests of their own, the `sizes` of all of them."""
        self._of_others = iter(tokens_of_forwards or ())
        token_N = self._run(plan, table_writes)
        self.serve(self._of_others)
        return token_N

    def _run(self, plan: StepPlan, table_writes: Sequence[tuple[int, int, int]]) -> Tensor | None:
        self.proposals = None
        if self._kept is not None:
            self._kept.clear()  # a run that failed has left what it drew
        drafting = [chunk for chunk in plan.prefill if chunk.drafts_on_device]
        # As many tokens as a request's drafts may have given: the last alone is often the one that they missed.
        for chunk in drafting:
            self._low_tokens.saw(chunk.request.tokens[-1 - len(chunk.drafts) :])
        for request, start in zip(plan.decode, plan.decode_starts, strict=True):
            if len(request.tokens) == start + 1:  # else its last token is still in flight
                self._low_tokens.saw(request.tokens[-1:])
        first = len(plan.decode)
        if self.target is not None:
            self._write_rows(_first_step(plan, drafting), table_writes)
            if not drafting:
                return None
            first, (hidden_TD, batch) = 0, self._forward(_later_step(plan, drafting, 0))
        else:
            hidden_TD, batch = self._forward(_first_step(plan, drafting), table_writes)
        drawn: list[Tensor] = []
        for place in range(max((len(chunk.drafts) for chunk in drafting), default=0)):
            going = [chunk for chunk in drafting if len(chunk.drafts) > place]
            hidden_RD = hidden_TD[first : first + len(drafting)]
            if len(going) < len(hidden_RD):
                at = [index for index, chunk in enumerate(drafting) if len(chunk.drafts) > place]
                hidden_RD = hidden_RD.index_select(0, self._builder.device.to_device(np.array(at)))
            drawn.append(self._draw(hidden_RD, batch, going, place))
            drafting, first = going, 0
            if self.target is not None and place + 1 == max(len(chunk.drafts) for chunk in going):
                break
            hidden_TD, batch = self._forward(_later_step(plan, going, place + 1))
        return self._by_chunk(plan, drawn)

    def _forward(self, plan: StepPlan, table_writes: Sequence[tuple[int, int, int]] = ()) -> tuple[Tensor, Batch]:
        batch = self._builder.build(plan, table_writes)
        batch.tokens_of_ranks = next(self._of_others, None)
        return self._model.hidden(batch), batch

    def _write_rows(self, plan: StepPlan, table_writes: Sequence[tuple[int, int, int]]) -> None:
        """Write block-table entries and the tokens of admitted requests, without a step."""
        if plan.readmitted or any(chunk.first for chunk in plan.prefill):
            self._builder.writer.forget()
        rows, stage = self._builder.rows, self._builder.device.to_device
        table = {row * rows.max_blocks + column: block for row, column, block in table_writes}
        if table:
            at, block = np.array(list(table), dtype=np.int64), np.array(list(table.values()), dtype=np.int32)
            rows.flat_table.index_copy_(0, stage(at), stage(block))
        rows.admit(plan)

    def _draw(self, hidden_RD: Tensor, batch: Batch, chunks: Sequence[PrefillChunk], place: int) -> Tensor:
        """Draw draft number `place` of these chunks into the token pool."""
        rows = np.array([chunk.request.lease.row for chunk in chunks], dtype=np.int32)  # type: ignore[union-attr]
        positions = np.array([chunk.start + 1 + place for chunk in chunks], dtype=np.int64)
        pool = self._builder.token_pool
        inputs = SamplerInput(rows=rows, positions=positions, token_pool=pool)
        drawn = self._greedy(hidden_RD, batch, rows) or self._sampler.sample(self._logits(hidden_RD, batch), inputs)
        tokens_R = drawn.tokens_S
        stage = self._builder.device.to_device
        self._builder.rows.store(stage(rows), stage(positions), tokens_R)
        return tokens_R

    def _greedy(self, hidden_RD: Tensor, batch: Batch, rows: np.ndarray) -> SamplerOutput | None:
        """The drafts of rows that are all greedy; None: it takes logits."""
        if self._kept is not None or (self._sampler.params.flags[rows] & ~int(RETURNED)).any():
            return None
        count = self._low_tokens.count or self._sampler.vocab_size
        found = self._model.argmax(hidden_RD, batch.ops, count)
        return None if found is None else SamplerOutput(*found, None)

    def _logits(self, hidden_RD: Tensor, batch: Batch) -> Tensor:
        """[R, V]; of tokens that are not drafted -inf."""
        count = self._low_tokens.count
        low = None if count is None else self._model.first_logits(hidden_RD, batch.ops, count)
        if low is None:
            return self._model.logits(hidden_RD, batch.ops)
        logits_RV = low.new_full((len(low), self._sampler.padded_vocab_size), -torch.inf)
        logits_RV[:, :count] = low
        return logits_RV

    def _by_chunk(self, plan: StepPlan, drawn: Sequence[Tensor]) -> Tensor | None:
        """Drafts drawn place by place, in the order of the chunks."""
        if not drawn:
            return None
        counts = [len(chunk.drafts) for chunk in plan.prefill if chunk.drafts_on_device]
        # draft `place` of chunk `index` stands behind all drafts of lower places and of the chunks before with as many
        before = np.cumsum([0, *(len(tokens_R) for tokens_R in drawn)])
        order = [
            before[place] + sum(other > place for other in counts[:index])
            for index, count in enumerate(counts)
            for place in range(count)
        ]
        order_N = self._builder.device.to_device(np.array(order, dtype=np.int64))
        token_N = torch.cat(list(drawn)).index_select(0, order_N)
        if self._kept:
            probs_NV, bad_N = (torch.cat(parts).index_select(0, order_N) for parts in zip(*self._kept, strict=True))
            places = _verifying_draws(plan)
            self.proposals = Proposals(places=places, token_N=token_N, probs_NV=probs_NV, bad_N=bad_N)
        return token_N


def _verifying_draws(plan: StepPlan) -> np.ndarray:
    """The number, among the plan's draws, of the one that verifies each draft on the device."""
    draws: list[int] = []
    first = len(plan.decode)
    for chunk in plan.prefill:
        if not chunk.drafts:
            break  # chunks with drafts come first
        if chunk.drafts_on_device:
            draws += range(first, first + len(chunk.drafts))
        first += chunk.n
    return np.array(draws, dtype=np.int64)


def _first_step(plan: StepPlan, drafting: Sequence[PrefillChunk]) -> StepPlan:
    """What the draft model computes before the first draft. Of its chunks none draws, and none keeps a state."""
    others = [replace(chunk, samples=False, captures=()) for chunk in plan.prefill if not chunk.drafts_on_device]
    decode = [*plan.decode, *(chunk.request for chunk in drafting)]
    return replace(
        plan,
        decode=decode,
        decode_starts=[*plan.decode_starts, *(chunk.start for chunk in drafting)],
        prefill=tuple(others),
        num_tokens=len(decode) + sum(chunk.n for chunk in others),
        sampled=decode,
    )


def _later_step(plan: StepPlan, chunks: Sequence[PrefillChunk], place: int) -> StepPlan:
    decode = [chunk.request for chunk in chunks]
    starts = [chunk.start + place for chunk in chunks]
    return StepPlan(step=plan.step, decode=decode, decode_starts=starts, num_tokens=len(decode), sampled=decode)
