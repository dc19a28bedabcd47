"""Argmax, draws and log probabilities in C++ (native/sampling.cpp): one call for all rows that sorts what it needs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_infer.kernels.native.native_call import bind_threaded

_P, _I = ctypes.c_void_p, ctypes.c_int64


class NativeSampling:
    """`runner.sampling.filters` and `runner.sampling.logprobs` for fp32 logits on a CPU; the tokens are the same."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._argmax = bind_threaded(library, "mi_argmax", [_P, _I, _I, _I, _P, _P])
        self._draw = bind_threaded(library, "mi_draw", [_P, _I, _I, _I, *[_P] * 6])
        self._score = bind_threaded(library, "mi_score", [_P, _I, _I, _I, _P, _I, *[_P] * 6])

    def argmax(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """(lowest id of the largest logit, that logit in fp32) of each row; rows may be strided.

        A NaN never wins, but makes the row's largest logit NaN; a row of NaN gives id 0.
        """
        rows, vocab = logits_SV.shape
        assert logits_SV.dtype is torch.float32 and logits_SV.stride(1) == 1
        token, top = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self._argmax(logits_SV, logits_SV.stride(0), rows, vocab, token, top)
        return token, top

    def draw(self, logits_MV: Tensor, columns_5M: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(token, largest logit, logit and id of the last candidate kept, mass) of each row; rows may be strided.

        columns_5M: float64 1 / temperature, top_k (V when off), top_p, min_p, uniform. A row without a finite largest
        logit gives token 0. Where nothing was cut the last kept is (-inf, V). mass: see `filters.DrawResult`.
        """
        rows, vocab = logits_MV.shape
        assert logits_MV.dtype is torch.float32 and logits_MV.stride(1) == 1
        assert columns_5M.shape == (5, rows) and columns_5M.is_contiguous()
        token, cut_id, mass = torch.empty(3, rows, dtype=torch.int64)
        top, cut_logit = torch.empty(2, rows)
        drawn = token, top, cut_logit, cut_id, mass
        self._draw(logits_MV, logits_MV.stride(0), rows, vocab, columns_5M, *drawn)
        return drawn

    def score(
        self, logits_AV: Tensor, token_A: Tensor, top: int, known: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logprob and rank of each row's token, `top` most likely ids and their logprobs); rows may be strided.

        known: mass and largest logit of the rows from `draw` of the same logits; the same bits, faster. Where the mass
        is below 0 only the largest logit is known, where it is 0 neither.
        """
        rows, vocab = logits_AV.shape
        assert logits_AV.dtype is torch.float32 and logits_AV.stride(1) == 1
        assert token_A.dtype is torch.int64 and token_A.is_contiguous() and top <= vocab
        logprob, rank = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        top_ids, top_logprobs = torch.empty(rows, top, dtype=torch.int64), torch.empty(rows, top)
        mass, largest = known or (None, None)
        if mass is not None and largest is not None:
            assert mass.dtype is torch.int64 and largest.dtype is torch.float32 and len(mass) == len(largest) == rows
            assert mass.is_contiguous() and largest.is_contiguous()
        scored = logprob, rank, top_ids, top_logprobs
        self._score(logits_AV, logits_AV.stride(0), rows, vocab, token_A, top, mass, largest, *scored)
        return scored
