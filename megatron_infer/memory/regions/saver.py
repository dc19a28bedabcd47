"""Device memory whose addresses torch_memory_saver keeps reserved."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron_infer.errors import ConfigError
from megatron_infer.memory.regions.cuda import FixedPages, drop_cached, free_bytes, wait

SAVER_MARGIN_BYTES = 64 << 20
"""Free device memory required beyond the tensor before torch_memory_saver maps it: it ends the process when short."""


def unavailable() -> str | None:
    """Why torch_memory_saver cannot be used; None: it is installed."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        return "torch_memory_saver is not installed; pip install torch-memory-saver"
    return None


class SaverRegion(FixedPages):
    """Device memory whose address range torch_memory_saver keeps reserved while the memory is released.

    Each region has its own tag: the saver ends the process when a tag is paused or resumed twice, so two engines must
    not share one. Memory that another process takes between the check in `restore` and the mapping ends the process,
    too (torch_memory_saver 0.0.10).
    """

    addresses_stable = True

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._saver = _load_saver()
        self._tag = f"kv_cache-{uuid.uuid4().hex[:12]}"
        try:
            with torch.cuda.device(device), self._saver.region(tag=self._tag):
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
        drop_cached(self.tensor.device)
        free, needed = free_bytes(self.tensor.device), self.tensor.nbytes + SAVER_MARGIN_BYTES
        if free < needed:
            raise torch.OutOfMemoryError(
                f"the KV cache needs {self.tensor.nbytes:,} bytes of {self.tensor.device} (and "
                f"{SAVER_MARGIN_BYTES:,} to spare), {free:,} are free; free memory there and resume again"
            )
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


def _load_saver() -> Any:
    """torch_memory_saver's process-wide object, in the mode that needs no LD_PRELOAD unless that is set up."""
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise ConfigError(f"torch_memory_saver is not there ({error}); pip install torch-memory-saver") from error
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        with contextlib.suppress(AttributeError, AssertionError):  # it was used before: its mode is fixed
            saver.hook_mode = "torch"
    return saver
