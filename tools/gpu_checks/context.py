"""What a check is given: the device, whether this is a rehearsal, and how a device is waited for and measured.

A rehearsal runs every line on a CPU: tiny shapes, Triton's interpreter where it works, and `StandIn` for torch.cuda.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from light.machine import seconds

from gpu_checks.registry import Unavailable

T = TypeVar("T")
ENOUGH_BYTES = 36 << 30
"""Device memory in which every check has room: 16 GiB of weights, a cache, activations."""
OTHERS_BYTES = 2 << 30
"""More than the driver's own part of a process: another process has the rest."""


class StandIn:
    """As much of torch.cuda as the checks use, on a CPU: time is the host's, memory is the process's own account."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self._at = 0.0

        def record(self) -> None:
            self._at = time.perf_counter()

        def query(self) -> bool:
            return bool(self._at)

        def elapsed_time(self, other: StandIn.Event) -> float:
            return max(other._at - self._at, 1e-6) * 1e3

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def _sleep(self, cycles: int) -> None:
        assert cycles > 0

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total): as if the process had 64 GiB."""
        with open("/proc/self/statm", encoding="ascii") as line:
            used = int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 2**36 - used, 2**36

    def memory_reserved(self) -> int:
        return 0

    def set_sync_debug_mode(self, mode: str) -> None:
        assert mode in ("default", "warn", "error")

    def get_device_capability(self) -> tuple[int, int]:
        return (0, 0)


@dataclass(frozen=True, slots=True)
class Context:
    """Handed to every check."""

    device: torch.device
    cuda: Any
    """torch.cuda, or `StandIn`."""
    rehearse: bool = False
    quick: bool = False

    def pick(self, real: T, tiny: T) -> T:
        """A size: `real` on a GPU, `tiny` in a rehearsal."""
        return tiny if self.rehearse else real

    def dtypes(self) -> list[torch.dtype]:
        """What kernels are checked in; the interpreter computes bfloat16 wrongly."""
        return [torch.float32] if self.rehearse else [torch.float32, torch.float16, torch.bfloat16]

    def wait(self) -> None:
        """Until the device has done all it was given; raises what went wrong on it."""
        self.cuda.synchronize()

    def milliseconds(self, function: Callable[[], Any], *, rounds: int, warm: int = 2) -> float:
        """Median of the device's time for one call."""
        return 1e3 * seconds(function, self.device, rounds=rounds, warm=warm)

    def free_bytes(self) -> int:
        """Of the device's memory, by the driver's account, after torch has given back what it only keeps."""
        gc.collect()
        self.cuda.synchronize()
        self.cuda.empty_cache()
        return int(self.cuda.mem_get_info()[0])

    def lacks_room(self) -> str | None:
        """Why a check may find no memory though nothing is wrong; None: the device has enough."""
        free, total = self.cuda.mem_get_info()
        if total < ENOUGH_BYTES:
            return f"the device has {total / 2**30:.0f} GiB"
        others = total - free - self.cuda.memory_reserved()
        if others > OTHERS_BYTES:
            return f"other processes hold {others / 2**30:.0f} of {total / 2**30:.0f} GiB"
        return None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, whatever makes the host wait for the device raises."""
        self.cuda.synchronize()
        self.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self.cuda.set_sync_debug_mode("default")

    def backends(self, candidates: Any, dtype: torch.dtype) -> list[Any]:
        """The accelerated backends of an operation that exist here; on a GPU Triton's must be among them."""
        from megatron_infer.kernels import backend_candidates

        found, reasons = backend_candidates.available(
            candidates, self.device, dtype, forced="triton" if self.rehearse else None
        )
        if not any(backend.name == "triton" for backend in found):
            why = reasons.get("triton", "this version has no such backend")
            if self.rehearse:
                raise Unavailable(f"Triton: {why}")
            raise AssertionError(f"Triton's kernels cannot run here: {why}")
        return found


def error_of(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest entry that is wanted; NaN where `got` is not finite."""
    difference = (got.detach().cpu().double() - wanted.cpu().double()).abs()
    if not difference.numel():
        return 0.0
    return float(difference.max() / wanted.double().abs().max().clamp_min(1e-6))


def make_context(*, rehearse: bool, quick: bool) -> Context:
    """Raises Unavailable where there is no GPU and this is no rehearsal."""
    torch.manual_seed(0)
    if rehearse:
        return Context(torch.device("cpu"), StandIn(), rehearse=True, quick=quick)
    if not torch.cuda.is_available():
        raise Unavailable("torch finds no CUDA device; --rehearse runs every check on a CPU")
    # Parity in fp32 means fp32: no reduced precision anywhere.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(0)
    return Context(torch.device("cuda", 0), torch.cuda, quick=quick)
