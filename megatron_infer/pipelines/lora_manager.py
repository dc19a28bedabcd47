"""The adapters of an engine as a loop by hand sees them: an id for each name, and where the device has its matrices.

contexts ── inputs_of ──> lora_ids, lora_ranks ── (McorePipelineModel.execute) ── slots_of ──> slots of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import CapacityError, ConfigError, UnknownAdapter
from megatron_infer.scheduler.context.adapter_slots import AdapterSlots

if TYPE_CHECKING:
    from megatron_infer.pipelines.text_generation import TextContext

NO_ADAPTER = -1


class LoRAManager:
    """Numbers the adapters of an engine; a name keeps its number, whatever is loaded or unloaded meanwhile.

    `engine.load_adapter` and `engine.unload_adapter` load and forget adapters.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._names: list[str] = []
        """By id."""

    @property
    def loras(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._slots.versions)

    def id_of(self, name: str | None) -> int:
        """The number of an adapter in `lora_ids`; -1 for None, the base model. Raises UnknownAdapter."""
        if name is None:
            return NO_ADAPTER
        self._engine.input_processor.check_adapter(name)
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def inputs_of(self, contexts: Sequence[TextContext]) -> tuple[Tensor, Tensor]:
        """(lora_ids, lora_ranks), int32 [R]: of the adapter that each context's parameters name; -1 and 0: of none."""
        device, ranks = self._engine.device.torch, {one.name: one.rank for one in self._engine.adapters()}
        names = [context.params.adapter for context in contexts]
        ids = torch.tensor([self.id_of(name) for name in names], dtype=torch.int32, device=device)
        rank_R = [0 if name is None else ranks[name] for name in names]
        return ids, torch.tensor(rank_R, dtype=torch.int32, device=device)

    def names_of(self, lora_ids: Tensor) -> list[str | None]:
        """The adapter of each id. Raises ConfigError for an id that stands for none, UnknownAdapter if unloaded."""
        return [self._name_of(one) for one in lora_ids.tolist()]

    def slots_of(self, names: Sequence[str | None]) -> list[int]:
        """Where the device has, or will have before the step, the adapter of each sequence; -1: it has none.

        Raises CapacityError where running requests leave too few slots.
        """
        slots = self._slots
        used = self._of_running_requests() | {name for name in names if name is not None}
        found = []
        for name in names:
            if name is not None and not slots.has_room(name, lambda: used):
                raise CapacityError(
                    f"adapter {name!r} has no slot on the device: {slots.num_slots} (max_loras) are those of running "
                    "requests or of this step; compute with fewer adapters at once, or raise max_loras"
                )
            found.append(NO_ADAPTER if name is None else slots.take(name, lambda: used))
        return found

    def _name_of(self, lora_id: int) -> str | None:
        if lora_id == NO_ADAPTER:
            return None
        if not 0 <= lora_id < len(self._names):
            raise ConfigError(f"lora_ids has {lora_id}, which stands for no adapter; id_of(name) gives the number")
        name = self._names[lora_id]
        if name not in self._slots.versions:
            raise UnknownAdapter(f"adapter {name!r} was unloaded; load it again, or take -1 for the base model")
        return name

    def _of_running_requests(self) -> set[str]:
        states = self._engine.output_processor.requests
        running = [state for state in states if any(one.request.lease is not None for one in state.sequences)]
        return {state.params.adapter for state in running if state.params.adapter is not None}

    @property
    def _slots(self) -> AdapterSlots:
        slots = self._engine.replay.context.adapters
        assert slots is not None, "an engine without adapters"
        return slots
