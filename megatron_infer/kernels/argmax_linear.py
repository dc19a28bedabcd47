"""The largest outputs of a linear, found by a copy of its weight in 8 bits (native/int8.cpp).

A greedy token needs one logit of a vocabulary. Products with the 8-bit copy, half of a bf16 weight, bound every
output; a panel of the weight is multiplied only by tokens whose largest output can be there. What is multiplied has the
bits that `NativeOps.fp32_linear` gives, and every output left out is surely smaller: the argmax is the same.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_infer.kernels.native.native_call import bind, bind_threaded
from megatron_infer.kernels.packing import PackedLinears

LEAST_BYTES = 4 << 20
"""A smaller weight stays in the caches and is multiplied whole."""
LEAST_SAVED = 0.7
"""Share of the panels that must be left out, on the mean over the tokens where these are many; else the next `PAUSE`
products are whole."""
PAUSE = 64
_P, _I = ctypes.c_void_p, ctypes.c_int64


class ArgmaxLinear:
    """`fp32_linear` and `Argmax` of one dtype at once."""

    def __init__(self, library: ctypes.CDLL, suffix: str, packed: PackedLinears) -> None:
        self._packed = packed
        self._num_bytes = bind(library, "mi_bounds_bytes", [_I, _I], _I)
        self._pack = bind_threaded(library, f"mi_bounds_pack_{suffix}", [_P, _P, _I, _I])
        self._run = bind_threaded(library, f"mi_argmax_linear_{suffix}", [_P, _I, *[_P] * 4, *[_I] * 5], ctypes.c_int)
        self._panel_rows = int(library.mi_panel_rows())
        self._pause = 0

    def __call__(self, x_TX: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor] | None:
        """See `Ops.argmax_linear`; None also where x is not contiguous or of another dtype than the weight."""
        panels = self._packed.get(id(weight))
        if panels is None or weight.nbytes < LEAST_BYTES or self._pause:
            self._pause = max(0, self._pause - 1)
            return None
        if x_TX.dtype is not weight.dtype or not x_TX.is_contiguous():
            return None
        bounds = self._packed.derived(weight, lambda copy, memory: self._bounds_of(weight, copy, memory))
        tokens, inner = x_TX.shape
        most = int((1 - LEAST_SAVED) * -(-rows // self._panel_rows))
        token, bad = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.bool)
        if not self._run(x_TX, inner, panels, bounds, token, bad, tokens, inner, len(weight), rows, most):
            self._pause = PAUSE
            return None
        return token, bad

    def _bounds_of(self, weight: Tensor, panels: Tensor, memory: Tensor | None) -> Tensor:
        rows, inner = weight.shape
        size = self._num_bytes(inner, rows)
        if memory is None or len(memory) != size:
            memory = torch.empty(size, dtype=torch.uint8)
        self._pack(panels, memory, inner, rows)
        return memory
