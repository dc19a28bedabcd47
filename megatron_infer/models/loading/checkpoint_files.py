"""A torch_dist directory as it may be read: whatever its files hold, loading them runs no code.

megatron-core and torch unpickle three things of such a directory: `.metadata`, `common.pt`, and every entry that
`.metadata` calls bytes (the `_extra_state` of layers). None of the three is left to them:

    directory/                              tensors_only(directory), a temporary folder
      metadata.json    names the format     written again
      common.pt        arguments, optimizer an empty one
      .metadata        a pickle             read by MetadataUnpickler; its tensors alone are written again
      *.distcp         tensors, bytes       links to those files; tensors are read with weights_only=True
"""

from __future__ import annotations

import enum
import importlib
import io
import json
import math
import pathlib
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.hf_names import Span
from megatron_infer.utils.files import regular
from megatron_infer.utils.json_file import read_json

REMEDY = (
    "if you trust it, load it in Megatron and save it with save_checkpoint; or give its weights as safetensors, which "
    "`megatron-infer convert` makes of a checkpoint that can be read"
)
_DCP = "torch.distributed.checkpoint"
_VALUES = {
    f"{_DCP}.metadata": (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_DCP}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}  # fmt: skip
"""The classes of torch's and megatron-core's own metadata, by module: values without methods that act."""
_PATHS = ("pathlib", "pathlib._local")


class MetadataUnpickler(pickle._Unpickler):
    """Makes the values of a checkpoint's metadata, and refuses every other class and function by its name.

    In Python, not C: state is set on values of these classes only, not on the classes themselves.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for what is not listed."""
        if name in _VALUES.get(module, ()):
            found = getattr(importlib.import_module(module), name, None)
        elif module in _PATHS and name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            found = pathlib.PurePosixPath
        elif module == "torch":
            found = getattr(torch, name, None)
            found = found if found is torch.Size or isinstance(found, torch.dtype) else None
        else:
            found = {
                ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
                ("collections", "OrderedDict"): OrderedDict,
                ("builtins", "getattr"): _enum_member,  # how some versions of Python pickle an enum
            }.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is none of the classes of a checkpoint's metadata")
        return found

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"extension {code} of the pickle format is not read")

    def load_build(self) -> None:
        kind = type(self.stack[-2])  # type: ignore[attr-defined]
        if kind.__name__ not in _VALUES.get(kind.__module__, ()):
            raise pickle.UnpicklingError(f"the state of a {kind.__module__}.{kind.__qualname__} is not set")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def _enum_member(kind: type[enum.Enum], name: str) -> enum.Enum:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError("getattr of what is no enum")
    return kind[name]


@contextmanager
def tensors_only(directory: Path) -> Iterator[Path]:
    """A folder from which megatron-core loads the tensors of the checkpoint in `directory`, and nothing else.

    Raises ModelError for a directory of another format, and for metadata that hold more than metadata.
    """
    metadata = _tensor_metadata(directory)
    backend = read_json(directory / "metadata.json").get("sharded_backend")
    if backend != "torch_dist":
        raise ModelError(f"{directory}: its format is {str(backend)[:40]!r}, only torch_dist is read; {REMEDY}")
    files = {info.relative_path for info in metadata.storage_data.values()}
    with tempfile.TemporaryDirectory(prefix="megatron-infer-") as name:
        folder = Path(name)
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        about |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")
        torch.save({}, folder / "common.pt")
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        for file in files:
            (folder / file).symlink_to((directory / file).resolve())
        yield folder


class DistcpReader:
    """The model's tensors in a directory of torch.distributed.checkpoint, as a model in FSDP2 saves its state dict, or
    Megatron-LM as `fsdp_dtensor`.

    Each is read whole, by this process alone. What stands beside the model, such as an optimizer, is left out: where
    names begin with "model.", the others. Gates that Megatron-FSDP has split off (`weight_w`, `weight_v`) are joined.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ModelError for metadata that hold more than metadata, and without tensors of a model."""
        self._directory, self._metadata = directory, _tensor_metadata(directory)
        keys = list(self._metadata.state_dict_metadata)
        is_bare = any(key.startswith(("lm_head.", "model.layers.")) for key in keys)  # Hugging Face's names
        prefix = "model." if not is_bare and any(key.startswith("model.") for key in keys) else ""
        self._keys: dict[str, tuple[str, ...]] = {
            key.removeprefix(prefix): (key,) for key in keys if key.startswith(prefix)
        }
        """Name -> the entries of equal shapes whose rows it has."""
        for gate in [name for name in self._keys if ".linear_fc1." in name and name.endswith("_w")]:
            linear = f"{gate[:-2]}_v"
            if linear in self._keys and self._shape(self._keys[gate]) == self._shape(self._keys[linear]) != ():
                self._keys[gate[:-2]] = self._keys.pop(gate) + self._keys.pop(linear)
        if not self._keys:
            raise ModelError(f"{directory}: its metadata have no tensors of a model")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._shape(keys) for name, keys in self._keys.items()}

    def _shape(self, keys: Sequence[str]) -> tuple[int, ...]:
        first = tuple(self._metadata.state_dict_metadata[keys[0]].size)
        return first if len(keys) == 1 else (len(keys) * first[0], *first[1:])

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """Raises ModelError for a file that holds something else than the tensor."""
        from torch.distributed import checkpoint

        entries = {key: self._metadata.state_dict_metadata[key] for key in self._keys[name]}
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
        reader = checkpoint.FileSystemReader(self._directory)
        reader.read_metadata = lambda *_, **__: self._metadata  # which was read without running code
        try:
            checkpoint.load(state, storage_reader=reader, no_dist=True)
        except checkpoint.CheckpointException as error:
            reason = next((str(failure[0]) for failure in error.failures.values()), str(error))
            raise ModelError(f"{self._directory}: {name} cannot be read: {reason}") from error
        tensor = torch.cat(list(state.values())) if len(state) > 1 else state[self._keys[name][0]]
        tensor = tensor if columns is None else tensor[:, columns[0] : columns[1]]
        return tensor if rows is None else tensor[rows[0] : rows[1]]


def _tensor_metadata(directory: Path) -> Any:
    """The metadata of the checkpoint's tensors. Raises ModelError."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

    path = directory / ".metadata"
    try:
        found = MetadataUnpickler(io.BytesIO(regular(path).read_bytes())).load()
        kept = {
            name: entry for name, entry in found.state_dict_metadata.items() if type(entry) is TensorStorageMetadata
        }
        storage = {index: info for index, info in found.storage_data.items() if index.fqn in kept}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # a pickle of anything raises anything; each means that it is no metadata
        raise ModelError(f"{path}: cannot be read safely: {error}; {REMEDY}") from None
    sizes: dict[str, int] = {}
    for index, info in storage.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise ModelError(f"{path}: {str(index)[:100]} has no place in a file")
        file = info.relative_path
        is_name = isinstance(file, str) and Path(file).name == file and file.endswith(".distcp")
        if not is_name or not (directory / file).is_file():
            raise ModelError(f"{path}: {str(file)[:100]!r} is no .distcp file of this directory")
        sizes[file] = (directory / file).stat().st_size
    for name, entry in kept.items():
        try:
            reason = _why_not_whole(
                entry, [storage.get(MetadataIndex(name, one.offsets)) for one in entry.chunks], sizes
            )
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            reason = f"its entry is damaged: {error}"
        if reason:
            raise ModelError(f"{path}: {str(name)[:100]}: {reason}")
    return Metadata(state_dict_metadata=kept, storage_data=storage)


MAX_COMPARISONS = 1_000_000
"""Of the chunks of one tensor with each other, in a search for two that overlap."""


def _why_not_whole(entry: Any, places: Sequence[Any], sizes: Mapping[str, int]) -> str:
    """Why the chunks of a tensor's entry are not the whole tensor, or their bytes are not in the files; else "".

    places: of each chunk, None for one without. sizes: bytes of the files.
    """
    size, itemsize = tuple(entry.size), entry.properties.dtype.itemsize
    boxes = [(tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks]
    if any(type(number) is not int or number < 0 for part in (size, *chain.from_iterable(boxes)) for number in part):
        return f"its shape {size} or that of a chunk is no shape"
    for (start, extent), info in zip(boxes, places, strict=True):
        if not len(start) == len(extent) == len(size) or any(
            first + length > whole for first, length, whole in zip(start, extent, size, strict=True)
        ):
            return f"the chunk {extent} at {start} is not within its shape {size}"
        if info is None:
            return f"the chunk at {start} has no place in a file"
        if getattr(info, "transform_descriptors", None):
            return f"its bytes are transformed by {str(info.transform_descriptors)[:100]}, which is not read"
        if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
            return f"{info.relative_path} is cut short: it ends before byte {info.offset + info.length:,}"
        if math.prod(extent) * itemsize > info.length:
            return f"the chunk {extent} at {start} has {info.length:,} bytes, too few for its shape"
    if sum(math.prod(extent) for _, extent in boxes) != math.prod(size):
        return f"its chunks have another number of elements than its shape {size}"
    return _overlap(boxes, len(size))


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], num_dims: int) -> str:
    """Which two boxes (offsets, sizes) have elements in common; "" for none.

    Boxes with as many elements as their tensor that have none in common are the whole tensor.
    """
    if num_dims == 0 or len(boxes) < 2:
        return ""
    along = max(range(num_dims), key=lambda dim: len({start[dim] for start, _ in boxes}))
    ordered = sorted((box for box in boxes if math.prod(box[1])), key=lambda box: box[0][along])
    compared = 0
    for number, (start, extent) in enumerate(ordered):
        for other, length in ordered[number + 1 :]:
            if other[along] >= start[along] + extent[along]:
                break
            compared += 1
            if compared > MAX_COMPARISONS:
                return f"it is cut into {len(boxes):,} chunks, too many to compare"
            if all(a < b + m and b < a + n for a, n, b, m in zip(start, extent, other, length, strict=True)):
                return f"its chunks at {start} and {other} overlap"
    return ""
