"""The scan in C++ (native/ssm.cpp): one call per layer for all rows, the same bits however a sequence is chunked."""

from __future__ import annotations

import ctypes
import struct
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.native.cpu_native import SUFFIXES, point_at
from megatron_infer.kernels.native.native_call import bind
from megatron_infer.kernels.ssm import LayerStates, RecurrentSpec, SsmWeights

MAX_STATE_DIM = 256
MAX_TAPS = 8
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _ScanStep(ctypes.Structure):
    """ScanStep in native/ssm.cpp."""

    _fields_ = [
        *((name, _I) for name in ("num_rows", "threads")),
        *((name, _P) for name in ("q_len", "kv_len", "cu_q", "table_row")),
        ("num_captures", _I),
        *((name, _P) for name in ("row", "num_tokens", "state_slot")),
    ]


class _ScanSpec(ctypes.Structure):
    """ScanSpec in native/ssm.cpp."""

    _fields_ = [
        *((name, _I) for name in ("num_heads", "head_dim", "state_dim", "num_groups", "conv_width", "is_delta")),
        *((name, ctypes.c_double) for name in ("dt_min", "dt_max")),
    ]


_CALL = struct.Struct("17q")
"""ScanCall in native/ssm.cpp; packed at once because every layer of every step does it."""


@dataclass(slots=True)
class _ScanKind:
    spec: RecurrentSpec
    struct: _ScanSpec
    address: int


class NativeScan:
    """The recurrence token by token, with the state in registers.

    A position's y and the state behind it have the same bits in a decode row, in any chunk, in a whole prompt, in any
    batch and with any number of threads; a capture holds the state of a chunk that ends there. This needs states that
    are stored without rounding: fp32 for the SSM state, fp32 or the inputs' dtype for the convolution's.
    """

    name = "native"
    graph_safe = False
    _step: StepMetadata

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._scan = bind(library, f"mi_scan_{SUFFIXES[dtype]}", [_P, _P, _P, _P])
        self._context = bind(library, "mi_scan_context_new", [], _P)()
        weakref.finalize(self, bind(library, "mi_scan_context_free", [_P]), self._context)
        self._step_struct = _ScanStep()
        self._step_address = ctypes.addressof(self._step_struct)
        self._call = ctypes.create_string_buffer(_CALL.size)
        self._call_address = ctypes.addressof(self._call)
        self._kinds: dict[int, _ScanKind] = {}
        self._num_used = 0

    def supports(
        self, spec: RecurrentSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        for what, got in (("inputs", dtype), ("convolution states", conv_dtype), ("SSM states", ssm_dtype)):
            if got not in SUFFIXES:
                return f"needs {what} of float32 or bfloat16, got {got}"
        if dtype is not self._dtype:
            return f"built for {self._dtype}, got {dtype}"
        if spec.state_dim > MAX_STATE_DIM:
            return f"needs state_dim up to {MAX_STATE_DIM}, got {spec.state_dim}"
        if spec.conv_width > MAX_TAPS:
            return f"needs conv_width up to {MAX_TAPS}, got {spec.conv_width}"
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step = step  # keeps the arrays alive whose addresses are taken below
        s = self._step_struct
        s.num_rows, s.threads, s.num_captures = step.num_rows, torch.get_num_threads(), len(step.captures.row)
        point_at(s, step, ("q_len", "kv_len", "cu_q", "table_row"))
        point_at(s, step.captures, ("row", "num_tokens", "state_slot"))
        self._num_used = int(step.cu_q[step.num_rows])

    def run(
        self, xBC_TC: Tensor, dt_TX: Tensor, states: LayerStates, weights: SsmWeights, spec: RecurrentSpec
    ) -> Tensor:
        step = self._step
        kind = self._kinds.get(id(spec)) or self._new_kind(spec)
        assert xBC_TC.dtype is self._dtype and dt_TX.dtype is self._dtype
        x_stride, x_last = xBC_TC.stride()
        dt_stride, dt_last = dt_TX.stride()
        if x_last != 1 or dt_last != 1:
            return self.run(xBC_TC.contiguous(), dt_TX.contiguous(), states, weights, spec)
        conv, ssm, bias, skip = states.conv_SCW, states.ssm_SHPN, weights.conv_bias_C, weights.skip_H
        for weight in (weights.conv_CW, weights.decay_H, weights.dt_bias_H, weights.decay_H if skip is None else skip):
            assert weight.dtype is torch.float32 and weight.is_contiguous(), "weights must be contiguous float32"
        y_TM = torch.empty(step.num_tokens, spec.inner_width, dtype=self._dtype)
        _CALL.pack_into(
            self._call,
            0,
            xBC_TC.data_ptr(),
            dt_TX.data_ptr(),
            y_TM.data_ptr(),
            conv.data_ptr(),
            ssm.data_ptr(),
            weights.conv_CW.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            weights.decay_H.data_ptr(),
            0 if skip is None else skip.data_ptr(),
            weights.dt_bias_H.data_ptr(),
            x_stride,
            dt_stride,
            conv.stride(0),
            ssm.stride(0),
            conv.dtype is torch.bfloat16,
            ssm.dtype is torch.bfloat16,
            skip is not None and skip.numel() != spec.num_heads,
        )
        self._scan(self._context, self._step_address, kind.address, self._call_address)
        if self._num_used < step.num_tokens:
            y_TM[self._num_used :] = 0  # padding tokens must not carry garbage (NaN) onwards
        return y_TM

    def _new_kind(self, spec: RecurrentSpec) -> _ScanKind:
        # A delta net has no step sizes that are clamped.
        packed = _ScanSpec(**{name: getattr(spec, name, 0) for name, _ in _ScanSpec._fields_})
        # Keyed by identity: hashing the dataclass would cost more than the rest of the call. The entry holds spec.
        kind = self._kinds[id(spec)] = _ScanKind(spec, packed, ctypes.addressof(packed))
        return kind
