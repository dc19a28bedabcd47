"""From a tensor's megatron-core name to this rank's part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from megatron_infer.errors import ConfigError, WeightUpdateError, unknown_name
from megatron_infer.rl.weights.inventory import EMBEDDING, HEAD, Inventory, LocalTensor, whole_name

NAMES = ("whole", "local")
"""How layers and experts are numbered: over the whole model, or on this rank."""


def locals_of(inventory: Inventory, name: str, *, names: str, strict: bool) -> list[LocalTensor]:
    """The tensors of this rank that `name` is about; none where it belongs to another rank.

    Raises WeightUpdateError for a name the model does not have, if strict.
    """
    if names not in NAMES:
        raise ConfigError(f"{unknown_name('kind of names', str(names), NAMES)}; one of {', '.join(NAMES)}")
    if names == "local":
        found = {whole_name(local.name): local for local in inventory.tensors}.get(whole_name(name))
        if found is not None:
            return [found]
        known: Iterable[str] = inventory.by_name
    else:
        whole = whole_name(name)
        if whole == HEAD and HEAD not in inventory.of_whole and EMBEDDING in inventory.of_whole:
            whole = EMBEDDING  # a tied model's head may come once more; it has to be the same
        if whole in inventory.of_whole:
            return inventory.of_whole[whole]
        if inventory.holds_elsewhere(whole):
            return []
        known = inventory.of_whole
    if not strict:
        return []
    raise WeightUpdateError(f"{unknown_name('tensor', name, known)}; the model has none of that name", tensor=name)


def places_of(
    inventory: Inventory, name: str, tensor: Tensor, *, names: str, strict: bool
) -> list[tuple[LocalTensor, Tensor]]:
    """(tensor of this rank, its value out of `tensor`, the whole one or this rank's part)."""
    places = []
    for local in locals_of(inventory, name, names=names, strict=strict):
        check_shape(local, tuple(tensor.shape))
        whole = local.layout.accepts_whole(tensor.shape)
        places.append((local, local.layout.part_of(tensor) if whole else tensor))
    return places


def check_shape(local: LocalTensor, shape: tuple[int, ...]) -> None:
    """Raise WeightUpdateError unless a tensor of `shape` is the whole one or this rank's part."""
    if local.layout.accepts_whole(shape) or shape == tuple(local.tensor.shape):
        return
    whole, own = list(local.layout.shape), list(local.tensor.shape)
    part = "" if whole == own else f" ({own} of it on this rank)"
    raise WeightUpdateError(f"{local.layout.name} has shape {whole}{part}, got {list(shape)}", tensor=local.layout.name)


def numbering_of(inventory: Inventory, names: Mapping[str, object] | Iterable[str]) -> str:
    """Which of NAMES a complete set of names is: the one that leaves fewer tensors of this rank without a value."""
    given = {whole_name(name.removeprefix("module.")) for name in names}
    whole = sum(local.layout.name not in given for local in inventory.tensors)
    own = sum(whole_name(local.name) not in given for local in inventory.tensors)
    return "local" if own < whole else "whole"
