"""Launches of Triton kernels: which there are, which specialization each takes, and graphs that repeat them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
    """One specialization."""

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    """(argument, Triton's type of it, "constexpr" where its value is compiled in)."""
    values: tuple[tuple[str, Any], ...]
    """(argument, value) of those compiled in: a number, a string, None."""
    aligned: tuple[str, ...]
    """Arguments that are multiples of 16."""
    options: tuple[tuple[str, Any], ...]

    def at_any_size(self) -> Launched:
        """No integer is compiled in for being 1; pointers, and integers named for a stride, are multiples of 16, as
        torch's allocations make them. That turns loads into copies to shared memory, which take the most of a GPU."""
        constants = constexprs_of(self.function)
        freed = {name for name, value in self.values if name not in constants and value is not None}
        types = tuple((name, "i32" if name in freed else kind) for name, kind in self.types)
        strides = [name for name, kind in types if kind in ("i32", "i64") and "stride" in name]
        return replace(
            self,
            types=types,
            values=tuple((name, value) for name, value in self.values if name not in freed),
            aligned=(*strides, *(name for name, kind in types if kind.startswith("*"))),
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
