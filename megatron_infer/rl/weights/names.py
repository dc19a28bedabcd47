"""From a tensor's name, megatron-core's or Hugging Face's, to this rank's part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from megatron_infer.errors import ConfigError, WeightUpdateError, unknown_name
from megatron_infer.model_loader.model_description import ModelDescription
from megatron_infer.rl.weights.hf import HFAssembler, is_hf_name
from megatron_infer.rl.weights.inventory import EMBEDDING, HEAD, Inventory, LocalTensor, whole_name
from megatron_infer.rl.weights.target import UpdateTarget

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
        if whole == HEAD and inventory.is_tied:
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


class TensorRouter:
    """Says of each tensor that comes which of this rank's tensors it makes, and what they become."""

    def __init__(self, target: UpdateTarget, *, plan: ModelDescription | None, names: str, strict: bool) -> None:
        """As in `WeightUpdate`."""
        self._target, self._plan, self._names, self._strict = target, plan, names, strict
        self._hf: HFAssembler | None = None

    def route(self, name: str, tensor: Tensor, *, names: str | None = None) -> Iterator[tuple[LocalTensor, Tensor]]:
        """(tensor of this rank, its value) of each that is complete with this one."""
        name = name.removeprefix("module.")
        if name.endswith("_extra_state"):
            return
        inventory = self._target.inventory
        if not is_hf_name(name):
            yield from places_of(inventory, name, tensor, names=names or self._names, strict=self._strict)
            return
        if self._hf is None:
            self._hf = HFAssembler.of(self._target.model, self._plan, name)
        for parameter, value in self._hf.take(name, tensor, strict=self._strict):
            yield inventory.by_name[parameter], value

    def missing(self, done: Iterable[str]) -> WeightUpdateError | None:
        """What is still to come, if all has to."""
        if not self._strict:
            return None
        known = set(done)
        missing = [local.name for local in self._target.inventory.tensors if local.name not in known]
        if not missing:
            return None
        waiting = "" if self._hf is None else self._hf.waiting()
        text = f"no value came for {listed(missing)}{waiting}"
        return WeightUpdateError(text, tensor=missing[0], rank=self._target.rank)


def listed(names: list[str], *, most: int = 8) -> str:
    """The first few, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
