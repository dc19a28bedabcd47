"""What layers chose for a step's tokens, where a request returns it: experts, and keys of sparse attention."""

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


def asks_index_choices(plan: StepPlan) -> bool:
    """Whether a request of the step returns the keys that indexers choose."""
    requests = [*plan.decode, *(chunk.request for chunk in plan.prefill)]
    return any(request.params.return_index_choices for request in requests)


def routing_buffer(num_tokens: int, shape: RoutingShape, device: Device) -> Tensor:
    """[T, layers, top-k] that layers write expert ids to: uint8, or int16 that stands for uint16."""
    dtype = torch.uint8 if shape.num_experts <= 256 else torch.int16
    return torch.empty((num_tokens, shape.num_layers, shape.top_k), dtype=dtype, device=device.torch)


def expert_ids(routing: Tensor) -> np.ndarray:
    """A `routing_buffer` on the host: uint8 or uint16."""
    ids: np.ndarray = routing.numpy()
    return ids if ids.dtype == np.uint8 else ids.view(np.uint16)
