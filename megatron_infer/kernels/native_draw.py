"""The draws of a step in C++ (native/sampling.cpp): one call for all rows, a full sort only where filters reach far."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_P, _I = ctypes.c_void_p, ctypes.c_int64
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NativeDraw:
    """The draws of `sampling.filters` for fp32 and bf16 logits on a CPU; the tokens are the same."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for dtype, suffix in _SUFFIXES.items():
            function = getattr(library, f"mi_draw_{suffix}")
            function.argtypes, function.restype = [_P, _I, _I, _I, _P, _P, _P, _P, _P, ctypes.c_int], None
            self._functions[dtype] = function

    def __call__(self, logits_MV: Tensor, columns_5M: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(token, largest logit, logit and id of the last candidate kept) of each row; rows may be strided.

        columns_5M: float64 1 / temperature, top_k (V when off), top_p, min_p, uniform. A row without a finite largest
        logit gives token 0. Where nothing was cut the last kept is (-inf, V).
        """
        rows, vocab = logits_MV.shape
        assert logits_MV.stride(1) == 1 and columns_5M.shape == (5, rows) and columns_5M.is_contiguous()
        token, cut_id = torch.empty(2, rows, dtype=torch.int64)
        top, cut_logit = torch.empty(2, rows)
        self._functions[logits_MV.dtype](
            logits_MV.data_ptr(),
            logits_MV.stride(0),
            rows,
            vocab,
            columns_5M.data_ptr(),
            token.data_ptr(),
            top.data_ptr(),
            cut_logit.data_ptr(),
            cut_id.data_ptr(),
            torch.get_num_threads(),
        )
        return token, top, cut_logit, cut_id
