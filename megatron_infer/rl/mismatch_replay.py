"""Models that take the place of the engine's in a replay: watched, or given the trainer's inputs part by part.

Legend: T tokens of a step, S positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.base import Ops, RotaryTable
from megatron_infer.models.layer_probes import MOE, OUTPUT, Part, Trace


class Kept:
    """Rows by position, as steps bring them."""

    def __init__(self, num_positions: int, first: int = 0) -> None:
        self.first = first
        self.seen_S = torch.zeros(num_positions, dtype=torch.bool)
        self._rows_SX: Tensor | None = None

    def put(self, positions_T: Tensor, rows_TX: Tensor) -> None:
        """Rows of positions from `first` on; the others are let go."""
        wanted_T = positions_T >= self.first
        if not bool(wanted_T.any()):
            return
        at, rows_TX = positions_T[wanted_T] - self.first, rows_TX[wanted_T]
        if self._rows_SX is None:
            self._rows_SX = rows_TX.new_zeros(len(self.seen_S) - self.first, *rows_TX.shape[1:])
        self._rows_SX[at] = rows_TX
        self.seen_S[at.cpu() + self.first] = True

    def beside(self, its_SX: Tensor, at: int | None = None) -> tuple[Tensor, Tensor]:
        """(kept rows, the same of another tensor that begins with position `first`), fp32; at: of one position."""
        assert self._rows_SX is not None, "no step has brought anything"
        seen = self.seen_S.nonzero().flatten() if at is None else torch.tensor([at])
        seen = (seen - self.first).to(its_SX.device)
        return self._rows_SX[seen].float(), its_SX[seen].float()


class Stand:
    """Takes the model's place in a runner: the same model, watched."""

    routing = None

    def __init__(self, model: Any) -> None:
        self.model = model

    def embed(self, step: Any) -> Tensor:
        out: Tensor = self.model.embed(step)
        return out

    def hidden(self, step: Any) -> Tensor:
        out: Tensor = self.model.hidden(step)
        return out

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        out: Tensor = self.model.logits(hidden_SD, ops)
        return out

    def rotary_table(self, num_positions: int) -> RotaryTable | None:
        table: RotaryTable | None = self.model.rotary_table(num_positions)
        return table

    def packable_weights(self) -> Iterable[Tensor]:
        weights: Iterable[Tensor] = self.model.packable_weights()
        return weights


class Watched(Stand):
    """Notes the residual stream behind every layer, and where experts' routers send tokens."""

    def __init__(self, model: Any, num_positions: int) -> None:
        super().__init__(model)
        self._num_positions = num_positions
        self.layers: list[Kept] = []
        num_experts = 0 if model.routing is None else model.routing.num_layers
        self.experts = [Kept(num_positions) for _ in range(num_experts)]
        """Of each mixture-of-experts layer."""

    def hidden(self, step: Any) -> Tensor:
        at = itertools.count()
        _make_room_for_routing(step, self.model)

        def around(run: Any, *arguments: Any) -> Any:
            x_TD, residual_TD = run(*arguments)
            number = next(at)
            if number == len(self.layers):
                self.layers.append(Kept(self._num_positions))
            self.layers[number].put(step.positions_T, residual_TD.float() + x_TD.float())
            return x_TD, residual_TD

        out: Tensor = self.model.decode(step, around=around)
        for layer, kept in enumerate(self.experts):
            kept.put(step.positions_T, step.routing_TLK[:, layer])
        return out


class Forced(Stand):
    """Gives every part what the trainer's forward gave it, whatever the part before has made: errors stay apart."""

    def __init__(self, model: Any, parts: Sequence[Part], trace: Trace) -> None:
        super().__init__(model)
        self._parts, self._trace = parts, trace
        num_positions = len(trace.outputs[parts[0].name])
        self.outputs = {
            part.name: Kept(num_positions, trace.logits_from if part.kind == OUTPUT else 0) for part in parts
        }
        self.experts = {part.name: Kept(num_positions) for part in parts if part.kind == MOE}
        self._nothing = torch.empty(num_positions, 0, device=model.device)
        """What the embedding is given, beside the step's tokens."""
        self._dtype = getattr(torch, model.shape.dtype)

    def hidden(self, step: Any) -> Tensor:
        positions_T = step.positions_T
        _make_room_for_routing(step, self.model)
        given_TD = positions_T
        for part in self._parts:
            kept = self.outputs[part.name]
            given = self._trace.inputs.get(part.name, self._nothing)
            given_TD = given.index_select(0, positions_T).to(self._dtype).contiguous()
            if part.kind == OUTPUT:
                wanted_T = positions_T >= kept.first
                if bool(wanted_T.any()):
                    kept.put(positions_T[wanted_T], part.run(step, given_TD[wanted_T].contiguous()))
                continue
            kept.put(positions_T, part.run(step, given_TD))
            if part.moe is not None:
                self.experts[part.name].put(positions_T, step.routing_TLK[:, part.moe])
        return given_TD


def _make_room_for_routing(step: Any, model: Any) -> None:
    if model.routing is not None and model.routing.num_layers:
        step.routing_TLK = step.positions_T.new_empty(step.num_tokens, model.routing.num_layers, model.routing.top_k)
