"""Convolution and recurrence in Triton behind the seam of kernels/ssm.py: decode rows, slices, captures.

Here are the launches of Mamba-2's scan; those of a delta net, which has the same convolution, are in `delta`. A step of
decode rows alone has two launches per layer; slices add four to Mamba-2's, slices of a segment or more two, captures up
to three. Kernels read the step's device mirrors, and grids and scratch follow from the step's shape, so that a step can
be captured in a graph and replayed. Only captures come from the host: `plan` copies them once per step, and such a step
is not replayed. What is convolved is rounded to the inputs' dtype after it.
Not yet run on a GPU. Legend: `kernels/ssm.py`; the segments of slices: `scan_slices.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import StateCaptures, StepMetadata
from megatron_infer.kernels.ssm import LayerStates, RecurrentSpec, SsmSpec, SsmWeights
from megatron_infer.kernels.triton import conv, delta
from megatron_infer.kernels.triton.launch import (
    DTYPES,
    cdiv,
    kernels_unavailable,
    launch,
    power_of_2,
    precision,
)
from megatron_infer.kernels.triton.scan_decode import scan_decode
from megatron_infer.kernels.triton.scan_slices import (
    scan_captures,
    scan_carry,
    scan_scores,
    scan_segments,
    scan_states,
    scan_steps,
)
from megatron_infer.kernels.triton_scratch import SCAN_SEGMENT, scan_chunk, scan_shapes

MAX_STATE_DIM = 256
DECODE_TILE = 4096
"""Entries of the state that a decode program updates: 32 registers for each thread of 4 warps."""
STEPS_HEADS = 16
CARRY_BLOCK = 1024
"""Entries of a state that a program carries from segment to segment."""


unavailable = kernels_unavailable


def make(device: torch.device, dtype: torch.dtype) -> TritonScan:
    return TritonScan()


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sizes of a scan kernel's work, the same for every step of an engine, so that a row has the same bits."""

    block_p: int
    block_n: int
    chunk: int
    num_warps: int
    num_stages: int = 1


def decode_tiles(head_dim: int, state_dim: int) -> Tiles:
    block_n = max(16, power_of_2(state_dim))
    block_p = min(max(1, DECODE_TILE // block_n), power_of_2(head_dim))
    return Tiles(block_p, block_n, 1, 4 if block_p * block_n >= 2048 else 1)


def slice_tiles(head_dim: int, state_dim: int, dtype: torch.dtype) -> Tiles:
    """Sizes that keep the state and a chunk's products in registers, as compiled for sm_80, sm_90 and sm_100.

    Operands of tl.dot have at least 16 entries along every axis.
    """
    block_n = max(16, power_of_2(state_dim))
    whole, chunk = max(16, power_of_2(head_dim)), scan_chunk(dtype.itemsize)
    if dtype is torch.float32:
        return Tiles(16, block_n, chunk, 8)
    if block_n > 128:
        return Tiles(min(32, whole), block_n, chunk, 8)
    return Tiles(min(64, whole), block_n, chunk, 8, num_stages=2)


def _upload(captures: StateCaptures, device: torch.device) -> Tensor:
    """int32 [*, 3] on the device: (row, num_tokens, slot). One copy, not awaited."""
    captures_E3 = np.stack((captures.row, captures.num_tokens, captures.state_slot), axis=1)
    uploaded = torch.from_numpy(captures_E3.astype(np.int32, copy=False))
    if device.type == "cuda":
        uploaded = uploaded.pin_memory()
    return uploaded.to(device, non_blocking=True)


def has_channel_skip(weights: SsmWeights, spec: SsmSpec) -> bool:
    return weights.skip_H is not None and weights.skip_H.numel() != spec.num_heads


def layer_constexprs(spec: SsmSpec, dtype: torch.dtype, tiles: Tiles, segment: int) -> dict[str, Any]:
    """Constexprs of the kernels over slices."""
    return {
        "NUM_HEADS": spec.num_heads,
        "HEADS_PER_GROUP": spec.num_heads // spec.num_groups,
        "HEAD_DIM": spec.head_dim,
        "STATE_DIM": spec.state_dim,
        "PRECISION": precision(dtype.itemsize),
        "SEGMENT": segment,
        "CHUNK": tiles.chunk,
        "BLOCK_P": tiles.block_p,
        "BLOCK_N": tiles.block_n,
        "BLOCK_H": STEPS_HEADS,
        "BLOCK": CARRY_BLOCK,
    }


def only(constexprs: dict[str, Any], kernel: Any) -> dict[str, Any]:
    """The constexprs that the kernel takes."""
    return {name: value for name, value in constexprs.items() if name in kernel.arg_names}


class TritonScan:
    """`plan` finds the row of each token once per step, on the device; all layers share it."""

    name = "triton"
    graph_safe = True

    def __init__(self, segment: int = SCAN_SEGMENT) -> None:
        """segment: a multiple of the chunk in `slice_tiles`."""
        self._segment = segment
        self._step: StepMetadata | None = None
        self._row_T: Tensor | None = None
        """The row of each token; None: the step has decode rows only."""
        self._captures: Tensor | None = None
        """int32 [*, 3]: (row, num_tokens, slot)."""

    def supports(
        self, spec: RecurrentSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        for what, got in (("inputs", dtype), ("convolution states", conv_dtype), ("SSM states", ssm_dtype)):
            if got not in DTYPES:
                return f"needs {what} of float32, bfloat16 or float16, got {got}"
        most = delta.MAX_STATE_DIM if spec.is_delta else MAX_STATE_DIM
        if spec.state_dim > most:
            return f"needs state_dim up to {most}, got {spec.state_dim}"
        if spec.conv_width > conv.MAX_TAPS:
            return f"needs conv_width up to {conv.MAX_TAPS}, got {spec.conv_width}"
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step, self._row_T, self._captures = step, None, None
        if step.num_tokens > step.num_decode:
            self._row_T = conv.rows_of_tokens(step.cu_q_R1, step.num_tokens)
        if len(step.captures.row):
            self._captures = _upload(step.captures, step.cu_q_R1.device)

    def run(
        self, xBC_TC: Tensor, dt_TX: Tensor, states: LayerStates, weights: SsmWeights, spec: RecurrentSpec
    ) -> Tensor:
        step = self._step
        assert step is not None, "run() before plan()"
        xBC_TC, dt_TX = (part if part.stride(-1) == 1 else part.contiguous() for part in (xBC_TC, dt_TX))
        mixed_TC = torch.empty(xBC_TC.shape, dtype=xBC_TC.dtype, device=xBC_TC.device)
        y_TM = xBC_TC.new_empty(xBC_TC.shape[0], spec.inner_width)
        self._convolve(step, xBC_TC, mixed_TC, states.conv_SCW, weights)
        if spec.is_delta:
            delta.delta_rule(step, mixed_TC, dt_TX, y_TM, states.ssm_SHPN, weights, spec, self._captures)
        else:
            self._scan(step, mixed_TC, dt_TX, y_TM, states.ssm_SHPN, weights, spec)
        return y_TM

    def _scan(
        self,
        step: StepMetadata,
        mixed_TC: Tensor,
        dt_TH: Tensor,
        y_TM: Tensor,
        ssm_SHPN: Tensor,
        weights: SsmWeights,
        spec: Any,
    ) -> None:
        """Mamba-2's recurrence."""
        if step.num_decode:
            tiles = decode_tiles(spec.head_dim, spec.state_dim)
            launch(
                scan_decode, (step.num_decode, spec.num_heads, cdiv(spec.head_dim, tiles.block_p)),
                mixed_TC, dt_TH, y_TM, ssm_SHPN, weights.decay_H, weights.skip_H, weights.dt_bias_H,
                step.kv_len_R, step.table_row_R,
                mixed_TC.stride(0), dt_TH.stride(0), y_TM.stride(0), ssm_SHPN.stride(0),
                spec.num_heads, spec.num_heads // spec.num_groups, spec.dt_min, spec.dt_max,
                HEAD_DIM=spec.head_dim, STATE_DIM=spec.state_dim,
                CHANNEL_SKIP=has_channel_skip(weights, spec),
                BLOCK_P=tiles.block_p, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps,
            )  # fmt: skip
        if self._row_T is not None:
            self._scan_slices(step, mixed_TC, dt_TH, y_TM, ssm_SHPN, weights, spec)

    def _scan_slices(
        self,
        step: StepMetadata,
        mixed_TC: Tensor,
        dt_TH: Tensor,
        y_TM: Tensor,
        ssm_SHPN: Tensor,
        weights: SsmWeights,
        spec: SsmSpec,
    ) -> None:
        """Slices and padding tokens, in the order of launches given in `scan_slices`."""
        tiles = slice_tiles(spec.head_dim, spec.state_dim, mixed_TC.dtype)
        layer = layer_constexprs(spec, mixed_TC.dtype, tiles, self._segment)
        layer["CHANNEL_SKIP"] = has_channel_skip(weights, spec)
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        programs = spec.num_heads * cdiv(spec.head_dim, tiles.block_p)
        num_rows, num_tokens, slot = step.num_rows - step.num_decode, mixed_TC.shape[0], ssm_SHPN.stride(0)
        whole = (num_tokens - step.num_decode) // self._segment
        num_tiles = whole + num_rows + 1
        lengths = step.num_decode, num_rows, num_tokens
        rows = step.cu_q_R1, step.kv_len_R, step.table_row_R
        fp32 = {"dtype": torch.float32, "device": mixed_TC.device}
        shapes = scan_shapes(
            num_tokens, num_tokens - step.num_decode, step.max_q_len, ssm_shape=ssm_SHPN.shape[1:],
            num_groups=spec.num_groups, chunk=tiles.chunk, segment=self._segment,
        )  # fmt: skip

        sums_3HT, decay_EH, scores_GTL, states_EHPN = (torch.empty(shape, **fp32) for shape in shapes)
        launch(
            scan_steps, (num_tiles, cdiv(spec.num_heads, STEPS_HEADS)),
            dt_TH, sums_3HT, decay_EH, weights.decay_H, weights.dt_bias_H, step.cu_q_R1,
            dt_TH.stride(0), spec.dt_min, spec.dt_max, *lengths,
            **only(layer, scan_steps), num_warps=4,
        )  # fmt: skip
        launch(
            scan_scores, (num_tiles * spec.num_groups * (self._segment // tiles.chunk),),
            mixed_TC, scores_GTL, step.cu_q_R1, *lengths, **only(layer, scan_scores), num_warps=4, num_stages=1,
        )  # fmt: skip
        is_long = step.max_q_len >= self._segment
        states_EHPN = states_EHPN if is_long else sums_3HT  # some address
        for later in (0, 1) if is_long else (0,):
            if later:
                launch(
                    scan_states, (num_tiles * programs,), mixed_TC, sums_3HT, states_EHPN, step.cu_q_R1, *lengths,
                    **only(layer, scan_states), **options,
                )  # fmt: skip
                carries = num_rows * spec.num_heads * cdiv(spec.head_dim * spec.state_dim, CARRY_BLOCK)
                launch(
                    scan_carry, (carries,),
                    states_EHPN, decay_EH, ssm_SHPN, *rows, slot, step.num_decode,
                    **only(layer, scan_carry), num_warps=4,
                )  # fmt: skip
            if self._captures is not None:
                launch(
                    scan_captures, (len(self._captures) * programs,),
                    mixed_TC, sums_3HT, states_EHPN, ssm_SHPN, self._captures, *rows,
                    slot, later, step.num_decode, num_tokens, **only(layer, scan_captures), **options,
                )  # fmt: skip
            launch(
                scan_segments, (num_tiles * programs,),
                mixed_TC, scores_GTL, sums_3HT, states_EHPN, y_TM, ssm_SHPN, weights.skip_H, *rows,
                slot, later, *lengths, **only(layer, scan_segments), **options,
            )  # fmt: skip

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
            conv.keep_inputs(xBC_TC, conv_SCW, rows, first_row=0, captures_E3=self._captures)
        if step.num_rows > decode:
            conv.keep_inputs(xBC_TC, conv_SCW, rows, first_row=decode)
