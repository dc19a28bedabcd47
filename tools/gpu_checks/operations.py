"""Norms and activations of every accelerated backend against their definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_checks.context import Context
from gpu_checks.registry import Comparison, Result, check
from gpu_checks.steps import error_of
from megatron_infer.kernels import accelerated
from megatron_infer.kernels.torch_ref import ReferenceOps

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
WIDTHS = (64, 576, 4096, 8192, 5120, 1000)
Calls = dict[str, Callable[[Any], Any]]


def _calls(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Calls:
    """Name -> the operation on given inputs, to be called with a backend."""
    generator = torch.Generator().manual_seed(width)

    def randn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind).to(device)

    first, second, weight, bias = randn(num_tokens, width), randn(num_tokens, width), randn(width), randn(width)
    residual = randn(num_tokens, width, kind=torch.float32)
    both, gate, group = randn(num_tokens, 2 * width), randn(num_tokens, width + 8)[:, 8:], width // 2
    return {
        "rms_norm": lambda ops: ops.rms_norm(first, weight, 1e-5),
        "add_rms_norm": lambda ops: ops.add_rms_norm(first, second.clone(), weight, 1e-5),
        "add_rms_norm fp32 residual": lambda ops: ops.add_rms_norm(first, residual.clone(), weight, 1e-5),
        "layer_norm": lambda ops: ops.layer_norm(first, weight, bias, 1e-5),
        "layer_norm without bias": lambda ops: ops.layer_norm(first, weight, None, 1e-5),
        "silu_mul": lambda ops: ops.silu_mul(both),
        "gated_rms_norm": lambda ops: ops.gated_rms_norm(first, gate, weight, 1e-5, group_size=group),
        "gate alone": lambda ops: ops.gated_rms_norm(first, gate, None, 1e-5, group_size=group),
    }


@check(
    "elementwise",
    group="operations",
    promise="norms, gated norms and SwiGLU equal their definition at widths that are powers of two and at others",
    budget_s=15,
)
def elementwise(ctx: Context) -> Result:
    compare = Comparison("error over the largest entry")
    cpu = torch.device("cpu")
    for dtype in ctx.dtypes():
        for backend in ctx.backends(accelerated.OPS, dtype):
            for width in ctx.pick(WIDTHS, (48,)):
                for num_tokens in ctx.pick((1, 7, 300), (2,)):
                    there, here = (_calls(num_tokens, width, dtype, where) for where in (ctx.device, cpu))
                    for name, call in there.items():
                        got, wanted = call(backend), here[name](ReferenceOps())
                        pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
                        for part, reference in pairs:
                            label = f"{backend.name} {name} {dtype} [{num_tokens}, {width}]"
                            compare.require(f"{label}: gives {part.dtype}", part.dtype == reference.dtype)
                            compare.add(label, error_of(part, reference), TOLERANCE[dtype])
    return compare.result()
