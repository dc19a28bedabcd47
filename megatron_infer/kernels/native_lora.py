"""Products of LoRA adapters in C++ (native/lora.cpp): a token has the same bits alone and among others."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.cpu_native import SUFFIXES, bind
from megatron_infer.kernels.lora import PackedPair

COLUMNS = 32
"""Outputs of a linear in one block of B (kColumns in native/lora.cpp)."""
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Weights(ctypes.Structure):
    """LoraWeights in native/lora.cpp."""

    _fields_ = [
        *((name, _P) for name in ("a", "b", "ranges", "rank", "scale")),
        *((n, _I) for n in ("max_rank", "inner", "rows")),
    ]


class _Step(ctypes.Structure):
    """LoraStep in native/lora.cpp."""

    _fields_ = [("token", _P), ("slot", _P), ("num_tokens", _I), ("threads", _I)]


class NativePairs:
    """The pairs of all adapter slots for one linear. A slot points at packed tensors: nothing is copied."""

    def __init__(self, num_slots: int, max_rank: int, width_in: int, width_out: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held: list[PackedPair] = [()] * num_slots
        self._pointers = [(_P * num_slots)() for _ in range(3)]
        """Of each slot's A, B and ranges."""
        self._rank_S, self._scale_S = (ctypes.c_int32 * num_slots)(), (ctypes.c_float * num_slots)()
        arrays = (*self._pointers, self._rank_S, self._scale_S)
        self._struct = _Weights(*map(ctypes.addressof, arrays), max_rank=max_rank, inner=width_in, rows=width_out)
        self.address = ctypes.addressof(self._struct)
        """Of the pairs in C."""

    @property
    def num_pairs(self) -> int:
        return sum(map(bool, self._held))

    def pack(self, a_RX: Tensor, b_WR: Tensor) -> PackedPair:
        """(A, B in blocks of COLUMNS outputs by the ranks with entries there, these ranks of each block)."""
        width, rank = b_WR.shape
        num_blocks = -(-width // COLUMNS)
        b_WR = F.pad(b_WR.to(self._dtype), (0, 0, 0, num_blocks * COLUMNS - width))
        b_CRW = b_WR.view(num_blocks, COLUMNS, rank).transpose(1, 2).contiguous()
        used_CR = b_CRW.bool().any(dim=2).numpy()
        first_C, end_C = used_CR.argmax(axis=1), rank - used_CR[:, ::-1].argmax(axis=1)
        ranges_C2 = np.stack([first_C, end_C], axis=1) * used_CR.any(axis=1)[:, None]
        ranks_R = np.arange(rank)
        inside_CR = (ranks_R >= ranges_C2[:, :1]) & (ranks_R < ranges_C2[:, 1:])
        blocks = b_CRW[torch.from_numpy(inside_CR)]
        return a_RX.to(self._dtype, copy=True).contiguous(), blocks, torch.from_numpy(ranges_C2.astype(np.int32))

    def put(self, slot: int, pair: PackedPair, scale: float) -> None:
        for pointers, tensor in zip(self._pointers, pair, strict=True):
            pointers[slot] = tensor.data_ptr()
        self._held[slot], self._rank_S[slot], self._scale_S[slot] = pair, len(pair[0]), scale

    def clear(self, slot: int) -> None:
        self._held[slot], self._rank_S[slot] = (), 0


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

    def pairs(
        self, num_slots: int, max_rank: int, width_in: int, width_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> NativePairs:
        assert dtype is self._dtype and device.type == "cpu", f"{dtype} on {device}"
        return NativePairs(num_slots, max_rank, width_in, width_out, dtype)

    def plan(self, slot_T: Tensor) -> None:
        slots, tokens = slot_T.sort(stable=True)
        first = int((slots < 0).sum())
        self._sorted = slots, tokens = slots[first:].contiguous(), tokens[first:].int()
        step = self._step
        step.token, step.slot = tokens.data_ptr(), slots.data_ptr()
        step.num_tokens, step.threads = len(tokens), torch.get_num_threads()

    def run(self, y_TW: Tensor, x_TX: Tensor, pairs: NativePairs) -> Tensor:
        assert y_TW.dtype is x_TX.dtype is self._dtype, f"{y_TW.dtype}, {x_TX.dtype}"
        assert y_TW.stride(1) == 1 == x_TX.stride(1), "columns are contiguous"
        self._add(pairs.address, self.step_address, y_TW.data_ptr(), x_TX.data_ptr(), y_TW.stride(0), x_TX.stride(0))
        return y_TW
