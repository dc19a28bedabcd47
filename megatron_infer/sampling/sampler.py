"""The sampler: logits of a step in, one token a row out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.sampling.captured_draw import RowMirror, static_draw, why_outside
from megatron_infer.sampling.draw_groups import DeviceOps, DrawGroup, make_draw_group, split_draw_groups
from megatron_infer.sampling.filters import DrawResult, Search, draw_any, draw_filtered
from megatron_infer.sampling.logprobs import LogprobBatch, Score, score
from megatron_infer.sampling.returned_details import (
    TokenDetailsBatch,
    TokenDetailsPlan,
    collect_token_details,
    plan_token_details,
)
from megatron_infer.sampling.rng import uniform
from megatron_infer.sampling.row_params import TOUCHED, RowFlags, RowParams
from megatron_infer.sampling.token_masks import TokenMasks
from megatron_infer.sampling.token_masks import forbid as torch_forbid
from megatron_infer.sampling.upload import Upload

DRAWS_BEHIND = "FlashInfer draws behind the graph"


class SamplingKernels(Protocol):
    """A backend's own draws and scores, for logits of the model's dtype and fp32; rows may be strided."""

    def draw(self, logits_MV: Tensor, columns_5M: Tensor) -> tuple[Tensor, ...]:
        """What `filters.draw_any` and `draw_filtered` do, by `Shape.columns_5M` -> the first fields of a Choice, up to
        mass_M at least."""
        ...

    def score(
        self, logits_AV: Tensor, token_A: Tensor, top: int, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `logprobs.score` does; known: mass and largest logit that `draw` found in the same rows."""
        ...


class DeviceKernels(Protocol):
    """What a GPU's backend does besides: never a word with the host, fit for a captured graph."""

    def static_draw(
        self,
        logits_SV: Tensor,
        columns_NR: Tensor,
        lists_RI: Tensor,
        row_S: Tensor,
        position_S: Tensor,
        token_pool: Tensor,
        out: DrawRoom,
    ) -> None:
        """`Sampler.static_sample`, with the parameters as `RowMirror` has them."""
        ...

    def forbid(self, work_MV: Tensor, bits_GW: Tensor, rows_G: Tensor | None) -> None:
        """`masks.forbid`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInput:
    """Whose tokens are drawn."""

    rows: np.ndarray
    """int32 [S] request rows."""
    positions: np.ndarray
    """[S] index in its sequence of the token to be drawn: the length of its context."""
    token_pool: Tensor
    """int32 [rows, positions] on the device: prompt and output ids of each row, read below `positions`."""
    masks: TokenMasks | None = None
    """Of the rows with structured output; None where there are none."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """A step's tokens, still on the device."""

    tokens_S: Tensor
    """int64; 0 where bad."""
    bad_S: Tensor
    """bool: the row had nothing to draw from (NaN or +inf among its logits, or every token masked)."""
    logprobs: LogprobBatch | None
    token_details: TokenDetailsBatch | None = None


class Sampler:
    """Draws tokens by the parameters of their rows.

    A row's token is a function of its logits, parameters, context, seed and position: not of its company. Stages run
    only on rows that want them; a batch of greedy rows is one argmax in the model's dtype. What follows from the
    parameters alone is kept while the same rows come back.
    """

    def __init__(
        self,
        params: RowParams,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        argmax: Callable[[Tensor], Tensor] | None = None,
        kernels: SamplingKernels | None = None,
        device_kernels: DeviceKernels | None = None,
        search: Search | None = None,
        stage: Upload | None = None,
    ) -> None:
        """argmax(logits [S, V], rows possibly strided) -> int64 [S], lowest id among equals; None: torch's.

        kernels, device_kernels: stand in for the torch code; None: there are none for this device. search: finds the
        candidates of the torch code's draws; nothing is drawn within graphs then. stage: brings arrays to where the
        logits are; None: copies that wait, where that is a GPU.
        """
        assert params.vocab_size == vocab_size <= padded_vocab_size, (
            f"rows for {params.vocab_size} tokens, vocabulary {vocab_size}, padded {padded_vocab_size}"
        )
        self.params, self.vocab_size, self.padded_vocab_size = params, vocab_size, padded_vocab_size
        self._processed = logprobs_mode == "processed"
        self.argmax = argmax if argmax is not None else _argmax
        """As given, or torch's."""
        self._kernels, self._device_kernels, self._search = kernels, device_kernels, search
        self._device = torch.device("cpu")
        self.stage: Upload = self._plain_stage if stage is None else stage
        self._device_ops = DeviceOps(
            stage=self.stage, forbid=torch_forbid if device_kernels is None else device_kernels.forbid
        )
        self._mirror: RowMirror | None = None
        self.drawn_outside: Counter[str] = Counter()
        """Reason -> steps that `can_be_static` has refused."""
        self.score: Score = score if kernels is None else kernels.score
        """For prompts too: see `prompt_logprobs`."""
        self._kept_key: tuple[int, bytes, bytes] | None = None
        self._groups: list[DrawGroup] | None = None
        self._asked: DrawGroup | None = None
        self._details_plan: TokenDetailsPlan | None = None

    def sample(self, logits_SV: Tensor, inputs: SamplerInput) -> SamplerOutput:
        """One token a row. logits_SV is [S, padded V] in the model's dtype and is left as it was."""
        assert logits_SV.shape[1] == self.padded_vocab_size, (
            f"{logits_SV.shape[1]} logits, not {self.padded_vocab_size}"
        )
        self._device = logits_SV.device
        flags = self._plan(inputs.rows, inputs.positions)
        if self._groups is None:
            self._groups = split_draw_groups(self.params, inputs.rows, flags, self._device_ops)
        logits_SV = logits_SV[:, : self.vocab_size]
        choices = [self._choose(group, logits_SV, inputs) for group in self._groups]
        whole = choices[0] if len(choices) == 1 else self._merge(choices, len(flags), logits_SV.device)
        bad_S = ~whole.top_M.isfinite()
        tokens_S = whole.token_M.masked_fill(bad_S, 0)
        token_details = self._collect_token_details(logits_SV, inputs, tokens_S, whole)
        return SamplerOutput(tokens_S, bad_S, self._score(logits_SV, inputs, tokens_S, whole), token_details)

    def _plain_stage(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def can_be_static(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether `static_sample` gives these rows all that they want; positions as in SamplerInput."""
        if self._search is not None:
            reason: str | None = DRAWS_BEHIND
        else:
            reason = why_outside(self.params, rows, self._flags(rows, positions))
        if reason is not None:
            self.drawn_outside[reason] += 1
        return reason is None

    @torch.inference_mode()
    def refresh_static(self) -> None:
        """Bring the parameters that `static_sample` reads up to date; before each step of its own, not captured."""
        if self._mirror is None:
            self._mirror = RowMirror(self.params, self._device_ops.stage, is_processed=self._processed)
        self._mirror.refresh()

    def static_sample(
        self, logits_SV: Tensor, row_S: Tensor, position_S: Tensor, token_pool: Tensor, out: DrawRoom
    ) -> None:
        """Each row's token and what is told of it, from device tensors alone, into `out` [S]; the pool gets the tokens.

        row_S, position_S: integers as in SamplerInput; padding has a row of nobody, whose parameters are greedy, and
        any position. Fit for a captured graph: one sequence of launches, whatever the rows want, of shapes that follow
        from logits_SV. The tokens are those of `sample`; `after_static` gives the rest.
        """
        assert self._mirror is not None, "static_sample before refresh_static"
        logits_SV, mirror = logits_SV[:, : self.vocab_size], self._mirror
        if self._device_kernels is None:
            static_draw(logits_SV, mirror, row_S, position_S, token_pool, out)
        else:
            self._device_kernels.static_draw(
                logits_SV, mirror.columns_NR, mirror.lists_RI, row_S, position_S, token_pool, out
            )

    def after_static(self, logits_SV: Tensor, inputs: SamplerInput, room: DrawRoom) -> SamplerOutput:
        """What `sample` gives, of rows that `static_sample` has drawn: alternatives and supports of those who ask are
        all that is computed here. logits_SV: the logits that it drew from."""
        self._device = logits_SV.device
        self._plan(inputs.rows, inputs.positions)
        logits_SV = logits_SV[:, : self.vocab_size]
        drawn = DrawResult(room.tokens, room.top, room.cut_logit, room.cut_id, room.mass, room.own, room.raw)
        group, token_details = self._asked, self._collect_token_details(logits_SV, inputs, room.tokens, drawn)
        if group is None:
            return SamplerOutput(room.tokens, room.bad, None, token_details)
        counts = self.params.num_logprobs[inputs.rows[group.places]]
        if counts.max() > 0:
            return SamplerOutput(
                room.tokens, room.bad, self._score(logits_SV, inputs, room.tokens, drawn), token_details
            )
        logprob = group.take(room.own if self._processed else room.raw)
        none = logprob.new_empty(len(counts), 0)
        scored = LogprobBatch(group.places, logprob, group.take(room.rank), none.to(torch.int64), none, counts)
        return SamplerOutput(room.tokens, room.bad, scored, token_details)

    def _flags(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What the rows want in this step: MIN_TOKENS ends with their position."""
        flags: np.ndarray = self.params.flags[rows]
        if len(flags) and np.bitwise_or.reduce(flags) & RowFlags.MIN_TOKENS:
            flags[positions >= self.params.min_total[rows]] &= ~int(RowFlags.MIN_TOKENS)
        return flags

    def _plan(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Who is told what in this step: as in the last one if the same rows want the same things -> flags."""
        flags = self._flags(rows, positions)
        key = (self.params.version, rows.tobytes(), flags.tobytes())
        if key == self._kept_key:
            return flags
        self._groups, self._kept_key = None, None
        asked = np.flatnonzero(flags & RowFlags.LOGPROBS)
        self._asked = make_draw_group(self.params, rows, flags, asked, self._device_ops) if len(asked) else None
        self._details_plan = plan_token_details(self.params, rows, flags, self._device_ops)
        self._kept_key = key
        return flags

    def _choose(self, group: DrawGroup, logits_SV: Tensor, inputs: SamplerInput) -> DrawResult:
        values = group.take(logits_SV)
        if group.wants & TOUCHED:
            values = group.edited(values, inputs.positions, inputs.token_pool, inputs.masks)
        if group.shape is None:
            # amax, because an argmax may pass over a NaN that is not alone
            return DrawResult(self.argmax(values), values.amax(-1).float())
        group.shape.columns_5M[4].copy_(self._device_ops.stage(uniform(group.seed, inputs.positions[group.places])))
        if self._kernels is not None:
            choice = DrawResult(*self._kernels.draw(values, group.shape.columns_5M))  # type: ignore[arg-type]
            if group.wants & TOUCHED:
                choice.mass_M = None  # of other logits than the model's
            return choice
        if group.wants & RowFlags.FILTER:
            return draw_filtered(values.float(), group.shape, self._search)
        return draw_any(values.float(), group.shape)

    def _merge(self, choices: list[DrawResult], num_rows: int, device: torch.device) -> DrawResult:
        """The lanes' choices in the step's order; a row that was not filtered is cut after everything."""
        whole = DrawResult(
            torch.empty(num_rows, dtype=torch.int64, device=device),
            torch.empty(num_rows, device=device),
            torch.full((num_rows,), -torch.inf, device=device),
            torch.full((num_rows,), self.vocab_size, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        if any(choice.own_M is not None for choice in choices):
            whole.own_M = torch.full((num_rows,), torch.nan, device=device)
        assert self._groups is not None
        for group, choice in zip(self._groups, choices, strict=True):
            whole.replace(group.places_M, choice)
        return whole

    def _collect_token_details(
        self, logits_SV: Tensor, inputs: SamplerInput, tokens_S: Tensor, drawn: DrawResult
    ) -> TokenDetailsBatch | None:
        """What the tokens carry of rows that asked."""
        plan = self._details_plan
        if plan is None:
            return None
        score_own = self._score_of_model(plan.group, drawn)
        positions, pool, masks = inputs.positions, inputs.token_pool, inputs.masks
        return collect_token_details(plan, logits_SV, positions, pool, masks, tokens_S, drawn, self.score, score_own)

    def _score(
        self, logits_SV: Tensor, inputs: SamplerInput, tokens_S: Tensor, drawn: DrawResult
    ) -> LogprobBatch | None:
        """Log probabilities for the rows that asked, of the model's distribution or of the one drawn from."""
        group = self._asked
        if group is None:
            return None
        rows = inputs.rows[group.places]
        values, score_rows = group.take(logits_SV), self._score_of_model(group, drawn)
        if self._processed:
            temperature = self.params.table[0, rows]
            temperature[(self.params.flags[rows] & RowFlags.DRAW) == 0] = 1.0
            if group.wants & (TOUCHED | RowFlags.FILTER) or (temperature != 1.0).any():
                divisors = self._device_ops.stage(temperature)
                values = group.drawn_from(values, inputs.positions, inputs.token_pool, inputs.masks, drawn, divisors)
                score_rows = self.score
        counts = self.params.num_logprobs[rows]
        logprob, *others = score_rows(values, group.take(tokens_S), int(counts.max()))
        if self._processed and drawn.own_M is not None:
            own = group.take(drawn.own_M)  # the same bits, whether or not the draw was captured
            logprob = torch.where(own.isnan(), logprob, own)
        return LogprobBatch(group.places, logprob, *others, counts)

    def _score_of_model(self, group: DrawGroup, drawn: DrawResult) -> Score:
        """`score` for the lane's rows of the model's logits: what drawing has summed up is not summed again."""
        if self._kernels is None or drawn.mass_M is None:
            return self.score
        return partial(self._kernels.score, known=(group.take(drawn.mass_M), group.take(drawn.top_M)))


def _argmax(logits_SV: Tensor) -> Tensor:
    return logits_SV.argmax(-1)
