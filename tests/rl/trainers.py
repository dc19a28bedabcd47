"""Trainers as in users' scripts, on a CPU: a model's wrappers and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from session_case import batch, own_positions

from megatron_infer.models import mcore_compat as mcore
from megatron_infer.testing.cpu_shim import cpu_shim


class TorchTrainer:
    """AdamW, on a plain model or torch's DDP."""

    def __init__(self, model: Any, *, ddp: bool = False, smooth: bool = False) -> None:
        """smooth: see `MegatronTrainer`."""
        self.model = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.1 if smooth else 0.02, eps=0.1 if smooth else 1e-8
        )

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

    def __init__(
        self, model: Any, *, distributed: bool, overlap: bool = False, half: bool = False, smooth: bool = False
    ) -> None:
        """model: or a list of chunks. smooth: to compare layouts; Adam's first steps are as long for a gradient near
        zero as for any other."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        chunks = model if isinstance(model, list) else [model]
        config = chunks[0].config
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap,
            overlap_grad_reduce=overlap,
            grad_reduce_in_fp32=half,
        )
        with cpu_shim(4):
            wrapped = [
                DistributedDataParallel(
                    config, ddp_config, mcore.Float16Module(config, one) if half else one, disable_bucketing=number > 0
                )
                for number, one in enumerate(chunks)
            ]
            self.model: Any = wrapped if isinstance(model, list) else wrapped[0]
            if distributed:
                for one in wrapped:
                    one.broadcast_params()
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=0.1 if smooth else 0.02,
                    adam_eps=0.1 if smooth else 1e-8,
                    clip_grad=1.0,
                    use_distributed_optimizer=distributed,
                    bf16=half,
                    overlap_param_gather=overlap,
                ),
                wrapped,
            )

    def step(self, step: int, rows: slice = slice(None)) -> float | None:
        """rows: this rank's part of the batch; a context-parallel rank takes its positions of it. Returns the loss on
        ranks that compute it."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.train()
        self.model.config.finalize_model_grads_func = finalize_model_grads
        ids, positions, labels = (part[rows] for part in batch(step))
        shape, num_ranks = ids.shape, parallel_state.get_context_parallel_world_size()
        cut = own_positions({"ids": ids, "positions": positions, "labels": labels})
        ids, positions, labels = cut.values()

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.mean() / num_ranks
            whole = loss.detach().clone()
            torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
            return loss, {"loss": whole}

        def forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
            next(batches)
            return model(ids, positions, None, labels=labels), loss_of

        with cpu_shim(4):
            self.optimizer.zero_grad()
            self.model.zero_grad_buffer()
            found = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter([None]),
                model=[self.model],
                num_microbatches=1,
                seq_length=shape[1],
                micro_batch_size=shape[0],
                forward_only=False,
            )
            self.optimizer.step()
        return found[0]["loss"].item() if found else None
