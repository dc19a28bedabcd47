"""Draws at the end of a captured step: fixed shapes, parameters read on the device, no decision on the host.

    RowParams --rows that changed--> RowMirror (device) --row_S--> filters --> token --> token_pool[row, position]
                                                                                 `--> log probabilities

A step's graph is replayed with other rows, positions and parameters than it was captured with: which row is greedy and
which is filtered or scored is therefore data. After the graph the ordinary sampler computes what other outputs need of
the step's logits: ranks, alternatives, supports. It draws the whole step where a row has penalties, edited logits or a
grammar's mask.
Legend: S sampled positions, R request rows, V vocab, N columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.draw_columns import Asks, Column, DrawRoom
from megatron_infer.runner.sampling.filters import DrawParams, DrawResult, draw_any, draw_sorted
from megatron_infer.runner.sampling.logprobs import processed, score
from megatron_infer.runner.sampling.returned_details import needs_logits
from megatron_infer.runner.sampling.rng import GAMMA, MIX_FIRST, MIX_SECOND, mix
from megatron_infer.runner.sampling.row_params import CHANGES_LOGITS, GREEDY_BELOW, RETURNS, RowFlags, RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput, SamplerOutput
from megatron_infer.runner.sampling.upload import Upload


class DrawKernel(Protocol):
    """A GPU backend's `CapturedDraw.draw`."""

    def static_draw(
        self,
        logits_SV: Tensor,
        columns_NR: Tensor,
        row_S: Tensor,
        position_S: Tensor,
        token_pool: Tensor,
        out: DrawRoom,
    ) -> None:
        """columns_NR: see RowMirror."""
        ...


class CapturedDraw:
    """Draws the tokens that `sampler` would draw, bit for bit, in a way that a graph can hold."""

    def __init__(
        self,
        sampler: Sampler,
        kernel: DrawKernel | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """sampler: over the whole vocabulary. kernel: None where this device's backend has none. gather: makes whole
        rows of logits of every rank's part; None where the vocabulary is not split over ranks.
        """
        self._sampler, self._kernel, self._gather = sampler, kernel, gather
        self._mirror: RowMirror | None = None
        self.drawn_outside: Counter[str] = Counter()
        """Reason -> steps that `can_draw` has refused."""

    def can_draw(self, inputs: SamplerInput) -> bool:
        """Whether `draw` serves these rows with all that they ask for; the same on every rank."""
        sampler = self._sampler
        reason = why_outside(sampler.flags_of(inputs.rows, inputs.positions))
        if reason is None and self._gather is not None and _needs_logits(sampler.params, inputs.rows):
            reason = "ranks, alternatives or supports, of a vocabulary in parts"
        if reason is not None:
            self.drawn_outside[reason] += 1
        return reason is None

    @torch.inference_mode()
    def refresh(self) -> None:
        """Upload the parameters that changed; before each run of `draw`, never within a capture."""
        if self._mirror is None:
            sampler = self._sampler
            self._mirror = RowMirror(sampler.params, sampler.ops.to_device, is_processed=sampler.is_processed)
        self._mirror.refresh()

    def draw(self, logits_SV: Tensor, row_S: Tensor, position_S: Tensor, token_pool: Tensor, out: DrawRoom) -> None:
        """Each row's token and its log probabilities, from device tensors alone, into `out` [S] and the token pool.

        row_S, position_S: integers as in SamplerInput; padding has the dummy row, whose parameters are greedy, and any
        position. It can be captured: one sequence of launches, whatever the rows ask for, of shapes that follow from
        logits_SV.
        """
        assert self._mirror is not None, "draw before refresh"
        logits_SV = logits_SV if self._gather is None else self._gather(logits_SV)
        logits_SV, mirror = logits_SV[:, : self._sampler.vocab_size], self._mirror
        if self._kernel is None:
            static_draw(logits_SV, mirror.columns_NR, row_S, position_S, token_pool, out)
        else:
            self._kernel.static_draw(logits_SV, mirror.columns_NR, row_S, position_S, token_pool, out)

    def output(self, logits_SV: Tensor, inputs: SamplerInput, room: DrawRoom) -> SamplerOutput:
        """What `Sampler.sample` gives, for rows that `draw` has drawn into `room` from these logits: what is computed
        here are ranks, alternatives and supports."""
        if self._gather is not None:  # only the shape is used: `can_draw` has refused rows that need their values
            logits_SV = logits_SV[:, :1].expand(-1, self._sampler.padded_vocab_size)
        drawn = DrawResult(room.tokens, room.top, room.cut_logit, room.cut_id, room.mass, room.own, room.raw)
        return self._sampler.output_of_drawn(logits_SV, inputs, drawn, room.bad)


class RowMirror:
    """`RowParams` on the device, at a fixed address; brought up to date between steps.

    Only rows that changed are uploaded: one array and one scatter, none where nothing changed.
    """

    def __init__(self, params: RowParams, stage: Upload, *, is_processed: bool = False) -> None:
        """is_processed: see `Sampler.is_processed`."""
        self._params, self._stage, self._version, self._is_processed = params, stage, 0, is_processed
        start = np.zeros((len(Column), len(params.flags)), dtype=np.int64)
        neutral = ((Column.TOP_K, params.vocab_size), (Column.TOP_P, 1.0), (Column.TEMPERATURE, 1.0))
        for column, value in neutral:
            start[column] = np.float64(value).view(np.int64)
        self.columns_NR = stage(start)
        """int64 [Column, R]; some columns hold the bits of a float64."""

    def refresh(self) -> None:
        """Upload the rows that changed since the last call; ordered on the current stream, never inside a capture.

        A call that was interrupted is repeated by the next.
        """
        params = self._params
        version = params.version
        if version == self._version:
            return
        changed = np.flatnonzero(params.changed_at > self._version)
        packed = np.zeros((1 + len(Column), len(changed)), dtype=np.int64)
        packed[0] = changed
        columns, values, flags = packed[1:], packed[1:].view(np.float64), params.flags[changed]
        temperature, top_k, top_p, min_p = params.table[:4, changed]
        drawn = (flags & RowFlags.DRAW) != 0
        values[Column.INVERSE] = np.where(drawn, 1.0 / np.maximum(temperature, GREEDY_BELOW), 0.0)
        values[Column.TEMPERATURE] = np.where(drawn, temperature, 1.0)
        values[Column.TOP_K], values[Column.TOP_P], values[Column.MIN_P] = top_k, top_p, min_p
        columns[Column.STREAM] = mix(params.seed[changed]).view(np.int64)
        columns[Column.ASKS] = np.where(flags & RETURNS["return_sampled_logprobs"], int(Asks.RAW | Asks.OWN), 0)
        if self._is_processed:
            columns[Column.ASKS] |= np.where(flags & RowFlags.LOGPROBS, int(Asks.OWN), 0)
        staged = self._stage(packed)
        self.columns_NR.index_copy_(1, staged[0], staged[1:])
        self._version = version


def _needs_logits(params: RowParams, rows: np.ndarray) -> bool:
    """Whether a row's outputs need whole rows of logits after the draw: ranks, alternatives, or token details."""
    flags = params.flags[rows]
    return bool((flags & RowFlags.LOGPROBS).any()) or needs_logits(params, rows, flags)


def why_outside(flags: np.ndarray) -> str | None:
    """Why a captured draw cannot serve rows with these flags in force; None: it can."""
    union = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
    if union & RowFlags.GRAMMAR:
        return "structured output"
    return "penalties or edited logits" if union & CHANGES_LOGITS else None


def uniform_of(stream_S: Tensor, position_S: Tensor) -> Tensor:
    """`rng.uniform` on the device, from Column.STREAM and int64 positions -> float64, bit for bit."""
    mixed = stream_S + (position_S + 1) * _signed(GAMMA)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(MIX_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(MIX_SECOND)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def static_draw(
    logits_SV: Tensor, columns_NR: Tensor, row_S: Tensor, position_S: Tensor, token_pool: Tensor, out: DrawRoom
) -> None:
    """`CapturedDraw.draw` in torch.

    Every row is sorted in full, drawn in every way and scored; its parameters select the results that it keeps. It is
    the reference, and what devices without a kernel run; it is not fast.
    """
    row_S, position_S, vocab = row_S.long(), position_S.long(), logits_SV.shape[1]
    columns_NS = columns_NR.index_select(1, row_S)
    values_NS = columns_NS.view(torch.float64)
    inverse, top_k, top_p, min_p = values_NS[:4]
    greedy = inverse == 0.0
    uniform_S = uniform_of(columns_NS[Column.STREAM], position_S)
    params = DrawParams(
        columns_5M=torch.stack([inverse.masked_fill(greedy, 1.0), top_k, top_p, min_p, uniform_S]),
        candidates=vocab,
        needs_mass=True,
    )
    work_SV = logits_SV.to(torch.float32, copy=True)
    filtered = ((top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)) & ~greedy
    free, kept = draw_any(work_SV, params), draw_sorted(work_SV, params)
    assert kept.cut_logit_M is not None and kept.cut_id_M is not None
    token = torch.where(greedy, work_SV.argmax(-1), torch.where(filtered, kept.token_M, free.token_M))
    bad_S = ~free.top_M.isfinite()
    token_S = token.masked_fill(bad_S, 0)
    put_drawn(token_pool, row_S, position_S, token_S)
    cut = DrawResult(token_S, free.top_M)
    cut.cut_logit_M = torch.where(filtered, kept.cut_logit_M, -torch.inf)
    cut.cut_id_M = torch.where(filtered, kept.cut_id_M, vocab)
    found = {"tokens": token_S, "bad": bad_S, "raw": score(logits_SV, token_S, 0)[0]}
    found["own"] = score(processed(work_SV, values_NS[Column.TEMPERATURE], cut), token_S, 0)[0]
    found |= {"top": cut.top_M, "cut_logit": cut.cut_logit_M, "cut_id": cut.cut_id_M}
    for name, value in found.items():
        getattr(out, name).copy_(value)
    out.mass.zero_()


def put_drawn(token_pool: Tensor, row_S: Tensor, position_S: Tensor, token_S: Tensor) -> None:
    """token_pool[row, position] = token; rows of padding all write to the dummy row."""
    at = row_S.long() * token_pool.shape[1] + position_S.long()
    token_pool.view(-1).index_copy_(0, at, token_S.to(token_pool.dtype))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count as of unsigned numbers."""
    return (x >> count) & ((1 << (64 - count)) - 1)
