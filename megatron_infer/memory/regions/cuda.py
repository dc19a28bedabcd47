"""What the regions on a GPU share: waiting, the current device, a tensor over memory that torch does not own."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def wait(device: torch.device) -> None:
    """Return once everything launched on `device` is done; its errors are raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def drop_cached(device: torch.device) -> None:
    """Give the memory that torch's allocator keeps for reuse back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device."""
    return int(torch.cuda.mem_get_info(device)[0])


@contextmanager
def current(device: torch.device) -> Iterator[int]:
    """Make `device` the calling thread's, with a context -> its number; 0 for host memory."""
    if device.type != "cuda":
        yield 0
        return
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        yield torch.cuda.current_device()


class FixedPages:
    """Memory whose pages never migrate: `Region.allow_migration` and `Region.end_migration` do nothing."""

    def allow_migration(self) -> None:
        return

    def end_migration(self) -> None:
        return


class ForeignMemory:
    """Bytes at an address; `close` runs when the last tensor over them is gone."""

    def __init__(self, address: int, num_bytes: int, close: Callable[[], None]) -> None:
        self.address, self.num_bytes = address, num_bytes
        # As bytes: the interface has no bfloat16.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
        weakref.finalize(self, close).atexit = False  # at the end of the process the system takes all of it

    def tensor(self, device: torch.device) -> Tensor:
        """The bytes, [num_bytes] uint8, which must be accessible now."""
        with torch.inference_mode(False):
            if device.type == "cpu":
                buffer = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
                buffer.owner = self  # type: ignore[attr-defined]
                return torch.frombuffer(buffer, dtype=torch.uint8)
            tensor = torch.as_tensor(self, device=device)
        assert tensor.data_ptr() == self.address, "torch made a copy: the memory is not where it was asked for"
        return tensor
