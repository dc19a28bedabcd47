"""Device memory that is given back and taken again at the same addresses, by torch_memory_saver.

    region(tag) -> a segment of torch's allocator, in a pool of its own -> pause(tag): unmapped, addresses reserved
                                                                       <- resume(tag): new memory, same addresses

The package ends the process where the driver refuses something: memory is looked for before it is asked for, and each
region has a tag of its own, which is paused and resumed in turn. Read against torch_memory_saver 0.0.10.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron_infer.errors import ConfigError
from megatron_infer.kernels.optional_packages import missing
from megatron_infer.memory.regions.cuda import FixedPages, current, drop_cached, free_bytes, wait

PACKAGE, MODULE, MIN_VERSION = "torch-memory-saver", "torch_memory_saver", (0, 0, 10)
MARGIN_BYTES = 64 << 20
"""Free device memory required beyond the tensor before it is mapped: pages, and what other processes take meanwhile."""


def unavailable() -> str | None:
    """Why torch_memory_saver cannot be used; None: it can."""
    reason = missing((MODULE,), PACKAGE, MIN_VERSION)
    return None if reason is None else f"{reason}; pip install {PACKAGE}"


class SaverRegion(FixedPages):
    """Device memory whose addresses stay reserved while it is released; touching it then is an illegal access.

    Memory that another process takes between the look at the free memory and the mapping ends this process. Without
    LD_PRELOAD of the package its allocator serves this region alone.
    """

    addresses_stable = True

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError, or ConfigError where the package does not work."""
        self._saver, self._tag = _load_saver(), f"kv_cache-{uuid.uuid4().hex[:12]}"
        _check_room(math.prod(shape) * dtype.itemsize, device, "lower buffer_size_gb or free memory there")
        try:
            with current(device), self._saver.region(tag=self._tag):
                self.tensor = torch.empty(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError, AssertionError) as error:
            raise ConfigError(
                f"static_kv_memory_pointers=True: torch_memory_saver does not work here ({error}); "
                "set static_kv_memory_pointers=False, or unified_memory_level=1, which keeps its addresses too"
            ) from error
        self._released = False
        self._pause_at_end()

    def resident_bytes(self) -> int:
        return 0 if self._released else self.tensor.nbytes

    def release(self) -> None:
        wait(self.tensor.device)
        self._at_end.detach()
        self._saver.pause(self._tag)
        self._released = True

    def restore(self) -> None:
        _check_room(self.tensor.nbytes, self.tensor.device, "free memory there and try again")
        self._saver.resume(self._tag)
        self._released = False
        self._pause_at_end()

    def _pause_at_end(self) -> None:
        """The saver's pool keeps the memory of a dropped tensor; pausing gives it back when the region is dropped."""
        self._at_end = weakref.finalize(self, _pause, self._saver, self._tag, self.tensor.device)
        self._at_end.atexit = False


def _pause(saver: Any, tag: str, device: torch.device) -> None:
    wait(device)
    saver.pause(tag)


def _check_room(num_bytes: int, device: torch.device, remedy: str) -> None:
    """Raise torch.OutOfMemoryError where the device has less memory than that free, and a margin."""
    drop_cached(device)
    if (free := free_bytes(device)) < num_bytes + MARGIN_BYTES:
        raise torch.OutOfMemoryError(
            f"the KV cache needs {num_bytes:,} bytes of {device} (and {MARGIN_BYTES:,} to spare), {free:,} are free; "
            f"{remedy}"
        )


def _load_saver() -> Any:
    """torch_memory_saver's process-wide object, in the mode that needs no LD_PRELOAD unless that is set up."""
    from torch_memory_saver import torch_memory_saver as saver

    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        with contextlib.suppress(AttributeError, AssertionError):  # it was used before: its mode is fixed
            saver.hook_mode = "torch"
    _keep_for_ever(saver)
    return saver


@functools.cache
def _keep_for_ever(saver: Any) -> None:
    """Collected when the interpreter ends, its pools would free memory in a way that ends the process with an error."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(saver))
