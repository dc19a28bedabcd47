"""Models that replace the engine's in a replay: recorded, or given the trainer's inputs part by part.

Legend: T tokens of a step, S positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.base import RoutingShape
from megatron_infer.models.layer_probes import MOE, OUTPUT, ForwardTrace, ModuleProbe


class RowsByPosition:
    """Rows of a tensor by position in the sequence, collected over the steps of a replay."""

    def __init__(self, num_positions: int, first: int = 0) -> None:
        self.first = first
        self.seen_S = torch.zeros(num_positions, dtype=torch.bool)
        self._rows_SX: Tensor | None = None

    def put(self, positions_T: Tensor, rows_TX: Tensor) -> None:
        """Keep the rows of positions from `first` on; ignore the others."""
        wanted_T = positions_T >= self.first
        if not bool(wanted_T.any()):
            return
        at, rows_TX = positions_T[wanted_T] - self.first, rows_TX[wanted_T]
        if self._rows_SX is None:
            self._rows_SX = rows_TX.new_zeros(len(self.seen_S) - self.first, *rows_TX.shape[1:])
        self._rows_SX[at] = rows_TX
        self.seen_S[at.cpu() + self.first] = True

    def paired_with(self, other_SX: Tensor, at: int | None = None) -> tuple[Tensor, Tensor]:
        """(rows kept here, the same rows of a tensor that begins at position `first`), fp32; at: one position only."""
        assert self._rows_SX is not None, "no step has put a row"
        seen = self.seen_S.nonzero().flatten() if at is None else torch.tensor([at])
        seen = (seen - self.first).to(other_SX.device)
        return self._rows_SX[seen].float(), other_SX[seen].float()


class ModelProxy:
    """A PagedModel that passes calls on to another; a subclass computes `hidden`."""

    routing: RoutingShape | None = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.embed, self.logits = model.embed, model.logits
        self.rotary_table, self.packable_weights = model.rotary_table, model.packable_weights


class RecordingModel(ModelProxy):
    """Records the residual stream after every layer, and the experts that routers choose."""

    def __init__(self, model: Any, num_positions: int) -> None:
        super().__init__(model)
        self._num_positions = num_positions
        self.layers: list[RowsByPosition] = []
        num_experts = 0 if model.routing is None else model.routing.num_layers
        self.experts = [RowsByPosition(num_positions) for _ in range(num_experts)]
        """One for each mixture-of-experts layer."""

    def hidden(self, step: Any) -> Tensor:
        at = itertools.count()
        _allocate_routing(step, self.model)

        def around(run: Any, *arguments: Any) -> Any:
            x_TD, residual_TD = run(*arguments)
            number = next(at)
            if number == len(self.layers):
                self.layers.append(RowsByPosition(self._num_positions))
            self.layers[number].put(step.positions_T, residual_TD.float() + x_TD.float())
            return x_TD, residual_TD

        out: Tensor = self.model.decode(step, around=around)
        for layer, kept in enumerate(self.experts):
            kept.put(step.positions_T, step.routing_TLK[:, layer])
        return out


class TeacherForcedModel(ModelProxy):
    """Gives each part the input that it had in the trainer's forward, so that errors do not add up over parts."""

    def __init__(self, model: Any, probes: Sequence[ModuleProbe], trace: ForwardTrace) -> None:
        super().__init__(model)
        self._probes, self._trace = probes, trace
        num_positions = len(trace.outputs[probes[0].name])
        self.outputs = {
            probe.name: RowsByPosition(num_positions, trace.logits_from if probe.kind == OUTPUT else 0)
            for probe in probes
        }
        self.experts = {probe.name: RowsByPosition(num_positions) for probe in probes if probe.kind == MOE}
        self._nothing = torch.empty(num_positions, 0, device=model.device)
        """Input of the embedding, which reads the step's tokens instead."""
        self._dtype = getattr(torch, model.shape.dtype)

    def hidden(self, step: Any) -> Tensor:
        positions_T = step.positions_T
        _allocate_routing(step, self.model)
        given_TD = positions_T
        for probe in self._probes:
            kept = self.outputs[probe.name]
            given = self._trace.inputs.get(probe.name, self._nothing)
            given_TD = given.index_select(0, positions_T).to(self._dtype).contiguous()
            if probe.kind == OUTPUT:
                wanted_T = positions_T >= kept.first
                if bool(wanted_T.any()):
                    kept.put(positions_T[wanted_T], probe.run(step, given_TD[wanted_T].contiguous()))
                continue
            kept.put(positions_T, probe.run(step, given_TD))
            if probe.moe is not None:
                self.experts[probe.name].put(positions_T, step.routing_TLK[:, probe.moe])
        return given_TD


def _allocate_routing(step: Any, model: Any) -> None:
    if model.routing is not None and model.routing.num_layers:
        step.routing_TLK = step.positions_T.new_empty(step.num_tokens, model.routing.num_layers, model.routing.top_k)
