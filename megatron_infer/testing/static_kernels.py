"""Paged attention and selective scan in plain torch whose shapes follow from the step's shape: a graph can hold them.

For tests of graphs where there is no GPU: each token looks at the whole width of its row's block table, and masks made
of device tensors hide what it may not see. Right on any device, slow on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, GraphSupport, StepMetadata
from megatron_infer.kernels.kv_rounding import append, select
from megatron_infer.kernels.ssm import LayerStates, SsmSpec, SsmWeights
from megatron_infer.kernels.torch.cpu_torch import apply_rotary

STATIC = f"{__name__}:StaticKernels"
"""For `MEGATRON_INFER_BACKEND`."""


def rows_of_tokens(step: StepMetadata) -> tuple[Tensor, Tensor]:
    """(the row of each token, whether it has one), both [T]; padding tokens get some row."""
    token_T = torch.arange(step.num_tokens, device=step.cu_q_R1.device, dtype=step.cu_q_R1.dtype)
    # A row without tokens ends where the one before it does: the count of ends at or before a token is its row.
    row_T = torch.bucketize(token_T, step.cu_q_R1[1:], right=True)
    return row_T.clamp(max=step.num_rows - 1), row_T < step.num_rows


class StaticAttention:
    """Every token against every key its row could have. Legend: `kernels/base.py`."""

    name = "static"
    graphs = GraphSupport.ALL
    plan_on_host = None

    def __init__(self) -> None:
        self._step: StepMetadata | None = None

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        step = self._step
        assert step is not None, "run() before plan()"
        if spec.rotary_dim and step.cos_TR is not None and step.sin_TR is not None:
            dim, interleaved = spec.rotary_dim, spec.rotary_interleaved
            q_TKGH = apply_rotary(q_TKGH, step.cos_TR, step.sin_TR, dim=dim, interleaved=interleaved)
            k_TKH = apply_rotary(k_TKH, step.cos_TR, step.sin_TR, dim=dim, interleaved=interleaved)
        keys, values = kv_cache[layer, 0], kv_cache[layer, 1]
        append(keys, step.kv_pos_T, k_TKH)
        append(values, step.kv_pos_T, v_TKH)
        row_T, has_row_T = rows_of_tokens(step)
        block_TW = step.block_table.index_select(0, step.table_row_R.index_select(0, row_T))
        num_tokens, width = block_TW.shape
        shape = (num_tokens, width * keys.shape[1], spec.num_kv_heads, spec.head_dim)
        key_TPKH = select(keys, block_TW.flatten()).view(shape).float()
        value_TPKH = select(values, block_TW.flatten()).view(shape).float()
        position_P = torch.arange(shape[1], device=keys.device)
        seen_TP = position_P <= step.positions_T[:, None]
        if spec.window is not None:
            seen_TP &= position_P > step.positions_T[:, None] - spec.window
        scores_TKGP = torch.einsum("tkgh,tpkh->tkgp", q_TKGH.float(), key_TPKH) * spec.scale
        scores_TKGP = scores_TKGP.masked_fill(~seen_TP[:, None, None, :], float("-inf"))
        if spec.sinks_N is not None:
            sink_TKG1 = spec.sinks_N.view(1, spec.num_kv_heads, spec.group_size, 1).expand(num_tokens, -1, -1, 1)
            weight_TKGP = torch.cat((scores_TKGP, sink_TKG1), -1).softmax(-1)[..., :-1]
        else:
            weight_TKGP = scores_TKGP.softmax(-1)
        # Blocks that the row does not reach may hold anything, and 0 x NaN is NaN.
        value_TPKH = value_TPKH.masked_fill(~seen_TP[:, :, None, None], 0.0)
        out_TKGH = torch.einsum("tkgp,tpkh->tkgh", weight_TKGP, value_TPKH)
        out_TKGH = out_TKGH.masked_fill(~has_row_T[:, None, None, None], 0.0)
        return out_TKGH.flatten(1).to(q_TKGH.dtype).contiguous()


class StaticScan:
    """All decode rows at once, then one token after the other, each on the state in its slot.

    Legend: `kernels/ssm.py`.
    """

    name = "static"
    graph_safe = True

    def __init__(self) -> None:
        self._step: StepMetadata | None = None

    def supports(
        self, spec: SsmSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        if ssm_dtype is not torch.float32 or conv_dtype is not dtype:
            return f"needs states in float32 and {dtype}, which round nothing between tokens"
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(self, xBC_TC: Tensor, dt_TH: Tensor, states: LayerStates, weights: SsmWeights, spec: SsmSpec) -> Tensor:
        step = self._step
        assert step is not None, "run() before plan()"
        row_T, has_row_T = rows_of_tokens(step)
        token_T = torch.arange(step.num_tokens, device=row_T.device)
        is_fresh_R = step.kv_len_R == step.q_len_R
        tokens = Tokens(
            slot_T=step.table_row_R.index_select(0, row_T).long(),
            begins_T=is_fresh_R.index_select(0, row_T) & (step.cu_q_R1.index_select(0, row_T) == token_T),
            has_row_T=has_row_T,
        )
        runs = [slice(0, step.num_decode)] if step.num_decode else []
        runs += [slice(token, token + 1) for token in range(step.num_decode, step.num_tokens)]
        captured = _captured(step)
        parts = []
        for run in runs:
            parts.append(_advance(xBC_TC[run], dt_TH[run], tokens.at(run), states, weights, spec))
            for source, target in captured.get(run.stop - 1, ()):
                states.conv_SCW[target], states.ssm_SHPN[target] = states.conv_SCW[source], states.ssm_SHPN[source]
        return torch.cat(parts).masked_fill(~has_row_T[:, None], 0.0).to(xBC_TC.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Where the state of each token's sequence is."""

    slot_T: Tensor
    begins_T: Tensor
    """True for the first token of a sequence: the state before it is zeros."""
    has_row_T: Tensor
    """A padding token leaves the state in its slot unchanged."""

    def at(self, run: slice) -> Tokens:
        return Tokens(slot_T=self.slot_T[run], begins_T=self.begins_T[run], has_row_T=self.has_row_T[run])


def _captured(step: StepMetadata) -> dict[int, list[tuple[int, int]]]:
    """Token -> (source slot, target slot) copies of the state behind it. Host work: a captured step has none."""
    kept: dict[int, list[tuple[int, int]]] = {}
    captures = step.captures
    for row, count, slot in zip(captures.row, captures.num_tokens, captures.state_slot, strict=True):
        kept.setdefault(int(step.cu_q[row] + count - 1), []).append((int(step.table_row[row]), int(slot)))
    return kept


def _advance(
    x_MC: Tensor, dt_MH: Tensor, tokens: Tokens, states: LayerStates, weights: SsmWeights, spec: SsmSpec
) -> Tensor:
    """One token of each of M sequences -> y, fp32; updates their states in place. Source: arXiv:2405.21060."""
    heads, groups, count = spec.num_heads, spec.num_groups, x_MC.shape[0]
    old_MCW = states.conv_SCW.index_select(0, tokens.slot_T)
    old_MHPN = states.ssm_SHPN.index_select(0, tokens.slot_T)
    conv_MCW = old_MCW.masked_fill(tokens.begins_T[:, None, None], 0.0)
    ssm_MHPN = old_MHPN.masked_fill(tokens.begins_T[:, None, None, None], 0.0)
    conv_MCW = torch.cat((conv_MCW[:, :, 1:], x_MC[:, :, None].to(conv_MCW.dtype)), dim=-1)
    mixed_MC = (conv_MCW.float() * weights.conv_CW).sum(-1)
    if weights.conv_bias_C is not None:
        mixed_MC = mixed_MC + weights.conv_bias_C
    width = groups * spec.state_dim
    x, b, c = F.silu(mixed_MC).split((spec.inner_width, width, width), dim=-1)
    x_MHP = x.view(count, heads, spec.head_dim)
    b_MHN, c_MHN = (
        part.view(count, groups, 1, -1).expand(-1, -1, heads // groups, -1).reshape(count, heads, -1) for part in (b, c)
    )
    dt_MH = F.softplus(dt_MH.float() + weights.dt_bias_H).clamp(spec.dt_min, spec.dt_max)
    ssm_MHPN = ssm_MHPN * torch.exp(dt_MH * weights.decay_H)[:, :, None, None]
    ssm_MHPN = ssm_MHPN + (dt_MH[:, :, None] * x_MHP)[..., None] * b_MHN[:, :, None, :]
    is_real = tokens.has_row_T
    states.conv_SCW.index_copy_(0, tokens.slot_T, torch.where(is_real[:, None, None], conv_MCW, old_MCW))
    states.ssm_SHPN.index_copy_(0, tokens.slot_T, torch.where(is_real[:, None, None, None], ssm_MHPN, old_MHPN))
    y_MHP = (ssm_MHPN * c_MHN[:, :, None, :]).sum(-1) + weights.skip_H.view(heads, -1) * x_MHP
    return y_MHP.flatten(1)


class StaticKernels:
    """`kernels.select.TorchKernels` of fixed shapes."""

    name = "static"
    attention = StaticAttention
    scan = StaticScan
