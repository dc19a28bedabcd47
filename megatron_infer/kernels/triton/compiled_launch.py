"""Launches of compiled kernels without Triton's search for them, which takes longer than the launch itself.

Triton binds the arguments of every launch, derives what the kernel is specialised for, and forms a key of it: 15 to 25
us on the host. Here a kernel whose compiled-in values are given once (`CompiledLaunches`) is found by a key that is at
least as fine as Triton's: device, dtype of each tensor, whether addresses are multiples of 16, each number that Triton
may specialise for, and the range of each number that it may not. The function that forms the key, and passes pointers
as numbers, is written out for the kernel's arguments, as a loop over them would take as long as what it saves. A key
that is new goes through Triton, which compiles where it has to.

What is not looked at again after the first launch: Triton's environment variables, its pre-run hooks, and globals of
kernels. Hooks of launches (profilers) are: while there are any, every launch goes through Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

MAX_KNOWN = 4096
"""Keys of one kernel; numbers that Triton specialises for and that differ with every step must not fill the memory."""


class CompiledLaunches:
    """Launches of one kernel with the same compiled-in values and options, for arguments of the same types."""

    __slots__ = ("_kernel", "_known", "_options", "_types", "run")

    def __init__(self, kernel: Any, options: dict[str, Any], args: tuple[Any, ...]) -> None:
        """args: those of a launch, for their types."""
        import triton
        from triton.runtime import driver

        self._kernel, self._options = kernel, options
        self._types = tuple(map(_type_of, args))
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        space = {"known": self._known, "stream_of": driver.active.get_current_stream, "hooks": triton.knobs.runtime}
        exec(_source(kernel, args), space)  # from names and places of parameters alone
        self.run: Callable[..., tuple[Any, ...] | None] = space["run"]
        """run(device, x, y, z, *arguments): launches on the thread's current device and returns None, or launches
        nothing and returns what `search` takes. AttributeError and TypeError: an argument is of another type."""

    def search(self, key: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Launch through Triton, and remember what it found. key: what `run` gave; empty: nothing is remembered."""
        compiled = self._kernel.run(*args, grid=grid, warmup=False, **self._options)
        if not key or compiled is None or tuple(map(_type_of, args)) != self._types:
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = compiled.run, compiled.function, compiled.packed_metadata


def _type_of(value: Any) -> type:
    return Tensor if isinstance(value, Tensor) else type(value)


def _source(kernel: Any, args: tuple[Any, ...]) -> str:
    """The function `CompiledLaunches.run`."""
    names = [f"a{place}" for place in range(len(args))]
    lines, key, aligned, given = [], ["device"], [], []
    for name, parameter, value in zip(names, kernel.params, args, strict=False):
        if isinstance(value, Tensor):
            lines.append(f"p{name} = {name}.data_ptr()")
            key.append(f"{name}.dtype")
            if not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                aligned.append(f"p{name}")
            given.append(f"p{name}")
        else:
            if value is None:
                key.append(f"{name} is None")
            elif isinstance(value, int):
                key.append(f"{name} >> 31" if parameter.do_not_specialize else name)
            else:
                key.append(f"{name}.__class__")
            given.append(name)
    if aligned:
        each = " ".join(f"{name} & 15," for name in aligned)
        key.append(f"({' | '.join(aligned)}) & 15 and ({each})")
    given += ["None"] * (len(kernel.params) - len(args))  # compiled in
    return "\n    ".join(
        [
            f"def run(device, x, y, z, {', '.join(names)}):",
            "enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook",
            "if (enter is not None and enter.calls) or (leave is not None and leave.calls):",
            "    return ()",
            *lines,
            f"key = ({', '.join(key)},)",
            "found = known.get(key)",
            "if found is None:",
            "    return key",
            "launch, function, metadata = found",
            f"launch(x, y, z, stream_of(device), function, metadata, None, None, None, {', '.join(given)})",
        ]
    )
