"""Products of LoRA adapters in C++ (native/lora.cpp): a token has the same bits alone and among others."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels import huge_pages
from megatron_infer.kernels.lora import PackedPair, PairBlock
from megatron_infer.kernels.native.cpu_native import SUFFIXES
from megatron_infer.kernels.native.native_call import bind

COLUMNS = 32
"""Outputs of a linear in one block of B (kColumns in native/lora.cpp)."""
_BLOCK_FIELDS, _PACKING_FIELDS = 7, 10
"""Fields of the structs LoraBlock and LoraPacking in native/lora.cpp, 8 bytes each."""
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

    def __init__(self, num_slots: int, max_rank: int, width_in: int, width_out: int) -> None:
        self.width_in, self.width_out = width_in, width_out
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
        self._find_ranges = bind(library, f"mi_lora_find_ranges_{SUFFIXES[dtype]}", [_P, _I])
        self._pack = bind(library, f"mi_lora_pack_{SUFFIXES[dtype]}", [_P, _I])
        self._step = _Step()
        self.step_address = ctypes.addressof(self._step)
        """Of the step's plan in C."""
        self._sorted: tuple[Tensor, Tensor] | None = None
        """Tokens and slots, kept alive while the step points at them."""

    def pairs(
        self, num_slots: int, max_rank: int, width_in: int, width_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> NativePairs:
        assert dtype is self._dtype and device.type == "cpu", f"{dtype} on {device}"
        return NativePairs(num_slots, max_rank, width_in, width_out)

    def pack(self, given: Sequence[tuple[NativePairs, Sequence[PairBlock]]]) -> list[PackedPair | None]:
        """Each pair as (A, B in blocks of COLUMNS outputs by the ranks not zero there, the range of these per block).

        All are in one piece of memory, which two native calls find the size of and fill.
        """
        if not given:
            return []
        held = [(self._readable(a), self._readable(b), rows) for _, parts in given for a, b, rows in parts]
        blocks = np.empty((len(held), _BLOCK_FIELDS), np.int64)
        for block, (a, b, rows) in zip(blocks, held, strict=True):
            block[:3] = a.data_ptr(), b.data_ptr(), 0 if rows is None else rows.data_ptr()
            block[3:] = len(a), len(b), a.dtype is torch.bfloat16, b.dtype is torch.bfloat16
        shapes = [(sum(len(a) for a, _, _ in parts), pairs.width_in) for pairs, parts in given]
        counts = [-(-pairs.width_out // COLUMNS) for pairs, _ in given]
        ranges_C2 = torch.empty(sum(counts), 2, dtype=torch.int32)
        packings = np.zeros((len(given), _PACKING_FIELDS), np.int64)
        packings[:, 1] = [len(parts) for _, parts in given]
        packings[:, 0] = blocks.ctypes.data + (packings[:, 1].cumsum() - packings[:, 1]) * blocks.strides[0]
        packings[:, 2:4], packings[:, 4] = shapes, [pairs.width_out for pairs, _ in given]
        packings[:, 5] = ranges_C2.data_ptr() + (np.cumsum(counts) - counts) * ranges_C2[:1].nbytes
        self._find_ranges(packings.ctypes.data, len(packings))
        lengths = np.stack([packings[:, 2] * packings[:, 3], packings[:, 8] * COLUMNS], axis=1)
        padded = -(-lengths // COLUMNS) * COLUMNS  # each begins at a cache line
        starts = padded.cumsum().reshape(padded.shape) - padded
        packed = huge_pages.empty(int(padded.sum()), self._dtype)
        packings[:, 6:8] = packed.data_ptr() + starts * packed.itemsize
        self._pack(packings.ctypes.data, len(packings))
        found: list[PackedPair | None] = []
        parts = zip(shapes, starts.tolist(), lengths.tolist(), ranges_C2.split(counts), packings[:, 9], strict=True)
        for shape, (a, b), (num_a, num_b), ranges, is_finite in parts:
            a_RX, blocks_nC = packed[a : a + num_a].view(shape), packed[b : b + num_b].view(-1, COLUMNS)
            found.append((a_RX, blocks_nC, ranges) if is_finite else None)
        return found

    def _readable(self, tensor: Tensor) -> Tensor:
        """On the host, in a dtype and order that the native calls read."""
        dtype = tensor.dtype if tensor.dtype in SUFFIXES else self._dtype
        return tensor.detach().to("cpu", dtype).contiguous()

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
