"""FlashInfer's part of a draw (`sampling_backend="flashinfer"`): which ids are a row's best, for rows with a top_k.

Its samplers use random numbers of their own, and its masks of probabilities sum fp32 in an order of their own and keep
every id that ties with the last one: another token for the same seed. Its search for the k largest is exact when it
prefers lower ids among equals. So the set comes from here, and order, weights, top_p, min_p and the seeded draw from
sampling/filters.py: the tokens are those of the torch path, bit for bit. Not yet run on a GPU.
Legend: M rows, V vocab, C candidates.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from megatron_infer.kernels.flashinfer_attention import PACKAGE, no_compiler
from megatron_infer.kernels.optional_packages import missing, not_on_gpu

MODULE = "flashinfer.topk"
MODULES, MIN_VERSION = ("flashinfer", MODULE), (0, 7, 2)
PREFER_LOWER = 1
"""`flashinfer.TopKTieBreak.SMALL`: among ids with the last place's logit the lowest are taken."""


def unavailable(device: torch.device) -> str | None:
    """Why FlashInfer cannot search here; None: it can. The first call on a GPU may compile its module."""
    reason = not_on_gpu(device) or missing(MODULES, PACKAGE, MIN_VERSION) or no_compiler()
    if reason is None and not importlib.import_module(MODULE).can_implement_filtered_topk():
        reason = (
            "decides ties only with 128 KiB of shared memory per multiprocessor, as compute capability 8.0 or 9.0 has"
        )
    return reason


class FlashInferSearch:
    """The `Search` of sampling/filters.py."""

    def __init__(self) -> None:
        self._top_k = importlib.import_module(MODULE).top_k

    def __call__(self, values_MV: Tensor, count: int) -> Tensor:
        """int64 [M, count] from fp32 [M, V], in any order; count < V."""
        values_MV = (values_MV + 0.0).contiguous()  # FlashInfer compares bits: -0.0 must equal 0.0
        return self._top_k(values_MV, count, tie_break=PREFER_LOWER)[1].to(torch.int64)
