"""The recurrences of Mamba-2 and of gated delta nets as differentiable torch calls, for training on any device.

Legend: S positions, b sequences, C convolution channels, W taps, H heads, P head dim, M = H*P, G groups, N state dim,
Q positions of a chunk, K chunks, J heads of a group. The arithmetic is at least fp32, whatever the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.distributed.backends import group_size
from megatron_infer.kernels.ssm import RecurrentSpec, SsmWeights
from megatron_infer.kernels.torch import delta_rule
from megatron_infer.models.context_parallel import gather_positions, take_own
from megatron_infer.models.mcore_compat import packed_lengths


def mix(xBC_SbC: Tensor, dt_SbX: Tensor, weights: SsmWeights, spec: RecurrentSpec, *, chunk: int) -> Tensor:
    """Convolution and recurrence of whole sequences, each from an empty state -> [S, b, M], before gate and norm.

    Inputs (see `kernels.ssm.ScanBackend.run`) and weights have one dtype, fp32 at least. chunk: positions of a
    chunk, at most.
    """
    mixed = F.silu(causal_conv(xBC_SbC, weights.conv_CW, weights.conv_bias_C))
    recur = _delta_rule if spec.is_delta else _selective_scan
    return recur(mixed, dt_SbX, weights, spec, min(chunk, len(mixed)))


def over_sequences(mixed: Callable[[Tensor], Tensor], projected: Tensor, packed_seq_params: Any, cp: Any) -> Tensor:
    """mixed(projected [S, b, X]) -> [S, b, M], of each packed sequence by itself where there are cu_seqlens.

    cp: ranks of which each has its positions of every sequence; each mixes whole ones. None: sequences are whole.
    """
    num_ranks = group_size(cp)

    def one(sequence: Tensor) -> Tensor:
        return mixed(sequence) if num_ranks == 1 else take_own(mixed(gather_positions(sequence, cp)), cp)

    if packed_seq_params is None:
        return one(projected)
    length, batch, _ = projected.shape
    lengths = packed_lengths(packed_seq_params, length=length * num_ranks, batch=batch)
    return torch.cat([one(sequence) for sequence in projected.split([whole // num_ranks for whole in lengths])])


def training_weights(layer: Any, dtype: torch.dtype) -> SsmWeights:
    """A mixer's or delta net's parameters as `mix` takes them, with gradients."""
    bias = layer.conv1d.bias
    skip_H = getattr(layer, "D", None)
    return SsmWeights(
        conv_CW=layer.conv1d.weight.flatten(1).to(dtype),
        conv_bias_C=None if bias is None else bias.to(dtype),
        decay_H=-torch.exp(layer.A_log.to(dtype)),
        skip_H=None if skip_H is None else skip_H.to(dtype),
        dt_bias_H=layer.dt_bias.to(dtype),
    )


def _selective_scan(mixed: Tensor, dt_SbH: Tensor, weights: SsmWeights, spec: Any, chunk: int) -> Tensor:
    assert weights.skip_H is not None
    state = spec.num_groups * spec.state_dim
    x, b, c = mixed.split((spec.inner_width, state, state), dim=-1)
    x = x.unflatten(-1, (-1, spec.head_dim))
    b, c = (part.unflatten(-1, (spec.num_groups, -1)) for part in (b, c))
    dt = F.softplus(dt_SbH + weights.dt_bias_H).clamp(spec.dt_min, spec.dt_max)
    y = chunk_scan(x, dt, weights.decay_H, b, c, chunk=chunk)
    return (y + x * weights.skip_H.view(spec.num_heads, -1)).flatten(-2)


def _delta_rule(mixed: Tensor, ba_SbX: Tensor, weights: SsmWeights, spec: RecurrentSpec, chunk: int) -> Tensor:
    length = len(mixed)
    b, a = ba_SbX.chunk(2, dim=-1)
    log = F.softplus(a + weights.dt_bias_H) * weights.decay_H

    def chunked(x: Tensor) -> Tensor:
        """[S, b, H, ...] -> [K, b, H, Q, ...], padded with zeros: tokens that change no state."""
        x = F.pad(x, (*[0, 0] * (x.ndim - 1), 0, -length % chunk))
        return x.unflatten(0, (-1, chunk)).movedim(1, 3)

    parts = (*delta_rule.split_heads(mixed, spec), torch.sigmoid(b), log)
    terms = delta_rule.chunk_terms(*(chunked(x) for x in parts))
    state, outs = mixed.new_zeros(mixed.shape[1], spec.num_heads, spec.head_dim, spec.state_dim), []
    for part in zip(*terms, strict=True):
        y_bHQP, state = delta_rule.through_chunk(delta_rule.ChunkTerms(*part), state)
        outs.append(y_bHQP.movedim(2, 0).flatten(-2))
    return torch.cat(outs)[:length]


def causal_conv(x_SbC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """Depthwise convolution over each position and the W - 1 before it, zeros before the first -> [S, b, C]."""
    length, taps = x_SbC.shape[0], weight_CW.shape[1]
    padded = F.pad(x_SbC, (0, 0, 0, 0, taps - 1, 0))
    # W products and sums: torch's depthwise convolution is slower here, and its bits depend on the batch.
    mixed = padded[:length] * weight_CW[:, 0]
    for tap in range(1, taps):
        mixed = mixed + padded[tap : tap + length] * weight_CW[:, tap]
    return mixed if bias_C is None else mixed + bias_C


def chunk_scan(
    x_SbHP: Tensor, dt_SbH: Tensor, decay_H: Tensor, b_SbGN: Tensor, c_SbGN: Tensor, *, chunk: int
) -> Tensor:
    """y[t] = c[t] . h[t] with h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] b[t]^T and h before the first 0 -> [S, b, H, P].

    dt is after softplus; S is any length. Inside a chunk this is attention with decaying weights, between chunks a
    recurrence over S / chunk states. Memory grows with S * chunk * H.
    Source: state-space duality, arXiv:2405.21060, section 6.
    """
    length, groups = x_SbHP.shape[0], b_SbGN.shape[2]
    pad = -length % chunk

    def chunked(x: Tensor, *heads: int) -> Tensor:
        """[S, b, ...] -> [b, K, Q, ...]; padding has dt = 0, so that it neither decays the state nor adds to it."""
        x = F.pad(x, (*[0, 0] * (x.ndim - 1), 0, pad)).transpose(0, 1)
        return x.unflatten(1, (-1, chunk)).unflatten(3, heads) if heads else x.unflatten(1, (-1, chunk))

    per_group = (groups, x_SbHP.shape[2] // groups)
    x = chunked(x_SbHP * dt_SbH[..., None], *per_group)  # b K Q G J P
    step = chunked(dt_SbH * decay_H, *per_group).permute(0, 1, 3, 4, 2)  # b K G J Q
    b_KQGN, c_KQGN = chunked(b_SbGN), chunked(c_SbGN)
    within = torch.exp(_segment_sums(step))  # decay from position s to position q: b K G J Q s
    y = torch.einsum("bkqgn,bksgn,bkgjqs,bksgjp->bkqgjp", c_KQGN, b_KQGN, within, x)
    if x.shape[1] == 1:
        return y.flatten(1, 2)[:, :length].flatten(2, 3).transpose(0, 1)
    added = torch.einsum("bksgjp,bkgjs,bksgn->bkgjpn", x, within[..., -1, :], b_KQGN)
    whole = torch.exp(step.sum(-1))[..., None, None]
    state = torch.zeros_like(added[:, 0])
    before = []
    for k in range(x.shape[1]):
        before.append(state)
        state = whole[:, k] * state + added[:, k]
    from_start = torch.exp(step.cumsum(-1))
    y = y + torch.einsum("bkqgn,bkgjpn,bkgjq->bkqgjp", c_KQGN, torch.stack(before, 1), from_start)
    return y.flatten(1, 2)[:, :length].flatten(2, 3).transpose(0, 1)


def _segment_sums(step: Tensor) -> Tensor:
    """[..., Q] -> [..., Q, Q]: entry (q, s) is step[s + 1] + ... + step[q], -inf above the diagonal.

    Each sum is computed by itself: the difference of two long prefix sums would lose the digits of a short one.
    """
    size = step.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=step.device).tril(-1)
    sums = step[..., None].expand(*step.shape, size).masked_fill(~below, 0).cumsum(-2)
    return sums.masked_fill(~(below | torch.eye(size, dtype=torch.bool, device=step.device)), float("-inf"))


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor | None, eps: float, group_size: int) -> Tensor:
    """RMS norm of y * silu(gate) over each group of group_size channels -> y's dtype; without a weight the product."""
    wide = torch.promote_types(y.dtype, torch.float32)
    out = y.to(wide) * F.silu(gate.to(wide))
    if weight is not None:
        groups = out.unflatten(-1, (-1, group_size))
        out = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.to(wide)
    return out.to(y.dtype)
