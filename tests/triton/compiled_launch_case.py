"""Run as a process of its own, on the stub driver: each launch is given to the kernel that Triton itself would run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from stub_driver import stubbed

from megatron_infer.kernels.triton import compiled_launch
from megatron_infer.kernels.triton import launch as launching


@triton.jit(do_not_specialize=["loose"], do_not_specialize_on_alignment=["y"])
def kernel(x, y, out, n, loose, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    value = tl.load(x + at, mask=there) * scale + tl.load(y + at, mask=there) + loose
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


class Seen:
    """Stands for Triton's launcher: what a compiled kernel is launched with."""

    calls: list[tuple[Any, ...]] = []

    def __init__(self, src: Any, metadata: Any) -> None:
        self.kernel, self.types = metadata.hash, list(src.signature.values())

    def __call__(self, x, y, z, stream, function, metadata, data, enter, leave, *args) -> None:
        for one, kind in zip(args, self.types, strict=True):
            if kind in ("i32", "i64") and not isinstance(one, int):
                raise TypeError("as PyArg_ParseTuple does")
        given = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in args[:6]]
        Seen.calls.append((self.kernel, (x, y, z), stream, function, metadata, *given))


def searches(run: Any) -> int:
    """How many of a call's launches went through Triton's own search."""
    count, own = [0], type(kernel).run

    def counted(self, *args, **options):
        count[0] += 1
        return own(self, *args, **options)

    type(kernel).run = counted
    try:
        run()
    finally:
        type(kernel).run = own
    return count[0]


def main(folder: Path) -> None:
    buffer = torch.zeros(256)
    aligned, odd = buffer[:64], buffer[1:65]
    assert aligned.data_ptr() % 16 == 0 and odd.data_ptr() % 16 == 4
    half, double = aligned.half(), aligned.double()
    given = {
        "plain": (aligned, aligned, aligned, 48, 3, 1.5),
        "another address": (buffer[64:], aligned, aligned, 48, 3, 1.5),
        "an address that is no multiple of 16": (odd, aligned, aligned, 48, 3, 1.5),
        "another one": (aligned, aligned, odd, 48, 3, 1.5),
        "one whose alignment does not count": (aligned, odd, aligned, 48, 3, 1.5),
        "another dtype": (half, aligned, aligned, 48, 3, 1.5),
        "another dtype of another": (aligned, aligned, double, 48, 3, 1.5),
        "a number that is no multiple of 16": (aligned, aligned, aligned, 47, 3, 1.5),
        "a number that is 1": (aligned, aligned, aligned, 1, 3, 1.5),
        "a number over 31 bits": (aligned, aligned, aligned, 2**31, 3, 1.5),
        "another number that is not specialised for": (aligned, aligned, aligned, 48, 1, 1.5),
        "one over 31 bits": (aligned, aligned, aligned, 48, 2**40, 1.5),
        "one below zero": (aligned, aligned, aligned, 48, -5, 1.5),
        "another float": (aligned, aligned, aligned, 48, 3, 1.0),
        "an int for a float": (aligned, aligned, aligned, 48, 3, 2),
        "a float for an int": (aligned, aligned, aligned, 48, 3.5, 1.5),
        "a float for an int of its value": (aligned, aligned, aligned, 48.0, 3, 1.5),
        "no tensor": (aligned, None, aligned, 48, 3, 1.5),
    }
    with stubbed(folder):
        from triton.runtime import driver

        driver.active.launcher_cls = Seen
        for options in ({"BLOCK": 32}, {"BLOCK": 64}, {"BLOCK": 32, "num_warps": 1}):
            bound = launching.Launcher(kernel, **options)
            for times in range(2):
                for what, args in given.items():
                    answers = []
                    for run in (
                        partial(kernel.run, *args, grid=(2, 3, 1), warmup=False, **options),
                        partial(bound, (2, 3), *args),
                        partial(launching.launch, kernel, (2, 3), *args, **options),
                    ):
                        before = len(Seen.calls)
                        try:
                            run()
                        except Exception as error:  # what Triton refuses is refused here
                            answers.append(type(error).__name__)
                        else:
                            assert len(Seen.calls) == before + 1, what
                            answers.append(Seen.calls[-1])
                    assert answers[0] == answers[1] == answers[2], (what, times, answers)
        kept = [args for what, args in given.items() if "for a" not in what and what != "no tensor"]
        bound = launching.Launcher(kernel, BLOCK=32)
        assert searches(lambda: [bound((1,), *args) for args in kept]) < len(kept), "an address is looked up for itself"
        assert searches(lambda: [bound((1,), *args) for args in kept]) == 0
        # a profiler's hook sees every launch, and is gone when it is removed
        heard: list[Any] = []
        triton.knobs.runtime.launch_enter_hook.add(heard.append)
        assert searches(lambda: bound((1,), *kept[0])) == 1
        triton.knobs.runtime.launch_enter_hook.remove(heard.append)
        assert searches(lambda: bound((1,), *kept[0])) == 0
        # what is remembered is bounded
        for number in range(compiled_launch.MAX_KNOWN + 10):
            bound._compiled._known[number] = bound._compiled._known[next(iter(bound._compiled._known))]
        bound((1,), aligned, aligned, aligned, 32, 3, 1.5)
        assert len(bound._compiled._known) == 1
        # other compiled-in values are another kernel
        calls = []
        for block in (16, 32, 16):
            launching.launch(kernel, (1,), *kept[0], BLOCK=block)
            calls.append(Seen.calls[-1][0])
        assert calls[0] == calls[2] != calls[1]
    print("the same launches")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
