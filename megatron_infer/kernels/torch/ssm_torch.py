"""The scan in plain torch: chunks are matrix products, single tokens one vectorised state update; any device.

A slice is cut into chunks of CHUNK tokens, and at its captures. Inside a chunk the scan is a masked product of C and B
(a delta net: `delta_rule`);
from chunk to chunk only states are passed, for one chunk of all rows at a time:

    round          0        1        2            rows by number of chunks: those that have a chunk k come first
    row a       |------->|------->|---->          chunks are stored by round, then by row: 0a 0b 0c, 1a 1b, 2a
    row b       |------->|--->                    a wave: rounds whose states and masks fit the workspace together
    row c       |-->

Rows of one token (decode) are updated together, or one after the other where their states are large.
Shape legend: `kernels/ssm.py`, and K chunks of a wave, L tokens of a chunk, Q slices of several tokens, E ends (of
slices, then captures).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.host_uploads import upload
from megatron_infer.kernels.ssm import LayerStates, RecurrentSpec, SsmWeights
from megatron_infer.kernels.torch import delta_rule

CHUNK = 64
"""Tokens of a chunk: shorter ones waste less in the masked products, longer ones pass fewer states."""
WORKSPACE_BYTES = 32 << 20
"""Most memory for the states, masks and inputs of one wave: about a last-level cache."""

ROW_BYTES = 64 << 10
"""From this size on states are updated one row after the other: reading them once outweighs the calls."""

Pick = slice | Tensor
"""Rows of a tensor: a slice (a view, updated in place) where they follow each other, else int64 indices."""


def _index(indices: np.ndarray, device: torch.device) -> Tensor:
    return upload(indices.astype(np.int64, copy=False), device)


def _pick(indices: np.ndarray, device: torch.device) -> Pick:
    first = int(indices[0])
    if np.array_equal(indices, np.arange(first, first + len(indices))):
        return slice(first, first + len(indices))
    return _index(indices, device)


class _Slots:
    """The state slots of some rows, and the rows that start from zeros."""

    def __init__(self, slots: np.ndarray, fresh: np.ndarray, device: torch.device) -> None:
        self.slots = _pick(slots, device)
        self.fresh = _index(np.flatnonzero(fresh), device) if fresh.any() else None

    def load(self, states: Tensor) -> Tensor:
        """fp32; a view of the states where possible."""
        loaded = states[self.slots].float()
        return loaded if self.fresh is None else loaded.index_fill_(0, self.fresh, 0.0)

    def save(self, states: Tensor, content: Tensor) -> None:
        if not (isinstance(self.slots, slice) and states.dtype is torch.float32):  # else `load` returned a view
            states[self.slots] = content.to(states.dtype)


@dataclass(slots=True)
class _StateInputs:
    """Inputs from the convolution's state instead of the step: target[at] <- state[row, :, column]."""

    at: tuple[Tensor, Tensor]
    row: Tensor
    column: Tensor

    def put(self, target_XYC: Tensor, conv_QCW: Tensor) -> None:
        target_XYC[self.at] = conv_QCW[self.row, :, self.column]


def _state_inputs(offsets: np.ndarray, rows: np.ndarray, width: int, device: torch.device) -> _StateInputs | None:
    """offsets [X, Y] from the beginning of slice rows[X]: negative ones are in its state, -1 in the last column."""
    x, y = np.nonzero(offsets < 0)
    if not len(x):
        return None
    row, column = _index(rows[x], device), _index(width + offsets[x, y], device)
    return _StateInputs((_index(x, device), _index(y, device)), row, column)


@dataclass(slots=True)
class _ChunkRound:
    """Chunks [chunk, chunk + rows) of a wave, which belong to the first `rows` rows."""

    chunk: int
    rows: int
    captured: Tensor | None
    """Rows with a capture at the end of this round."""
    slots: Tensor | None
    """The slots of their states."""


@dataclass(slots=True)
class _Wave:
    rounds: list[_ChunkRound]
    window_KX: Tensor
    """Tokens of the step: the W - 1 before each chunk and its L; behind its end some token of the same row."""
    history: _StateInputs | None
    dt_KL: Tensor
    """The chunk's tokens; behind its end an extra row of zeros, a token that neither decays the state nor adds."""


class _Slices:
    """The indices of the slices, for one width of convolution."""

    def __init__(self, step: StepMetadata, rows: np.ndarray, width: int, max_chunks: int, device: torch.device) -> None:
        captures: dict[int, dict[int, int]] = {int(row): {} for row in rows}
        for row, n, slot in zip(*(step.captures.row, step.captures.num_tokens, step.captures.state_slot), strict=True):
            captures[int(row)][int(n)] = int(slot)
        ends = {
            int(row): sorted({*range(CHUNK, int(step.q_len[row]), CHUNK), *captures[int(row)], int(step.q_len[row])})
            for row in rows
        }
        order = sorted(ends, key=lambda row: -len(ends[row]))
        self._device, self._width, self._num_tokens = device, width, step.num_tokens
        self._first = step.cu_q[order].astype(np.int64)
        at = np.array(order)
        self.states = _Slots(step.table_row[at], step.kv_len[at] == step.q_len[at], device)

        lengths = step.q_len[at].tolist()
        tails = [*enumerate(lengths), *((q, n) for q, row in enumerate(order) for n in captures[row])]
        slots = [*step.table_row[at].tolist(), *(slot for row in order for slot in captures[row].values())]
        owner, end = np.array(tails).T
        offsets = end[:, None] + np.arange(-width, 0)
        self.tail_EW = _index(self._first[owner, None] + np.maximum(offsets, 0), device)
        self.tail_history = _state_inputs(offsets, owner, width, device)
        self.tail_slots = _index(np.array(slots), device)

        self.waves: list[_Wave] = []
        pending: list[list[tuple[int, int, int, int | None]]] = []  # per round: (slice, start, stop, capture's slot)
        for k in range(len(ends[order[0]])):
            chunks = [
                (q, ends[row][k - 1] if k else 0, ends[row][k], captures[row].get(ends[row][k]))
                for q, row in enumerate(order)
                if k < len(ends[row])
            ]
            if pending and sum(map(len, pending)) + len(chunks) > max_chunks:
                self.waves.append(self._wave(pending))
                pending = []
            pending.append(chunks)
        self.waves.append(self._wave(pending))

    def _wave(self, rounds: list[list[tuple[int, int, int, int | None]]]) -> _Wave:
        device, width = self._device, self._width
        done, made = 0, []
        for chunks in rounds:
            kept = [(i, slot) for i, (_, _, _, slot) in enumerate(chunks) if slot is not None]
            captured, slots = (
                (_index(np.array(part), device) for part in zip(*kept, strict=True)) if kept else (None,) * 2
            )
            made.append(_ChunkRound(done, len(chunks), captured, slots))
            done += len(chunks)
        q, start, stop = np.array([chunk[:3] for chunks in rounds for chunk in chunks]).T
        longest = int((stop - start).max())
        offsets = start[:, None] + np.arange(1 - width, longest)
        inside = offsets < stop[:, None]
        tokens = self._first[q, None] + offsets
        window = np.where(inside & (offsets >= 0), tokens, (self._first[q] + start)[:, None])
        dt = np.where(inside, tokens, self._num_tokens)[:, width - 1 :]
        history = _state_inputs(offsets, q, width, device)
        return _Wave(made, _index(window, device), history, _index(dt, device))


class _DecodeRows:
    """Rows of one token."""

    def __init__(self, step: StepMetadata, rows: np.ndarray, device: torch.device) -> None:
        self.tokens = _pick(step.cu_q[rows], device)
        self.slots = step.table_row[rows].tolist()
        fresh = step.kv_len[rows] == 1
        self.states = _Slots(step.table_row[rows], fresh, device)
        self.fresh_slots = _index(step.table_row[rows][fresh], device)


class TorchScan:
    """Vectorised over rows and chunks. Indices are computed once per step; all layers share them."""

    name = "torch"
    graph_safe = False
    _step: StepMetadata

    def __init__(self) -> None:
        self._singles: _DecodeRows | None = None
        self._rows = np.empty(0, dtype=np.int64)
        self._slices: dict[tuple[int, int], _Slices] = {}

    def supports(
        self, spec: RecurrentSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        return None

    def plan(self, step: StepMetadata) -> None:
        q_len = step.q_len[: step.num_rows]
        singles = np.flatnonzero(q_len == 1)
        self._step, self._rows = step, np.flatnonzero(q_len > 1)
        self._singles = _DecodeRows(step, singles, step.q_len_R.device) if len(singles) else None
        self._slices.clear()

    def run(
        self, xBC_TC: Tensor, dt_TX: Tensor, states: LayerStates, weights: SsmWeights, spec: RecurrentSpec
    ) -> Tensor:
        step = self._step
        num_tokens = step.num_tokens
        # One row more than tokens, for what is computed behind the end of a chunk.
        y_TM = xBC_TC.new_empty(num_tokens + 1, spec.inner_width)
        kind = _DeltaLayer if spec.is_delta else _MambaLayer
        layer = kind(xBC_TC, kind.steps(dt_TX.float(), weights, spec), states, weights, spec)
        if self._singles is not None:
            layer.advance(self._singles, y_TM)
        if len(self._rows):
            layer.scan(self._slices_of(step, spec, xBC_TC.device), y_TM)
        y_TM[int(step.cu_q[step.num_rows]) :] = 0  # padding tokens must not carry garbage (NaN) onwards
        return y_TM[:num_tokens]

    def _slices_of(self, step: StepMetadata, spec: RecurrentSpec, device: torch.device) -> _Slices:
        state = spec.inner_width * spec.state_dim
        chunk_floats = state + 2 * CHUNK * (spec.num_heads * CHUNK + spec.num_channels + 2 * spec.inner_width)
        max_chunks = max(1, WORKSPACE_BYTES // (4 * chunk_floats))
        key = (spec.conv_width, max_chunks)
        found = self._slices.get(key)
        if found is None:
            found = self._slices[key] = _Slices(step, self._rows, spec.conv_width, max_chunks, device)
        return found


@dataclass(slots=True)
class _RecurrentLayer:
    """The arguments of one `ScanBackend.run`. A subclass has the recurrence."""

    xBC_TC: Tensor
    steps_TX: Tensor
    """fp32, what `steps` made of the inputs that are not convolved; a token of zeros changes no state."""
    states: LayerStates
    weights: SsmWeights
    spec: Any

    @staticmethod
    def steps(dt_TX: Tensor, weights: SsmWeights, spec: Any) -> Tensor:
        raise NotImplementedError

    def _next(self, singles: _DecodeRows, mixed_RC: Tensor, steps_RX: Tensor) -> Tensor:
        """One token of each row through its state -> y [R, M]."""
        raise NotImplementedError

    def _wave(self, wave: _Wave, mixed_KLC: Tensor, steps_KLX: Tensor, carry_QHPN: Tensor) -> Tensor:
        """Scan a wave's chunks -> [K, L, M]; updates the states carry_QHPN and stores captures."""
        raise NotImplementedError

    def advance(self, singles: _DecodeRows, y_TM: Tensor) -> None:
        """One token of each row."""
        weights, where = self.weights, singles.states
        conv = where.load(self.states.conv_SCW)
        conv = torch.cat((conv[:, :, 1:], self.xBC_TC[singles.tokens].float()[:, :, None]), dim=2)
        self.states.conv_SCW[where.slots] = conv.to(self.states.conv_SCW.dtype)
        mixed = (conv * weights.conv_CW).sum(-1)
        mixed = F.silu(mixed if weights.conv_bias_C is None else mixed.add_(weights.conv_bias_C), inplace=True)
        y_TM[singles.tokens] = self._next(singles, mixed, self.steps_TX[singles.tokens]).to(y_TM.dtype)

    def scan(self, slices: _Slices, y_TM: Tensor) -> None:
        """Every slice of several tokens."""
        spec, states = self.spec, self.states
        conv_QCW = slices.states.load(states.conv_SCW)
        carry_QHPN = slices.states.load(states.ssm_SHPN)
        steps_T1X = F.pad(self.steps_TX, (0, 0, 0, 1))
        for wave in slices.waves:
            window_KXC = self.xBC_TC[wave.window_KX].float()
            if wave.history is not None:
                wave.history.put(window_KXC, conv_QCW)
            y_KLM = self._wave(wave, self._convolve(window_KXC), steps_T1X[wave.dt_KL], carry_QHPN)
            y_TM.index_copy_(0, wave.dt_KL.flatten(), y_KLM.reshape(-1, spec.inner_width).to(y_TM.dtype))
        slices.states.save(states.ssm_SHPN, carry_QHPN)
        tail_EWC = self.xBC_TC[slices.tail_EW].float()
        if slices.tail_history is not None:
            slices.tail_history.put(tail_EWC, conv_QCW)
        states.conv_SCW[slices.tail_slots] = tail_EWC.transpose(1, 2).to(states.conv_SCW.dtype)

    def _capture(self, item: _ChunkRound, behind_QHPN: Tensor) -> None:
        """Keep the states after a round that are wanted."""
        if item.captured is not None:
            self.states.ssm_SHPN[item.slots] = behind_QHPN[item.captured].to(self.states.ssm_SHPN.dtype)

    def _convolve(self, window_KXC: Tensor) -> Tensor:
        """Causal convolution and silu -> [K, L, C]; X = W - 1 + L."""
        taps_WC = self.weights.conv_CW.t().contiguous()
        length, bias = window_KXC.shape[1] - len(taps_WC) + 1, self.weights.conv_bias_C
        mixed = window_KXC[:, :length] * taps_WC[0]
        for i in range(1, len(taps_WC)):
            mixed.addcmul_(window_KXC[:, i : i + length], taps_WC[i])
        return F.silu(mixed if bias is None else mixed.add_(bias), inplace=True)


class _MambaLayer(_RecurrentLayer):
    """The steps are the step sizes after bias, softplus and clamp."""

    __slots__ = ()

    @staticmethod
    def steps(dt_TX: Tensor, weights: SsmWeights, spec: Any) -> Tensor:
        return F.softplus(dt_TX + weights.dt_bias_H).clamp_(spec.dt_min, spec.dt_max)

    def _next(self, singles: _DecodeRows, mixed_RC: Tensor, steps_RX: Tensor) -> Tensor:
        spec, weights = self.spec, self.weights
        assert weights.skip_H is not None
        num_rows, groups, heads = len(mixed_RC), spec.num_groups, spec.num_heads
        width = groups * spec.state_dim
        x, b, c = mixed_RC.split((spec.inner_width, width, width), dim=-1)
        b_RG11N, c_RG11N = (part.reshape(num_rows, groups, 1, 1, -1) for part in (b, c))
        x_RHP, dt_RH = x.reshape(num_rows, heads, -1), steps_RX
        step_RGIP1 = (x_RHP * dt_RH[..., None]).view(num_rows, groups, heads // groups, -1, 1)
        decay_RH = (dt_RH * weights.decay_H).exp_()
        in_place = (
            self.states.ssm_SHPN.dtype is torch.float32 and 4 * step_RGIP1[0].numel() * spec.state_dim >= ROW_BYTES
        )
        update = self._update_rows if in_place else self._update_all
        y_RHP = update(singles, decay_RH.view(num_rows, groups, -1, 1, 1), step_RGIP1, b_RG11N, c_RG11N)
        return y_RHP.view(x_RHP.shape).addcmul_(x_RHP, weights.skip_H.view(heads, -1)).flatten(1)

    def _update_all(
        self, singles: _DecodeRows, decay_RGI11: Tensor, step_RGIP1: Tensor, b_RG11N: Tensor, c_RG11N: Tensor
    ) -> Tensor:
        """h = decay h + step B -> C h [R, G, I, P], I heads of a group, for all rows at once."""
        state = singles.states.load(self.states.ssm_SHPN)
        state_RGIPN = state.view(*step_RGIP1.shape[:4], -1)
        state_RGIPN.mul_(decay_RGI11).addcmul_(step_RGIP1, b_RG11N)
        singles.states.save(self.states.ssm_SHPN, state)
        return (state_RGIPN * c_RG11N).sum(-1)

    def _update_rows(
        self, singles: _DecodeRows, decay_RGI11: Tensor, step_RGIP1: Tensor, b_RG11N: Tensor, c_RG11N: Tensor
    ) -> Tensor:
        """The same in place, row by row: a row's state stays in the CPU cache and is not copied."""
        y_RGX = step_RGIP1.new_empty(*decay_RGI11.shape[:2], step_RGIP1[0, 0].numel())
        if singles.states.fresh is not None:
            self.states.ssm_SHPN.index_fill_(0, singles.fresh_slots, 0.0)
        parts = zip(decay_RGI11, step_RGIP1, b_RG11N, c_RG11N.flatten(2), y_RGX, strict=True)
        for slot, (decay, step, b, c_GN, y_GX) in zip(singles.slots, parts, strict=True):
            state_GIPN = self.states.ssm_SHPN[slot].view(*step.shape[:3], -1)
            state_GIPN.mul_(decay).addcmul_(step, b)
            for state_XN, c_N, y_X in zip(state_GIPN.flatten(1, 2), c_GN, y_GX, strict=True):
                torch.mv(state_XN, c_N, out=y_X)
        return y_RGX

    def _wave(self, wave: _Wave, mixed_KLC: Tensor, steps_KLX: Tensor, carry_QHPN: Tensor) -> Tensor:
        spec, dt_KLH = self.spec, steps_KLX
        assert self.weights.skip_H is not None
        chunks, length, heads, groups = *dt_KLH.shape, spec.num_groups
        width = groups * spec.state_dim
        x_KLM, b, c = mixed_KLC.split((spec.inner_width, width, width), dim=-1)
        x_KLHP = x_KLM.unflatten(-1, (heads, -1))
        b_KGLN, c_KGLN = (part.unflatten(-1, (groups, -1)).transpose(1, 2) for part in (b, c))
        # Sums of decays reach hundreds: a rounded part and the rest, so that differences keep their digits.
        sum_KLH = (dt_KLH * self.weights.decay_H).clamp_(min=delta_rule.FORGOTTEN).double().cumsum(1)
        high_KLH = sum_KLH.float()
        rest_KLH = (sum_KLH - high_KLH).float()

        # Inside the chunks: y[l] = sum over s <= l of (C[l] . B[s]) decay(s .. l) dt[s] x[s].
        high_KHL = high_KLH.transpose(1, 2).contiguous()
        mask_KHLL = (high_KHL[..., :, None] - high_KHL[..., None, :]).clamp_(max=0.0).exp_()
        score_KGLL = (c_KGLN @ b_KGLN.transpose(2, 3)).tril_()
        mask_KHLL.unflatten(1, (groups, -1)).mul_(score_KGLL[:, :, None])
        scaled_KHLP = x_KLHP.new_empty(chunks, heads, length, spec.head_dim)
        torch.mul(x_KLHP.transpose(1, 2), _column(dt_KLH * (-rest_KLH).exp_()).transpose(1, 2), out=scaled_KHLP)
        inside_KHLP = torch.bmm(mask_KHLL.flatten(0, 1), scaled_KHLP.flatten(0, 1)).view(scaled_KHLP.shape)

        # What each chunk adds to the state; then, chunk by chunk, the states that the chunks begin with.
        to_end_KLH = (sum_KLH[:, -1:] - sum_KLH).exp_().float().mul_(dt_KLH)
        scaled_KGLM = (x_KLHP * _column(to_end_KLH)).view(chunks, length, groups, -1).transpose(1, 2)
        state_KGMN = scaled_KGLM.transpose(2, 3) @ b_KGLN
        decay_KH11 = _column(_column(sum_KLH[:, -1].exp().float()))
        for item in wave.rounds:
            part = slice(item.chunk, item.chunk + item.rows)
            carry, added = carry_QHPN[: item.rows], state_KGMN[part].view(item.rows, *carry_QHPN.shape[1:])
            behind = torch.addcmul(added, carry, decay_KH11[part])
            added.copy_(carry)
            carry.copy_(behind)
            self._capture(item, behind)

        y_KGLM = c_KGLN @ state_KGMN.transpose(2, 3)
        y_KLHP = y_KGLM.transpose(1, 2).reshape(x_KLHP.shape)
        y_KLHP.mul_(_column(sum_KLH.exp_().float()))
        y_KLHP.addcmul_(inside_KHLP.transpose(1, 2), _column(rest_KLH.exp_()))
        return y_KLHP.addcmul_(x_KLHP, self.weights.skip_H.view(heads, -1)).flatten(2)


class _DeltaLayer(_RecurrentLayer):
    """The steps are beta of each head, then the logarithm of each head's decay."""

    __slots__ = ()

    @staticmethod
    def steps(dt_TX: Tensor, weights: SsmWeights, spec: Any) -> Tensor:
        b_TH, a_TH = dt_TX.chunk(2, dim=-1)
        return torch.cat((b_TH.sigmoid(), F.softplus(a_TH + weights.dt_bias_H) * weights.decay_H), dim=-1)

    def _next(self, singles: _DecodeRows, mixed_RC: Tensor, steps_RX: Tensor) -> Tensor:
        q, k, v_RHP = delta_rule.split_heads(mixed_RC, self.spec)
        q_RHN, k_RHN = delta_rule.unit(q) * self.spec.state_dim**-0.5, delta_rule.unit(k)
        beta_RH, log_RH = steps_RX.chunk(2, dim=-1)
        state_RHPN = singles.states.load(self.states.ssm_SHPN).mul_(_column(_column(log_RH.exp())))
        error_RHP = v_RHP - (state_RHPN @ _column(k_RHN)).squeeze(-1)
        state_RHPN.addcmul_(_column(error_RHP * _column(beta_RH)), k_RHN[:, :, None])
        singles.states.save(self.states.ssm_SHPN, state_RHPN)
        return (state_RHPN @ _column(q_RHN)).flatten(1)

    def _wave(self, wave: _Wave, mixed_KLC: Tensor, steps_KLX: Tensor, carry_QHPN: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in delta_rule.split_heads(mixed_KLC, self.spec))
        beta_KHL, log_KHL = (part.transpose(1, 2) for part in steps_KLX.chunk(2, dim=-1))
        terms = delta_rule.chunk_terms(q, k, v, beta_KHL, log_KHL)
        outs = []
        for item in wave.rounds:
            y_QHLP, behind = delta_rule.through_chunk(
                terms.of(slice(item.chunk, item.chunk + item.rows)), carry_QHPN[: item.rows]
            )
            carry_QHPN[: item.rows] = behind
            self._capture(item, behind)
            outs.append(y_QHLP)
        return torch.cat(outs).transpose(1, 2).flatten(2)


def _column(x: Tensor) -> Tensor:
    return x[..., None]
