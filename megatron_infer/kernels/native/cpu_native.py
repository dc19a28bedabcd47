"""Linears, norms and paged attention in C++ (native/*.cpp) for fp32 and bf16 on a CPU, called with pointers."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.activations import GEGLU, form_of
from megatron_infer.kernels.argmax_linear import ArgmaxLinear
from megatron_infer.kernels.base import NO_INDEXER, AttendSpec, StepMetadata
from megatron_infer.kernels.experts import RoutingRules
from megatron_infer.kernels.kv_rounding import only_own_dtype
from megatron_infer.kernels.native.native_call import bind, bind_threaded
from megatron_infer.kernels.native.native_experts import NativeRouter
from megatron_infer.kernels.packing import PackedLayout, PackedLinears
from megatron_infer.kernels.torch.cpu_torch import TorchOps
from megatron_infer.kernels.weight_dtypes import WEIGHT_DTYPE_BYTES

LINEAR_TOKENS = 32
"""Up to this many tokens the C++ linear, which streams the live weight, is faster than `F.linear` (measured)."""
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
FP32_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16_f32"}
"""Suffixes of the linear kernels that store their fp32 sums."""
MAX_HEAD_DIM = 704
MAX_NORM_GROUP = 16384
"""Channels of one gated norm, whose products native/elementwise.cpp keeps on the stack."""
PANELS = "native panels"
QUANTISED_PANELS = {name: f"{PANELS}, {name}" for name in WEIGHT_DTYPE_BYTES}
"""weight_dtype -> layout of weights that are rounded to it."""
KERNELS = {PANELS: "mi_panel_linear"} | {layout: f"mi_{name}_linear" for name, layout in QUANTISED_PANELS.items()}
"""Layout of packed weights -> the linear that reads it, without its dtype."""
_P, _I = ctypes.c_void_p, ctypes.c_int64


def point_at(struct: ctypes.Structure, owner: Any, names: Sequence[str]) -> None:
    """Set fields of a C struct to the addresses of `owner`'s int32 arrays; the caller keeps the arrays alive."""
    for name in names:
        array = getattr(owner, name)
        assert array.dtype == np.int32 and array.flags.c_contiguous, f"{name} must be contiguous int32"
        setattr(struct, name, array.ctypes.data)


def panel_layout(library: ctypes.CDLL, dtype: torch.dtype, *, may_compact: bool = True) -> PackedLayout:
    """Weights in panels for `NativeOps.linear`.

    may_compact: weights of bfloat16 take 12 bits a value where that is possible (native/packed_weight.h).
    """
    suffix = SUFFIXES[dtype]
    function = bind_threaded(library, f"mi_pack_{suffix}", [_P, _P, _I, _I, ctypes.c_int], ctypes.c_uint64)
    num_bytes = bind(library, f"mi_packed_bytes_{suffix}", [_I, _I, ctypes.c_int], _I)
    fits_compact = bind_threaded(library, f"mi_fits_compact_{suffix}", [_P, _I, _I], ctypes.c_int)
    unpacks = bind_threaded(library, f"mi_unpack_{suffix}", [_P, _P, _I, _I])

    def size_of(weight: Tensor, is_compact: bool) -> int:
        rows, inner = weight.shape
        return int(num_bytes(inner, rows, is_compact)) // dtype.itemsize

    def num_elements(weight: Tensor) -> int:
        rows, inner = weight.shape
        return size_of(weight, may_compact and bool(fits_compact(weight.contiguous(), inner, rows)))

    def pack(weight: Tensor, panels: Tensor | None) -> tuple[Tensor, int | None]:
        weight = weight.contiguous()
        rows, inner = weight.shape
        if panels is None or panels.numel() not in (size_of(weight, False), size_of(weight, True)):
            panels = torch.empty(num_elements(weight), dtype=dtype)
        is_compact = panels.numel() == size_of(weight, True) != size_of(weight, False)
        checksum = function(weight, panels, inner, rows, is_compact)
        if ctypes.c_uint64.from_address(panels.data_ptr() + 8).value:  # it changed since its size was asked for
            return pack(weight, torch.empty(size_of(weight, False), dtype=dtype))
        return panels, int(checksum)

    def unpack(panels: Tensor, weight: Tensor) -> None:
        rows, inner = weight.shape
        unpacks(panels, weight, inner, rows)

    # bf16 is multiplied in pairs along the inner dimension.
    return PackedLayout(
        name=PANELS,
        takes=lambda weight: weight.dtype is dtype and weight.shape[1] % 2 == 0,
        pack=pack,
        num_elements=num_elements,
        unpack=unpack,
    )


def quantised_layout(library: ctypes.CDLL, dtype: torch.dtype, weight_dtype: str) -> PackedLayout:
    """Weights of `dtype` in the codes of `weight_dtype` (native/int8.cpp, int4.cpp), on any CPU."""
    name = f"mi_{weight_dtype}_pack_{SUFFIXES[dtype]}"
    function = bind_threaded(library, name, [_P, _P, _I, _I], ctypes.c_uint64)
    num_bytes = bind(library, f"mi_{weight_dtype}_bytes", [_I, _I], _I)

    def num_elements(weight: Tensor) -> int:
        rows, inner = weight.shape
        return int(num_bytes(inner, rows))

    def pack(weight: Tensor, panels: Tensor | None) -> tuple[Tensor, int | None]:
        weight = weight.contiguous()
        rows, inner = weight.shape
        size = num_elements(weight)
        if panels is None or panels.numel() != size:
            panels = torch.empty(size, dtype=torch.uint8)
        return panels, int(function(weight, panels, inner, rows))

    return PackedLayout(
        name=QUANTISED_PANELS[weight_dtype],
        takes=lambda weight: weight.dtype is dtype,
        pack=pack,
        num_elements=num_elements,
        dtype=torch.uint8,
    )


LINEAR_ARGUMENTS = [_P, _I, _P, _P, _P, _I, _I, _I, ctypes.c_int]


def panel_linear(library: ctypes.CDLL, suffix: str, layout: PackedLayout) -> Callable[..., Any] | None:
    """The linear that reads weights in `layout`; None: there is none here."""
    kernel = KERNELS.get(layout.name)
    return None if kernel is None else bind(library, f"{kernel}_{suffix}", LINEAR_ARGUMENTS)


class LinearKernels:
    """The kernels of linears with outputs of one dtype."""

    def __init__(self, library: ctypes.CDLL, suffix: str, copies: PackedLinears, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """The dtype of the outputs."""
        self.live = bind(library, f"mi_linear_{suffix}", LINEAR_ARGUMENTS)
        """Reads the weight itself."""
        self.panels = panel_linear(library, suffix, copies.layout)
        self.output_panels = panel_linear(library, suffix, copies.output_layout)
        """Read packed copies; None: those are not ours."""

    def run(self, kernel: Callable[..., Any], x_TX: Tensor, source: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        """kernel: one of the above, which reads `source` -> [T, rows]. All are contiguous."""
        tokens, inner = x_TX.shape
        out = torch.empty(tokens, rows, dtype=self.dtype)
        kernel(
            x_TX.data_ptr(),
            inner,
            source.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            inner,
            rows,
            torch.get_num_threads(),
        )
        return out


def argmax_linear(library: ctypes.CDLL, suffix: str, packed: PackedLinears | None) -> ArgmaxLinear | None:
    """None: for weights in another layout."""
    is_for = packed is not None and packed.layout.name == PANELS
    return ArgmaxLinear(library, suffix, packed) if is_for and packed is not None else None


class NativeOps(TorchOps):
    """C++ norms, activation and linears for one dtype; `TorchOps` runs the rest."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, packed: PackedLinears | None = None) -> None:
        super().__init__(packed)
        suffix = SUFFIXES[dtype]
        self._dtype = dtype
        norm_arguments = [_P, _P, _P, _P, _I, _I, ctypes.c_float, ctypes.c_int, ctypes.c_int]
        self._rms_norm = bind(library, f"mi_rms_norm_{suffix}", norm_arguments)
        self._rms_norm_wide = bind(library, f"mi_rms_norm_wide_{suffix}", norm_arguments)
        self._silu_mul = bind(library, f"mi_silu_mul_{suffix}", [_P, _P, _I, _I, ctypes.c_int])
        self._gelu_mul = bind(library, f"mi_gelu_mul_{suffix}", [_P, _P, _I, _I, ctypes.c_int])
        self._softcap = bind(library, "mi_softcap", [_P, _I, ctypes.c_float, ctypes.c_int])
        self._sigmoid_mul = bind(library, f"mi_sigmoid_mul_{suffix}", [_P, _P, _I, _P, _I, _I, ctypes.c_int])
        gated_arguments = [_P, _P, _I, _P, _P, _I, _I, _I, ctypes.c_float, ctypes.c_int]
        self._gated_rms_norm = bind(library, f"mi_gated_rms_norm_{suffix}", gated_arguments)
        latent_arguments = [_P, _P, _I, _P, *[_I] * 5, ctypes.c_int]
        self._into_latent = bind(library, f"mi_into_latent_{suffix}", latent_arguments)
        self._out_of_latent = bind(library, f"mi_out_of_latent_{suffix}", latent_arguments)
        self._copies = packed or PackedLinears()
        self._own = LinearKernels(library, suffix, self._copies, dtype)
        self._fp32 = LinearKernels(library, FP32_SUFFIXES[dtype], self._copies, torch.float32)
        self.argmax_linear = argmax_linear(library, suffix, packed)
        self._router = NativeRouter(library)
        self._select = bind_threaded(library, f"mi_select_rows_{suffix}", [_P, _P, _P, _I, _I, _I], ctypes.c_int)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """From the packed copy where the weight is freed. Raises IndexError for ids beyond its rows."""
        data = weight.detach()  # which keeps its memory meanwhile
        packed = None if any(data.stride()) else self._copies.get(id(weight))
        if packed is None:
            return super().embedding(ids, data)
        which, (rows, width) = ids.to(torch.int64).contiguous(), weight.shape
        out = torch.empty(*ids.shape, width, dtype=weight.dtype)
        if not self._select(packed, which, out, which.numel(), width, rows):
            raise IndexError(f"token ids of {int(which.min())} to {int(which.max())}, the embedding has {rows:,} rows")
        return out

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """From packed panels; without them oneDNN, the C++ linear for few tokens, or `F.linear`."""
        found = self._product(self._own, x_TX, weight, bias, weight.shape[0])
        return super().linear(x_TX, weight, bias) if found is None else found

    def fp32_linear(self, x_SX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        """With the order of sums of `linear`."""
        found = self._product(self._fp32, x_SX, weight, bias, rows)
        return super().fp32_linear(x_SX, weight, bias, rows) if found is None else found

    def _product(
        self, kernels: LinearKernels, x_TX: Tensor, weight: Tensor, bias: Tensor | None, rows: int
    ) -> Tensor | None:
        """By the first rows of the weight; None: there is no kernel for it."""
        packed = self._packed_of(id(weight))
        if packed is None:
            source, function = weight, kernels.live if x_TX.shape[0] <= LINEAR_TOKENS else None
        else:
            is_output = id(weight) == self._copies.output_id
            source, function = packed, kernels.output_panels if is_output else kernels.panels
        if function is None:
            return None
        known = x_TX.ndim == 2 and self._ours(x_TX, weight if packed is None else x_TX)
        if not known or not (bias is None or self._ours(x_TX, bias)):
            return None if packed is None else self._converted(kernels, x_TX, weight, bias, rows)
        return kernels.run(function, x_TX, source, bias, rows)

    def _converted(
        self, kernels: LinearKernels, x_TX: Tensor, weight: Tensor, bias: Tensor | None, rows: int
    ) -> Tensor | None:
        """`_product` for other forms of inputs, by the packed copy, which may be all there is of the weight."""
        x = x_TX.reshape(-1, x_TX.shape[-1]).to(self._dtype).contiguous()
        bias = None if bias is None else bias.to(self._dtype).contiguous()
        found = self._product(kernels, x, weight, bias, rows)
        return None if found is None else found.view(*x_TX.shape[:-1], rows)

    def _ours(self, a: Tensor, b: Tensor) -> bool:
        dtype = self._dtype
        return a.dtype is dtype and b.dtype is dtype and a.is_contiguous() and b.is_contiguous()

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        if not self._ours(x_TD, weight):
            return super().rms_norm(x_TD, weight, eps, zero_centered=zero_centered)
        out = torch.empty_like(x_TD)
        dim = x_TD.shape[-1]
        self._rms_norm(
            x_TD.data_ptr(),
            None,
            weight.data_ptr(),
            out.data_ptr(),
            x_TD.numel() // dim,
            dim,
            eps,
            zero_centered,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        wide = residual_TD.dtype is torch.float32
        if (
            not self._ours(x_TD, weight)
            or not residual_TD.is_contiguous()
            or not (wide or residual_TD.dtype is self._dtype)
        ):
            return super().add_rms_norm(x_TD, residual_TD, weight, eps, zero_centered=zero_centered)
        out = torch.empty_like(x_TD)
        dim = x_TD.shape[-1]
        (self._rms_norm_wide if wide else self._rms_norm)(
            x_TD.data_ptr(),
            residual_TD.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x_TD.numel() // dim,
            dim,
            eps,
            zero_centered,
            torch.get_num_threads(),
        )
        return out, residual_TD

    def route(
        self, logits_TE: Tensor, bias_E: Tensor | None, rules: RoutingRules, formula: Callable[[Tensor], Any]
    ) -> tuple[Tensor, Tensor]:
        """A token has the same bits alone and among others where the kernel runs, as it does for logits in float32."""
        found = self._router.choose(logits_TE, bias_E, rules)
        return self.rowwise(formula, logits_TE) if found is None else found

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        return self._gated(self._silu_mul, x_T2F) if self._ours(x_T2F, x_T2F) else super().silu_mul(x_T2F)

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        if form_of(function) == GEGLU and self._ours(x_TX, x_TX):
            return self._gated(self._gelu_mul, x_TX)
        return super().rowwise(function, x_TX)

    def _gated(self, kernel: Callable[..., Any], x_T2F: Tensor) -> Tensor:
        tokens, width = x_T2F.numel() // x_T2F.shape[-1], x_T2F.shape[-1] // 2
        out = x_T2F.new_empty(*x_T2F.shape[:-1], width)
        kernel(x_T2F.data_ptr(), out.data_ptr(), tokens, width, torch.get_num_threads())
        return out

    def into_latent(self, q_TNX: Tensor, weight_NHL: Tensor) -> Tensor:
        """From the live weight; a token has the same bits alone and among others."""
        if not self._reads_heads(q_TNX, weight_NHL):
            return super().into_latent(q_TNX, weight_NHL)
        (tokens, heads, given), (_, width, latent) = q_TNX.shape, weight_NHL.shape
        out = torch.empty(tokens, heads, given - width + latent, dtype=self._dtype)
        self._per_head(self._into_latent, q_TNX, weight_NHL, out, given - width)
        return out

    def out_of_latent(self, x_TNL: Tensor, weight_NVL: Tensor) -> Tensor:
        """From the live weight; a token has the same bits alone and among others."""
        if not self._reads_heads(x_TNL, weight_NVL):
            return super().out_of_latent(x_TNL, weight_NVL)
        out = torch.empty(len(x_TNL), weight_NVL.shape[0] * weight_NVL.shape[1], dtype=self._dtype)
        self._per_head(self._out_of_latent, x_TNL, weight_NVL, out, 0)
        return out

    def _reads_heads(self, x_TNX: Tensor, weight_NXL: Tensor) -> bool:
        heads_are_whole = weight_NXL.stride()[1:] == (weight_NXL.shape[2], 1)
        same = x_TNX.dtype is weight_NXL.dtype is self._dtype
        return same and x_TNX.is_contiguous() and heads_are_whole and weight_NXL.shape[2] % 16 == 0

    def _per_head(
        self, kernel: Callable[..., Any], x_TNX: Tensor, weight_NXL: Tensor, out: Tensor, rotary: int
    ) -> None:
        tokens, (heads, width, latent) = len(x_TNX), weight_NXL.shape
        kernel(
            x_TNX.data_ptr(),
            weight_NXL.data_ptr(),
            weight_NXL.stride(0),
            out.data_ptr(),
            tokens,
            heads,
            width,
            rotary,
            latent,
            torch.get_num_threads(),
        )

    def softcap(self, x_SV: Tensor, cap: float) -> Tensor:
        if x_SV.dtype is not torch.float32 or not x_SV.is_contiguous():
            return super().softcap(x_SV, cap)
        self._softcap(x_SV.data_ptr(), x_SV.numel(), cap, torch.get_num_threads())
        return x_SV

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        """A token has the same bits alone and among others."""
        if (
            not self._ours(y_TM, y_TM if weight is None else weight)
            or gate_TM.dtype is not self._dtype
            or gate_TM.stride(-1) != 1
            or group_size > MAX_NORM_GROUP
        ):
            return super().gated_rms_norm(y_TM, gate_TM, weight, eps, group_size=group_size)
        tokens, width = y_TM.shape
        assert gate_TM.shape == y_TM.shape and width % group_size == 0
        out = torch.empty_like(y_TM)
        self._gated_rms_norm(
            y_TM.data_ptr(),
            gate_TM.data_ptr(),
            gate_TM.stride(0),
            None if weight is None else weight.data_ptr(),
            out.data_ptr(),
            tokens,
            width,
            group_size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def sigmoid_mul(self, x_TM: Tensor, gate_TM: Tensor) -> Tensor:
        """A token has the same bits alone and among others."""
        if not self._ours(x_TM, x_TM) or gate_TM.dtype is not self._dtype or gate_TM.stride(-1) != 1:
            return super().sigmoid_mul(x_TM, gate_TM)
        out, (tokens, width) = torch.empty_like(x_TM), x_TM.shape
        where = x_TM.data_ptr(), gate_TM.data_ptr(), gate_TM.stride(0), out.data_ptr()
        self._sigmoid_mul(*where, tokens, width, torch.get_num_threads())
        return out


def native_checksums(library: ctypes.CDLL, tensors: Sequence[Tensor]) -> list[int]:
    """`native_checksum` of each."""
    return [native_checksum(library, tensor) for tensor in tensors]


def native_checksum(library: ctypes.CDLL, tensor: Tensor) -> int:
    """64-bit order-sensitive checksum of a CPU tensor's bytes, at memory speed."""
    function = bind_threaded(library, "mi_checksum", [_P, _I], ctypes.c_uint64)
    return int(function(tensor.detach().contiguous(), tensor.nbytes))


class AttentionStep(ctypes.Structure):
    """Step in native/attention.h."""

    _fields_ = [
        *((name, _I) for name in ("num_tokens", "num_rows", "num_decode", "threads")),
        *((name, _P) for name in ("q_len", "kv_len", "cu_q", "table_row", "num_prompt_queries", "block_table")),
        ("table_stride", _I),
        *((name, _P) for name in ("kv_pos", "cos", "sin")),
        ("rotary_stride", _I),
        ("elsewhere", _P),
    ]


class AttentionSpec(ctypes.Structure):
    """Spec in native/attention.h."""

    _fields_ = [
        *((n, _I) for n in ("num_kv", "group", "head_dim", "block_size", "rotary_dim", "interleaved", "window")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, _I) for name in ("rotary_at", "value_dim")),
        ("sinks", _P),
        ("sinks_fp32", _I),
        ("key_stride", _I),
    ]


CALL = struct.Struct("13q")
"""Call in native/attention.h; packed at once because every layer of every step does it."""


@dataclass(slots=True)
class _AttentionKind:
    spec: AttendSpec
    struct: AttentionSpec
    address: int
    width: int


class NativePagedAttention:
    """Rotation, cache append and attention of all rows in one C++ call per layer."""

    name = "native"
    graph_safe = False
    _step: StepMetadata

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._attend = bind(library, f"mi_attend_{SUFFIXES[dtype]}", [_P, _P, _P, _P])
        self.context = bind(library, "mi_context_new", [], _P)()
        weakref.finalize(self, bind(library, "mi_context_free", [_P]), self.context)
        self._step_struct = AttentionStep()
        self.step_address = ctypes.addressof(self._step_struct)
        self._call = ctypes.create_string_buffer(CALL.size)
        self._call_address = ctypes.addressof(self._call)
        self._kinds: dict[int, _AttentionKind] = {}
        self.num_padding = 0
        """Tokens of the planned step behind those of its rows."""

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if dtype not in SUFFIXES:
            return f"needs float32 or bfloat16, got {dtype}"
        if dtype is not self._dtype:
            return f"built for {self._dtype}, got {dtype}"
        if (reason := only_own_dtype(dtype, kv_dtype)) is not None:
            return reason
        if spec.index is not None:
            return NO_INDEXER
        if spec.query_dim % 16 or spec.query_dim > MAX_HEAD_DIM:
            return f"needs head_dim a multiple of 16 up to {MAX_HEAD_DIM}, got {spec.query_dim}"
        if spec.scale <= 0:
            return f"needs a positive scale, got {spec.scale}"
        if spec.softcap is not None and spec.softcap <= 0:
            return f"needs a positive softcap, got {spec.softcap}"
        sinks = spec.sinks_N
        if sinks is not None and not (sinks.dtype in (torch.float32, dtype) and sinks.is_contiguous()):
            return f"needs contiguous sinks of float32 or {dtype}, got {sinks.dtype}"
        if spec.rotary_dim % 2 or spec.rotary_dim > spec.head_dim:
            return f"needs an even rotary_dim up to head_dim, got {spec.rotary_dim}"
        if spec.value_start is not None and (spec.value_dim % 16 or not spec.value_start):
            return f"needs a rotary part, and latents of a multiple of 16, got {spec.value_start} and {spec.value_dim}"
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step = step  # keeps the arrays alive whose addresses are taken below
        s = self._step_struct
        s.num_tokens, s.num_rows, s.num_decode = step.num_tokens, step.num_rows, step.num_decode
        s.threads = torch.get_num_threads()
        point_at(s, step, ("q_len", "kv_len", "cu_q", "table_row", "num_prompt_queries"))
        assert step.block_table.dtype is torch.int32 and step.kv_pos_T.dtype is torch.int64
        assert step.block_table.stride(1) == 1 and step.kv_pos_T.is_contiguous()
        s.block_table, s.table_stride = step.block_table.data_ptr(), step.block_table.stride(0)
        s.kv_pos, s.elsewhere = step.kv_pos_T.data_ptr(), None
        if step.cos_TR is None or step.sin_TR is None:
            s.cos = s.sin = None
        else:
            assert step.cos_TR.dtype is self._dtype and step.cos_TR.stride() == step.sin_TR.stride()
            s.cos, s.sin = step.cos_TR.data_ptr(), step.sin_TR.data_ptr()
            s.rotary_stride = step.cos_TR.stride(0)
        self.num_padding = step.num_tokens - int(step.cu_q[step.num_rows])

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        kind = self.kind_of(spec, kv_cache.shape[3])
        assert q_TKGH.dtype is self._dtype and kv_cache.dtype is self._dtype
        q_token, q_kv, q_group, q_last = q_TKGH.stride()
        k_token, k_head, k_last = k_TKH.stride()
        v_token, v_head, v_last = v_TKH.stride()
        if q_last != 1 or k_last != 1 or v_last != 1:
            return self.run(
                q_TKGH.contiguous(), k_TKH.contiguous(), v_TKH.contiguous(), kv_cache, layer=layer, spec=spec
            )
        out = torch.empty(q_TKGH.shape[0], kind.width, dtype=self._dtype)
        layer_stride, plane_stride = kv_cache.stride()[:2]
        item = kv_cache.itemsize
        keys = kv_cache.data_ptr() + layer * layer_stride * item
        to_values = plane_stride if spec.value_start is None else spec.value_start
        CALL.pack_into(
            self._call,
            0,
            q_TKGH.data_ptr(),
            k_TKH.data_ptr(),
            v_TKH.data_ptr(),
            out.data_ptr(),
            keys,
            keys + to_values * item,
            q_token,
            q_kv,
            q_group,
            k_token,
            k_head,
            v_token,
            v_head,
        )
        self._attend(self.context, self.step_address, kind.address, self._call_address)
        if self.num_padding:
            out[-self.num_padding :] = 0  # padding tokens must not carry garbage (NaN) onwards
        return out

    def kind_of(self, spec: AttendSpec, block_size: int) -> _AttentionKind:
        """The C struct of a layer's parameters, which lives as long as this object.

        It holds the address of the layer's sinks: to be asked for again where that may have changed.
        """
        kind = self._kinds.get(id(spec)) or self._new_kind(spec, block_size)
        if spec.sinks_N is not None:
            kind.struct.sinks = spec.sinks_N.data_ptr()
        return kind

    def _new_kind(self, spec: AttendSpec, block_size: int) -> _AttentionKind:
        packed = AttentionSpec(
            num_kv=spec.num_kv_heads,
            group=spec.group_size,
            head_dim=spec.query_dim,
            key_stride=spec.head_dim,
            block_size=block_size,
            rotary_dim=spec.rotary_dim,
            interleaved=int(spec.rotary_interleaved),
            window=spec.window or 0,
            value_dim=spec.value_dim,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            rotary_at=spec.rotary_at,
            sinks_fp32=int(spec.sinks_N is not None and spec.sinks_N.dtype is torch.float32),
        )
        width = spec.num_kv_heads * spec.group_size * spec.value_dim
        # Keyed by identity: hashing the dataclass would cost more than the rest of the call. The entry holds spec.
        kind = self._kinds[id(spec)] = _AttentionKind(spec, packed, ctypes.addressof(packed), width)
        return kind
