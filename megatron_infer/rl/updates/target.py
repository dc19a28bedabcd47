"""The target of a weight update: an engine on all its ranks, or a model alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import WrongState
from megatron_infer.kernels.freed_weights import names_only, unpack_weights, unpacked
from megatron_infer.rl.updates.inventory import Inventory, bare


@dataclass(slots=True, kw_only=True)
class UpdateTarget:
    """A model whose weights are written, and its engine, if there is one."""

    model: Any
    """Without wrappers."""
    inventory: Inventory
    engine: DynamicInferenceEngine | None = None
    rank: int = 0
    """Rank of this process in the world."""
    group: Any = None
    """For a model alone: the ranks that it is split over; None: only this one."""

    @classmethod
    def of(cls, engine_or_model: Any) -> UpdateTarget:
        is_engine = isinstance(engine_or_model, DynamicInferenceEngine)
        if is_engine:
            engine_or_model.weights.require_present()
        model = engine_or_model.model if is_engine else bare(engine_or_model)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if not is_engine:
            unpack_weights(model)
        with names_only(model):
            inventory = Inventory.of(model)
        if is_engine:
            return cls(model=model, inventory=inventory, engine=engine_or_model, rank=rank)
        return cls(model=model, inventory=inventory, rank=rank, group=ParallelGroups.of(None, model).engine)

    @property
    def version(self) -> int:
        return 0 if self.engine is None else self.engine.weight_version

    @property
    def incomplete_reason(self) -> str | None:
        """Why the weights are incomplete; None if they are complete, and always for a model alone."""
        return None if self.engine is None else self.engine.lifecycle.incomplete_reason

    @incomplete_reason.setter
    def incomplete_reason(self, reason: str | None) -> None:
        if self.engine is not None:
            self.engine.lifecycle.incomplete_reason = reason

    def hold(self) -> None:
        """Finish the step in flight; the engine refuses to run until the update has ended. On every rank."""
        if self.engine is None:
            return
        if self.engine.weights.offloaded_bytes:
            raise WrongState(
                "a weight update while the weights are offloaded to the host; call resume({'weights'}) first",
                state=self.engine.state.value,
            )
        self.engine.drain()
        with self.together("unpacking the weights"):
            self.engine.weights.unpack()
        self.incomplete_reason = "an update is under way; finish it or roll it back"

    def together(self, what: str) -> AbstractContextManager[Any]:
        """An error inside is raised on all ranks of an engine."""
        return contextlib.nullcontext() if self.engine is None else self.engine.rank_group.together(what)

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """Inside, all weights can be read: also those that an engine has freed, which it frees again."""
        with contextlib.ExitStack() as stack:
            with self.together("unpacking the weights"):
                stack.enter_context(unpacked(self.model))
            yield

    def gather(self, what: str, text: str) -> list[str]:
        """Every rank's text. All ranks of the engine or model make the same call. what: named in errors."""
        if self.engine is not None:
            return self.engine.rank_group.lockstep.gather(what, text)
        if self.group is None:
            return [text]
        found: list[Any] = [None] * self.group.size()
        torch.distributed.all_gather_object(found, text, group=self.group)
        return found

    def accept(self, version: int, running: str) -> None:
        """Set the weight version: derived copies are rebuilt, cached keys and values are not matched again."""
        if self.engine is not None:
            self.engine.set_weight_version(version, running)

    def restore(self, version: int) -> None:
        """`accept` for the weights from before an update: an earlier version is expected, and nothing warns."""
        if self.engine is None:
            return
        weights = self.engine.weights
        highest, weights.highest_version = weights.highest_version, version
        try:
            self.engine.set_weight_version(version)
        finally:
            weights.highest_version = highest
