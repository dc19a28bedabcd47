"""Digests of weights that are equal in every layout, so that an engine's can be compared with its trainer's.

The sum modulo 2**64 of each element's bits, times an odd number computed from its row and another from its column in
the whole tensor: a rank sums its part, and the parts of a tensor add up to the digest of the whole. One changed element
always changes the digest (odd numbers have inverses); two exchanged elements, a transposed or a shifted part do so
except for one case in 2**32 or fewer. The live tensors that kernels and packed copies read are hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from megatron_infer.errors import WeightUpdateError
from megatron_infer.rl.updates.inventory import VOCABULARY, Inventory, Layout
from megatron_infer.rl.updates.target import UpdateTarget

_MASK = (1 << 64) - 1
_CHUNK = 1 << 16
_ZERO = 0x1D8E4E27C47D124F
"""Added to each element's bits, so that zeros count too."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the type that its bits are read as."""


@dataclass(frozen=True, slots=True)
class PartDigest:
    """Digest of one rank's part of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, without padding."""
    length: int
    """Length of the dimension that it is split along."""
    spans: tuple[tuple[int, int], ...]
    """(start, size) along that dimension."""
    value: int
    rank: int


def part_digest(
    layout: Layout, tensor: Tensor, *, dtype: torch.dtype | None = None, rank: int = 0, limit: int | None = None
) -> PartDigest:
    """Digest of `tensor`, the part that `layout` describes. dtype: rounded to that type first.

    Padding rows of a vocabulary are left out, and all rows from `limit` on along the split dimension.
    """
    true = layout.shape[layout.dim] if limit is None else min(limit, layout.shape[layout.dim])
    if layout.padded == VOCABULARY and layout.true_size is not None:
        true = min(true, layout.true_size)
    shape = tuple(true if at == layout.dim else size for at, size in enumerate(layout.shape))
    total, spans = 0, []
    for span in layout.spans:
        size = max(0, min(span.size, true - span.whole))
        if size:
            piece = tensor.detach().narrow(layout.dim, span.local, size)
            total += _sum(piece if dtype is None else piece.to(dtype), layout.dim, span.whole)
            spans.append((span.whole, size))
    return PartDigest(layout.name, shape, true, tuple(spans), total & _MASK, rank)


def _sum(piece: Tensor, dim: int, start: int) -> int:
    """The sum over one span of a tensor, which begins at index `start` along `dim`."""
    if piece.ndim == 1:
        piece = piece.unsqueeze(1)
    rows, columns = piece.shape[0], piece[0].numel()
    inner = piece.numel() // max(1, rows * piece.shape[1])  # elements for one index of the second dimension
    first_row, first_column = (start, 0) if dim == 0 else (0, start * inner)
    weights_C = _odd_numbers(first_column, columns, 1, piece.device)
    weights_R = _odd_numbers(first_row, rows, 2, piece.device)
    step, total = max(1, _CHUNK // max(1, columns)), 0
    for at in range(0, rows, step):
        chunk = piece[at : at + step].reshape(-1, columns).contiguous()
        bits = chunk.view(BITS[chunk.element_size()]).to(torch.int64, copy=True)
        # a zero counts too, so that a missing row is not a row of zeros
        sums = bits.add_(_ZERO).mul_(weights_C).sum(1)
        total += int(sums.mul_(weights_R[at : at + step]).sum())
    return total


def _odd_numbers(start: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Pseudo-random odd 64-bit numbers for the indices start .. start + count - 1."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x = (x + seed * 0x1E3779B97F4A7C15) * -0x61C8864680B583EB
    x = (x ^ (x >> 29)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 32)) * 0x14C2CA6AFDEEF915
    return x ^ (x >> 31) | 1


def digests_of(
    inventory: Inventory,
    *,
    rank: int = 0,
    dtypes: Mapping[str, torch.dtype] | None = None,
    limits: Mapping[str, int] | None = None,
) -> list[PartDigest]:
    """Digests of all tensors of a rank; dtypes, limits: by name in the whole model, see `part_digest`."""
    dtypes, limits = dtypes or {}, limits or {}
    return [
        part_digest(
            local.layout,
            local.tensor,
            dtype=dtypes.get(local.layout.name),
            rank=rank,
            limit=limits.get(local.layout.name),
        )
        for local in inventory.tensors
    ]


def encode_digests(parts: list[PartDigest]) -> str:
    return msgspec.json.encode(parts).decode()


def decode_digests(text: str) -> list[PartDigest]:
    return msgspec.json.decode(text, type=list[PartDigest])


def combine_digests(parts: list[PartDigest]) -> dict[str, int]:
    """Digest of every whole tensor from all ranks' parts.

    Raises WeightUpdateError naming tensor and ranks if two ranks hold the same part with different values, if parts are
    missing, or if parts overlap without being the same.
    """
    by_name: dict[str, dict[tuple[tuple[int, int], ...], PartDigest]] = {}
    for part in parts:
        others = by_name.setdefault(part.name, {})
        same = others.setdefault(part.spans, part)
        if same.value != part.value or same.shape != part.shape:
            raise WeightUpdateError(
                f"{part.name} differs between rank {same.rank} and rank {part.rank}, which hold the same part of it",
                tensor=part.name,
                rank=part.rank,
            )
    return {name: _total(name, list(held.values())) for name, held in sorted(by_name.items())}


def _total(name: str, parts: list[PartDigest]) -> int:
    dim_sizes = {part.shape for part in parts}
    if len(dim_sizes) > 1:
        raise WeightUpdateError(f"{name} has shapes {sorted(dim_sizes)} on different ranks", tensor=name)
    covered = sorted(span for part in parts for span in part.spans)
    at = 0
    for start, size in [*covered, (parts[0].length, 0)]:
        if start != at:
            what = "is held twice" if start < at else "is held by no rank"
            raise WeightUpdateError(f"{name}: the range from {min(at, start)} to {max(at, start)} {what}", tensor=name)
        at = start + size
    return sum(part.value for part in parts) & _MASK


def checksum_of(totals: Mapping[str, int]) -> str:
    """One value for a whole model."""
    lines = "\n".join(f"{name} {value:016x}" for name, value in sorted(totals.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def model_digests(target: UpdateTarget) -> dict[str, int]:
    """Digest of every tensor of the target's whole model; called on every rank of its engine, each gets all of them."""
    with target.unpacked():
        own = encode_digests(digests_of(target.inventory, rank=target.rank))
    return combine_digests(
        [part for text in target.gather("the weights' digests", own) for part in decode_digests(text)]
    )


def model_checksum(target: UpdateTarget) -> str:
    """Checksum of the target's whole model, the same for every layout of the same weights in the same dtypes."""
    return checksum_of(model_digests(target))
