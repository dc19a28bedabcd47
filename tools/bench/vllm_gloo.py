"""vLLM's weight updates on a CPU: its engine class over a gloo group, as its NCCL one is over NCCL.

A plugin of group vllm.general_plugins in vLLM's environment (`weight_updates.py --vllm-python`). vLLM 0.32 has no
transport for a CPU. Only the bytes come another way: routes, the reload of layers and `load_weights` are vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info: Any) -> None:
        uri = f"tcp://{init_info.master_address}:{init_info.master_port}"
        rank, size = init_info.rank_offset + self.parallel_config.rank, init_info.world_size
        store, *_ = next(c10d.rendezvous(uri, rank, size))
        self.group = dist.ProcessGroupGloo(dist.PrefixStore(uri, store), rank, size)

    def receive_weights(self, update_info: Any) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.group.broadcast([tensor], options).wait()
            self.group.barrier().wait()
            self.model.load_weights([(name, tensor)])


def register() -> None:
    WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
