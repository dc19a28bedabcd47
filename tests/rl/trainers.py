"""Trainers as users have them, on a CPU: what stands around a model, and what steps it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from session_case import batch

from megatron_infer.models import mcore_compat as mcore
from megatron_infer.testing.cpu_shim import cpu_shim


class TorchTrainer:
    """AdamW, on a plain model or torch's DDP."""

    def __init__(self, model: Any, *, ddp: bool = False) -> None:
        self.model = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        yield

    def step(self, step: int) -> float:
        self.model.train()
        ids, positions, labels = batch(step)
        loss = self.model(ids, positions, None, labels=labels).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class MegatronTrainer:
    """megatron-core's DDP and optimizer under the CPU shim; with `half`, Float16Module and master weights."""

    def __init__(self, model: Any, *, distributed: bool, overlap: bool = False, half: bool = False) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = model.config
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap,
            overlap_grad_reduce=overlap,
            grad_reduce_in_fp32=half,
        )
        with cpu_shim(4):
            inner = mcore.Float16Module(config, model) if half else model
            self.model = DistributedDataParallel(config, ddp_config, inner)
            if distributed:
                self.model.broadcast_params()
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=0.02,
                    clip_grad=1.0,
                    use_distributed_optimizer=distributed,
                    bf16=half,
                    overlap_param_gather=overlap,
                ),
                [self.model],
            )

    def step(self, step: int) -> float:
        from megatron.core.distributed import finalize_model_grads

        self.model.train()
        with cpu_shim(4):
            self.optimizer.zero_grad()
            self.model.zero_grad_buffer()
            ids, positions, labels = batch(step)
            loss = self.model(ids, positions, None, labels=labels).mean()
            loss.backward()
            finalize_model_grads([self.model])
            self.optimizer.step()
        return loss.item()
