"""Weights of verl's trainer for its servers by gloo: `rollout.checkpoint_engine.backend=megatron_infer`.

    trainer's rank 0      header, bytes; header, bytes; ... {"end"}       one broadcast each, on any device's host
    every rollout worker  the same broadcasts ─▶ (name, tensor)

A header is JSON: the tensors of a bucket, or the end, or the error for which the trainer has stopped.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from megatron_infer.errors import WeightUpdateError
from megatron_infer.rl.frameworks.buckets import buckets
from megatron_infer.rl.trainer_group import TensorSpec, tensors


@CheckpointEngineRegistry.register("megatron_infer")
class GlooWeights(CheckpointEngine):
    """A process group of the trainer's rank 0 and all rollout workers, made for each update."""

    def __init__(self, bucket_size: int, is_master: bool = False, *, timeout_s: float = 600.0) -> None:
        """bucket_size: most bytes of a broadcast; a larger tensor is sent alone. timeout_s: of each broadcast."""
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        """The address of this rank's store; only the master's has one."""
        self.finalize()
        if not self._is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 is the trainer's first; -1 are the trainer's others, which only take part in gathering weights."""
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [size] * len(ranks), "master": metadata[:1] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        if rank < 0:
            return
        if self._store is None:
            self._store = dist.TCPStore(master["host"], master["port"], is_master=False, timeout=self._timeout)
        self._group = dist.ProcessGroupGloo(self._store, rank, world_size, self._timeout)

    def finalize(self) -> None:
        self._group = self._store = None

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send (rank 0) or drain (others) the trainer's weights -> figures for verl's log."""
        if self._group is None:
            for _ in weights:
                pass
            return {}
        num_bytes = 0
        try:
            for bucket in buckets(weights, self._bucket_size):
                header = [
                    [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket
                ]
                data = torch.cat([one.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, one in bucket])
                self._broadcast_header({"tensors": header})
                self._broadcast(data)
                num_bytes += data.nbytes
        except Exception as error:
            self._broadcast_header({"error": f"{type(error).__name__}: {error}"})
            raise
        self._broadcast_header({"end": global_steps})
        return {"megatron_infer/weight_bytes_sent": float(num_bytes)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Raises WeightUpdateError for a trainer that has failed, is gone, or does not send for `timeout_s`."""
        while True:
            header = self._broadcast_header(None)
            if "error" in header:
                raise WeightUpdateError(f"the trainer stopped sending: {header['error']}")
            if "end" in header:
                return
            specs = [TensorSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in header["tensors"]]
            for pair in tensors(self._received, specs, buffer_bytes=sum(one.num_bytes for one in specs)):
                yield pair

    def _broadcast_header(self, header: dict[str, Any] | None) -> dict[str, Any]:
        """Send a header, or receive one (None)."""
        text = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)
        size = torch.tensor([len(text)])
        self._broadcast(size)
        if header is None:
            text = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(text)
        found: dict[str, Any] = json.loads(bytes(text.tolist()))
        return found

    def _received(self, num_bytes: int) -> Tensor:
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        self._broadcast(flat)
        return flat

    def _broadcast(self, tensor: Tensor) -> None:
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise WeightUpdateError(f"the trainer or a rollout worker is gone: {error}") from error
