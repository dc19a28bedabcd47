"""Files as they are opened and written: their kind is checked, and a full disk is an OSError."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a directory"),
)


def regular(path: str | Path, *, or_pipe: bool = False) -> Path:
    """`path`, if it leads to a regular file: to open or to read a pipe or a device may never end.

    or_pipe: a pipe will do, as shells give one for `<(command)`. Raises OSError, also where there is nothing.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or (or_pipe and stat.S_ISFIFO(mode))):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "of another kind")
        raise OSError(errno.EINVAL, f"it is {kind}, no regular file", str(path))
    return Path(path)


def save_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a .safetensors file. Raises OSError, which safetensors makes errors of its own of."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
