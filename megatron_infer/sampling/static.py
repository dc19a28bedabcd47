"""Drawing without a decision on the host: fixed shapes, parameters read on the device, fit for a captured graph.

    RowParams --rows that changed--> RowMirror (device) --row_S--> columns_5S --> token_S --> token_pool[row, position]

A step's graph is replayed with other rows, positions and parameters than it was captured with: which row is greedy and
which is filtered is therefore data. Legend: S sampled positions, R request rows, V vocab.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_infer.sampling.filters import Choice, Shape, draw_any, draw_sorted
from megatron_infer.sampling.params import GREEDY_BELOW, RowParams, Wants
from megatron_infer.sampling.rng import GAMMA, MIX_FIRST, MIX_SECOND, mix
from megatron_infer.sampling.staging import Stage


class RowMirror:
    """What a draw needs of `RowParams`, on the device at one address; brought up to date between steps.

    Only rows that changed travel: one staged array and one scatter, nothing where nothing changed.
    """

    def __init__(self, params: RowParams, stage: Stage) -> None:
        self._params, self._stage, self._version = params, stage, 0
        num_rows = len(params.flags)
        start = np.zeros((5, num_rows), dtype=np.int64)
        start[:4] = np.array([[0.0], [params.vocab_size], [1.0], [0.0]]).view(np.int64)
        self._packed_5R = stage(start)
        self.columns_4R = self._packed_5R[:4].view(torch.float64)
        """1 / temperature (0: greedy), top_k (V when off), top_p, min_p."""
        self.stream_R = self._packed_5R[4]
        """int64: the bits of `rng.mix(seed)`."""

    def refresh(self) -> None:
        """Take over what changed since the last call; ordered on the current stream, never inside a capture."""
        params = self._params
        if params.version == self._version:
            return
        changed = np.flatnonzero(params.changed_at > self._version)
        self._version = params.version
        packed = np.empty((6, len(changed)), dtype=np.int64)
        packed[0] = changed
        columns = params.table[:4, changed]
        drawn = (params.flags[changed] & Wants.DRAW) != 0
        columns[0] = np.where(drawn, 1.0 / np.maximum(columns[0], GREEDY_BELOW), 0.0)
        packed[1:5] = columns.view(np.int64)
        packed[5] = mix(params.seed[changed]).view(np.int64)
        staged = self._stage(packed)
        self._packed_5R.index_copy_(1, staged[0], staged[1:])


def uniform_of(stream_S: Tensor, position_S: Tensor) -> Tensor:
    """`rng.uniform` on the device, from `RowMirror.stream_R` and int64 positions -> float64, bit for bit."""
    mixed = stream_S + (position_S + 1) * _signed(GAMMA)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(MIX_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(MIX_SECOND)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def static_draw(logits_SV: Tensor, mirror: RowMirror, row_S: Tensor, position_S: Tensor) -> Choice:
    """The tokens that `Sampler.sample` draws for rows whose logits nothing touches; top_M not finite: there is none.

    Every row is sorted in full and drawn in every way, of which its parameters keep one: it is the reference and the
    way of devices without kernels, not the fast one.
    """
    row_S, position_S = row_S.long(), position_S.long()
    columns_4S = mirror.columns_4R.index_select(1, row_S)
    uniform_S = uniform_of(mirror.stream_R.index_select(0, row_S), position_S)
    inverse, top_k, top_p, min_p = columns_4S
    greedy = inverse == 0.0
    inverse = inverse.masked_fill(greedy, 1.0)
    shape = Shape(
        columns_5M=torch.stack([inverse, top_k, top_p, min_p, uniform_S]),
        candidates=logits_SV.shape[1],
        needs_mass=True,
    )
    logits_SV = logits_SV.float()
    filtered = (top_k < logits_SV.shape[1]) | (top_p < 1.0) | (min_p > 0.0)
    free, kept = draw_any(logits_SV, shape), draw_sorted(logits_SV, shape)
    token = torch.where(filtered, kept.token_M, free.token_M)
    return Choice(torch.where(greedy, logits_SV.argmax(-1), token), free.top_M)


def put_drawn(token_pool: Tensor, row_S: Tensor, position_S: Tensor, token_S: Tensor) -> None:
    """token_pool[row, position] = token; rows of padding all write to the dummy row."""
    at = row_S.long() * token_pool.shape[1] + position_S.long()
    token_pool.view(-1).index_copy_(0, at, token_S.to(token_pool.dtype))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count as of unsigned numbers."""
    return (x >> count) & ((1 << (64 - count)) - 1)
