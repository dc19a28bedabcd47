"""A model's own MTP layer as the model that drafts, with the hidden states it computes from.

    before the step   each row that drafts: hidden state before its last token  ->  draft 1, hidden state
                      the same at draft 1 with that hidden state                ->  draft 2, ...     (`hidden`)
    behind the model  all tokens of the step: the model's hidden states are stored, and keys and values of the MTP layer
                      computed from them, also in the place of those that drafting made  (`MTPTarget.hidden`)

The cache of a draft model holds, under the block ids of the model's, keys and values of the MTP layer as its layer 0,
and the hidden state of each token in the bytes of the layers behind it. So whatever shares, copies, swaps or saves a
block has the hidden state before the next token too. A sequence's first token has zeros for the one before it.
Legend: T tokens, D hidden, X bytes, P positions in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.base import Ops, RotaryTable, RoutingShape
from megatron_infer.memory.store import DraftCache
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.runner.batch import Batch
from megatron_infer.runner.row_tensors import RowTensors


class MTPModel:
    """kernels.base.PagedModel of the first MTP layer: a draft model whose hidden states come from the model."""

    routing: RoutingShape | None = None

    def __init__(self, adopted: AdoptedModel, cache: DraftCache, rows: RowTensors) -> None:
        """rows: those of the model's builder."""
        self._adopted, self._cache, self._rows = adopted, cache, rows
        self._block_size = cache.layout.block_size
        self._hidden_bytes = adopted.shape.hidden_size * adopted.shape.kv_dtype_bytes

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states that the MTP layer predicts, [T, D]; the cache then has them in the place of the model's."""
        hidden_TD = self._head.run(batch, self._tokens(batch), self._before(batch))
        self._store(batch, hidden_TD)
        return hidden_TD

    def follow(self, batch: Batch, hidden_TD: Tensor) -> None:
        """Keep the model's hidden states of a step, and the MTP layer's keys and values for all of its tokens."""
        self._store(batch, hidden_TD)
        own = replace(batch, kv_cache=self._cache.kv_cache, restore=None, routing_TLK=None, lora=None)
        self._head.write(own, self._tokens(own), self._before(own))

    def embed(self, step: Any) -> Tensor:
        return self._adopted.embed(step)

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        return self._adopted.logits(hidden_SD, ops)

    def first_logits(self, hidden_SD: Tensor, ops: Ops, count: int) -> Tensor | None:
        return self._adopted.first_logits(hidden_SD, ops, count)

    def argmax(self, hidden_SD: Tensor, ops: Ops, count: int) -> tuple[Tensor, Tensor] | None:
        return self._adopted.argmax(hidden_SD, ops, count)

    def rotary_table(self, num_positions: int) -> RotaryTable | None:
        return self._adopted.rotary_table(num_positions)

    def packable_weights(self) -> Iterable[Tensor]:
        """None of its own: the model packs them with its others."""
        return ()

    def serve(self, ops: Ops, tokens_of_ranks: Sequence[int]) -> None:
        if (experts := self._head.experts) is not None:
            experts.serve(ops, tokens_of_ranks, getattr(torch, self._adopted.shape.dtype))

    @property
    def _head(self) -> Any:
        head = self._adopted.heads
        assert head is not None, "a model adopted without its MTP layers"
        return head

    def _tokens(self, batch: Batch) -> Tensor:
        return self._adopted.embed(batch).squeeze(1)

    def _states(self) -> Tensor:
        """The bytes of all positions' hidden states, [parts, P, X]."""
        parts = self._cache.kv_cache[1:].flatten(0, 1).flatten(1, 2).flatten(2)
        return parts.view(torch.uint8)

    def _store(self, batch: Batch, hidden_TD: Tensor) -> None:
        states = self._states()
        bytes_TX = hidden_TD.contiguous().view(torch.uint8)
        room = states.shape[0] * states.shape[2]
        padded_TX = torch.nn.functional.pad(bytes_TX, (0, room - self._hidden_bytes))
        states.index_copy_(1, batch.meta.kv_pos_T, padded_TX.view(len(hidden_TD), len(states), -1).transpose(0, 1))

    def _before(self, batch: Batch) -> Tensor:
        """The hidden state before each token of the step, [T, D]."""
        rows, size = self._rows, self._block_size
        before_T = batch.positions_T - 1
        at_T = before_T.clamp(min=0)
        columns_T = torch.add(at_T // size, batch.views.mirror["token_row"].long(), alpha=rows.max_blocks)
        kv_pos_T = rows.flat_table.index_select(0, columns_T).long() * size + at_T % size
        bytes_TX = self._states().index_select(1, kv_pos_T).transpose(0, 1).flatten(1)[:, : self._hidden_bytes]
        hidden_TD = bytes_TX.contiguous().view(getattr(torch, self._adopted.shape.dtype))
        return hidden_TD.masked_fill_((before_T < 0).unsqueeze(1), 0)


class MTPTarget:
    """kernels.base.PagedModel: the model itself, with its MTP layer behind each step."""

    def __init__(self, adopted: AdoptedModel, mtp: MTPModel) -> None:
        self._adopted, self._mtp = adopted, mtp

    @property
    def routing(self) -> RoutingShape | None:
        return self._adopted.routing

    @property
    def routing_of_chunks(self) -> list[RoutingShape] | None:
        return self._adopted.routing_of_chunks

    def embed(self, step: Any) -> Tensor:
        return self._adopted.embed(step)

    def hidden(self, batch: Batch, received_TD: Tensor | None = None) -> Tensor:
        batch.only_sampled = False  # the layer reads the hidden state of each token
        hidden_TD = self._adopted.hidden(batch, received_TD)
        self._mtp.follow(batch, hidden_TD)
        return hidden_TD

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        return self._adopted.logits(hidden_SD, ops)

    def argmax(self, hidden_SD: Tensor, ops: Ops, count: int) -> tuple[Tensor, Tensor] | None:
        return self._adopted.argmax(hidden_SD, ops, count)

    def rotary_table(self, num_positions: int) -> RotaryTable | None:
        return self._adopted.rotary_table(num_positions)

    def packable_weights(self) -> Iterable[Tensor]:
        return self._adopted.packable_weights()

    def serve(self, ops: Ops, tokens_of_ranks: Sequence[int]) -> None:
        self._adopted.serve(ops, tokens_of_ranks)
