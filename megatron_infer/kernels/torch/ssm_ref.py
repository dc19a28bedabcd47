"""The oracle of the scan: token by token, in float64, rounded where a state is stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata
from megatron_infer.kernels.ssm import LayerStates, SsmSpec, SsmWeights


class ReferenceScan:
    """The recurrence by definition. Legend: `kernels/ssm.py`."""

    name = "reference"
    graph_safe = False

    def __init__(self) -> None:
        self._step: StepMetadata | None = None

    def supports(
        self, spec: SsmSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        return None

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(self, xBC_TC: Tensor, dt_TH: Tensor, states: LayerStates, weights: SsmWeights, spec: SsmSpec) -> Tensor:
        step = self._step
        assert step is not None, "run() before plan()"
        y_TM = xBC_TC.new_zeros(xBC_TC.shape[0], spec.inner_width)
        captures = step.captures
        kept: dict[tuple[int, int], int] = {
            (int(row), int(n)): int(slot)
            for row, n, slot in zip(captures.row, captures.num_tokens, captures.state_slot, strict=True)
        }
        for row in range(step.num_rows):
            first, q_len, slot = int(step.cu_q[row]), int(step.q_len[row]), int(step.table_row[row])
            conv, ssm = states.conv_SCW[slot].double(), states.ssm_SHPN[slot].double()
            if int(step.kv_len[row]) == q_len:
                conv, ssm = torch.zeros_like(conv), torch.zeros_like(ssm)
            for i in range(q_len):
                conv = torch.cat((conv[:, 1:], xBC_TC[first + i].double()[:, None]), dim=1)
                y, ssm = advance(conv, ssm, dt_TH[first + i].double(), weights, spec)
                y_TM[first + i] = y.to(y_TM.dtype)
                for target in (kept.get((row, i + 1)), slot if i + 1 == q_len else None):
                    if target is not None:
                        states.conv_SCW[target] = conv.to(states.conv_SCW.dtype)
                        states.ssm_SHPN[target] = ssm.to(states.ssm_SHPN.dtype)
        return y_TM


def advance(
    conv_CW: Tensor, ssm_HPN: Tensor, dt_H: Tensor, weights: SsmWeights, spec: SsmSpec
) -> tuple[Tensor, Tensor]:
    """One token, whose input is the last column of conv_CW -> (y_M, the SSM state behind it)."""
    mixed = (conv_CW * weights.conv_CW).sum(-1)
    mixed = F.silu(mixed if weights.conv_bias_C is None else mixed + weights.conv_bias_C)
    heads, groups, width = spec.num_heads, spec.num_groups, spec.num_groups * spec.state_dim
    x, b, c = mixed.split((spec.inner_width, width, width))
    x_HP = x.view(heads, spec.head_dim)
    b_HN, c_HN = (part.view(groups, -1).repeat_interleave(heads // groups, dim=0) for part in (b, c))
    dt = F.softplus(dt_H + weights.dt_bias_H).clamp(spec.dt_min, spec.dt_max)
    ssm_HPN = ssm_HPN * torch.exp(dt * weights.decay_H)[:, None, None]
    ssm_HPN = ssm_HPN + (dt[:, None] * x_HP)[..., None] * b_HN[:, None, :]
    skip_HP = weights.skip_H.view(heads, -1)
    return ((ssm_HPN * c_HN[:, None, :]).sum(-1) + skip_HP * x_HP).flatten(), ssm_HPN
