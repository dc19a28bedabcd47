"""Verified drafts: a step's draws as the steps of one token that they stand for.

A request that verifies k drafts draws behind its last token and behind each draft, with the parameters, seed and
position of a draw one by one. The first draw is right in any case. The one behind a draft is right if that draft equals
the draw before it. So the draws up to the first one that differs from its draft are what steps of one token would have
drawn, and they are committed as such:

    last token 5, drafts 7 9 2     drawn  7 9 4 8     committed   {7}, {9}, {4}      (8 stands behind 2: wrong)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from megatron_infer.runner.in_flight import RunnerOutput
from megatron_infer.runner.sampling.logprobs import LogprobBatch
from megatron_infer.runner.sampling.returned_details import TokenDetailsBatch
from megatron_infer.runner.speculative.synthetic import SyntheticAcceptance
from megatron_infer.scheduler.drafts import DraftPlanner
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan, StepResult


class Verifier:
    """Splits the output of a step that verified drafts."""

    def __init__(self, drafts: DraftPlanner, synthetic: SyntheticAcceptance | None = None) -> None:
        """synthetic: decides which drafts are kept in the place of what is drawn; None: draws do."""
        self.drafts, self._synthetic = drafts, synthetic

    def parts(self, plan: StepPlan, output: RunnerOutput) -> Iterator[tuple[StepPlan, RunnerOutput, bool]]:
        """(plan, its output, whether it is the last) of each part, to be committed before the next one is asked for."""
        self.drafts.stats.seconds_drafting += output.seconds_drafting
        chunks = [chunk for chunk in plan.prefill if chunk.drafts]
        if not chunks:
            yield plan, output, True
            return
        tokens, bad = list(output.result.tokens), set(output.bad)
        output = replace(output, result=StepResult(tokens))
        kept: list[tuple[PrefillChunk, int, int]] = []
        place, on_device = len(plan.decode), iter(output.drafts)
        for chunk in chunks:
            drawn = tokens[place : place + chunk.n]
            drafts = list(islice(on_device, chunk.n - 1)) if chunk.drafts_on_device else chunk.drafts
            num_right = self._num_right(chunk, drawn, drafts)
            if self._synthetic is not None:
                tokens[place : place + num_right] = drafts[:num_right]
            num_kept = 1
            while num_kept <= num_right and place + num_kept - 1 not in bad:
                num_kept += 1
            self.drafts.settle(chunk, num_kept)
            kept.append((chunk, place, num_kept))
            place += chunk.n
        before = [len(chunk.request.tokens) for chunk in chunks]
        most = max(num_kept for *_, num_kept in kept)
        for index in range(most):
            taking = [(chunk, place) for chunk, place, num_kept in kept if index < num_kept]
            part = (_first if index == 0 else _later)(plan, output, taking, index)
            yield *part, index == most - 1
        for chunk, num_tokens in zip(chunks, before, strict=True):
            self.drafts.count(chunk.request, max(0, len(chunk.request.tokens) - num_tokens - 1))

    def _num_right(self, chunk: PrefillChunk, drawn: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts equal the draws before them, or are taken to."""
        if self._synthetic is not None:
            return self._synthetic.num_kept(chunk.request, chunk.start, drafts)
        return next((place for place, draft in enumerate(drafts) if drawn[place] != draft), len(drafts))


def _first(
    plan: StepPlan, output: RunnerOutput, taking: Sequence[tuple[PrefillChunk, int]], index: int
) -> tuple[StepPlan, RunnerOutput]:
    """The first token of each chunk as a decode row, and all the rest of the step."""
    num_decode, num_verified = len(plan.decode), sum(chunk.n for chunk, _ in taking)
    others = plan.prefill[len(taking) :]
    decode, starts, places = _decode_of(taking, index)
    places = [*range(num_decode), *places, *range(num_decode + num_verified, len(plan.sampled))]
    first = replace(
        plan,
        decode=[*plan.decode, *decode],
        decode_starts=[*plan.decode_starts, *starts],
        prefill=others,
        num_tokens=plan.num_tokens - num_verified + len(taking),
        sampled=[plan.sampled[place] for place in places],
    )
    behind = range(num_decode + num_verified, plan.num_tokens)
    rows = [*places[: num_decode + len(taking)], *behind]  # a position of decode or drafts is a draw, too
    return first, replace(_select(output, places, rows), prompt_scores=output.prompt_scores, pooled=output.pooled)


def _later(
    plan: StepPlan, output: RunnerOutput, taking: Sequence[tuple[PrefillChunk, int]], index: int
) -> tuple[StepPlan, RunnerOutput]:
    """The tokens behind draft number `index` (from 1) of these chunks."""
    decode, starts, places = _decode_of(taking, index)
    later = StepPlan(step=plan.step, decode=decode, decode_starts=starts, num_tokens=len(decode), sampled=decode)
    return later, _select(output, places, places)


def _decode_of(taking: Sequence[tuple[PrefillChunk, int]], index: int) -> tuple[list[Request], list[int], list[int]]:
    """(requests, positions of their query tokens, places among the draws)."""
    return (
        [chunk.request for chunk, _ in taking],
        [chunk.start + index for chunk, _ in taking],
        [place + index for _, place in taking],
    )


def _select(output: RunnerOutput, places: Sequence[int], token_rows: Sequence[int]) -> RunnerOutput:
    """The draws at `places`, ascending, and the positions `token_rows` of a step's output, without its prompts'."""
    bad, chosen = set(output.bad), np.array(places)
    return RunnerOutput(
        StepResult([output.result.tokens[place] for place in places]),
        None if output.logprobs is None else _logprobs(output.logprobs, chosen),
        [index for index, place in enumerate(places) if place in bad],
        [],
        None if output.token_details is None else _details(output.token_details, chosen),
        {key: rows[list(token_rows)] for key, rows in output.positions.items()},
    )


def _entries(index: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Select the entries for `places` from those for the draws `index`.

    -> (the entries, the number of the place that each is for, the entries as a tensor).
    """
    entries = np.flatnonzero(np.isin(index, places))
    return entries, np.searchsorted(places, index[entries]), torch.from_numpy(entries)


def _logprobs(batch: LogprobBatch, places: np.ndarray) -> LogprobBatch:
    entries, index, at = _entries(batch.index, places)
    return LogprobBatch(
        index,
        batch.token_logprob[at],
        batch.token_rank[at],
        batch.top_ids[at],
        batch.top_logprobs[at],
        batch.counts[entries],
    )


def _details(batch: TokenDetailsBatch, places: np.ndarray) -> TokenDetailsBatch:
    """Bits of id sets stay where they are: `places` of the batch names their rows."""
    entries, index, at = _entries(batch.index, places)
    values = {key: value if key in batch.places else value[at] for key, value in batch.values.items()}
    return TokenDetailsBatch(
        index, values, {key: rows[entries] for key, rows in batch.places.items()}, batch.vocab_size
    )
