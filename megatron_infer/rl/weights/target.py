"""Whose weights are written: an engine's, on all its ranks, or those of a model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_infer.errors import WrongState
from megatron_infer.rl.weights.inventory import Inventory, bare


@dataclass(slots=True, kw_only=True)
class Target:
    """A model whose weights are to be written, and the engine that has to hear of it, if there is one."""

    model: Any
    """Without wrappers."""
    inventory: Inventory
    engine: Any = None
    rank: int = 0
    """Of this process in the world."""

    @classmethod
    def of(cls, engine_or_model: Any) -> Target:
        parts = getattr(engine_or_model, "parts", None)
        model = bare(engine_or_model) if parts is None else parts.adopted.live
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        engine = None if parts is None else engine_or_model
        return cls(model=model, inventory=Inventory.of(model), engine=engine, rank=rank)

    @property
    def version(self) -> int:
        return 0 if self.engine is None else int(self.engine.parts.weight_version)

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
        if self.engine.parts.shelf_bytes():
            raise WrongState(
                "a weight update while the weights are on the host; call resume({'weights'}) first",
                state=self.engine.state.value,
            )
        self.engine.drain()
        self.torn = "an update is under way; finish it or roll it back"

    def gather(self, what: str, text: str) -> list[str]:
        """Every rank's text; the engine's ranks call it at the same place."""
        lockstep = None if self.engine is None else self.engine.parts.team.lockstep
        return [text] if lockstep is None else lockstep.gather(what, text)

    def accept(self, version: int, running: str) -> None:
        """The weights are `version` now: derived copies are rebuilt, cached keys and values retired."""
        if self.engine is not None:
            self.engine.set_weight_version(version, running)
