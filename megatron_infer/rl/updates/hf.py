"""Assembles a rank's own parameters from tensors under Hugging Face names, which come one by one in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from megatron_infer.errors import WeightUpdateError, unknown_name
from megatron_infer.models.loading.checkpoint import description_by_names
from megatron_infer.models.loading.families import family_of, name_in_files
from megatron_infer.models.loading.head_padding import PaddedReader
from megatron_infer.models.loading.hf_names import Shard, Span
from megatron_infer.models.loading.hf_weights import ignorable, made, recipes_of, source_shapes
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.rl.updates.inventory import listed


class HFAssembler:
    """Collects tensors until a parameter has all its sources (q, k and v, for example), then makes it."""

    def __init__(self, model: nn.Module, plan: ModelDescription) -> None:
        """plan: its architecture determines how tensors are named."""
        self._parameters = dict(model.named_parameters()) | dict(model.named_buffers())
        self._recipes, self._padded = recipes_of(model, plan)
        self._plan = plan
        self._shard = Shard.of(model.pg_collection.tp)
        self._shapes = source_shapes(model, plan)
        self._padded_shapes = source_shapes(model, self._padded)
        self._missing = {name: set(recipe.sources) for name, recipe in self._recipes.items()}
        self._users: dict[str, set[str]] = {}
        for name, recipe in self._recipes.items():
            for source in recipe.sources:
                self._users.setdefault(source, set()).add(name)
        self._held: dict[str, Tensor] = {}
        self._constants = [name for name, recipe in self._recipes.items() if recipe.make is None]
        self._is_whole = bool(getattr(model, "pre_process", True) and getattr(model, "post_process", True))

    @classmethod
    def of(cls, model: Any, plan: ModelDescription | None, first: str = "") -> HFAssembler:
        """first: name of a tensor to come, which implies the family if there is no plan."""
        return cls(model, plan if plan is not None else description_by_names(model, (first,)))

    def take(self, name: str, tensor: Tensor, *, strict: bool) -> Iterator[tuple[str, Tensor]]:
        """(parameter, its value on this rank) for each that this tensor completes."""
        while self._constants:
            constant = self._constants.pop()
            yield constant, made(constant, self._parameters[constant], self._recipes[constant], self._reader(), Shard())
        base, name = family_of(self._plan).base, name_in_files(name, self._plan)
        if name not in self._users and f"{base}.{name}" in self._users:
            name = f"{base}.{name}"  # saved from the bare body
        users = self._users.get(name)
        if users is None:
            if self._is_whole and strict and not ignorable(name, self._plan):
                what = unknown_name("tensor", name, self._users)
                family = self._plan.architecture
                raise WeightUpdateError(
                    f"{what}; the names were taken for those of {family}, give plan= for another family", tensor=name
                )
            return
        expected = self._shapes[name]
        if tuple(tensor.shape) != expected:
            raise WeightUpdateError(f"{name} has shape {list(expected)}, got {list(tensor.shape)}", tensor=name)
        self._held[name] = tensor
        for user in sorted(users):
            self._missing[user].discard(name)
            if not self._missing[user]:
                yield user, self._make(user)
        self._drop(users)
        if name in self._held:
            self._held[name] = tensor.clone()  # a stream may use its memory again

    def waiting(self) -> str:
        """Sources that incomplete parameters lack, as the end of an error message; "" if none."""
        missing = sorted({source for sources in self._missing.values() for source in sources})
        return f"; still missing: {listed(missing)}" if missing else ""

    def _make(self, name: str) -> Tensor:
        return made(name, self._parameters[name], self._recipes[name], self._reader(), self._shard)

    def _reader(self) -> Any:
        reader = InMemoryReader(self._held)
        return reader if self._padded is self._plan else PaddedReader(reader, self._shapes, self._padded_shapes)

    def _drop(self, users: set[str]) -> None:
        """Drop held tensors that no incomplete parameter needs."""
        done = {source for user in users for source in self._recipes[user].sources}
        for source in done & set(self._held):
            if not any(self._missing[user] for user in self._users[source]):
                del self._held[source]


class InMemoryReader:
    """A TensorReader over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        tensor = self._tensors[name]
        if columns is not None:
            return tensor[:, columns[0] : columns[1]]
        return tensor[rows[0] : rows[1]] if rows is not None else tensor
