"""Router replay: a training forward that sends every token to the experts that it went to in generation.

A token near the border between two experts may go to one in generation and to the other in training, and then its log
probability differs by far more than rounding. With the recorded choice, the trainer computes only the probabilities of
the chosen experts, and gradients flow through them (R3, arXiv:2510.11370).

    with replay_routing(model, [sample.routing for sample in samples], sequences):
        loss = model(tokens, positions, None, labels=labels); loss.backward()

The choice is given to megatron-core (0.16 and later) through `TopKRouter.router_replay`; the model is unchanged
afterwards. With `moe_enable_routing_replay` the router has an object there already, megatron-core's RouterReplay: it is
given the choice in each forward, and makes it.
Legend: S positions, B sequences of a forward, N = S * B tokens, E experts, K of them per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.distributed.backends import group_size
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.models.adoption_checks import unwrap
from megatron_infer.models.context_parallel import gather_positions, take_own
from megatron_infer.models.mcore_compat import MoELayer, replay_forward, sequence_parts
from megatron_infer.models.model_chunks import chunks_of

_UNKNOWN = -1


@contextlib.contextmanager
def replay_routing(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    routing: Sequence[np.ndarray],
    sequences: Sequence[Sequence[int]],
) -> Iterator[None]:
    """Inside, each forward of the model's own modules over `sequences` uses the experts in `routing`.

    routing: for each sequence, [positions, layers, K] as in CompletionOutput.routing: all its positions, or all but the
    last. Layers are those of `model`: for a pipeline stage pass the part of its layers.
    sequences: prompt and output ids. The forward's tokens are [B, S] with one sequence per row, padded at the end, or
    [1, N] with the sequences one behind the other. Rows are recognised by their tokens and may be some of the sequences
    in another order, as `RolloutSession.score` runs them. Context-parallel ranks have one sequence per row, of which
    each has its positions (`models.context_parallel`). A later pipeline stage that is given no tokens assumes all
    sequences in order. Positions without a record (last ones, padding) are routed as usual.
    Where activations are recomputed the backward must be inside, too. An engine of the model generates inside as usual;
    make it before, as adoption refuses modules with hooks.
    Raises ModelError, with nothing changed, for arrays and models that do not fit, naming what does not.
    """
    routers = list(_routers(model))
    targets = _Targets(routers, routing, sequences)
    hooks: list[Any] = []
    before = [router.router_replay for _, router in routers]
    held = [dict(vars(theirs)) for theirs in before if theirs is not None]
    try:
        for layer, (name, router) in enumerate(routers):
            replay = _Replay(targets, layer, name, router.router_replay)
            hooks.append(router.register_forward_pre_hook(replay.on_forward, with_kwargs=True))
            router.router_replay = replay
        hooks += targets.rows.watch(model)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for (_, router), replaced in zip(routers, before, strict=True):
            router.router_replay = replaced
        for theirs, attributes in zip(filter(None, before), held, strict=True):
            vars(theirs).update(attributes)


def check_not_replaying(model: torch.nn.Module | Sequence[torch.nn.Module], call: str) -> None:
    """Raise ConfigError where megatron-core's RouterReplay still replays experts that a trainer gave it."""
    for name, router in _routers(model):
        action = getattr(getattr(router, "router_replay", None), "router_replay_action", None)
        if action is not None and action.value != "record":
            raise ConfigError(
                f"{call}: {name} replays the experts of other tokens ({action}); call "
                "RouterReplay.clear_global_router_replay_action() before, or run within replay_routing(...)"
            )


class _Replay:
    """What one router calls instead of taking the top k, with the interface of megatron-core's RouterReplay."""

    def __init__(self, targets: _Targets, layer: int, name: str, theirs: Any) -> None:
        """theirs: the router's own RouterReplay; None: it has none."""
        self._targets, self._layer, self._name, self._theirs = targets, layer, name, theirs
        self._target_NK: Tensor | None = None

    def on_forward(self, router: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["input"]
        self._target_NK = self._targets.of(router, tuple(hidden.shape[:-1]), self._name)[:, self._layer]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores [N, K], experts [N, K]), the best first as in top-k, so that sums over them have the same bits."""
        assert default_compute_topk is not None and self._target_NK is not None, f"{self._name} ran out of order"
        with torch.no_grad():
            own_NK = default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
            target_NK = self._target_NK.to(scores.device)
            chosen_NK = torch.where(target_NK == _UNKNOWN, own_NK, target_NK)
            order_NK = scores.gather(1, chosen_NK).argsort(dim=1, descending=True, stable=True)
            chosen_NK = chosen_NK.gather(1, order_NK)
        if self._theirs is None:
            return scores.gather(1, chosen_NK), chosen_NK
        self._theirs.target_topk_idx = chosen_NK  # not by its setter, which keeps each tensor for a backward pass
        self._theirs.set_router_replay_action(replay_forward())
        made: tuple[Tensor, Tensor] = self._theirs.get_replay_topk(
            scores, topk, num_groups, group_topk, default_compute_topk
        )
        return made


class ReplayedRows:
    """Which sequence is in each row of a forward, by its tokens."""

    def __init__(self, caller: str, sequences: Sequence[Sequence[int]], known: Sequence[int]) -> None:
        """known: leading positions of each sequence that have a record."""
        self._caller = caller
        self._sequences = [torch.tensor(list(sequence), dtype=torch.int64) for sequence in sequences]
        self._known = [ids[:count] for ids, count in zip(self._sequences, known, strict=True)]
        self.rows: tuple[int, ...] | None = None
        """Of the present forward; None: one behind the other, or unknown."""
        self._used = False

    def watch(self, model: Any) -> list[Any]:
        """Look at the tokens of each forward of the model's chunks, which may run in turns -> the hooks."""
        return [unwrap(chunk).register_forward_pre_hook(self.on_tokens, with_kwargs=True) for chunk in chunks_of(model)]

    def on_tokens(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when a forward begins."""
        ids_BS = args[0] if args else kwargs.get("input_ids")
        before, self.rows = self.rows, None
        if ids_BS is None:
            return
        if (cp := _context_ranks(model)) is not None:
            ids_BS = gather_positions(ids_BS.T, cp).T
        ids_BS = ids_BS.detach().cpu()
        if not (len(ids_BS) == 1 and _begins(ids_BS[0], torch.cat(self._sequences))):
            self.rows = tuple(self._row_of(row, ids_S) for row, ids_S in enumerate(ids_BS))
        if self._used and before != self.rows and _recomputes(model):
            raise ModelError(
                f"{self._caller}: forwards over other rows than before, and their activations are recomputed in the "
                f"backward pass, which cannot tell the rows apart; use one {self._caller} for each forward and its "
                "backward"
            )

    def see(self) -> tuple[int, ...] | None:
        """`rows`, for a layer that replays."""
        self._used = True
        return self.rows

    def _row_of(self, row: int, ids_S: Tensor) -> int:
        """The sequence that a row begins with: that of the same index if possible, else the longest."""
        if row < len(self._known) and _begins(ids_S, self._known[row]):
            return row
        fitting = [i for i, ids in enumerate(self._known) if _begins(ids_S, ids)]
        if not fitting:
            raise ModelError(
                f"{self._caller}: row {row} of the forward's tokens begins with none of the {len(self._known)} "
                "sequences; run those, one a row and padded at the end, or one behind the other in one row"
            )
        return max(fitting, key=lambda i: len(self._sequences[i]))


class _Targets:
    """The recorded experts in the layout of a forward's tokens."""

    def __init__(
        self, routers: Sequence[tuple[str, Any]], routing: Sequence[np.ndarray], sequences: Sequence[Sequence[int]]
    ) -> None:
        if not routers:
            raise ModelError("replay_routing: the model has no mixture-of-experts layers")
        for name, router in routers:
            _check_router(name, router)
        if len(routing) != len(sequences) or not len(routing):
            raise ModelError(f"replay_routing: {len(routing)} routing arrays of {len(sequences)} sequences")
        router = routers[0][1]
        self._arrays = [
            _checked(i, array, len(sequence), len(routers), router.topk, router.config.num_moe_experts)
            for i, (array, sequence) in enumerate(zip(routing, sequences, strict=True))
        ]
        self._lengths = [len(sequence) for sequence in sequences]
        self.rows = ReplayedRows("replay_routing", sequences, [len(array) for array in self._arrays])
        self._made: dict[tuple[int, int, tuple[int, ...] | None], Tensor] = {}

    def of(self, router: Any, shape: tuple[int, ...], name: str) -> Tensor:
        """int64 [N, layers, K] for a router that gets [S, B, hidden], with this rank's share of S."""
        local, size = shape[0], shape[1] if len(shape) > 1 else 1
        parts, part = sequence_parts(router)
        cp = _context_ranks(router)
        target_SBLK = self._laid_out(local * parts * group_size(cp), size, name)
        if cp is not None:
            target_SBLK = take_own(target_SBLK, cp)
        return target_SBLK[part * local : (part + 1) * local].flatten(0, 1)

    def _laid_out(self, num_positions: int, size: int, name: str) -> Tensor:
        own_rows = self.rows.see()
        key = num_positions, size, own_rows
        found = self._made.get(key)
        if found is not None:
            return found
        starts = np.cumsum([0, *self._lengths[:-1]])
        rows = own_rows is not None or size == len(self._arrays)
        if own_rows is None and not (
            max(self._lengths) <= num_positions if rows else size == 1 and sum(self._lengths) <= num_positions
        ):
            raise ModelError(
                f"replay_routing: {name} was given {size} x {num_positions} tokens, and the routing is of "
                f"{len(self._lengths)} sequences of {min(self._lengths)} to {max(self._lengths)}; run those, one a row "
                "and padded at the end, or one behind the other in one row"
            )
        _, layers, top_k = self._arrays[0].shape
        target = torch.full((num_positions, size, layers, top_k), _UNKNOWN, dtype=torch.int64)
        for place, i in enumerate(own_rows if own_rows is not None else range(len(self._arrays))):
            array, first, column = self._arrays[i], 0 if rows else int(starts[i]), place if rows else 0
            target[first : first + len(array), column] = torch.from_numpy(array)
        self._made[key] = target
        return target


def _begins(ids_S: Tensor, sequence: Tensor) -> bool:
    return len(sequence) <= len(ids_S) and torch.equal(ids_S[: len(sequence)], sequence)


def _recomputes(model: Any) -> bool:
    return model.training and torch.is_grad_enabled() and model.config.recompute_granularity is not None


def _routers(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """(name, router) of the model's mixture-of-experts layers, first to last."""
    for name, layer in named_layers(model):
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, MoELayer):
            yield f"{name}.mlp.router", mlp.router


def named_layers(model: torch.nn.Module | Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """(name, decoder layer) of a model or of a list of its chunks, first to last."""
    chunks = chunks_of(model)
    for number, chunk in enumerate(chunks):
        prefix = f"chunk {number}: " if len(chunks) > 1 else ""
        for i, layer in enumerate(unwrap(chunk).decoder.layers):
            yield f"{prefix}decoder.layers.{i}", layer


def _check_router(name: str, router: Any) -> None:
    """Raise ModelError for a router that would not call `router_replay`."""
    reason = None
    if router.routing_type == "sinkhorn":
        reason = "sinkhorn routing does not choose by top-k"
    elif router.config.moe_router_fusion:
        reason = "moe_router_fusion=True chooses inside a kernel; turn it off"
    if reason is not None:
        raise ModelError(f"replay_routing: {name}: {reason}")


def _checked(i: int, array: Any, length: int, layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """The array as int64; raises ModelError when it does not fit this sequence and model."""
    where = f"replay_routing: routing[{i}]"
    ids = recorded(where, array, length, "top-k", kinds="ui")
    if ids.shape[1:] != (layers, top_k):
        raise ModelError(f"{where} has {ids.shape[1]} layers of {ids.shape[2]} experts, the model {layers} of {top_k}")
    if ids.size and not 0 <= ids.min() <= ids.max() < num_experts:
        raise ModelError(f"{where} names experts {ids.min()} to {ids.max()}, the model has 0 to {num_experts - 1}")
    if (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any():
        raise ModelError(f"{where} sends a token to the same expert twice")
    return ids


def recorded(where: str, array: Any, length: int, last: str, *, kinds: str) -> np.ndarray:
    """A record of a sequence as int64 [positions, layers, `last`]; raises ModelError where it is none of its length.

    kinds: numpy's letters of the dtypes that it may have.
    """
    found = np.asarray(array)
    if found.ndim != 3 or found.dtype.kind not in kinds:
        raise ModelError(f"{where} is {found.dtype} of shape {found.shape}, not integers [positions, layers, {last}]")
    if len(found) not in (length - 1, length):
        raise ModelError(f"{where} is of {len(found)} positions, its sequence has {length} tokens (the last may lack)")
    integers: np.ndarray = found.astype(np.int64)
    return integers


def _context_ranks(module: Any) -> Any:
    """The context-parallel ranks of a model or a router; None: they are one."""
    group = getattr(module, "cp_group", None)
    return None if group_size(group) == 1 else group
