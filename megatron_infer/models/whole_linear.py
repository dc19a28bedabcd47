"""A linear that every tensor-parallel rank has whole, without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class WholeLinear(torch.nn.Module):
    """Stands where a spec asks for a linear with parallel_mode="duplicated"; has no bias."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__()
        on_cpu = config.use_cpu_initialization or not torch.accelerator.is_available()
        device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.register_parameter("bias", None)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None
