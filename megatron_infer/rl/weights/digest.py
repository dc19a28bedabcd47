"""Digests of weights that are equal in every layout, so that an engine's can be compared with its trainer's.

An element's bits, times an odd number made of its row and one made of its column in the whole tensor, summed up modulo
2**64: a rank sums what it holds, the parts of a tensor add up to the digest of the whole. One changed element changes
it for certain (odd numbers have inverses), two exchanged ones, a transposed or a shifted part but for one case in 2**32
or fewer. What is hashed is the live tensor that kernels and packed copies read from, never a list of names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.errors import WeightUpdateError
from megatron_infer.rl.weights.inventory import VOCABULARY, Inventory, Layout
from megatron_infer.rl.weights.target import UpdateTarget

_MASK = (1 << 64) - 1
_CHUNK = 1 << 16
_ZERO = 0x1D8E4E27C47D124F
"""What an element of which no bit is set counts."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class PartDigest:
    """Of what one rank holds of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor, without the padding that computes nothing."""
    length: int
    """Of the dimension that it is split along."""
    spans: tuple[tuple[int, int], ...]
    """(start, size) along that dimension."""
    value: int
    rank: int


def part_digest(
    layout: Layout, tensor: Tensor, *, dtype: torch.dtype | None = None, rank: int = 0, limit: int | None = None
) -> PartDigest:
    """Of `tensor`, which is the part that `layout` says; dtype: as if it were rounded to that type.

    Rows of a padded vocabulary do not count, nor anything from `limit` on along the split dimension.
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
    """Of a piece of a tensor whose index along `dim` begins at `start`."""
    if piece.ndim == 1:
        piece = piece.unsqueeze(1)
    rows, columns = piece.shape[0], piece[0].numel()
    inner = piece.numel() // max(1, rows * piece.shape[1])  # elements for one index of the second dimension
    first_row, first_column = (start, 0) if dim == 0 else (0, start * inner)
    weights_C = _odd(first_column, columns, 1, piece.device)
    weights_R = _odd(first_row, rows, 2, piece.device)
    step, total = max(1, _CHUNK // max(1, columns)), 0
    for at in range(0, rows, step):
        chunk = piece[at : at + step].reshape(-1, columns).contiguous()
        bits = chunk.view(_BITS[chunk.element_size()]).to(torch.int64, copy=True)
        # a zero counts too, so that a missing row is not a row of zeros
        sums = bits.add_(_ZERO).mul_(weights_C).sum(1)
        total += int(sums.mul_(weights_R[at : at + step]).sum())
    return total


def _odd(start: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers, scattered, for indices start .. start + count - 1."""
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
    """Of everything a rank holds; dtypes, limits: by name in the whole model, see `part_digest`."""
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


def encode(parts: list[PartDigest]) -> str:
    return json.dumps([[p.name, p.shape, p.length, p.spans, p.value, p.rank] for p in parts])


def decode(text: str) -> list[PartDigest]:
    return [
        PartDigest(name, tuple(shape), length, tuple((a, b) for a, b in spans), value, rank)
        for name, shape, length, spans, value, rank in json.loads(text)
    ]


def combined(parts: list[PartDigest]) -> dict[str, int]:
    """Digest of every whole tensor out of all ranks' parts.

    Raises WeightUpdateError naming tensor and ranks where two ranks hold the same part with different values, where
    parts are missing, or where one element is held in two different divisions.
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
    """Digest of every tensor of the target's whole model; every rank of its engine calls it and has all of them."""
    own = encode(digests_of(target.inventory, rank=target.rank))
    return combined([part for text in target.gather("the weights' digests", own) for part in decode(text)])


def model_checksum(target: UpdateTarget) -> str:
    """Of the target's whole model, the same for every layout of the same weights in the same dtypes."""
    return checksum_of(model_digests(target))
