"""Weights of a model that generates in another layout than the trainer's: there while it generates, and only then.

    at rest      parameters have their shapes, and no memory
    gathered     memory of their own, filled from the trainer's shards by one reshard

`ShardedWeights` drives it as it drives FSDP's. Where FSDP holds the trainer's weights in shards, the reshard gathers
one unit of FSDP after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.distributed.generation_groups import LayoutRanks
from megatron_infer.errors import ConfigError
from megatron_infer.models.sharded_weights import ShardedWeights
from megatron_infer.models.trainer_state import wrapper_chain
from megatron_infer.models.weights.change_guard import guarded_tensors
from megatron_infer.rl.updates.inventory import Inventory, LocalTensor
from megatron_infer.rl.updates.reshard import ReshardReport, ReshardSource
from megatron_infer.rl.updates.target import UpdateTarget


class GenerationWeights:
    """One kind of `Shards`: a trainer's model in another layout."""

    def __init__(self, model: Any, generation_model: Any, collection: Any, sharded: ShardedWeights | None) -> None:
        """model: the trainer's, without wrappers. collection: groups of the other, if they are not its own. sharded:
        the trainer's weights, in shards of FSDP; None: each rank has them whole.

        Gives back the memory of generation_model, whose content is lost. Every rank of the world calls it. Raises
        ConfigError and ModelError, with nothing changed.
        """
        self.model = wrapper_chain(generation_model)[-1]
        """Without wrappers."""
        if self.model is model or any(getattr(layer, "fused", None) is not None for layer in self.model.decoder.layers):
            raise ConfigError("generation_model has an engine already; build a model that nothing else uses")
        self.ranks = LayoutRanks.of(model, collection, self.model, [] if sharded is None else sharded.shards.groups)
        self.groups = [self.ranks.all]
        self._model = model
        self._sharded = sharded
        self._parts = None if sharded is None else sharded.by_part
        if self._parts is not None:
            self._parts.gathered_tensors()  # a collective, the first time
        self._source = ReshardSource(model, group=self.ranks.all, shards=self._parts)
        self.target = UpdateTarget(model=self.model, inventory=Inventory.of(self.model), rank=dist.get_rank())
        self._tensors = [local.tensor for local in self.target.inventory.tensors if local.tensor.numel() > 1]
        self.release()

    @property
    def report(self) -> ReshardReport | None:
        """Figures of the last time that weights were gathered."""
        return self._source.report

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    @property
    def num_bytes(self) -> int:
        own = sum(tensor.nbytes for tensor in self._tensors)
        parts = [] if self._parts is None else self._parts.parts
        return own + max((sum(one.numel() * one.element_size() for one in part) for part in parts), default=0)

    def local_tensors(self) -> list[Tensor]:
        if self._sharded is not None:
            return self._sharded.shards.local_tensors()
        return [tensor.detach() for tensor in guarded_tensors(self._model)]

    def check(self) -> None:
        """Whatever else does not fit is found by the plan, before anything moves."""
        if self._sharded is not None:
            self._sharded.shards.check()

    def gather(self) -> None:
        for tensor in self._tensors:
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self._sharded is not None:
            self._sharded.shards.reshard()
        self._source.check(self.target)
        self._source.write_into(self)

    def release(self) -> None:
        for tensor in self._tensors:
            nothing = math.nan if tensor.is_floating_point() else 0
            tensor.data = torch.full((), nothing, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    def reshard(self) -> None:
        """The trainer's forward gathers nothing."""

    def put_back(self) -> Callable[[], None]:
        return self.reshard

    def reset(self) -> None:
        """The trainer's forward leaves nothing."""

    # ------------------------------------------------------------------ a WeightSink of the reshard

    def writable(self, local: LocalTensor) -> Tensor:
        return local.tensor.data  # whose writes are no new version: the content decides whether the weights changed

    def count_received(self, num_bytes: int) -> None:
        """`report` has it."""
