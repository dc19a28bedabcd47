"""The scan by mamba-ssm's Triton kernels, with causal-conv1d's convolution where it can run, else torch's.

Rows of one token go to `selective_state_update`, which updates the state slots in place. Slices are padded to the
longest (in groups of similar length) and go side by side to `mamba_chunk_scan_combined`, with their states as initial
states; its variable-length form rounds the states it returns to the inputs' dtype, this one keeps fp32. A capture cuts
its slice in segments: the scan is called once for the first segments, once for the second, ...

    round           0         1
    slice a    |--------->|------|        a segment ends at a capture; a padding token has a step size of 0:
    slice b    |-----|                    it neither decays the state nor adds to it

Legend: kernels/ssm.py, and Q slices of a group, L tokens of the longest.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.host_uploads import upload
from megatron_infer.kernels.optional_packages import first_line, import_below, missing, not_on_gpu, numbers, version
from megatron_infer.kernels.ssm import LayerStates, SsmSpec, SsmWeights

PACKAGE, MIN_VERSION = "mamba-ssm", (2, 2, 6)
OPERATIONS = ("ops.triton.selective_state_update", "ops.triton.ssd_combined")
"""Modules that do not need the CUDA extensions that the package's own `__init__` imports."""
CONV_PACKAGE, CONV_MODULE, CONV_MIN_VERSION = "causal-conv1d", "causal_conv1d", (1, 5, 3)
CONV_WIDTHS = (2, 3, 4)
CONV_CHANNELS = 8
"""The number of channels is a multiple of it."""
DTYPES = (torch.float16, torch.bfloat16)
CHUNK = 128
NO_STEP = -1e4
"""Step size of a padding token, before bias and softplus; softplus of it is 0."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why mamba-ssm's kernels cannot run here; None: they can."""
    reason = not_on_gpu(device)
    if reason is None and dtype not in DTYPES:
        reason = f"needs float16 or bfloat16 (float32 products would be TF32's), got {dtype}"
    if reason is not None:
        return reason
    try:
        import_below("mamba_ssm", OPERATIONS)
    except ModuleNotFoundError as error:
        return f"{PACKAGE} is not installed" if error.name == "mamba_ssm" else f"{PACKAGE} does not import: {error}"
    except Exception as error:
        return f"{PACKAGE} does not import: {type(error).__name__}: {first_line(error)}"
    found = version(PACKAGE, "mamba_ssm")
    if found is not None and numbers(found) < MIN_VERSION:
        return f"needs {PACKAGE} {'.'.join(map(str, MIN_VERSION))} or newer, this is {found}"
    return None


def conv_unavailable() -> str | None:
    """Why causal-conv1d cannot be used; None: it can."""
    return missing((CONV_MODULE,), CONV_PACKAGE, CONV_MIN_VERSION)


def make(device: torch.device, dtype: torch.dtype) -> MambaSsmScan:
    update, chunks = import_below("mamba_ssm", OPERATIONS)
    conv = importlib.import_module(CONV_MODULE) if conv_unavailable() is None else None
    return MambaSsmScan(update.selective_state_update, chunks.mamba_chunk_scan_combined, conv)


@dataclass(slots=True)
class _SingleTokens:
    """Rows of one token."""

    token_R: Tensor
    slot_R: Tensor
    """int64."""
    fresh: Tensor | None
    """Slots whose state begins as zeros; None: there are none."""


@dataclass(slots=True)
class _SegmentRound:
    """Segment k of every slice that has one."""

    slice_Q: Tensor
    token_QL: Tensor
    """Indices into the group's [Q * L] tokens."""
    absent_QL1: Tensor
    """True behind the end of the segment."""
    present: Tensor
    """Indices of the segments' tokens in [Q * L], and in the step."""
    step_token: Tensor
    end_E: Tensor
    """Segments whose final state is kept, and the slots that get it."""
    end_slot_E: Tensor


@dataclass(slots=True)
class _Group:
    """Slices of similar length."""

    slot_Q: Tensor
    fresh_Q: Tensor
    """bool: the slice starts at position 0."""
    token_QL: Tensor
    """Tokens of the step; behind a slice's end some token of the same slice."""
    tail_EW: Tensor
    """Indices into [Q * (W + L)] of the last W inputs of each end, and the slots that get them."""
    tail_slot_E: Tensor
    rounds: list[_SegmentRound]


class MambaSsmScan:
    """The host computes all indices once per step; all layers share them."""

    name = "mamba_ssm"
    graph_safe = False

    def __init__(self, update: Any, chunk_scan: Any, conv: Any | None) -> None:
        """update, chunk_scan: mamba-ssm's functions; conv: the module causal_conv1d, or None."""
        self._update, self._chunk_scan, self._conv = update, chunk_scan, conv
        self._step: StepMetadata | None = None
        self._singles: _SingleTokens | None = None
        self._slices = np.empty(0, dtype=np.int64)
        self._groups: dict[int, list[_Group]] = {}

    def supports(
        self, spec: SsmSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        if dtype not in DTYPES:
            return f"needs float16 or bfloat16, got {dtype}"
        if ssm_dtype not in (torch.float32, *DTYPES):
            return f"needs SSM states of float32, float16 or bfloat16, got {ssm_dtype}"
        if (spec.dt_min, spec.dt_max) != (0.0, float("inf")):
            return f"does not clamp step sizes of single tokens, the layer's range is {spec.dt_min} .. {spec.dt_max}"
        if spec.state_dim > 256:
            return f"needs state_dim up to 256, got {spec.state_dim}"
        return None

    def plan(self, step: StepMetadata) -> None:
        q_len = step.q_len[: step.num_rows]
        rows, self._slices = np.flatnonzero(q_len == 1), np.flatnonzero(q_len > 1)
        self._step, self._singles = step, None
        self._groups.clear()
        if len(rows):
            device, slots = step.q_len_R.device, step.table_row[rows].astype(np.int64)
            fresh = slots[step.kv_len[rows] == 1]
            self._singles = _SingleTokens(
                _index(step.cu_q[rows], device), _index(slots, device), _index(fresh, device) if len(fresh) else None
            )

    def run(self, xBC_TC: Tensor, dt_TH: Tensor, states: LayerStates, weights: SsmWeights, spec: SsmSpec) -> Tensor:
        step = self._step
        assert step is not None, "run() before plan()"
        y_TM = xBC_TC.new_zeros(xBC_TC.shape[0], spec.inner_width)
        layer = _ScanCall(self._update, self._chunk_scan, self._conv, xBC_TC, dt_TH, states, weights, spec)
        if self._singles is not None:
            layer.advance(self._singles, y_TM)
        if len(self._slices):
            groups = self._groups.get(spec.conv_width)
            if groups is None:
                groups = self._groups[spec.conv_width] = _group(step, self._slices, spec.conv_width)
            for group in groups:
                layer.scan(group, y_TM)
        return y_TM


def _index(indices: np.ndarray, device: torch.device) -> Tensor:
    return upload(indices.astype(np.int64, copy=False), device)


def _group(step: StepMetadata, rows: np.ndarray, width: int) -> list[_Group]:
    """Longest first; a group ends before a slice shorter than half of its first, so that padding is less than data."""
    order = rows[np.argsort(-step.q_len[rows], kind="stable")]
    groups, begin = [], 0
    while begin < len(order):
        lengths = step.q_len[order[begin:]]
        count = int(np.count_nonzero(2 * lengths > lengths[0]))
        groups.append(_make_group(step, order[begin : begin + count], width))
        begin += count
    return groups


def _make_group(step: StepMetadata, rows: np.ndarray, width: int) -> _Group:
    device = step.q_len_R.device
    lengths, first = step.q_len[rows].astype(np.int64), step.cu_q[rows].astype(np.int64)
    longest = int(lengths.max())
    offsets = np.arange(longest)
    tokens = first[:, None] + np.minimum(offsets, lengths[:, None] - 1)
    place = {int(row): i for i, row in enumerate(rows)}
    captures = step.captures
    kept = [
        (place[int(row)], int(n), int(slot))
        for row, n, slot in zip(captures.row, captures.num_tokens, captures.state_slot, strict=True)
        if int(row) in place
    ]
    slots = step.table_row[rows].astype(np.int64)
    tails = [*((i, int(n), int(slots[i])) for i, n in enumerate(lengths)), *kept]
    owner, end, slot = np.array(tails, dtype=np.int64).T
    return _Group(
        slot_Q=_index(slots, device),
        fresh_Q=upload(step.kv_len[rows] == step.q_len[rows], device),
        token_QL=_index(tokens, device),
        tail_EW=_index((owner * (width + longest) + end)[:, None] + np.arange(width), device),
        tail_slot_E=_index(slot, device),
        rounds=_rounds(lengths, first, slots, kept, device),
    )


def _rounds(
    lengths: np.ndarray,
    first: np.ndarray,
    slots: np.ndarray,
    kept: list[tuple[int, int, int]],
    device: torch.device,
) -> list[_SegmentRound]:
    """first: each slice's first token in the step; kept: (slice, tokens, slot) of each capture."""
    longest = int(lengths.max())
    stops: list[dict[int, list[int]]] = [{int(n): [int(slot)]} for n, slot in zip(lengths, slots, strict=True)]
    for owner, n, slot in kept:
        stops[owner].setdefault(n, []).append(slot)
    cuts = [sorted(each) for each in stops]
    rounds = []
    for k in range(max(map(len, cuts))):
        having = [i for i, cut in enumerate(cuts) if k < len(cut)]
        start = np.array([cuts[i][k - 1] if k else 0 for i in having])
        stop = np.array([cuts[i][k] for i in having])
        counts = (stop - start)[:, None]
        offsets = np.arange(int(counts.max()))
        inside = offsets < counts
        at = start[:, None] + np.minimum(offsets, counts - 1)
        owner = np.array(having)[:, None]
        targets = [(i, slot) for i, row in enumerate(having) for slot in stops[row][cuts[row][k]]]
        end, slot = np.array(targets, dtype=np.int64).T
        rounds.append(
            _SegmentRound(
                slice_Q=_index(np.array(having), device),
                token_QL=_index(owner * longest + at, device),
                absent_QL1=upload(~inside, device).unsqueeze(-1),
                present=_index(np.flatnonzero(inside), device),
                step_token=_index((first[owner] + at)[inside], device),
                end_E=_index(end, device),
                end_slot_E=_index(slot, device),
            )
        )
    return rounds


@dataclass(slots=True)
class _ScanCall:
    """One call of `MambaSsmScan.run`."""

    update: Any
    chunk_scan: Any
    conv: Any | None
    xBC_TC: Tensor
    dt_TH: Tensor
    states: LayerStates
    weights: SsmWeights
    spec: SsmSpec

    def advance(self, singles: _SingleTokens, y_TM: Tensor) -> None:
        """One token of each row."""
        spec, weights, states = self.spec, self.weights, self.states
        if singles.fresh is not None:
            for state in states:
                state.index_fill_(0, singles.fresh, 0.0)
        x_RC = self.xBC_TC.index_select(0, singles.token_R)
        if self._fused_conv():
            mixed_RC = self.conv.causal_conv1d_update(  # type: ignore[union-attr]
                x_RC,
                states.conv_SCW,
                weights.conv_CW,
                weights.conv_bias_C,
                activation="silu",
                conv_state_indices=singles.slot_R.int(),
            )
        else:
            conv_RCW = torch.cat((states.conv_SCW.index_select(0, singles.slot_R)[..., 1:], x_RC.unsqueeze(-1)), dim=-1)
            states.conv_SCW.index_copy_(0, singles.slot_R, conv_RCW.to(states.conv_SCW.dtype))
            mixed_RC = (conv_RCW.float() * weights.conv_CW).sum(-1)
            if weights.conv_bias_C is not None:
                mixed_RC = mixed_RC + weights.conv_bias_C
            mixed_RC = F.silu(mixed_RC).to(x_RC.dtype)
        x, b, c = self._split(mixed_RC)
        heads = (spec.num_heads, spec.head_dim)
        # Strides of 0 make the kernel use one step size and one decay per head.
        dt_RHP = self.dt_TH.index_select(0, singles.token_R).unsqueeze(-1).expand(-1, *heads)
        out_RHP = self.update(
            states.ssm_SHPN,
            x.contiguous(),
            dt_RHP,
            weights.decay_H[:, None, None].expand(*heads, spec.state_dim),
            b,
            c,
            D=weights.skip_H.view(spec.num_heads, -1).expand(heads),
            dt_bias=weights.dt_bias_H[:, None].expand(heads),
            dt_softplus=True,
            state_batch_indices=singles.slot_R,
        )
        y_TM.index_copy_(0, singles.token_R, out_RHP.flatten(1).to(y_TM.dtype))

    def scan(self, group: _Group, y_TM: Tensor) -> None:
        """All tokens of a group of slices."""
        spec, weights, states = self.spec, self.weights, self.states
        slices, longest = group.token_QL.shape
        before_QCW = states.conv_SCW.index_select(0, group.slot_Q)
        before_QCW = before_QCW.masked_fill_(group.fresh_Q[:, None, None], 0.0).to(self.xBC_TC.dtype)
        new_QLC = self.xBC_TC.index_select(0, group.token_QL.flatten()).view(slices, longest, -1)
        history_QXC = torch.cat((before_QCW.transpose(1, 2), new_QLC), dim=1)
        mixed_QLC = self._convolve(history_QXC)
        tails_EWC = history_QXC.flatten(0, 1)[group.tail_EW]
        states.conv_SCW.index_copy_(0, group.tail_slot_E, tails_EWC.transpose(1, 2).to(states.conv_SCW.dtype))

        mixed_XC, dt_XH = mixed_QLC.flatten(0, 1), self.dt_TH.index_select(0, group.token_QL.flatten())
        carry_QHPN = states.ssm_SHPN.index_select(0, group.slot_Q).float()
        carry_QHPN.masked_fill_(group.fresh_Q[:, None, None, None], 0.0)
        skip = weights.skip_H
        for segment in group.rounds:
            x, b, c = (part.contiguous() for part in self._split(mixed_XC[segment.token_QL]))
            dt_QLH = dt_XH[segment.token_QL].masked_fill(segment.absent_QL1, NO_STEP)
            out_QLHP, behind_QHPN = self.chunk_scan(
                x,
                dt_QLH,
                weights.decay_H,
                b,
                c,
                CHUNK,
                D=skip if len(skip) == spec.num_heads else skip.view(spec.num_heads, -1),
                dt_bias=weights.dt_bias_H,
                initial_states=carry_QHPN.index_select(0, segment.slice_Q),
                dt_softplus=True,
                return_final_states=True,
            )
            carry_QHPN.index_copy_(0, segment.slice_Q, behind_QHPN)
            ends_EHPN = behind_QHPN.index_select(0, segment.end_E).to(states.ssm_SHPN.dtype)
            states.ssm_SHPN.index_copy_(0, segment.end_slot_E, ends_EHPN)
            out_XM = out_QLHP.flatten(0, 1).flatten(1).index_select(0, segment.present)
            y_TM.index_copy_(0, segment.step_token, out_XM.to(y_TM.dtype))

    def _fused_conv(self) -> bool:
        """Whether causal-conv1d can run this layer."""
        return (
            self.conv is not None
            and self.spec.conv_width in CONV_WIDTHS
            and self.spec.num_channels % CONV_CHANNELS == 0
            and self.states.conv_SCW.dtype is self.xBC_TC.dtype
        )

    def _convolve(self, history_QXC: Tensor) -> Tensor:
        """[Q, W + L, C], the first W inputs from the state -> [Q, L, C] after silu."""
        width, weights = self.spec.conv_width, self.weights
        if self._fused_conv():
            # With initial states (the W - 1 inputs before the first) the kernel needs channels last.
            return self.conv.causal_conv1d_fn(  # type: ignore[union-attr]
                history_QXC[:, width:].transpose(1, 2),
                weights.conv_CW,
                weights.conv_bias_C,
                initial_states=history_QXC[:, 1:width].transpose(1, 2),
                activation="silu",
            ).transpose(1, 2)
        taps_QCX = history_QXC[:, 1:].transpose(1, 2).float()
        mixed_QCL = F.conv1d(taps_QCX, weights.conv_CW.unsqueeze(1), weights.conv_bias_C, groups=taps_QCX.shape[1])
        return F.silu(mixed_QCL).transpose(1, 2).to(history_QXC.dtype)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., C] -> x [..., H, P], B and C [..., G, N]."""
        spec = self.spec
        width = spec.num_groups * spec.state_dim
        x, b, c = mixed.split((spec.inner_width, width, width), dim=-1)
        groups = (spec.num_groups, spec.state_dim)
        return x.unflatten(-1, (spec.num_heads, spec.head_dim)), b.unflatten(-1, groups), c.unflatten(-1, groups)
