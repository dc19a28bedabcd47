"""The gated delta rule in chunks, as differentiable torch calls on any device.

    h = g h;  h = h + beta (v - k h) k;  y = q h

Within a chunk each token's correction depends on those before it: a unit triangular system, solved at once for all of
the chunk. From chunk to chunk only states are passed.
Legend: K chunks, H heads, L tokens of a chunk, P head dim, N state dim. The arithmetic is fp32 at least.
Source: gated delta networks, arXiv:2412.06464, section 3.3 (the WY form).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_infer.kernels.ssm import L2_EPS, RecurrentSpec

FORGOTTEN = -128.0
"""Lower limit of a token's log decay: e^-128 is zero in fp32, and larger sums would lose the digits of small ones."""


class ChunkTerms(NamedTuple):
    """What chunks are before the states that they begin with are known; the first axis is the chunks'."""

    added_KHLP: Tensor
    """What each token adds to the state along its key, beside a state of zeros."""
    erased_KHLN: Tensor
    """Times the state: what each token adds less."""
    within_KHLL: Tensor
    """The weight of each token's addition in the output of each later one, itself included."""
    read_KHLN: Tensor
    """q, decayed from the chunk's begin."""
    written_KHLN: Tensor
    """k, decayed up to the chunk's end."""
    decay_KH11: Tensor
    """The whole chunk's decay."""

    def of(self, chunks: slice) -> ChunkTerms:
        return ChunkTerms(*(part[chunks] for part in self))


def unit(x: Tensor) -> Tensor:
    """x with length 1 along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def split_heads(mixed: Tensor, spec: RecurrentSpec) -> tuple[Tensor, Tensor, Tensor]:
    """What the convolution gives [..., C] -> (q, k, v), q and k for each head: [..., H, N] twice, [..., H, P]."""
    width, repeats = spec.num_groups * spec.state_dim, spec.num_heads // spec.num_groups
    q, k, v = mixed.split((width, width, spec.inner_width), dim=-1)
    q, k = (part.unflatten(-1, (spec.num_groups, -1)).repeat_interleave(repeats, dim=-2) for part in (q, k))
    return q, k, v.unflatten(-1, (spec.num_heads, -1))


def chunk_terms(q_KHLN: Tensor, k_KHLN: Tensor, v_KHLP: Tensor, beta_KHL: Tensor, log_KHL: Tensor) -> ChunkTerms:
    """q and k are as the convolution gives them. log: of each token's decay; a token with 0 in beta and log changes no
    state."""
    q, k = unit(q_KHLN) * q_KHLN.shape[-1] ** -0.5, unit(k_KHLN)
    # Sums of decays reach hundreds: a rounded part and the rest, so that differences keep their digits.
    sums = log_KHL.clamp(min=FORGOTTEN).double().cumsum(-1)
    high = sums.to(log_KHL.dtype)
    rest = (sums - high).to(log_KHL.dtype)
    between = (high[..., :, None] - high[..., None, :]) + (rest[..., :, None] - rest[..., None, :])
    decay = between.clamp(max=0.0).exp().tril()
    lower = (k @ k.transpose(-1, -2) * decay * beta_KHL[..., None]).tril(-1)
    from_start = sums.exp().to(log_KHL.dtype)[..., None]
    known = torch.cat((v_KHLP, k * from_start), dim=-1) * beta_KHL[..., None]
    solved = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    added, erased = solved.split((v_KHLP.shape[-1], k.shape[-1]), dim=-1)
    to_end = (sums[..., -1:] - sums).exp().to(log_KHL.dtype)[..., None]
    within = q @ k.transpose(-1, -2) * decay
    return ChunkTerms(added, erased, within, q * from_start, k * to_end, from_start[..., -1:, :])


def through_chunk(terms: ChunkTerms, state_KHPN: Tensor) -> tuple[Tensor, Tensor]:
    """(y [K, H, L, P], the states after the chunks) of chunks that begin with these states."""
    state_KHNP = state_KHPN.transpose(-1, -2)
    added = terms.added_KHLP - terms.erased_KHLN @ state_KHNP
    y = terms.read_KHLN @ state_KHNP + terms.within_KHLL @ added
    return y, state_KHPN * terms.decay_KH11 + added.transpose(-1, -2) @ terms.written_KHLN
