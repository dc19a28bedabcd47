"""The oracle: every operation in its slow, obvious form, on any device and in any dtype.

All arithmetic is float64 and rounded once; the other backends are compared with it. Legend: `base.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, GraphSupport, StepMetadata
from megatron_infer.kernels.kv_rounding import as_kept


class ReferenceOps:
    """Norms, activations and linears by definition."""

    name = "reference"
    experts = None
    norms = None
    argmax_linear = None
    embedding = staticmethod(F.embedding)

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x_TX, weight, bias)

    def fp32_linear(self, x_SX: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        out_SV = x_SX.double() @ weight[:rows].double().t()
        return (out_SV if bias is None else out_SV + bias[:rows]).float()

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x_TD.double()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * scale * weight.double()).to(x_TD.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = (x_TD.double() + residual_TD.double()).to(residual_TD.dtype)
        return self.rms_norm(total, weight, eps).to(x_TD.dtype), total

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x_TD.double()
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
        return (x if bias is None else x + bias.double()).to(x_TD.dtype)

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        gate, up = x_T2F.double().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(x_T2F.dtype)

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        gate = gate_TM.double()
        y = y_TM.double() * gate * torch.sigmoid(gate)
        if weight is not None:
            groups = y.unflatten(-1, (-1, group_size))
            y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.double()
        return y.to(y_TM.dtype)

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


def weights(scores_KGP: Tensor, sinks_N: Tensor | None) -> Tensor:
    """Softmax over P; a sink takes part in the sum and gets no weight."""
    if sinks_N is None:
        return scores_KGP.softmax(-1)
    sinks_KG1 = sinks_N.to(scores_KGP).view(*scores_KGP.shape[:2], 1)
    return torch.cat((scores_KGP, sinks_KG1), -1).softmax(-1)[..., :-1]


class ReferenceAttention:
    """One query at a time over keys gathered one block at a time."""

    name = "reference"
    graphs = GraphSupport.NONE
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
        if spec.rotary_dim and step.cos_TR is not None:
            turn = {"dim": spec.rotary_dim, "interleaved": spec.rotary_interleaved}
            q_TKGH = rotate(q_TKGH, step.cos_TR, step.sin_TR, **turn)
            k_TKH = rotate(k_TKH, step.cos_TR, step.sin_TR, **turn)
        block_size = kv_cache.shape[3]
        k_TKH, v_TKH = as_kept(k_TKH, kv_cache.dtype), as_kept(v_TKH, kv_cache.dtype)
        for token, position in enumerate(step.kv_pos_T.tolist()):
            kv_cache[layer, 0, position // block_size, position % block_size] = k_TKH[token]
            kv_cache[layer, 1, position // block_size, position % block_size] = v_TKH[token]

        out_TKGH = torch.zeros(q_TKGH.shape, dtype=q_TKGH.dtype, device=q_TKGH.device)
        for row in range(step.num_rows):
            kv_len, q_len, first = int(step.kv_len[row]), int(step.q_len[row]), int(step.cu_q[row])
            if not q_len:
                continue  # pads the step
            blocks = step.block_table[int(step.table_row[row]), : -(-kv_len // block_size)].tolist()
            keys_PKH = torch.cat([kv_cache[layer, 0, block].double() for block in blocks])[:kv_len]
            values_PKH = torch.cat([kv_cache[layer, 1, block].double() for block in blocks])[:kv_len]
            for i in range(q_len):
                stop = kv_len - q_len + i + 1
                start = 0 if spec.window is None else max(0, stop - spec.window)
                query_KGH = q_TKGH[first + i].double()
                scores = torch.einsum("kgh,pkh->kgp", query_KGH, keys_PKH[start:stop]) * spec.scale
                weights_KGP = weights(scores, spec.sinks_N)
                mixed = torch.einsum("kgp,pkh->kgh", weights_KGP, values_PKH[start:stop])
                out_TKGH[first + i] = mixed.to(q_TKGH.dtype)
        return out_TKGH.flatten(1)
