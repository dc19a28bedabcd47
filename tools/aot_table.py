"""A table of compiled kernels: what the compiler was given, as a hash, and the figures that each Triton gave.

`tools/aot_compile.py --table FILE` does not compile again what FILE has from the Triton that runs. A kernel that
changes has another hash, and is compiled. The first line names the columns. A minor version of Triton has one: FIGURES,
"=" for those of the column before, "-" for none.
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

FIGURES = ("num_registers", "spill_bytes", "shared_bytes", "by_arch", "only_fp32")
"""Of a compiled kernel, whole numbers; the last two are 0 or 1."""
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


def version() -> str:
    """The column of the Triton that runs."""
    return ".".join(triton.__version__.split(".")[:2])


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Key -> figures of the Triton that runs; raises ValueError for a line that is none."""
    columns = _columns(path)
    return {
        key: dict(zip(FIGURES, (*cells[:3], *map(bool, cells[3:])), strict=True))
        for key, (_, row) in columns.items()
        if (cells := row.get(version())) is not None
    }


def _columns(path: Path) -> dict[str, tuple[str, dict[str, tuple[int, ...]]]]:
    """Key -> (name of the variant, version -> figures)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    versions = lines[0].split()[1:-1] if lines else []
    rows = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            key, *cells, name = line.split()
            row: dict[str, tuple[int, ...]] = {}
            last: tuple[int, ...] = ()
            for one, cell in zip(versions, cells, strict=True):
                if cell == "-":
                    continue
                last = row[one] = last if cell == "=" else tuple(map(int, cell.split("/")))
                if len(last) != len(FIGURES):
                    raise ValueError
        except ValueError:
            raise ValueError(f"{path}:{number}: is no line of the table; write it again with --write") from None
        rows[key] = name, row
    return rows


def write(path: Path, rows: Mapping[str, tuple[str, Mapping[str, Any]]], *, keep: bool = False) -> None:
    """Write the column of the Triton that runs; of other columns the keys in `rows` stay.

    rows: key -> (name of the variant, figures). keep: other keys stay, too.
    """
    known = _columns(path) if path.exists() else {}
    table = (known if keep else {}) | {
        key: (name, known.get(key, (name, {}))[1] | {version(): tuple(int(figures[one]) for one in FIGURES)})
        for key, (name, figures) in rows.items()
    }
    versions = sorted({one for _, row in table.values() for one in row}, key=lambda one: [*map(int, one.split("."))])
    lines = [" ".join(("key", *versions, "kernel"))]
    for key, (name, row) in sorted(table.items(), key=lambda item: (item[1][0], item[0])):
        cells, last = [], None
        for one in versions:
            cells.append("-" if one not in row else "=" if row[one] == last else "/".join(map(str, row[one])))
            last = row.get(one, last)
        lines.append(" ".join((key, *cells, name)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
