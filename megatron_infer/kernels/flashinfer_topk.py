"""FlashInfer's part of a draw (`sampling_backend="flashinfer"`): which ids are a row's best, for rows with a top_k.

Its samplers draw by random numbers of their own, and its masks of probabilities sum fp32 in an order of their own and
keep every id that ties with the last: another token for the same seed. Its search for the k largest, told to prefer
lower ids among equals, is exact. So the set comes from here, and order, weights, top_p, min_p and the seeded draw stay
those of sampling/filters.py: the tokens are the torch path's, bit for bit. Not yet run on a GPU.
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
"""`flashinfer.TopKTieBreak.SMALL`: of ids with the logit of the last place, the lowest are taken."""


def unavailable(device: torch.device) -> str | None:
    """Why FlashInfer cannot search here; None: it can. The first question to a GPU may compile its module."""
    reason = not_on_gpu(device) or missing(MODULES, PACKAGE, MIN_VERSION) or no_compiler()
    if reason is None and not importlib.import_module(MODULE).can_implement_filtered_topk():
        reason = (
            "decides ties only where a multiprocessor has 128 KiB of shared memory, as compute capability 8.0 or 9.0"
        )
    return reason


class FlashInferSearch:
    """Callable as `filters.Search`."""

    def __init__(self) -> None:
        self._top_k = importlib.import_module(MODULE).top_k

    def __call__(self, values_MV: Tensor, count: int) -> Tensor:
        """int64 [M, count] from fp32 [M, V], in any order; count < V. -0.0 equals 0.0, as it does not for its bits."""
        values_MV = (values_MV + 0.0).contiguous()
        return self._top_k(values_MV, count, tie_break=PREFER_LOWER)[1].to(torch.int64)
