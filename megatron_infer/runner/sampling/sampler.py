"""The sampler: a step's logits in, one token for each sampled row out.

Each row goes through these stages; a stage runs only on the rows that ask for it, on a copy of their logits:

    1. logit_bias, allowed and bad token ids, stop ids before min_tokens      penalties.TokenEdits
    2. repetition, frequency and presence penalties                           penalties.Penalties
    3. the grammar's mask of structured output                                token_masks
    4. argmax at temperature 0, else temperature, top_k, top_p, min_p, draw   filters
    5. logprobs of the token, of the model's logits or of what was drawn from logprobs, returned_details

All of it runs on the device that holds the logits, and the host does not wait for it: parameters are on the host
already (`RowParams`), a draw's random number follows from seed and position (`rng`), and results are read back with the
step's other outputs. What the stages need of the parameters is uploaded once and kept while the same rows come back.
Legend: S sampled positions, M rows of one draw group, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import Argmax, lowest_argmax
from megatron_infer.runner.sampling.draw_groups import DeviceOps, DrawGroup, make_draw_group, split_draw_groups
from megatron_infer.runner.sampling.filters import DrawResult, draw_any, draw_filtered
from megatron_infer.runner.sampling.logprobs import LogprobBatch, Score, score
from megatron_infer.runner.sampling.returned_details import (
    TokenDetailsBatch,
    TokenDetailsPlan,
    collect_token_details,
    plan_token_details,
)
from megatron_infer.runner.sampling.rng import uniform
from megatron_infer.runner.sampling.row_params import CHANGES_LOGITS, RowFlags, RowParams
from megatron_infer.runner.sampling.token_masks import TokenMasks


class SamplingKernels(Protocol):
    """A backend's own draws and scores, for fp32 logits; rows may be strided."""

    def draw(self, logits_MV: Tensor, columns_5M: Tensor) -> tuple[Tensor, ...]:
        """What `filters.draw_any` and `draw_filtered` do, by `DrawParams.columns_5M` -> the first fields of a
        DrawResult, up to mass_M at least."""
        ...

    def score(
        self, logits_AV: Tensor, token_A: Tensor, top: int, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `logprobs.score` does; known: mass and largest logit that `draw` found in the same rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInput:
    """The rows to draw a token for."""

    rows: np.ndarray
    """int32 [S] request rows."""
    positions: np.ndarray
    """[S] index in its sequence of the token to be drawn: the length of its context."""
    token_pool: Tensor
    """int32 [rows, positions] on the device: prompt and output ids of each row, read below `positions`."""
    masks: TokenMasks | None = None
    """For the rows with structured output; None where there are none."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """A step's tokens, still on the device."""

    tokens_S: Tensor
    """int64; 0 where bad."""
    bad_S: Tensor
    """bool: the row had nothing to draw from (NaN or +inf among its logits, or every token masked)."""
    logprobs: LogprobBatch | None
    token_details: TokenDetailsBatch | None = None


class StepSampler(Protocol):
    """What a runner needs of a sampler: `Sampler`, or one whose vocabulary is split over ranks."""

    params: RowParams
    vocab_size: int
    padded_vocab_size: int

    def sample(self, logits_SV: Tensor, inputs: SamplerInput) -> SamplerOutput: ...

    def score(self, logits_AV: Tensor, token_A: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`logprobs.score`, for prompts too (see `logprobs.prompt_logprobs`)."""
        ...


class Sampler:
    """Draws tokens by the parameters of their rows.

    A row's token is a function of its logits, parameters, context, seed and position, not of the other rows in the
    step. A batch of greedy rows is one argmax.
    """

    def __init__(
        self,
        params: RowParams,
        *,
        padded_vocab_size: int,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        argmax: Argmax | None = None,
        kernels: SamplingKernels | None = None,
        ops: DeviceOps | None = None,
    ) -> None:
        """argmax: for rows possibly strided; None: torch's.

        kernels: replace the torch code of draws and scores; None: there are none for this device. ops: None on a CPU.
        """
        assert params.vocab_size <= padded_vocab_size, f"vocabulary {params.vocab_size}, padded {padded_vocab_size}"
        self.params, self.vocab_size, self.padded_vocab_size = params, params.vocab_size, padded_vocab_size
        self.is_processed = logprobs_mode == "processed"
        """`logprobs` are of the distribution that a token was drawn from, not of the model's."""
        self.argmax = argmax if argmax is not None else lowest_argmax
        self.ops = DeviceOps() if ops is None else ops
        self._kernels = kernels
        self.score: Score = score if kernels is None else kernels.score
        self._plan_key: tuple[int, bytes, bytes] | None = None
        """Version of the parameters, rows and flags that the four attributes below were made for."""
        self._groups: list[DrawGroup] | None = None
        self._scored: DrawGroup | None = None
        """The rows with RowFlags.LOGPROBS."""
        self._details: TokenDetailsPlan | None = None

    def sample(self, logits_SV: Tensor, inputs: SamplerInput) -> SamplerOutput:
        """One token a row. logits_SV is fp32 [S, padded V] and is left as it was."""
        assert logits_SV.shape[1] == self.padded_vocab_size, (
            f"{logits_SV.shape[1]} logits, not {self.padded_vocab_size}"
        )
        flags = self._plan(inputs)
        if self._groups is None:
            self._groups = split_draw_groups(self.params, inputs.rows, flags, self.ops)
        logits_SV = logits_SV[:, : self.vocab_size]
        results = [self._draw(group, logits_SV, inputs) for group in self._groups]
        drawn = results[0] if len(results) == 1 else self._merge(self._groups, results, logits_SV)
        bad_S = ~drawn.top_M.isfinite()
        drawn.token_M = drawn.token_M.masked_fill(bad_S, 0)
        return self._output(logits_SV, inputs, drawn, bad_S)

    def output_of_drawn(
        self, logits_SV: Tensor, inputs: SamplerInput, drawn: DrawResult, bad_S: Tensor
    ) -> SamplerOutput:
        """What `sample` gives, for rows whose tokens are drawn already: logprobs and token details are all that is
        computed here. logits_SV: the logits that they were drawn from."""
        self._plan(inputs)
        return self._output(logits_SV[:, : self.vocab_size], inputs, drawn, bad_S)

    def flags_of(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """RowFlags [S] in force in this step: MIN_TOKENS ends at a position. positions: as in SamplerInput."""
        flags: np.ndarray = self.params.flags[rows]
        if len(flags) and np.bitwise_or.reduce(flags) & RowFlags.MIN_TOKENS:
            flags[positions >= self.params.min_total[rows]] &= ~int(RowFlags.MIN_TOKENS)
        return flags

    def _plan(self, inputs: SamplerInput) -> np.ndarray:
        """Prepare what follows from the parameters, unless the last step had the same rows and flags -> flags [S]."""
        rows, flags = inputs.rows, self.flags_of(inputs.rows, inputs.positions)
        key = (self.params.version, rows.tobytes(), flags.tobytes())
        if key == self._plan_key:
            return flags
        self._groups, self._plan_key = None, None
        scored = np.flatnonzero(flags & RowFlags.LOGPROBS)
        self._scored = make_draw_group(self.params, rows, flags, scored, self.ops) if len(scored) else None
        self._details = plan_token_details(self.params, rows, flags, self.ops)
        self._plan_key = key
        return flags

    def _draw(self, group: DrawGroup, logits_SV: Tensor, inputs: SamplerInput) -> DrawResult:
        values = group.take(logits_SV)
        if group.flags & CHANGES_LOGITS:
            values = group.edited(values, inputs)
        params = group.draw_params
        if params is None:
            drawn = DrawResult(*self.argmax(values))
            if not group.flags & CHANGES_LOGITS:
                drawn.mass_M = torch.full_like(drawn.token_M, -1)
            return drawn
        params.columns_5M[4].copy_(self.ops.to_device(uniform(group.seed, inputs.positions[group.places])))
        if self._kernels is not None:
            drawn = DrawResult(*self._kernels.draw(values, params.columns_5M))  # type: ignore[arg-type]
            if group.flags & CHANGES_LOGITS:
                drawn.mass_M = None  # of other logits than the model's
            return drawn
        if group.flags & RowFlags.FILTER:
            return draw_filtered(values.float(), params)
        return draw_any(values.float(), params)

    def _merge(self, groups: list[DrawGroup], results: list[DrawResult], logits_SV: Tensor) -> DrawResult:
        """The groups' results in the step's order; nothing is cut from a row that was not filtered."""
        num_rows, device = len(logits_SV), logits_SV.device
        merged = DrawResult(
            torch.empty(num_rows, dtype=torch.int64, device=device),
            torch.empty(num_rows, device=device),
            torch.full((num_rows,), -torch.inf, device=device),
            torch.full((num_rows,), self.vocab_size, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        if any(result.own_M is not None for result in results):
            merged.own_M = torch.full((num_rows,), torch.nan, device=device)
        for group, result in zip(groups, results, strict=True):
            merged.replace(group.places_M, result)
        return merged

    def _output(self, logits_SV: Tensor, inputs: SamplerInput, drawn: DrawResult, bad_S: Tensor) -> SamplerOutput:
        details = None
        if self._details is not None:
            score_model = self._model_score(self._details.group, drawn)
            details = collect_token_details(self._details, logits_SV, inputs, drawn, self.score, score_model)
        logprobs = None if self._scored is None else self._logprobs(self._scored, logits_SV, inputs, drawn)
        return SamplerOutput(drawn.token_M, bad_S, logprobs, details)

    def _logprobs(
        self, group: DrawGroup, logits_SV: Tensor, inputs: SamplerInput, drawn: DrawResult
    ) -> LogprobBatch | None:
        """Log probabilities of the group's tokens, in the model's distribution or in the one drawn from."""
        rows = inputs.rows[group.places]
        counts = self.params.num_logprobs[rows]
        values, score_rows = group.take(logits_SV), self._model_score(group, drawn)
        if self.is_processed:
            temperature = self.params.table[0, rows]
            temperature[(self.params.flags[rows] & RowFlags.DRAW) == 0] = 1.0
            if group.flags & (CHANGES_LOGITS | RowFlags.FILTER) or (temperature != 1.0).any():
                values = group.drawn_from(values, inputs, drawn, self.ops.to_device(temperature))
                score_rows = self.score
        logprob, *others = score_rows(values, group.take(drawn.token_M), int(counts.max()))
        if self.is_processed and drawn.own_M is not None:
            own = group.take(drawn.own_M)  # the same bits, whether or not the draw was captured
            logprob = torch.where(own.isnan(), logprob, own)
        return LogprobBatch(group.places, logprob, *others, counts)

    def _model_score(self, group: DrawGroup, drawn: DrawResult) -> Score:
        """`score` for the group's rows of the model's logits: what the draw has summed up is not summed again."""
        if self._kernels is None or drawn.mass_M is None:
            return self.score
        return partial(self._kernels.score, known=(group.take(drawn.mass_M), group.take(drawn.top_M)))
