"""A table of compiled kernels: what the compiler was given, as a hash, and the figures that it gave.

`tools/aot_compile.py --table FILE` does not compile again what FILE has. A kernel that changes, or another version of
Triton, has other hashes, and is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import triton
import triton.language

FIGURES = ("num_registers", "spill_bytes", "shared_bytes", "by_arch", "only_fp32")
"""Columns for a compiled kernel, whole numbers; the last two are 0 or 1."""


def key_of(variant: Any, arch: int, aligned: Iterable[str]) -> str:
    """A hash of everything that decides what the compiler gives; aligned: arguments taken as multiples of 16."""
    values = {name: _source(value) if _is_kernel(value) else value for name, value in variant.constexprs.items()}
    given = (
        triton.__version__,
        _source(variant.kernel),
        [(name, variant.signature.get(name)) for name in variant.kernel.arg_names],
        sorted(values.items()),
        sorted(variant.options.items()),
        sorted(aligned),
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


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Key -> figures; raises ValueError for a line that is none."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if line.startswith("#") or not words:
            continue
        try:
            figures = dict(zip(FIGURES, map(int, words[1 : len(FIGURES) + 1]), strict=True))
        except ValueError:
            raise ValueError(f"{path}:{number}: is no line of the table; write it again with --write") from None
        found[words[0]] = figures | {name: bool(figures[name]) for name in ("by_arch", "only_fp32")}
    return found


def write(path: Path, rows: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """rows: key -> (name of the variant, figures)."""
    lines = [
        f"{key} {' '.join(str(int(figures[name])) for name in FIGURES)} {name}"
        for key, (name, figures) in sorted(rows.items(), key=lambda row: (row[1][0], row[0]))
    ]
    head = f"# made by `make kernels-table` with Triton {triton.__version__}: key {' '.join(FIGURES)} kernel"
    path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
