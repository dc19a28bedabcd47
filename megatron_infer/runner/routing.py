"""Routing of a step's tokens: the experts that each mixture-of-experts layer chose, where a request returns them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import RoutingShape
from megatron_infer.memory.device import Device
from megatron_infer.scheduler.step_plan import StepPlan


def asks_routing(plan: StepPlan) -> bool:
    """Whether a request of the step returns routing; every rank finds the same."""
    return any(request.params.return_routing for request in plan.decode) or any(
        chunk.request.params.return_routing for chunk in plan.prefill
    )


def routing_buffer(num_tokens: int, shape: RoutingShape, device: Device) -> Tensor:
    """[T, layers, top-k] that layers write expert ids to: uint8, or int16 that stands for uint16."""
    dtype = torch.uint8 if shape.num_experts <= 256 else torch.int16
    return torch.empty((num_tokens, shape.num_layers, shape.top_k), dtype=dtype, device=device.torch)


def expert_ids(routing: Tensor) -> np.ndarray:
    """A `routing_buffer` on the host: uint8 or uint16."""
    ids: np.ndarray = routing.numpy()
    return ids if ids.dtype == np.uint8 else ids.view(np.uint16)
