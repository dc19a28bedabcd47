"""Whose weights are written: an engine's, on all its ranks, or those of a model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_infer.comm.groups import ParallelGroups
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import WrongState
from megatron_infer.rl.weights.inventory import Inventory, bare


@dataclass(slots=True, kw_only=True)
class Target:
    """A model whose weights are to be written, and the engine that has to hear of it, if there is one."""

    model: Any
    """Without wrappers."""
    inventory: Inventory
    engine: DynamicInferenceEngine | None = None
    rank: int = 0
    """Of this process in the world."""
    group: Any = None
    """Of a model alone: the ranks it is divided over; None: this one."""

    @classmethod
    def of(cls, engine_or_model: Any) -> Target:
        is_engine = isinstance(engine_or_model, DynamicInferenceEngine)
        model = engine_or_model.model if is_engine else bare(engine_or_model)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        inventory = Inventory.of(model)
        if is_engine:
            return cls(model=model, inventory=inventory, engine=engine_or_model, rank=rank)
        return cls(model=model, inventory=inventory, rank=rank, group=ParallelGroups.of(None, model).engine)

    @property
    def version(self) -> int:
        return 0 if self.engine is None else self.engine.weight_version

    @property
    def torn(self) -> str | None:
        """Why the weights are not whole; None: they are (of a model alone nobody keeps book)."""
        return None if self.engine is None else self.engine.lifecycle.torn

    @torn.setter
    def torn(self, reason: str | None) -> None:
        if self.engine is not None:
            self.engine.lifecycle.torn = reason

    def hold(self) -> None:
        """Nothing is computed until the update has ended; what is in flight is waited for. On every rank."""
        if self.engine is None:
            return
        if self.engine.weights.offloaded_bytes:
            raise WrongState(
                "a weight update while the weights are on the host; call resume({'weights'}) first",
                state=self.engine.state.value,
            )
        self.engine.drain()
        self.torn = "an update is under way; finish it or roll it back"

    def gather(self, what: str, text: str) -> list[str]:
        """Every rank's text; the ranks of the engine or model call it at the same place."""
        if self.engine is not None:
            return self.engine.rank_group.lockstep.gather(what, text)
        if self.group is None:
            return [text]
        found: list[Any] = [None] * self.group.size()
        torch.distributed.all_gather_object(found, text, group=self.group)
        return found

    def accept(self, version: int, running: str) -> None:
        """The weights are `version` now: derived copies are rebuilt, cached keys and values retired."""
        if self.engine is not None:
            self.engine.set_weight_version(version, running)
