"""Trainers as in users' scripts, on a CPU: a model's wrappers and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
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


@contextmanager
def megatron_fsdp_on_cpu() -> Iterator[None]:
    """Gloo cannot scale while it sums: inside, Megatron-FSDP's gradients are sums over ranks, not means."""
    with cpu_shim(4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.distributed, "_make_nccl_premul_sum", lambda factor: torch.distributed.ReduceOp.SUM)
        yield


class MegatronFsdpTrainer:
    """megatron-core's Adam on a model in its wrapper of Megatron-FSDP, inside `megatron_fsdp_on_cpu`."""

    def __init__(self, model: Any, *, strategy: str = "optim_grads_params") -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        with pytest.MonkeyPatch.context() as patch:  # its meshes are of CUDA devices
            wrapper = mcore.megatron_fsdp_wrapper(mcore_fsdp_adapter)
            patch.setattr(wrapper, "_init_dist_index", _index_on_cpu)
            self.model = wrapper(model.config, config, model, device=torch.device("cpu"))
        adam = OptimizerConfig(optimizer="adam", lr=0.02, clip_grad=1.0, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        self.fsdp = self.model.module

    def step(self, seed: int) -> float:
        self.model.train()
        ids, positions, labels = own_positions(dict(zip("ipl", batch(seed), strict=True))).values()
        loss = self.model(ids, positions, None, labels=labels).mean()
        loss.backward()
        self.finish()
        return loss.item()

    def finish(self) -> None:
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad_buffer()

    def weights(self) -> dict[str, torch.Tensor]:
        self.fsdp.start_param_sync(force_sync=True)
        found = {name: self.fsdp.raw_param[name].detach().clone() for name in self.fsdp.raw_param}
        self.fsdp.all_gather_pipeline.reset()
        return found


def _index_on_cpu(wrapper: Any, _: Any) -> Any:
    """The meshes that megatron-core makes, of CPU devices."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp import FSDPDistributedIndex
    from torch.distributed.device_mesh import DeviceMesh

    wrapper.tp_group = tp = parallel_state.get_tensor_model_parallel_group()
    experts, expert_tp = (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_tensor_parallel_group(),
    )

    def mesh_of(data: Any, tensor: Any, ep_size: int = 1, ep_rank: int = 0) -> Any:
        ranks = torch.arange(torch.distributed.get_world_size()).view(data.size(), ep_size, tensor.size())[:, ep_rank]
        return DeviceMesh.from_group([data, tensor], "cpu", mesh=ranks.tolist(), mesh_dim_names=("dp_cp", "tp"))

    return FSDPDistributedIndex(
        device_mesh=mesh_of(parallel_state.get_data_parallel_group(with_context_parallel=True), tp),
        dp_shard_dim="dp_cp",
        tp_dim="tp",
        expt_device_mesh=mesh_of(
            parallel_state.get_expert_data_parallel_group(), expert_tp, experts.size(), experts.rank()
        ),
    )
