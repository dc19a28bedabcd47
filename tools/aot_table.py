"""A table of compiled kernels: what the compiler was given, as a hash, and the figures that it gave.

`tools/aot_compile.py --table FOLDER` does not compile again what FOLDER has from the Triton that runs: a file for each
minor version of Triton, a line for each kernel. A kernel that changes has another hash, and is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
import triton.language

FIGURES = ("num_registers", "spill_bytes", "shared_bytes", "by_arch")
"""Columns of a compiled kernel in the table: integers; the last is a flag, 0 or 1."""
FIRST_VERSION = "3.6.0"
"""Part of every hash, so that hashes stay as they were when the table was for one Triton."""


@functools.cache
def key_of(launched: Any, arch: int) -> str:
    """A hash of everything that decides what the compiler gives for `launches.Launched`."""
    given = (
        FIRST_VERSION,
        _source(launched.function),
        list(launched.types),
        sorted(launched.values),
        sorted(launched.options),
        sorted(launched.aligned),
        arch,
    )
    return hashlib.sha256(repr(given).encode()).hexdigest()[:20]


@functools.cache
def _source(kernel: Any) -> str:
    """A hash of a kernel's source, of all functions outside of Triton that it calls, and of the values they name.

    Triton's own hash also has places in files, and differs from process to process.
    """
    found: dict[str, Any] = {}
    left = [kernel]
    while left:
        function = left.pop().fn
        place = f"{function.__module__}.{function.__qualname__}"
        if place in found:
            continue
        found[place] = inspect.getsource(function), function.__defaults__
        names = function.__code__.co_names
        known = [(function.__module__, function.__globals__)]
        modules = [known[0][1].get(name) for name in names]
        known += [(one.__name__, vars(one)) for one in modules if inspect.ismodule(one)]
        for module, values in known:
            if module.partition(".")[0] == "triton":
                continue
            for name in names:
                value = values.get(name)
                if _is_kernel(value) and not value.fn.__module__.startswith("triton."):
                    left.append(value)
                elif isinstance(value, bool | int | float | str | tuple | triton.language.constexpr):
                    found[f"{module}.{name}"] = value
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _is_kernel(value: Any) -> bool:
    return isinstance(value, triton.runtime.jit.JITCallable)


def path_of(folder: Path) -> Path:
    """The file of the Triton that runs."""
    return folder / f"{'.'.join(triton.__version__.split('.')[:2])}.txt"


def read(folder: Path) -> dict[str, dict[str, int]]:
    """Key -> figures by the Triton that runs; raises ValueError for a line that is none."""
    path, rows = path_of(folder), {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        try:
            key, figures, _ = line.split()
            rows[key] = dict(zip(FIGURES, map(int, figures.split("/")), strict=True))
        except ValueError:
            raise ValueError(f"{path}:{number}: is no line of the table; write it again with --write") from None
    return rows


def write(folder: Path, rows: Mapping[str, tuple[str, Mapping[str, int]]]) -> None:
    """Write the file of the Triton that runs. rows: key -> (name of the variant, figures)."""
    lines = [
        f"{key} {'/'.join(str(int(figures[one])) for one in FIGURES)} {name}\n"
        for key, (name, figures) in sorted(rows.items(), key=lambda row: (row[1][0], row[0]))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path_of(folder).write_text("".join(lines), encoding="utf-8")
