"""Definitions of attention and scan as a backend that graphs may hold, for tests of graphs where there is no GPU."""

from __future__ import annotations

from megatron_infer.kernels.torch.ssm_ref import ReferenceScan
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention

STATIC = f"{__name__}:StaticKernels"
"""For `MEGATRON_INFER_BACKEND`."""


class StaticAttention(ReferenceAttention):
    name = "static"
    graph_safe = True


class StaticScan(ReferenceScan):
    name = "static"
    graph_safe = True


class StaticKernels:
    """`kernels.select.TorchKernels` of fixed shapes."""

    name = "static"
    attention = StaticAttention
    scan = StaticScan
