"""Sources of new weights: state dicts, files, streams, other models. `as_source` picks the class."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from megatron_infer.errors import ConfigError, ModelError, WeightUpdateError
from megatron_infer.models.loading.checkpoint import CheckpointSource, description_by_names, latest_iteration
from megatron_infer.models.loading.checkpoint_files import DistcpReader
from megatron_infer.models.loading.families import family_of, is_hf_name, name_in_files
from megatron_infer.models.loading.find import is_checkpoint, is_distcp
from megatron_infer.models.loading.hf_names import Shard
from megatron_infer.models.loading.hf_weights import SafetensorsReader, fitted, made
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.sharded_weights import is_dtensor
from megatron_infer.rl.updates.hf import InMemoryReader
from megatron_infer.rl.updates.inventory import LocalTensor, listed
from megatron_infer.rl.updates.names import check_shape, locals_of, numbering_of
from megatron_infer.rl.updates.target import UpdateTarget

_SHOWN = 8


class RowSink(Protocol):
    """Takes a source's tensors in pieces."""

    target: UpdateTarget

    def writable(self, local: LocalTensor) -> Tensor:
        """The live tensor, for a source that writes all of it in pieces."""
        ...

    def count_received(self, num_bytes: int) -> None:
        """Add to the bytes that came from other processes."""
        ...


class WeightSink(RowSink, Protocol):
    """Takes a source's tensors: a `WeightUpdate` writes them, a `Comparison` compares them."""

    def write(self, name: str, tensor: Tensor, *, names: str | None = None) -> None:
        """Take a tensor of the whole model or this rank's part of it, under a megatron-core or Hugging Face name."""
        ...

    def put(self, local: LocalTensor, value: Tensor) -> None:
        """Take the value of one of this rank's tensors, in its own shape."""
        ...


@runtime_checkable
class WeightSource(Protocol):
    """New weights for a model. Both methods are called once per update, on every rank of the engine."""

    def check(self, target: UpdateTarget, *, strict: bool) -> None:
        """Raise errors that can be found before anything is written: names, shapes, missing files."""
        ...

    def write_into(self, update: WeightSink) -> None:
        """Write all tensors of this rank."""
        ...


def as_source(source: Any, *, plan: ModelDescription | None = None, names: str | None = None) -> WeightSource:
    """A WeightSource for any supported source.

    A mapping of tensors; a path (Hugging Face directory, .gguf, .safetensors file or directory, torch_dist checkpoint);
    an iterable or async iterable of (name, tensor); a live model (or a list of one) with the same sharding; a
    WeightSource itself (for another layout: `ReshardSource`). Names are megatron-core's or Hugging Face's. plan, names:
    as in `WeightUpdate`; names None: for a mapping the numbering that fits, else "whole".
    """
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, Mapping):
        return MappingSource(source, plan=plan, names=names)
    if isinstance(source, str | os.PathLike):
        return _of_path(Path(source), plan, names)
    if isinstance(source, list | tuple) and any(hasattr(part, "state_dict") for part in source):
        if len(source) > 1:
            raise ConfigError(f"weights of a model in {len(source)} chunks; give ReshardSource(chunks)")
        source = source[0]
    if hasattr(source, "state_dict"):
        return MappingSource(_tensors_of(source.state_dict()), plan=plan, names=names or "local")
    if isinstance(source, AsyncIterable):
        return AsyncStreamSource(source)
    if isinstance(source, Iterable):
        return StreamSource(source)
    raise ConfigError(
        f"weights cannot come from a {type(source).__name__}; give a mapping of tensors, a path, an iterable of "
        "(name, tensor), a model or a WeightSource"
    )


def _of_path(path: Path, plan: ModelDescription | None, names: str | None) -> WeightSource:
    if path.is_dir() and is_distcp(latest := latest_iteration(path)):
        return MappingSource(LazyTensors(DistcpReader(latest)), plan=plan, names=names)
    if path.is_dir() and is_checkpoint(path):
        return TorchDistSource(CheckpointSource(path))
    if path.is_dir() and not (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return MappingSource(LazyTensors(SafetensorsReader(path)), plan=plan, names=names)
    if path.is_file() and path.suffix == ".safetensors":
        return MappingSource(LazyTensors(SafetensorsReader(path)), plan=plan, names=names)
    model = open_source(path)  # raises ModelError that names the files it looked for
    if plan is not None:
        raise ConfigError(f"{path} has a model description of its own; leave out plan")
    return HFSource(model.config(), lambda: _reader_of(path, model))


def _reader_of(path: Path, model: Any) -> Any:
    if path.is_dir():
        return SafetensorsReader(path, base=family_of(model.config()).base)
    return model._weights


def _tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


class LazyTensors(Mapping[str, Tensor]):
    """Tensors in files, read on access."""

    def __init__(self, reader: SafetensorsReader | DistcpReader) -> None:
        self.reader = reader

    def __getitem__(self, name: str) -> Tensor:
        return self.reader.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader.shapes())

    def __len__(self) -> int:
        return len(self.reader.shapes())


class MappingSource:
    """A complete mapping of tensors by name: nothing is written unless all of them fit."""

    def __init__(
        self, tensors: Mapping[str, Tensor], *, plan: ModelDescription | None = None, names: str | None = None
    ) -> None:
        self._tensors, self._plan, self._names = tensors, plan, names
        self._hf: HFSource | None = None
        self._numbering = "whole"

    def check(self, target: UpdateTarget, *, strict: bool) -> None:
        keys = [name.removeprefix("module.") for name in self._tensors if not name.endswith("_extra_state")]
        self._hf = None
        foreign = [name for name in keys if is_hf_name(name)]
        if foreign and len(foreign) == len(keys):
            plan = self._plan if self._plan is not None else description_by_names(target.model, tuple(foreign))
            if isinstance(self._tensors, LazyTensors):
                reader: Any = self._tensors.reader
            else:
                reader = InMemoryReader({name_in_files(name, plan): tensor for name, tensor in self._tensors.items()})
            self._hf = HFSource(plan, lambda: reader)
            self._hf.check(target, strict=strict)
            if any(is_dtensor(tensor) for tensor in self._in_memory()):
                self._hf = None  # which reads what this rank needs: the ranks gather all, in one order
            return
        self._numbering = self._names or numbering_of(target.inventory, keys)
        self._check_megatron(target, strict=strict)

    def _in_memory(self) -> Iterable[Tensor]:
        return () if isinstance(self._tensors, LazyTensors) else self._tensors.values()

    def _check_megatron(self, target: UpdateTarget, *, strict: bool) -> None:
        problems: list[WeightUpdateError] = []
        found = set()
        for key in self._tensors:
            name = key.removeprefix("module.")
            if name.endswith("_extra_state"):
                continue
            try:
                for local in locals_of(target.inventory, name, names=self._numbering, strict=strict):
                    found.add(local.name)
                    check_shape(local, self._shape(key))
                    self._check_dtype(local, key)
            except WeightUpdateError as error:
                problems.append(error)
        missing = [local.name for local in target.inventory.tensors if local.name not in found]
        if missing and strict:
            problems.append(WeightUpdateError(f"no value for {listed(missing)}", tensor=missing[0]))
        if problems:
            text = "; ".join(str(problem) for problem in problems[:_SHOWN])
            more = f"; {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise WeightUpdateError(text + more, tensor=problems[0].tensor, rank=target.rank)

    def _check_dtype(self, local: LocalTensor, key: str) -> None:
        """Checks tensors in memory; tensors in files are checked when they are read."""
        if isinstance(self._tensors, LazyTensors):
            return
        given, own = self._tensors[key], local.tensor
        if given.dtype != own.dtype and not (given.is_floating_point() and own.is_floating_point()):
            raise WeightUpdateError(
                f"{local.layout.name} is {own.dtype}, got {given.dtype}, which is not rounded to it",
                tensor=local.layout.name,
            )

    def _shape(self, key: str) -> tuple[int, ...]:
        if isinstance(self._tensors, LazyTensors):
            return self._tensors.reader.shapes()[key]
        return tuple(self._tensors[key].shape)

    def write_into(self, update: WeightSink) -> None:
        if self._hf is not None:
            self._hf.write_into(update)
            return
        for name in self._tensors:
            update.write(name, self._tensors[name], names=self._numbering)


class HFSource:
    """A complete set of tensors under Hugging Face names; each rank reads only its part."""

    def __init__(self, plan: ModelDescription, reader: Callable[[], Any]) -> None:
        self._plan, self._open = plan, reader
        self._fitted: tuple[Any, Any] | None = None

    def check(self, target: UpdateTarget, *, strict: bool) -> None:
        if not strict:
            raise ConfigError(
                "strict=False needs a stream of (name, tensor) under Hugging Face names; a mapping or directory has to "
                "be complete"
            )
        try:
            self._fitted = fitted(target.model, self._open(), self._plan, Shard.of(target.model.pg_collection.tp))
        except ModelError as error:
            raise WeightUpdateError(str(error), rank=target.rank) from error

    def write_into(self, update: WeightSink) -> None:
        assert self._fitted is not None, "checked first"
        reader, recipes = self._fitted
        shard = Shard.of(update.target.model.pg_collection.tp)
        for name, recipe in recipes.items():
            local = update.target.inventory.by_name[name]
            update.put(local, made(name, local.tensor.detach(), recipe, reader, shard))
        self._fitted = None


class TorchDistSource:
    """A torch_dist checkpoint of any layout; each rank reads its part into memory of the same size beside the model."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._state: dict[str, Tensor] = {}

    def check(self, target: UpdateTarget, *, strict: bool) -> None:
        try:
            self._state = self._source.part_of(target.model)
        except ModelError as error:
            raise WeightUpdateError(str(error), rank=target.rank) from error

    def write_into(self, update: WeightSink) -> None:
        state, self._state = self._state, {}
        for name, tensor in state.items():
            if name in update.target.inventory.by_name:
                update.put(update.target.inventory.by_name[name], tensor)


class StreamSource:
    """A stream of (name, tensor) pairs. Nothing can be checked in advance, so an error may leave an update half-way."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._pairs = pairs

    def check(self, target: UpdateTarget, *, strict: bool) -> None:
        """A stream cannot be checked in advance."""

    def write_into(self, update: WeightSink) -> None:
        for name, tensor in self._pairs:
            update.write(name, tensor)


class AsyncStreamSource:
    """An async stream of (name, tensor) pairs, for a caller outside an event loop."""

    def __init__(self, pairs: AsyncIterable[tuple[str, Tensor]]) -> None:
        self._pairs = pairs

    def check(self, target: UpdateTarget, *, strict: bool) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise ConfigError("an async stream of weights inside an event loop; use `await apply_async(...)`")

    def write_into(self, update: WeightSink) -> None:
        asyncio.run(self.feed(update))

    async def feed(self, update: WeightSink) -> None:
        async for name, tensor in self._pairs:
            update.write(name, tensor)
