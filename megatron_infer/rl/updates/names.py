"""Finds this rank's part of a tensor by its megatron-core or Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from megatron_infer.errors import WeightUpdateError, check_known, unknown_name
from megatron_infer.models.loading.families import is_hf_name
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.sharded_weights import gathered
from megatron_infer.rl.updates.hf import HFAssembler
from megatron_infer.rl.updates.inventory import EMBEDDING, HEAD, Inventory, LocalTensor, listed, whole_name
from megatron_infer.rl.updates.target import UpdateTarget

NAMES = ("whole", "local")
"""Whether layers and experts are numbered over the whole model, or on this rank."""


def locals_of(inventory: Inventory, name: str, *, names: str, strict: bool) -> list[LocalTensor]:
    """The tensors of this rank that `name` names; none if it belongs to another rank.

    Raises WeightUpdateError for a name the model does not have, if strict.
    """
    check_known("kind of names", [names], NAMES, lists_known=True)
    if names == "local":
        found = {whole_name(local.name): local for local in inventory.tensors}.get(whole_name(name))
        if found is not None:
            return [found]
        known: Iterable[str] = inventory.by_name
    else:
        whole = whole_name(name)
        if whole == HEAD and inventory.is_tied:
            whole = EMBEDDING  # a tied model's head may be given in addition; it must be equal
        if whole in inventory.of_whole:
            return inventory.of_whole[whole]
        if inventory.is_elsewhere(whole):
            return []
        known = inventory.of_whole
    if not strict:
        return []
    raise WeightUpdateError(f"{unknown_name('tensor', name, known)}; the model has none of that name", tensor=name)


def check_shape(local: LocalTensor, shape: tuple[int, ...]) -> None:
    """Raise WeightUpdateError unless a tensor of `shape` is the whole one or this rank's part."""
    if local.layout.accepts_whole(shape) or shape == tuple(local.tensor.shape):
        return
    whole, own = list(local.layout.shape), list(local.tensor.shape)
    part = "" if whole == own else f" ({own} of it on this rank)"
    raise WeightUpdateError(f"{local.layout.name} has shape {whole}{part}, got {list(shape)}", tensor=local.layout.name)


def numbering_of(inventory: Inventory, names: Mapping[str, object] | Iterable[str]) -> str:
    """Which of NAMES a complete set of names uses: the one that leaves fewer tensors of this rank without a value."""
    given = {whole_name(name.removeprefix("module.")) for name in names}
    whole = sum(local.layout.name not in given for local in inventory.tensors)
    own = sum(whole_name(local.name) not in given for local in inventory.tensors)
    return "local" if own < whole else "whole"


class TensorRouter:
    """Maps named tensors to this rank's tensors and their new values."""

    def __init__(self, target: UpdateTarget, *, plan: ModelDescription | None, names: str, strict: bool) -> None:
        """plan, names, strict: as in `WeightUpdate`."""
        self._target, self._plan, self._names, self._strict = target, plan, names, strict
        self._hf: HFAssembler | None = None

    def route(self, name: str, tensor: Tensor, *, names: str | None = None) -> Iterator[tuple[LocalTensor, Tensor]]:
        """(tensor of this rank, its value) for each that this tensor completes.

        A DTensor is gathered: a collective of the ranks of its mesh.
        """
        tensor = gathered(tensor)
        name = name.removeprefix("module.")
        if name.endswith("_extra_state"):
            return
        inventory = self._target.inventory
        if not is_hf_name(name):
            found = locals_of(inventory, name, names=names or self._names, strict=self._strict)
            for local in found:
                check_shape(local, tuple(tensor.shape))
            for local in found:
                is_whole = local.layout.accepts_whole(tensor.shape)
                yield local, local.layout.part_of(tensor) if is_whole else tensor
            return
        if self._hf is None:
            self._hf = HFAssembler.of(self._target.model, self._plan, name)
        for parameter, value in self._hf.take(name, tensor, strict=self._strict):
            yield inventory.by_name[parameter], value

    def missing(self, done: Iterable[str]) -> WeightUpdateError | None:
        """An error naming the tensors without a value, if strict; None if there are none."""
        if not self._strict:
            return None
        known = set(done)
        missing = [local.name for local in self._target.inventory.tensors if local.name not in known]
        if not missing:
            return None
        waiting = "" if self._hf is None else self._hf.waiting()
        text = f"no value came for {listed(missing)}{waiting}"
        return WeightUpdateError(text, tensor=missing[0], rank=self._target.rank)
