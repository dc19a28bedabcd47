"""Mamba-2's convolution and scan in Triton behind the seam of kernels/ssm.py: decode rows, slices, captures.

A step of decode rows alone is two launches a layer; slices add three, captures one. Everything is found on the device
from the step's mirrors, grids follow from the shape of the step, so that it can be captured in a graph and replayed.
Only captures come from the host: `plan` copies them once a step, and such a step is not replayed.
x, B and C are rounded to the inputs' dtype behind the convolution. Not yet run on a GPU.

One long prompt of few heads does not fill a large GPU: a slice's chunks are walked one after the other, in parallel
are num_rows * num_heads * cdiv(head_dim, BLOCK_P) programs.
Legend: `kernels/ssm.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from megatron_infer.kernels.base import StateCaptures, StepMetadata
from megatron_infer.kernels.ssm import LayerStates, SsmSpec, SsmWeights
from megatron_infer.kernels.triton import conv
from megatron_infer.kernels.triton.launch import DTYPES, AotVariant, launch
from megatron_infer.kernels.triton.launch import unavailable as triton_unavailable
from megatron_infer.kernels.triton.scan_kernels import scan_decode, scan_slices

MAX_STATE_DIM = 256
DECODE_TILE = 4096
"""Entries of the state a decode program updates: 32 registers a thread of 4 warps."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `make` would not work here; None: it does."""
    if dtype not in DTYPES:
        return f"needs float32, bfloat16 or float16, got {dtype}"
    return triton_unavailable(device)


def make(device: torch.device, dtype: torch.dtype) -> TritonScan:
    return TritonScan()


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a scan kernel's work is cut; the same for every step of an engine, as the bits of a row must be."""

    block_p: int
    block_n: int
    chunk: int
    num_warps: int


def decode_tiles(head_dim: int, state_dim: int) -> Tiles:
    block_n = max(16, triton.next_power_of_2(state_dim))
    block_p = min(max(1, DECODE_TILE // block_n), triton.next_power_of_2(head_dim))
    return Tiles(block_p, block_n, 1, 4 if block_p * block_n >= 2048 else 1)


def slice_tiles(head_dim: int, state_dim: int, dtype: torch.dtype, *, captures: bool) -> Tiles:
    """What keeps the state and a chunk's products in registers, as compiled for sm_80, sm_90 and sm_100.

    Operands of tl.dot have 16 entries at least in every direction.
    """
    block_n = max(16, triton.next_power_of_2(state_dim))
    whole = max(16, triton.next_power_of_2(head_dim))
    if dtype is torch.float32:
        return Tiles(16, block_n, 16, 8)
    if block_n > 128:
        return Tiles(min(32, whole), block_n, 32, 8)
    return Tiles(min(16 if captures else 32, whole), block_n, 64, 8)


@dataclass(slots=True)
class _Captures:
    """On the device: int32 [*, 3] (row, num_tokens, slot), and [R + 1] the first one of each row."""

    captures_E3: Tensor
    first_R1: Tensor


def _upload(captures: StateCaptures, num_rows: int, device: torch.device) -> _Captures:
    """One copy, which nobody waits for."""
    first = np.searchsorted(captures.row, np.arange(num_rows + 1)).astype(np.int32)
    rows = np.stack((captures.row, captures.num_tokens, captures.state_slot), axis=1).astype(np.int32)
    both = torch.from_numpy(np.concatenate((rows.ravel(), first)))
    if device.type == "cuda":
        both = both.pin_memory()
    both = both.to(device, non_blocking=True)
    return _Captures(both[: rows.size].view(-1, 3), both[rows.size :])


class TritonScan:
    """Where a step's tokens lie is worked out once by `plan`, on the device, and shared by all layers."""

    name = "triton"
    graph_safe = True

    def __init__(self) -> None:
        self._step: StepMetadata | None = None
        self._row_T: Tensor | None = None
        """Whose each token is; None: the step has decode rows alone."""
        self._captures: _Captures | None = None

    def supports(
        self, spec: SsmSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        for what, got in (("inputs", dtype), ("convolution states", conv_dtype), ("SSM states", ssm_dtype)):
            if got not in DTYPES:
                return f"needs {what} of float32, bfloat16 or float16, got {got}"
        if spec.state_dim > MAX_STATE_DIM:
            return f"needs state_dim up to {MAX_STATE_DIM}, got {spec.state_dim}"
        if spec.conv_width > conv.MAX_TAPS:
            return f"needs conv_width up to {conv.MAX_TAPS}, got {spec.conv_width}"
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step, self._row_T, self._captures = step, None, None
        if step.num_tokens > step.num_decode:
            self._row_T = conv.rows_of_tokens(step.cu_q_R1, step.num_tokens)
        if len(step.captures.row):
            self._captures = _upload(step.captures, step.num_rows, step.cu_q_R1.device)

    def run(self, xBC_TC: Tensor, dt_TH: Tensor, states: LayerStates, weights: SsmWeights, spec: SsmSpec) -> Tensor:
        step = self._step
        assert step is not None, "run() before plan()"
        xBC_TC, dt_TH = (part if part.stride(-1) == 1 else part.contiguous() for part in (xBC_TC, dt_TH))
        mixed_TC = torch.empty(xBC_TC.shape, dtype=xBC_TC.dtype, device=xBC_TC.device)
        y_TM = xBC_TC.new_empty(xBC_TC.shape[0], spec.inner_width)
        self._convolve(step, xBC_TC, mixed_TC, states.conv_SCW, weights)
        tensors = mixed_TC, dt_TH, y_TM, states.ssm_SHPN, weights.decay_H, weights.skip_H, weights.dt_bias_H
        numbers = (
            mixed_TC.stride(0), dt_TH.stride(0), y_TM.stride(0), states.ssm_SHPN.stride(0),
            spec.num_heads, spec.num_heads // spec.num_groups, spec.dt_min, spec.dt_max,
        )  # fmt: skip
        layer = {
            "HEAD_DIM": spec.head_dim,
            "STATE_DIM": spec.state_dim,
            "CHANNEL_SKIP": weights.skip_H.numel() != spec.num_heads,
        }
        if step.num_decode:
            tiles = decode_tiles(spec.head_dim, spec.state_dim)
            launch(
                scan_decode, (step.num_decode, spec.num_heads, triton.cdiv(spec.head_dim, tiles.block_p)),
                *tensors, step.kv_len_R, step.table_row_R, *numbers,
                **layer, BLOCK_P=tiles.block_p, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps,
            )  # fmt: skip
        if self._row_T is not None:
            kept = self._captures
            tiles = slice_tiles(spec.head_dim, spec.state_dim, mixed_TC.dtype, captures=kept is not None)
            grid = step.num_rows - step.num_decode + 1, spec.num_heads, triton.cdiv(spec.head_dim, tiles.block_p)
            captures = (step.cu_q_R1, step.cu_q_R1) if kept is None else (kept.captures_E3, kept.first_R1)
            launch(
                scan_slices, grid, *tensors, step.cu_q_R1, step.kv_len_R, step.table_row_R, *captures, *numbers,
                step.num_decode, step.num_rows, step.num_tokens,
                **layer, CAPTURES=kept is not None, PRECISION=precision(mixed_TC.dtype),
                CHUNK=tiles.chunk, BLOCK_P=tiles.block_p, BLOCK_N=tiles.block_n,
                num_warps=tiles.num_warps, num_stages=1,
            )  # fmt: skip
        return y_TM

    def _convolve(
        self, step: StepMetadata, xBC_TC: Tensor, mixed_TC: Tensor, conv_SCW: Tensor, weights: SsmWeights
    ) -> None:
        kernel, decode = (weights.conv_CW, weights.conv_bias_C), step.num_decode
        rows = step.cu_q_R1, step.kv_len_R, step.table_row_R
        if decode:
            conv.convolve_decode(xBC_TC, mixed_TC, conv_SCW, *kernel, tuple(part[:decode] for part in rows[1:]))
        if self._row_T is None:
            return
        conv.convolve_slices(xBC_TC, mixed_TC, conv_SCW, *kernel, (self._row_T, *rows), first_row=decode)
        if self._captures is not None:
            conv.keep_inputs(xBC_TC, conv_SCW, rows, first_row=0, captures_E3=self._captures.captures_E3)
        if step.num_rows > decode:
            conv.keep_inputs(xBC_TC, conv_SCW, rows, first_row=decode)


def precision(dtype: torch.dtype) -> str:
    """Of tl.dot: fp32 operands are multiplied as such, which tensor cores would not do."""
    return "ieee" if dtype is torch.float32 else "tf32"


def aot_variants() -> list[AotVariant]:
    """Both kernels in each dtype, of usual and odd layers, each branch once."""
    variants = []
    numbers = (
        "mixed_stride", "dt_stride", "y_stride", "slot_stride", "num_heads", "heads_per_group",
        "first_row", "num_rows", "num_tokens",
    )  # fmt: skip

    def add(kernel: Any, name: str, dtypes: tuple[str, str], num_warps: int, **constexprs: Any) -> None:
        types = {f"{part}_ptr": f"*{dtypes[0]}" for part in ("mixed", "dt", "y")} | {"ssm_ptr": f"*{dtypes[1]}"}
        types |= dict.fromkeys(("decay_ptr", "skip_ptr", "dt_bias_ptr"), "*fp32")
        types |= dict.fromkeys(("kv_len_ptr", "table_row_ptr", "cu_q_ptr", "captures_ptr", "first_capture_ptr"), "*i32")
        types |= dict.fromkeys(numbers, "i32") | {"dt_min": "fp32", "dt_max": "fp32"}
        types |= dict.fromkeys(constexprs, "constexpr")
        variants.append(
            AotVariant(
                name=f"{name}-{'-'.join(dtypes)}",
                kernel=kernel,
                signature={argument: types[argument] for argument in kernel.arg_names},
                constexprs=constexprs,
                options={"num_warps": num_warps, "num_stages": 1},
            )
        )

    for dtype, ssm in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp16", "fp16")):
        torch_dtype = next(key for key, value in DTYPES.items() if value == dtype)
        usual = (64, 128)
        for head_dim, state_dim in (usual, (80, 96), (128, 256)) if ssm == "fp32" else (usual,):
            skip = head_dim == 80
            tiles = decode_tiles(head_dim, state_dim)
            block = functools.partial(
                dict, HEAD_DIM=head_dim, STATE_DIM=state_dim, CHANNEL_SKIP=skip, BLOCK_N=tiles.block_n
            )
            name = f"{head_dim}x{state_dim}"
            add(scan_decode, f"scan_decode-{name}", (dtype, ssm), tiles.num_warps, **block(BLOCK_P=tiles.block_p))
            for captures in (False, True):
                tiles = slice_tiles(head_dim, state_dim, torch_dtype, captures=captures)
                cut = {"BLOCK_P": tiles.block_p, "CHUNK": tiles.chunk, "PRECISION": precision(torch_dtype)}
                what = f"scan_slices-{name}{'-captures' if captures else ''}"
                add(scan_slices, what, (dtype, ssm), tiles.num_warps, **block(CAPTURES=captures, **cut))
    return variants
