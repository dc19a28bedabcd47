"""One file of saved requests: safetensors with a manifest and a checksum over everything, replaced atomically.

    metadata: {"format": FORMAT, "version": VERSION, "manifest": JSON (ASCII), "checksum": hex}
    tensors:  named by the manifest's writer, as safetensors stores them

The checksum is blake2b over format, version, manifest and, by name, every tensor's name, dtype, shape and bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.errors import SnapshotError
from megatron_infer.outputs.schema import SCHEMA
from megatron_infer.utils.files import regular, save_tensors

FORMAT = "megatron_infer.requests"
VERSION = str(SCHEMA)
_FIELDS = {"format", "version", "manifest", "checksum"}


def to_bytes(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a file."""
    from safetensors.torch import save

    return save(dict(tensors), _metadata(manifest, tensors))


def of_bytes(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(manifest, tensors) of what `to_bytes` gave, whose checksum is verified. Raises SnapshotError about `name`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)  # checks the length of the header
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is no texts by name")
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise SnapshotError(name, f"damaged, truncated or not of safetensors ({error})") from error
    return _checked(name, metadata, tensors), tensors


def write(path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Replace the file at `path`: after a crash at any moment it has the old content or all of the new."""
    staged = stage(path, manifest, tensors)
    try:
        put_in_place(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def stage(path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write the content to a file beside `path` and sync it -> that file, which `put_in_place` renames to `path`."""
    metadata = _metadata(manifest, tensors)
    staged = path.with_name(path.name + ".tmp")
    try:
        save_tensors(staged, tensors, metadata)
        sync(staged)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return staged


def put_in_place(staged: Path, path: Path) -> None:
    os.replace(staged, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file's content, or a directory's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(manifest, tensors) of a file, whose checksum is verified. Raises SnapshotError, FileNotFoundError."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
        _refuse_others(path, metadata)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return _checked(path, metadata, tensors), tensors


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, without the checksum. Raises SnapshotError, FileNotFoundError."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
    _refuse_others(path, metadata)
    return _manifest(path, metadata)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(regular(path), framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SnapshotError(path, f"cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise SnapshotError(path, f"damaged, truncated or not a safetensors file ({error})") from error
    except UnicodeDecodeError as error:
        raise SnapshotError(path, "damaged: its header is not UTF-8") from error


def _metadata(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    text = json.dumps(manifest, separators=(",", ":"))
    metadata = {"format": FORMAT, "version": VERSION, "manifest": text}
    return metadata | {"checksum": _checksum(metadata, tensors)}


def _checked(path: Path | str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The manifest, once format, version and checksum are right."""
    _refuse_others(path, metadata)
    if _checksum(metadata, tensors) != metadata["checksum"]:
        raise SnapshotError(path, "damaged: the checksum does not match the content")
    return _manifest(path, metadata)


def _manifest(path: Path | str, metadata: Mapping[str, str]) -> dict[str, Any]:
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        manifest = json.loads(metadata["manifest"])
        if isinstance(manifest, dict):
            return manifest
    raise SnapshotError(path, "its manifest is not a JSON object")


def _refuse_others(path: Path | str, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise SnapshotError(path, f"not a file of saved requests: its format is {metadata.get('format')!r}")
    version = metadata.get("version", "")
    if version != VERSION:
        remedy = ""
        if version.isascii() and version.isdigit() and len(version) < 10:
            other = "newer" if int(version) > SCHEMA else "earlier"
            remedy = f"; it was written by a release that is {other}, load it with that"
        raise SnapshotError(path, f"its version is {version!r}, this release reads {VERSION!r}{remedy}")
    if set(metadata) != _FIELDS:
        raise SnapshotError(path, f"damaged: its metadata holds {sorted(metadata)}, not {sorted(_FIELDS)}")


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for part in (metadata["format"], metadata["version"], metadata["manifest"]):
        content = part.encode("utf-8")
        digest.update(len(content).to_bytes(8, "little") + content)
    for name in sorted(tensors):
        add_tensor(digest, name, tensors[name], is_own=True)
    return digest.hexdigest()


def add_tensor(
    digest: hashlib.blake2b, name: str, tensor: Tensor, *, chunk: int = 1 << 24, is_own: bool = False
) -> None:
    """Add name, dtype, shape and bytes of a tensor to `digest`, `chunk` elements at a time, from any device.

    is_own: nothing else uses its memory.
    """
    head = f"{len(name)}:{name} {tensor.dtype} {list(tensor.shape)};"
    digest.update(head.encode("utf-8"))
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), chunk):
        piece = flat[start : start + chunk]
        piece = piece.to("cpu", copy=not is_own)  # numpy() bars a storage from FSDP's resizes
        digest.update(piece.view(torch.uint8).numpy())
