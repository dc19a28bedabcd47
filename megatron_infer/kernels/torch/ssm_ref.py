"""The oracle of the scan: token by token, in float64, rounded where a state is stored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.ssm import L2_EPS, LayerStates, RecurrentSpec, SsmWeights
from megatron_infer.kernels.torch.torch_ref import rows_of_tokens


class ReferenceScan:
    """The recurrence by definition: all decode rows at once, then one token after the other. Legend: `kernels/ssm.py`.

    Shapes and launches of a step without captures follow from the step's shape, so that a graph could hold them.
    """

    name = "reference"
    graph_safe = False
    _step: StepMetadata

    def supports(
        self, spec: RecurrentSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(
        self, xBC_TC: Tensor, dt_TX: Tensor, states: LayerStates, weights: SsmWeights, spec: RecurrentSpec
    ) -> Tensor:
        step = self._step
        row_T, has_row_T = rows_of_tokens(step)
        q_len_R, slot_R = step.q_len_R[: step.num_rows], step.table_row_R[: step.num_rows].long()
        is_fresh_R = step.kv_len_R[: step.num_rows] == q_len_R
        before = [part.index_select(0, slot_R) for part in states]
        now = [_where(is_fresh_R, torch.zeros_like(part), part).double() for part in before]
        kept = _captured(step)
        runs = [slice(0, step.num_decode)] if step.num_decode else []
        runs += [slice(token, token + 1) for token in range(step.num_decode, step.num_tokens)]
        parts = []
        for run in runs:
            row_M, is_real_M = row_T[run], has_row_T[run]
            old_MCW, old_MHPN = (part.index_select(0, row_M) for part in now)
            conv_MCW = torch.cat((old_MCW[:, :, 1:], xBC_TC[run].double()[:, :, None]), dim=-1)
            y_MM, ssm_MHPN = advance(conv_MCW, old_MHPN, dt_TX[run].double(), weights, spec)
            now[0].index_copy_(0, row_M, _where(is_real_M, conv_MCW, old_MCW))
            now[1].index_copy_(0, row_M, _where(is_real_M, ssm_MHPN, old_MHPN))
            parts.append(y_MM)
            for row, slot in kept.get(run.stop - 1, ()):
                for part, content in zip(states, now, strict=True):
                    part[slot] = content[row].to(part.dtype)
        for part, content, old in zip(states, now, before, strict=True):
            part.index_copy_(0, slot_R, _where(q_len_R > 0, content.to(part.dtype), old))
        return torch.cat(parts).masked_fill(~has_row_T[:, None], 0.0).to(xBC_TC.dtype)


def _where(is_first: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """By the first axis."""
    return torch.where(is_first.view(-1, *[1] * (first.ndim - 1)), first, second)


def _captured(step: StepMetadata) -> dict[int, list[tuple[int, int]]]:
    """Token -> (row, slot) in which the state after it is kept. Host work: a captured step has none."""
    kept: dict[int, list[tuple[int, int]]] = {}
    captures = step.captures
    for row, count, slot in zip(captures.row, captures.num_tokens, captures.state_slot, strict=True):
        kept.setdefault(int(step.cu_q[row] + count - 1), []).append((int(row), int(slot)))
    return kept


def advance(
    conv_MCW: Tensor, state_MHPN: Tensor, dt_MX: Tensor, weights: SsmWeights, spec: RecurrentSpec
) -> tuple[Tensor, Tensor]:
    """One token of each of M sequences, the last column of its conv_CW -> (y [M, inner width], states after it)."""
    mixed_MC = (conv_MCW * weights.conv_CW).sum(-1)
    mixed_MC = F.silu(mixed_MC if weights.conv_bias_C is None else mixed_MC + weights.conv_bias_C)
    recur = _delta_rule if spec.is_delta else _selective_scan
    y_MHP, state_MHPN = recur(mixed_MC, state_MHPN, dt_MX, weights, spec)
    return y_MHP.flatten(1), state_MHPN


def _selective_scan(
    mixed_MC: Tensor, state_MHPN: Tensor, dt_MH: Tensor, weights: SsmWeights, spec: Any
) -> tuple[Tensor, Tensor]:
    """Source: Mamba-2, arXiv:2405.21060."""
    assert weights.skip_H is not None
    width = spec.num_groups * spec.state_dim
    x, b, c = mixed_MC.split((spec.inner_width, width, width), dim=-1)
    x_MHP, b_MHN, c_MHN = x.unflatten(-1, (-1, spec.head_dim)), _per_head(b, spec), _per_head(c, spec)
    dt_MH = F.softplus(dt_MH + weights.dt_bias_H).clamp(spec.dt_min, spec.dt_max)
    state_MHPN = state_MHPN * torch.exp(dt_MH * weights.decay_H)[:, :, None, None]
    state_MHPN = state_MHPN + (dt_MH[:, :, None] * x_MHP)[..., None] * b_MHN[:, :, None, :]
    y_MHP = (state_MHPN * c_MHN[:, :, None, :]).sum(-1) + weights.skip_H.view(spec.num_heads, -1) * x_MHP
    return y_MHP, state_MHPN


def _delta_rule(
    mixed_MC: Tensor, state_MHPN: Tensor, ba_MX: Tensor, weights: SsmWeights, spec: RecurrentSpec
) -> tuple[Tensor, Tensor]:
    """Source: gated delta networks, arXiv:2412.06464."""
    width = spec.num_groups * spec.state_dim
    q, k, v = mixed_MC.split((width, width, spec.inner_width), dim=-1)
    q_MHN, k_MHN = (
        part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_EPS)
        for part in (_per_head(q, spec), _per_head(k, spec))
    )
    b_MH, a_MH = ba_MX.chunk(2, dim=-1)
    decay_MH = torch.exp(F.softplus(a_MH + weights.dt_bias_H) * weights.decay_H)
    state_MHPN = state_MHPN * decay_MH[:, :, None, None]
    error_MHP = v.unflatten(-1, (-1, spec.head_dim)) - (state_MHPN * k_MHN[:, :, None, :]).sum(-1)
    state_MHPN = state_MHPN + (torch.sigmoid(b_MH)[..., None] * error_MHP)[..., None] * k_MHN[:, :, None, :]
    y_MHP = (state_MHPN * q_MHN[:, :, None, :]).sum(-1) * spec.state_dim**-0.5
    return y_MHP, state_MHPN


def _per_head(part_MX: Tensor, spec: RecurrentSpec) -> Tensor:
    """The group's part of each head, [M, H, N]."""
    part_MG1N = part_MX.unflatten(-1, (spec.num_groups, 1, -1))
    return part_MG1N.expand(-1, -1, spec.num_heads // spec.num_groups, -1).flatten(1, 2)
