"""The output layer of a model on this rank: all logits, those of the first tokens, or no more than the largest one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_infer.kernels.base import Ops
from megatron_infer.models.tp_collectives import Reducer


class OutputLayer:
    """Reads the live weight at every call: a trainer may replace it."""

    def __init__(self, live: Any, tp: Reducer | None) -> None:
        """tp: the ranks that the vocabulary is split over; None: this rank has all of it."""
        self._live, self._tp = live, tp

    @property
    def weight(self) -> Tensor:
        """[V, D]; the embedding's where they are tied."""
        live = self._live
        if live.share_embeddings_and_output_weights:
            tied: Tensor = live.shared_embedding_or_output_weight()
            return tied
        own: Tensor = live.output_layer._parameters["weight"]
        return own

    @property
    def bias(self) -> Tensor | None:
        found: Tensor | None = self._live.output_layer._parameters["bias"]
        return found

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        """fp32 [S, V]: this rank's part of the padded vocabulary."""
        hidden_SD, weight = hidden_SD if self._tp is None else self._tp.spread(hidden_SD), self.weight
        return ops.fp32_linear(hidden_SD, weight, self.bias, len(weight))

    def first_logits(self, hidden_SD: Tensor, ops: Ops, count: int) -> Tensor | None:
        """Those of the lowest `count` tokens; None where the vocabulary is split over ranks."""
        if self._tp is not None:
            return None
        return ops.fp32_linear(hidden_SD, self.weight, self.bias, count)

    def argmax(self, hidden_SD: Tensor, ops: Ops, count: int) -> tuple[Tensor, Tensor] | None:
        """The largest of the lowest `count` tokens' logits, see `Ops.argmax_linear`; None: it takes all of them."""
        if self._tp is not None or ops.argmax_linear is None or self.bias is not None:
            return None
        return ops.argmax_linear(hidden_SD, self.weight, count)
