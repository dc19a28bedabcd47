"""Index replay: a training forward whose sparse attention attends to the keys that it attended to in generation.

A key near the border of the top-k may be chosen in generation and not in training, as an expert may
(models/router_replay.py).

    with replay_index_choices(model, [sample.index_choices for sample in samples], sequences):
        loss = model(tokens, positions, None, labels=labels); loss.backward()

Legend: S positions, B sequences of a forward, C keys of a position at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.errors import ModelError
from megatron_infer.models.indexer import is_sparse
from megatron_infer.models.router_replay import ReplayedRows, named_layers, recorded
from megatron_infer.models.sparse_module import TorchSparseAttention
from megatron_infer.utils.attributes import replaced

_CALLER = "replay_index_choices"
_NO_KEY = -1


@contextlib.contextmanager
def replay_index_choices(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    choices: Sequence[np.ndarray],
    sequences: Sequence[Sequence[int]],
) -> Iterator[None]:
    """Inside, each forward of the model's own modules over `sequences` attends to the keys in `choices`.

    choices: for each sequence, [positions, layers, C] as in CompletionOutput.index_choices: all its positions, or all
    but the last. Layers are those of `model` with an indexer; a layer that shares its choice follows it.
    sequences: prompt and output ids, one a row of the forward's tokens [B, S] and padded at the end. Rows are
    recognised by their tokens and may be some of the sequences in another order. A later pipeline stage without tokens
    assumes all sequences in order. Positions without a record choose as usual, in megatron-core's DSAttention the
    first keys. Indexers get no gradients inside. Where activations are recomputed the backward must be inside, too.
    Raises ModelError, with nothing changed, for arrays and models that do not fit, naming what does not.
    """
    attentions = list(_attentions(model))
    indexers = [core for _, core in attentions if core.indexer is not None]
    if not indexers:
        raise ModelError(f"{_CALLER}: the model has no sparse attention")
    if len(choices) != len(sequences) or not len(choices):
        raise ModelError(f"{_CALLER}: {len(choices)} arrays of {len(sequences)} sequences")
    for name, core in attentions:
        _check(name, core)
    arrays = [
        _checked(i, array, len(sequence), len(indexers))
        for i, (array, sequence) in enumerate(zip(choices, sequences, strict=True))
    ]
    rows = ReplayedRows(_CALLER, sequences, [len(array) for array in arrays])
    with contextlib.ExitStack() as stack:
        for hook in rows.watch(model):
            stack.callback(hook.remove)
        layer = -1
        for name, core in attentions:
            layer += core.indexer is not None
            replay = _Replay(rows, [array[:, layer] for array in arrays], name)
            if type(core) is not TorchSparseAttention:
                stack.enter_context(_sharing(core, replay))
            elif core.indexer is not None:
                stack.callback(core.indexer.register_forward_hook(replay.on_choice).remove)
        yield


class _Replay:
    """The recorded keys of one layer in the layout of a forward's tokens."""

    def __init__(self, rows: ReplayedRows, arrays: list[np.ndarray], name: str) -> None:
        self._rows, self._arrays, self._name = rows, arrays, name

    def on_choice(self, indexer: Any, args: tuple[Any, ...], own_bss: Tensor) -> Tensor:
        """bool [B, S, S]: query i attends to key j."""
        mask_bss = own_bss.clone()
        for row, keys_PC in enumerate(self._of_rows(*own_bss.shape[:2])):
            known = len(keys_PC)
            target = torch.zeros(known, own_bss.shape[2] + 1, dtype=torch.bool)  # the last column takes what is no key
            mask_bss[row, :known] = target.scatter_(1, keys_PC % target.shape[1], True)[:, :-1].to(own_bss.device)
        return mask_bss

    def chosen(self, query_sbnh: Tensor) -> Tensor:
        """int64 [B, S, C] of a forward, -1: no key."""
        length, size = query_sbnh.shape[:2]
        width = min(length, max(array.shape[1] for array in self._arrays))
        first_C = torch.arange(width)
        chosen_bSC = first_C.where(first_C <= torch.arange(length)[:, None], _NO_KEY).repeat(size, 1, 1)
        for row, keys_PC in enumerate(self._of_rows(size, length)):
            chosen_bSC[row, : len(keys_PC)] = keys_PC[:, :width]
        return chosen_bSC.to(query_sbnh.device)

    def _of_rows(self, size: int, length: int) -> list[Tensor]:
        """int64 [positions, C] of each row."""
        rows = self._rows.see()
        rows = tuple(range(len(self._arrays))) if rows is None else rows
        if len(rows) != size or any(len(self._arrays[i]) > length for i in rows):
            raise ModelError(
                f"{_CALLER}: {self._name} was given {size} x {length} tokens, and the rows of the forward hold "
                f"{len(rows)} sequences; run those one a row and padded at the end, not packed"
            )
        return [torch.from_numpy(self._arrays[i]) for i in rows]


@contextlib.contextmanager
def _sharing(core: Any, replay: _Replay) -> Iterator[None]:
    """A DSAttention of megatron-core takes the choice of a layer that it shares: `replay`'s."""
    choice: dict[int, Tensor] = {}

    def on_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        choice[core.layer_number] = replay.chosen(args[0] if args else kwargs["query"])

    changes = {"skip_topk": True, "index_share": True, "source_layer": core.layer_number}
    changes["_get_index_share_topk_holder"] = lambda *_: choice
    changes["_get_index_share_topk_length_holder"] = lambda *_: None
    with core.register_forward_pre_hook(on_forward, with_kwargs=True), replaced(core, **changes):
        yield


def _attentions(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """(name, core attention) of the model's sparse attention, first to last."""
    for name, layer in named_layers(model):
        core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
        if is_sparse(core):
            yield f"{name}.self_attention.core_attention", core


def _check(name: str, core: Any) -> None:
    """Raise ModelError for attention that would choose otherwise."""
    reason = None
    if core.config.dsa_indexer_loss_coeff:
        reason = "dsa_indexer_loss_coeff: the loss of an indexer is that of its own choice; set it to None"
    elif core.config.context_parallel_size > 1:
        reason = "context_parallel_size > 1 distributes positions in an order of its own"
    elif not hasattr(core, "source_layer") and type(core) is not TorchSparseAttention:
        reason = "this megatron-core has no place for a recorded choice; it has one from 0.19 on"
    if reason is not None:
        raise ModelError(f"{_CALLER}: {name}: {reason}")


def _checked(i: int, array: Any, length: int, layers: int) -> np.ndarray:
    """The array as int64; raises ModelError when it does not fit this sequence and model."""
    where = f"{_CALLER}: choices[{i}]"
    keys = recorded(where, array, length, "keys", kinds="i")  # an unsigned dtype has no -1
    if keys.shape[1] != layers:
        raise ModelError(f"{where} has {keys.shape[1]} layers, the model {layers} with an indexer")
    own = np.arange(len(keys))[:, None, None]
    if (keys < _NO_KEY).any() or (keys > own).any() or not (keys.max(-1, initial=_NO_KEY) >= 0).all():
        raise ModelError(f"{where} names keys that its positions do not see, or none of a position")
    return keys
