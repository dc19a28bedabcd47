"""The products of latent attention: queries into the space of latents, sums over latents out of it, head by head.

    into    [q | q_rope] -> [q_rope | q @ W_key], whose product with a cached vector is that with the full key
    out     weights @ latents -> (weights @ latents) @ W_value.T

So keys and values of all heads need not be made of the latents. Legend: kernels/base.py; L latent width, H a head's
width without its rotary part, R its rotary part, V a value's width.
Source: the absorbed form of multi-head latent attention, arXiv:2405.04434, section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def into_latent(q_TNX: Tensor, weight_NHL: Tensor) -> Tensor:
    """See `Ops.into_latent`."""
    width = weight_NHL.shape[1]
    latent_NTL = torch.bmm(q_TNX[..., :width].transpose(0, 1), weight_NHL)
    return torch.cat((q_TNX[..., width:], latent_NTL.transpose(0, 1)), dim=-1)


def out_of_latent(x_TNL: Tensor, weight_NVL: Tensor) -> Tensor:
    """See `Ops.out_of_latent`."""
    return torch.bmm(x_TNL.transpose(0, 1), weight_NVL.transpose(1, 2)).transpose(0, 1).flatten(1)
