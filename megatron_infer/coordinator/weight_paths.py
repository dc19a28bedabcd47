"""Which files new weights and adapters are read from: those below a root, an option of the process."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence

from megatron_infer.errors import ConfigError

_OF_WEIGHTS = re.compile(r"config\.json|.*\.safetensors(\.index\.json)?|pytorch_model.*")


class WeightsPathRefused(ConfigError):
    """A path that weights are not read from; the message reveals nothing of what lies outside the root."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        """no_weights_root, outside_weights_root, not_found or invalid_value."""


def weights_path(path: str, root: str | None) -> str:
    """The real path of weights below `root`: a .safetensors file, a directory of them, or a torch_dist checkpoint.

    path: absolute, or from the root. Raises WeightsPathRefused, also for links that lead out of the root.
    """
    if root is None:
        text = "no weights are read from files here: start it with --weights-root DIR, or send them as bytes"
        raise WeightsPathRefused(text, "no_weights_root")
    real, real_root = _resolved(path, root)
    if os.path.isfile(real):
        if not real.endswith(".safetensors"):
            raise WeightsPathRefused("path is a file of another kind than .safetensors", "invalid_value")
        return real
    if not os.path.isdir(real):
        raise WeightsPathRefused(f"path: there is nothing at {path[:200]!r} below the weights root", "not_found")
    names = os.listdir(real)
    if "metadata.json" not in names and not any(name.endswith(".safetensors") for name in names):
        text = "path is a directory without .safetensors files that is no torch_dist checkpoint either"
        raise WeightsPathRefused(text, "invalid_value")
    if "metadata.json" not in names and "latest_checkpointed_iteration.txt" in names:
        raise WeightsPathRefused("path is a run of several checkpoints; give one iteration's folder", "invalid_value")
    _check_links(real, names, real_root)
    return real


def fingerprint(path: str) -> str:
    """What tells whether weights were changed since: a hash of the name, size and time of change of their files.

    path: of `weights_path`. Of a directory all files count if it is a checkpoint, else those that weights are in.
    """
    if os.path.isfile(path):
        files = {"": path}
    else:
        files = {name: os.path.join(path, name) for name in os.listdir(path)}
        if "metadata.json" not in files:
            files = {name: at for name, at in files.items() if _OF_WEIGHTS.fullmatch(name)}
    about = [(name, status.st_size, status.st_mtime_ns) for name, at in files.items() if (status := os.stat(at))]
    return hashlib.blake2b(repr(sorted(about)).encode(), digest_size=16).hexdigest()


def adapter_path(path: str, root: str | None) -> str:
    """The real path of a PEFT adapter's directory below `root`.

    path: absolute, or from the root. Raises WeightsPathRefused, also for links that lead out of the root.
    """
    if root is None:
        text = "no adapters are read from files here: start it with --lora-root DIR"
        raise WeightsPathRefused(text, "no_lora_root")
    real, real_root = _resolved(path, root)
    if not os.path.isdir(real):
        raise WeightsPathRefused(f"path: there is no directory {path[:200]!r} below the root", "not_found")
    _check_links(real, os.listdir(real), real_root)
    return real


def _resolved(path: str, root: str) -> tuple[str, str]:
    """The real paths of both."""
    if not path or "\0" in path:
        raise WeightsPathRefused("path is empty or no path", "invalid_value")
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, path))
    if not _is_below(real, real_root):
        raise WeightsPathRefused("path leads out of the root", "outside_weights_root")
    return real, real_root


def _check_links(real: str, names: Sequence[str], real_root: str) -> None:
    if not all(_is_below(os.path.realpath(os.path.join(real, name)), real_root) for name in names):
        raise WeightsPathRefused("path holds a link that leads out of the root", "outside_weights_root")


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root
