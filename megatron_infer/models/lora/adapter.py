"""An adapter on the host: the pairs of matrices that it adds to a model's linears, in the whole model's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor

from megatron_infer.kernels.lora import PairBlock, dense


@dataclass(frozen=True)
class LoRAPair:
    """One linear computes y + scale * B(A x) in the place of y.

    The pair of a linear that stands for several, with an A each, has several blocks: what is zero in its B is not held.
    """

    blocks: tuple[PairBlock, ...]
    shape: tuple[int, int]
    """(out, in) of the linear."""
    scale: float

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float) -> LoRAPair:
        """a: [rank, in]. b: [out, rank], its rows in the order of the linear's own weight in megatron-core."""
        return cls(((a, b, None),), (b.shape[0], a.shape[1]), scale)

    @property
    def rank(self) -> int:
        return sum(len(a) for a, _, _ in self.blocks)

    @property
    def a(self) -> Tensor:
        return self._dense[0]

    @property
    def b(self) -> Tensor:
        return self._dense[1]

    @cached_property
    def _dense(self) -> tuple[Tensor, Tensor]:
        return dense(self.blocks, self.shape[0])


@dataclass(frozen=True)
class Adapter:
    """Pairs by the path of their linear below the model, such as `decoder.layers.3.self_attention.linear_qkv`.

    Layers are counted over the whole model and matrices are whole: not those of one pipeline stage or tensor-parallel
    rank. Queries, keys and values with an A each are one pair, whose A stacks theirs and whose B is block-diagonal.
    """

    name: str
    pairs: Mapping[str, LoRAPair] = field(repr=False)

    @property
    def rank(self) -> int:
        """The largest rank of a pair."""
        return max((pair.rank for pair in self.pairs.values()), default=0)

    @cached_property
    def digest(self) -> str:
        """Hash of all that the adapter computes with: paths, blocks in their dtypes, scales. Not of its name."""
        found = sha256()
        for path, pair in sorted(self.pairs.items()):
            found.update(repr((path, float(pair.scale))).encode())
            for tensor in (tensor for block in pair.blocks for tensor in block if tensor is not None):
                plain = tensor.detach().cpu().contiguous()
                found.update(repr((str(plain.dtype), tuple(plain.shape))).encode())
                found.update(memoryview(plain.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return found.hexdigest()[:32]
