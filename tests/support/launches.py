"""Records which specializations of Triton kernels a run launches in the interpreter, to compile them elsewhere.

The interpreter accepts code that the compiler refuses, and a list of kernels to compile may miss launched ones.
Tests record every launch with the compiler's arguments; `tools/aot_compile.py --launches` compiles the distinct ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_infer.kernels.triton.launch import listening

ALIGNMENT = 16
"""Triton compiles another specialization for pointers and numbers that are multiples of it."""
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One specialization, hashable and made of JSON values."""

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    """(argument, Triton's type of it, "constexpr" where its value is compiled in)."""
    values: tuple[tuple[str, Any], ...]
    """(argument, value) of those compiled in: a number, a string, None."""
    aligned: tuple[str, ...]
    """Arguments that are multiples of 16."""
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's name and a hash of the specialization."""
        return f"{self.kernel}-launched-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"

    def canonical(self) -> Launched:
        """Without what the kernel's do_not_specialize ignores; only where kernels are not interpreted."""
        loose = {one.name for one in self.function.params if one.do_not_specialize}
        unaligned = loose | {one.name for one in self.function.params if one.do_not_specialize_on_alignment}
        aligned = tuple(name for name in self.aligned if name not in unaligned)
        return replace(self._freed(loose), aligned=aligned)

    def at_any_size(self) -> Launched:
        """No integer is compiled in for being 1; pointers, and integers named for a stride, are multiples of 16, as
        torch's allocations make them. That turns loads into copies to shared memory, which take the most of a GPU."""
        freed = self._freed({name for name, _ in self.types} - constexprs_of(self.function))
        kinds = [(name, kind) for name, kind in freed.types if kind != "constexpr"]
        strides = [name for name, kind in kinds if kind in ("i32", "i64") and "stride" in name]
        return replace(freed, aligned=(*strides, *(name for name, kind in kinds if kind.startswith("*"))))

    def _freed(self, names: Collection[str]) -> Launched:
        """The same where none of these arguments is 1."""
        freed = {name for name, value in self.values if name in names and value is not None}
        return replace(
            self,
            types=tuple((name, "i32" if name in freed else kind) for name, kind in self.types),
            values=tuple((name, value) for name, value in self.values if name not in freed),
        )

    @property
    def function(self) -> Any:
        return getattr(importlib.import_module(self.module), self.kernel)


def constexprs_of(kernel: Any) -> set[str]:
    """The kernel's arguments that are always compiled in."""
    return {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}


def launched(kernel: Any, args: Iterable[Any], options: Mapping[str, Any]) -> Launched:
    """The specialization that Triton would compile for this launch."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options[name] for name in kernel.arg_names if name in options}
    constants = constexprs_of(kernel)
    types: dict[str, str] = {}
    aligned = []
    for name in kernel.arg_names:
        value = values[name]
        types[name] = "constexpr" if name in constants else type_of(value)
        multiple = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if types[name] not in ("constexpr", "fp32") and multiple % ALIGNMENT == 0:
            aligned.append(name)
    return Launched(
        module=kernel.fn.__module__,
        kernel=kernel.fn.__name__,
        types=tuple(types.items()),
        values=tuple((name, values[name]) for name, kind in types.items() if kind == "constexpr"),
        aligned=tuple(aligned),
        options=tuple(sorted((name, value) for name, value in options.items() if name not in values)),
    )


def type_of(value: Any) -> str:
    """Triton's type of an argument; None and 1 are "constexpr"."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if value is None or (value == 1 and not isinstance(value, bool | float)):
        return "constexpr"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextlib.contextmanager
def recording(folder: Path, package: str) -> Iterator[None]:
    """Record the launches of `package`'s kernels within the block in a file of this process in `folder`."""
    seen: dict[Launched, None] = {}

    def note(launch: Any, kernel: Any, grid: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if kernel.fn.__module__.startswith(package):
            seen[launched(kernel, args, options)] = None

    with listening(note):
        yield
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(one)) + "\n" for one in seen)
    (folder / f"{os.getpid()}.jsonl").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def kernels_launched() -> Iterator[list[str]]:
    """The names of the kernels that are launched within the block, in order."""
    names: list[str] = []
    with listening(lambda launch, kernel, *_: names.append(kernel.fn.__name__)):
        yield names


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Repeats what `work` does by a graph; on a CPU by the stand-in, which repeats its launches."""
    work()
    if device.type != "cuda":
        from replay_recorder import ReplayRecorder

        return ReplayRecorder().capture(work).replay
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def read(folder: Path) -> list[Launched]:
    """The specializations that all processes recorded, each once, sorted by name."""
    found = set()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.add(Launched(**{name: _frozen(value) for name, value in entry.items()}).canonical())
    return sorted(found, key=lambda one: one.name)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
