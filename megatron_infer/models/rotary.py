"""Rotary embedding that stays on its device, and the cos/sin table the paged path gathers from."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_infer.distributed.backends import group_size
from megatron_infer.kernels.base import RotaryTable
from megatron_infer.models.context_parallel import take_own
from megatron_infer.models.mcore_compat import (
    RotaryEmbedding,
    YarnRotaryEmbedding,
    cuda_available,
    yarn_concentration,
    yarn_frequencies,
)

TABLE_POSITIONS = 64
"""Positions of a table computed at once on a CPU: whole vectors, and too few for torch to divide over threads."""


class DeviceAgnosticRotary(RotaryEmbedding):
    """megatron-core's rotary embedding without the move of its frequencies to CUDA; the same values to the bit."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of positions offset .. offset + max_seq_len - 1, [P, 1, 1, rotary_dim] fp32."""
        return angles(self, max_seq_len, offset)[:, None, None, :]

    @functools.lru_cache(maxsize=32)  # noqa: B019 - as in megatron-core, which clears it
    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """`get_emb` of this context-parallel rank's positions."""
        whole = self.get_emb(max_seq_len, offset)
        return whole if packed_seq else _of_own_positions(self, whole, cp_group)


class DeviceAgnosticYarn(YarnRotaryEmbedding):
    """megatron-core's yarn embedding without the move of its frequencies to CUDA; the same values to the bit."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> tuple[Tensor, float]:
        """(angles as those of `DeviceAgnosticRotary`, the factor of cosines and sines)."""
        return angles(self, max_seq_len, offset)[:, None, None, :], yarn_concentration(self)

    @functools.lru_cache(maxsize=32)  # noqa: B019
    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> tuple[Tensor, float]:
        """`get_emb` of this context-parallel rank's positions."""
        whole, factor = self.get_emb(max_seq_len, offset)
        return whole if packed_seq else _of_own_positions(self, whole, cp_group), factor


def _of_own_positions(rotary: RotaryEmbedding, emb: Tensor, cp_group: Any) -> Tensor:
    """megatron-core selects them through pinned memory, which a machine without CUDA does not have."""
    group = rotary.cp_group if cp_group is None else cp_group
    return emb if group_size(group) == 1 else take_own(emb, group)


ROTARY_CLASSES = {
    "rope": (RotaryEmbedding, DeviceAgnosticRotary),
    "yarn": (YarnRotaryEmbedding, DeviceAgnosticYarn),
}
"""position_embedding_type -> megatron-core's class, and ours."""


def rotary_dim(rotary: RotaryEmbedding) -> int:
    """Leading dims of a head that rotate."""
    return rotary.dim if isinstance(rotary, YarnRotaryEmbedding) else 2 * rotary.inv_freq.numel()


def angles(rotary: RotaryEmbedding, num_positions: int, offset: int = 0) -> Tensor:
    """[P, rotary_dim] fp32 angles, each frequency twice: in halves, or side by side when interleaved."""
    if isinstance(rotary, YarnRotaryEmbedding):
        inverse = yarn_frequencies(rotary)
        positions = torch.arange(num_positions, device=inverse.device, dtype=inverse.dtype) + offset
        freqs = torch.outer(positions, inverse)
    else:
        freqs = rotary.get_freqs_non_repeated(num_positions, offset)
    if rotary.rotary_interleaved:
        return freqs.repeat_interleave(2, dim=-1)
    return torch.cat((freqs, freqs), dim=-1)


def cpu_rotary(model: torch.nn.Module) -> torch.nn.Module:
    """Let a stock rotary embedding run on a CPU, in place; a no-op where CUDA is available.

    Stock embeddings move their frequencies to CUDA in the first forward, so a model with rotary positions cannot train
    or score on a CPU. No parameter, buffer or state-dict key changes.
    """
    ours = dict(ROTARY_CLASSES.values())
    for module in () if cuda_available() else model.modules():
        rotary = module._modules.get("rotary_pos_emb")  # the model's, or that of each layer with latent attention
        if type(rotary) in ours:
            rotary.__class__ = ours[type(rotary)]
    return model


def ropes_of(rotary: RotaryEmbedding) -> tuple[RotaryEmbedding, ...]:
    """The ropes in the order of their columns: that of layers with a window, where the model has one for them, and
    its own."""
    local = getattr(rotary, "rope_local", None)
    return (rotary,) if local is None else (local, rotary)


def rotary_table(
    rotary: RotaryEmbedding, num_positions: int, device: torch.device, *, factor: float = 1.0
) -> RotaryTable:
    """cos and sin of positions 0 .. num_positions - 1, fp32, times `factor`, of all its ropes side by side.

    Cast to the activations' dtype they have the bits of the training path.
    """
    # On a CPU in parts of one shape: torch's last bit may depend on an element's place, and so on the table's length.
    # A GPU computes each element by itself: one part, where thousands would be launched with every update.
    cos, sin = [], []
    size = TABLE_POSITIONS if rotary.inv_freq.is_cpu else max(1, num_positions)
    for begin in range(0, num_positions, size):
        part = torch.cat([angles(rope, size, begin) for rope in ropes_of(rotary)], dim=-1)
        cos.append(part.cos())
        sin.append(part.sin())
    cos_PR, sin_PR = torch.cat(cos)[:num_positions] * factor, torch.cat(sin)[:num_positions] * factor
    return RotaryTable(cos_PR=cos_PR.to(device), sin_PR=sin_PR.to(device))


def latent_rotary_table(rotary: RotaryEmbedding, num_positions: int, device: torch.device) -> RotaryTable:
    """`rotary_table` of latent attention: each frequency twice, side by side, and yarn's factor."""
    factor = yarn_concentration(rotary) if isinstance(rotary, YarnRotaryEmbedding) else 1.0
    halves, count = rotary_table(rotary, num_positions, device, factor=factor), rotary_dim(rotary) // 2
    cos_PR, sin_PR = (part[:, :count].repeat_interleave(2, dim=-1) for part in (halves.cos_PR, halves.sin_PR))
    return RotaryTable(cos_PR=cos_PR, sin_PR=sin_PR)


def rotate_alike(one: RotaryEmbedding, other: RotaryEmbedding) -> bool:
    """Whether two embeddings of latent attention give the same tables."""
    if type(one) is not type(other):
        return False
    tables = (latent_rotary_table(each, 2, torch.device("cpu")) for each in (one, other))
    first, second = tables
    return torch.equal(first.cos_PR, second.cos_PR) and torch.equal(first.sin_PR, second.sin_PR)
