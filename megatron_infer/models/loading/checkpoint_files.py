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
import pathlib
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_infer.errors import ModelError
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
    for index, info in storage.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise ModelError(f"{path}: {str(index)[:100]} has no place in a file")
        file = info.relative_path
        is_name = isinstance(file, str) and Path(file).name == file and file.endswith(".distcp")
        if not is_name or not (directory / file).is_file():
            raise ModelError(f"{path}: {str(file)[:100]!r} is no .distcp file of this directory")
    return Metadata(state_dict_metadata=kept, storage_data=storage)
