"""The protocol for layers with a recurrent state: one call for the decode rows and slices of a step.

Shape legend: T tokens of the step, R rows, S state slots, C convolution channels (M + 2*G*N), W convolution taps,
H heads, P head dim, M = H*P inner width, N state dim, G groups (heads of one group share B and C, or q and k).

    Mamba-2            xBC, dt --> causal conv + silu --> x, B, C --> h = exp(dt*A) h + dt x B;  y = C h + D x --> y
    gated delta net    qkv, ba --> causal conv + silu --> q, k, v --> h = g h;  h += beta (v - k h) k;  y = q h --> y
                                       ^   |                               ^   |
                                    conv state                       recurrent state     both by slot, updated in place

In a delta net q and k have length 1 (q is then divided by sqrt(N)), beta = sigmoid(b), g = exp(softplus(a + bias) A).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_infer.kernels.base import StepMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """The sizes of one layer's recurrence; built once at adoption."""

    is_delta: ClassVar[bool] = False
    """The recurrence is a gated delta net's, else Mamba-2's."""
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int

    @property
    def inner_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        return self.inner_width + 2 * self.num_groups * self.state_dim

    @property
    def num_steps(self) -> int:
        """The inputs of a token that are not convolved."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SsmSpec(RecurrentSpec):
    """A Mamba-2 layer: channels are (x, B, C), the other inputs dt of each head."""

    dt_min: float = 0.0
    dt_max: float = math.inf
    """softplus(dt + bias) is clamped to this range."""

    @property
    def num_steps(self) -> int:
        return self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec(RecurrentSpec):
    """A gated delta net: channels are (q, k, v), heads and their dim those of v, groups and the state dim those of q
    and k. The other inputs are b of each head, then a of each."""

    is_delta: ClassVar[bool] = True

    @property
    def num_steps(self) -> int:
        return 2 * self.num_heads


L2_EPS = 1e-6
"""Added to the square of the length of q and k, as in flash-linear-attention."""


@dataclass(slots=True, kw_only=True)
class SsmWeights:
    """What a layer's recurrence needs, derived from its parameters: fp32, contiguous, and stale once they change."""

    conv_CW: Tensor
    conv_bias_C: Tensor | None
    decay_H: Tensor
    """A = -exp(A_log)."""
    skip_H: Tensor | None = None
    """D: one factor per head; [M] where each channel has its own. None in a delta net, which has none."""
    dt_bias_H: Tensor


class LayerStates(NamedTuple):
    """One layer's states, strided views: slot s is conv_SCW[s] and ssm_SHPN[s], each contiguous."""

    conv_SCW: Tensor
    """The last W inputs of the convolution, oldest first; zeros before the first token of a sequence."""
    ssm_SHPN: Tensor


class ScanBackend(Protocol):
    """Causal convolution and recurrence behind plan/run."""

    name: str
    graph_safe: bool
    """See `AttentionBackend`; a step with captures is never replayed."""

    def supports(
        self, spec: RecurrentSpec, *, dtype: torch.dtype, conv_dtype: torch.dtype, ssm_dtype: torch.dtype
    ) -> str | None:
        """None when it can run the layer with states of these dtypes, else the reason."""
        ...

    def plan(self, step: StepMetadata) -> None:
        """Called once per step, before the first layer."""
        ...

    def run(
        self, xBC_TC: Tensor, dt_TX: Tensor, states: LayerStates, weights: SsmWeights, spec: RecurrentSpec
    ) -> Tensor:
        """Convolve, scan -> y_TM contiguous in xBC's dtype, before gate and norm; zeros for padding tokens.

        Row r's state is in slot step.table_row[r], which no other row of the step uses; a row that starts at position 0
        (kv_len == q_len) starts from zeros, whatever its slot holds. Afterwards the slot holds the state behind the
        row's last token, and the slot of every capture the state there. xBC_TC holds the convolved inputs (q, k, v in
        a delta net), dt_TX the `num_steps` others. Both may be strided views of one fused
        projection (last dim contiguous). The arithmetic is fp32, whatever the dtypes of inputs and states.
        Source: Mamba-2, arXiv:2405.21060; gated delta networks, arXiv:2412.06464.
        """
        ...
