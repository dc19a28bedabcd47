"""Products of LoRA adapters in C++ (native/lora.cpp): a token has the same bits alone and among others."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.kernels.cpu_native import SUFFIXES, bind
from megatron_infer.kernels.lora import LoRAWeights

_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Weights(ctypes.Structure):
    """LoraWeights in native/lora.cpp."""

    _fields_ = [
        *((name, _P) for name in ("a", "b", "rank", "scale")),
        *((n, _I) for n in ("max_rank", "inner", "rows")),
    ]


class _Step(ctypes.Structure):
    """LoraStep in native/lora.cpp."""

    _fields_ = [("token", _P), ("slot", _P), ("num_tokens", _I), ("threads", _I)]


@dataclass(slots=True, eq=False)
class _Native:
    struct: _Weights
    address: int


class NativeLoRA:
    """fp32 or bf16 on a CPU."""

    name = "native"
    graph_safe = False

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._add = bind(library, f"mi_lora_{SUFFIXES[dtype]}", [_P, _P, _P, _P, _I, _I])
        self._step = _Step()
        self.step_address = ctypes.addressof(self._step)
        """Of the step's plan in C."""
        self._sorted: tuple[Tensor, Tensor] | None = None
        """Tokens and slots, kept alive while the step points at them."""

    def plan(self, slot_T: Tensor) -> None:
        slots, tokens = slot_T.sort(stable=True)
        first = int((slots < 0).sum())
        self._sorted = slots, tokens = slots[first:].contiguous(), tokens[first:].int()
        step = self._step
        step.token, step.slot = tokens.data_ptr(), slots.data_ptr()
        step.num_tokens, step.threads = len(tokens), torch.get_num_threads()

    def run(self, y_TW: Tensor, x_TX: Tensor, weights: LoRAWeights) -> Tensor:
        address = self.address_of(weights)
        assert y_TW.dtype is x_TX.dtype is self._dtype, f"{y_TW.dtype}, {x_TX.dtype}"
        assert y_TW.stride(1) == 1 == x_TX.stride(1), "columns are contiguous"
        self._add(address, self.step_address, y_TW.data_ptr(), x_TX.data_ptr(), y_TW.stride(0), x_TX.stride(0))
        return y_TW

    def address_of(self, weights: LoRAWeights) -> int:
        """Address of the pairs in C, as long as the pairs live."""
        native: _Native = weights.native or self._native_of(weights)
        return native.address

    def _native_of(self, weights: LoRAWeights) -> _Native:
        a, b = weights.a_SRX, weights.b_SRW
        assert a.dtype is b.dtype is self._dtype and weights.rank_S.dtype is torch.int32
        struct = _Weights(
            a=a.data_ptr(),
            b=b.data_ptr(),
            rank=weights.rank_S.data_ptr(),
            scale=weights.scale_S.data_ptr(),
            max_rank=a.shape[1],
            inner=a.shape[2],
            rows=b.shape[2],
        )
        weights.native = native = _Native(struct, ctypes.addressof(struct))
        return native
