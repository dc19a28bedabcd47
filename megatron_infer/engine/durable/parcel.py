"""A request on its way to another engine: the content of a file of saved requests, as an object or as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.engine.durable import file_format
from megatron_infer.engine.durable.request_codec import Records, SavedSequence, of_bytes, to_bytes
from megatron_infer.errors import SnapshotError
from megatron_infer.kernels.kv_rounding import movable
from megatron_infer.memory.store_layout import BLOCKS, DRAFT_BLOCKS, STATES

RECORDS = "records"
_OF_RANK = ".rank{}"
"""After the name of a tensor of another rank than the leader, in a whole parcel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One unfinished request that an engine has handed out, with what this rank has computed of it.

    A whole one has the parts of all ranks: descriptions ("parts" of the manifest) and tensors next to the leader's.
    """

    manifest: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_bytes(self) -> bytes:
        return file_format.to_bytes(self.manifest, self.tensors)

    @classmethod
    def of_bytes(cls, content: bytes) -> Parcel:
        """What `to_bytes` gave. Raises SnapshotError for bytes that were cut or changed."""
        manifest, tensors = file_format.of_bytes(content, "parcel")
        return cls(manifest=manifest, tensors=tensors)

    @classmethod
    def whole(cls, parts: Sequence[Parcel]) -> Parcel:
        """One parcel of the parts of all ranks, by rank."""
        leader, *others = parts
        tensors = dict(leader.tensors)
        for rank, part in enumerate(others, start=1):
            own = {name + _OF_RANK.format(rank): tensor for name, tensor in part.tensors.items() if name != RECORDS}
            tensors |= own
        return cls(manifest={**leader.manifest, "parts": [part.manifest["kv"] for part in others]}, tensors=tensors)

    def part(self, rank: int) -> Parcel:
        """What a rank takes in of a whole parcel. One of another number of ranks has tokens only, for any rank."""
        parts = self.manifest.get("parts")
        if not isinstance(parts, list):
            raise SnapshotError("parcel", f"its parts are {parts!r}, and no list")
        kv = parts[rank - 1] if 0 < rank <= len(parts) else self.manifest.get("kv")
        end = _OF_RANK.format(rank) if rank else ""
        own = {name: self.tensors[name + end] for name in (BLOCKS, DRAFT_BLOCKS, STATES) if name + end in self.tensors}
        if RECORDS in self.tensors:
            own[RECORDS] = self.tensors[RECORDS]
        return Parcel(manifest={**self.manifest, "kv": kv, "parts": [], "rank": rank}, tensors=own)

    def without(self, num_tokens: int) -> Parcel:
        """The parcel without the blocks of the first `num_tokens` tokens, which the receiver has published.

        Blocks that are among them in part stay.
        """
        size = (self.manifest["kv"] or {}).get("block_size")
        if not size or num_tokens < size:
            return self
        records = of_bytes(_bytes_of(self.tensors[RECORDS]), Records)
        used: dict[int, int] = {}
        for sequence in (sequence for request in records.requests for sequence in request.sequences):
            sequence.place = _without(sequence.place, num_tokens // size, size, used)
        blocks = [name for name in self.tensors if name.partition(".")[0] in (BLOCKS, DRAFT_BLOCKS)]
        kept = {name: _chosen(self.tensors[name], list(used)) for name in blocks}
        kv, *parts = ({**one, "num_blocks": len(used)} for one in (self.manifest["kv"], *self.manifest["parts"]))
        tensors = {**self.tensors, **kept, RECORDS: bytes_tensor(to_bytes(records))}
        return Parcel(manifest={**self.manifest, "kv": kv, "parts": parts}, tensors=tensors)


def _without(place: SavedSequence, columns: int, size: int, used: dict[int, int]) -> SavedSequence:
    """used: old number of a block that stays -> its new one."""
    kv = place.kv
    if kv is None:
        return place
    assert not kv.num_left_out, "blocks were left out before"
    columns = min(columns, kv.num_tokens // size)
    blocks = [used.setdefault(block, len(used)) for block in kv.blocks[columns:]]
    return replace(place, kv=replace(kv, blocks=blocks, num_left_out=columns * size))


def _chosen(content: Tensor, places: list[int]) -> Tensor:
    return movable(content)[places].view(content.dtype)


def bytes_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _bytes_of(tensor: Tensor) -> bytes:
    content: bytes = tensor.numpy().tobytes()
    return content
