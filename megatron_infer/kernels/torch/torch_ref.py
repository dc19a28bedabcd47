"""The oracle: every operation in its slow, obvious form, on any device and in any dtype.

All arithmetic is float64 and rounded once; the other backends are compared with it. Legend: `base.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import NO_INDEXER, AttendSpec, StepMetadata
from megatron_infer.kernels.kv_rounding import append, select
from megatron_infer.kernels.torch.latent_products import into_latent, out_of_latent

MOST_ENTRIES = 1 << 24
"""Numbers of gathered keys that attention has in memory at once."""


class ReferenceOps:
    """Norms, activations and linears by definition."""

    name = "reference"
    experts = None
    norms = None
    argmax_linear = None
    route = None
    embedding = staticmethod(F.embedding)
    into_latent = staticmethod(into_latent)
    out_of_latent = staticmethod(out_of_latent)

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x_TX, weight, bias)

    def fp32_linear(self, x_SX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        out_SV = x_SX.double() @ weight[:rows].double().t()
        return (out_SV if bias is None else out_SV + bias[:rows]).float()

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        x = x_TD.double()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * scale * (weight.double() + zero_centered)).to(x_TD.dtype)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        total = (x_TD.double() + residual_TD.double()).to(residual_TD.dtype)
        return self.rms_norm(total, weight, eps, zero_centered=zero_centered).to(x_TD.dtype), total

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x_TD.double()
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
        return (x if bias is None else x + bias.double()).to(x_TD.dtype)

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        gate, up = x_T2F.double().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(x_T2F.dtype)

    def softcap(self, x_SV: Tensor, cap: float) -> Tensor:
        return (cap * torch.tanh(x_SV.double() / cap)).float()

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        gate = gate_TM.double()
        y = y_TM.double() * gate * torch.sigmoid(gate)
        if weight is not None:
            groups = y.unflatten(-1, (-1, group_size))
            y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.double()
        return y.to(y_TM.dtype)

    def sigmoid_mul(self, x_TM: Tensor, gate_TM: Tensor) -> Tensor:
        return (x_TM.double() * torch.sigmoid(gate_TM.double())).to(x_TM.dtype)

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        return function(x_TX)


def rotate(x_TXH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, dim: int, interleaved: bool) -> Tensor:
    """Rotary embedding of the leading `dim` dims of every head, rounded once -> a new tensor.

    x may have any number of head axes between T and H. Source: RoFormer, arXiv:2104.09864.
    """
    x = x_TXH.double()
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (dim,)
    cos, sin = cos_TR[:, :dim].double().view(shape), sin_TR[:, :dim].double().view(shape)
    turn = x[..., :dim]
    if interleaved:
        other = torch.stack((-turn[..., 1::2], turn[..., 0::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-turn[..., dim // 2 :], turn[..., : dim // 2]), dim=-1)
    return torch.cat((turn * cos + other * sin, x[..., dim:]), dim=-1).to(x_TXH.dtype)


def rows_of_tokens(step: StepMetadata) -> tuple[Tensor, Tensor]:
    """(the row of each token, whether it has one), both [T], by device tensors alone; padding tokens get some row."""
    token_T = torch.arange(step.num_tokens, device=step.cu_q_R1.device, dtype=step.cu_q_R1.dtype)
    # A row without tokens ends where the one before it does: the count of ends at or before a token is its row.
    row_T = torch.bucketize(token_T, step.cu_q_R1[1 : step.num_rows + 1], right=True)
    return row_T.clamp(max=step.num_rows - 1), row_T < step.num_rows


class ReferenceAttention:
    """Every token against every key its row could have; a mask hides those that it may not see.

    Shapes and launches follow from the step's shape, so that a graph could hold them.
    """

    name = "reference"
    graph_safe = False
    _step: StepMetadata

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        return None if spec.index is None else NO_INDEXER

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        step, cache = self._step, kv_cache[layer]
        if (rotation := step.rotation(spec)) is not None:
            turn = {"dim": spec.rotary_dim, "interleaved": spec.rotary_interleaved}
            q_TKGH, k_TKH = (rotate(x, *rotation, **turn) for x in (q_TKGH, k_TKH))
        append(cache[0], step.kv_pos_T, k_TKH)
        if spec.value_start is None:
            append(cache[1], step.kv_pos_T, v_TKH)
        row_T, has_row_T = rows_of_tokens(step)
        block_TW = step.block_table.index_select(0, step.table_row_R.index_select(0, row_T))
        at_once = max(1, MOST_ENTRIES // (block_TW.shape[1] * cache[0, 0].numel()))
        parts = [
            attend(*part, cache, spec)
            for part in zip(*(x.split(at_once) for x in (q_TKGH, block_TW, step.positions_T)), strict=True)
        ]
        out_TKGH = torch.cat(parts).masked_fill(~has_row_T[:, None, None, None], 0.0)
        return out_TKGH.to(q_TKGH.dtype).flatten(1)


def attend(q_TKGH: Tensor, block_TW: Tensor, position_T: Tensor, cache: Tensor, spec: AttendSpec) -> Tensor:
    """Each token against the keys in its row's blocks of a layer's cache [planes, blocks, B, K, H] -> float64
    [T, K, G, V].

    A sink takes part in the softmax and has no value. Source: PagedAttention, arXiv:2309.06180.
    """
    shape = (len(block_TW), -1, spec.num_kv_heads, spec.head_dim)
    planes = [select(part, block_TW.flatten()).double().view(shape)[..., : spec.query_dim] for part in cache]
    key_TPKH, value_TPKH = planes[0], planes[-1][..., spec.value_start or 0 :]
    position_P = torch.arange(key_TPKH.shape[1], device=cache.device)
    seen_TP = position_P <= position_T[:, None]
    if spec.window is not None:
        seen_TP &= position_P > position_T[:, None] - spec.window
    scores_TKGP = torch.einsum("tkgh,tpkh->tkgp", q_TKGH.double(), key_TPKH) * spec.scale
    if spec.softcap is not None:
        scores_TKGP = spec.softcap * torch.tanh(scores_TKGP / spec.softcap)
    scores_TKGP = scores_TKGP.masked_fill(~seen_TP[:, None, None, :], -torch.inf)
    if spec.sinks_N is not None:
        sink_KG1 = spec.sinks_N.double().view(spec.num_kv_heads, spec.group_size, 1)
        scores_TKGP = torch.cat((scores_TKGP, sink_KG1.expand(*scores_TKGP.shape[:-1], 1)), -1)
    weight_TKGP = scores_TKGP.softmax(-1)[..., : key_TPKH.shape[1]]
    # Blocks that the row does not reach may hold anything, and 0 x NaN is NaN.
    value_TPKH = value_TPKH.masked_fill(~seen_TP[:, :, None, None], 0.0)
    return torch.einsum("tkgp,tpkh->tkgh", weight_TKGP, value_TPKH)
