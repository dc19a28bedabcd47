"""Attention of a chunk whose tokens are divided over ranks of equal weights, each of which has the whole cache.

tokens of the rank's step   | own               | those of the other ranks    |
queries, rows               | yes               | none, as padding tokens      |
keys and values             | computed here     | gathered, in each layer      |
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_infer.kernels.base import AttendSpec, AttentionBackend


class GatheredAttention:
    """`AttentionBackend.run` of a rank's own tokens; keys and values of all ranks' tokens are appended to its cache.

    The backend has planned a step with all these tokens, the rank's own first, then those of the ranks after it.
    """

    def __init__(self, backend: AttentionBackend, group: ProcessGroup) -> None:
        self._backend, self._group, self._size = backend, group, group.size()

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        """Every rank calls it, with as many tokens."""
        own = len(q_TKGH)
        planes = (k_TKH,) if spec.planes == 1 else (k_TKH, v_TKH)
        all_AX = self._gather(torch.cat([plane.flatten(1) for plane in planes], 1))
        parts = all_AX.split([plane[0].numel() for plane in planes], 1)
        k_AKH, *values = (part.unflatten(1, plane.shape[1:]) for part, plane in zip(parts, planes, strict=True))
        v_AKH = values[0] if values else k_AKH[..., spec.value_start :]
        q_AKGH = q_TKGH.new_zeros(len(all_AX), *q_TKGH.shape[1:])
        q_AKGH[:own] = q_TKGH
        return self._backend.run(q_AKGH, k_AKH, v_AKH, kv_cache, layer=layer, spec=spec)[:own]

    def _gather(self, own_TX: Tensor) -> Tensor:
        """The tokens of all ranks, A in number."""
        parts_RTX = own_TX.new_empty(self._size, *own_TX.shape)
        places = [parts_RTX[(rank - self._group.rank()) % self._size] for rank in range(self._size)]
        dist.all_gather(places, own_TX, group=self._group)
        return parts_RTX.flatten(0, 1)
