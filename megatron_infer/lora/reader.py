"""Reads adapters for an engine and packs them for its slots, on a thread beside the engine's steps."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.config.lora import check_adapter_name
from megatron_infer.errors import ConfigError
from megatron_infer.lora.adapter import Adapter
from megatron_infer.lora.bank import AdapterBank, PackedAdapter
from megatron_infer.lora.peft import read_adapter

PeftFields = Mapping[str, Any]
"""Those of an adapter_config.json."""
Unread = str | os.PathLike[str] | Mapping[str, Tensor] | Adapter
"""A PEFT directory, tensors by name, or an adapter that was read for another engine."""
_NICE = 5
"""How much less of a busy processor the thread gets than the engine's steps (nice(2))."""
_TURN_S = 2e-4
"""Seconds that one thread has the interpreter while another one waits for it."""


class ShortTurns:
    """Inside, a thread that waits for the interpreter, which steps give away with each kernel, soon has it back.

    The length of a turn is the process's: the first reader shortens it, and the last one puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._num_inside, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _TURN_S))
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                sys.setswitchinterval(self._before)


_short_turns = ShortTurns()


class AdapterReader:
    """Reads one adapter after the other."""

    def __init__(self, live: Any, bank: AdapterBank) -> None:
        """live: the model that adapters are for."""
        self._live, self._bank = live, bank
        self._thread: ThreadPoolExecutor | None = None

    def read(self, name: str, source: Unread | None, config: PeftFields | None) -> PackedAdapter:
        """Read, check and pack; from any thread. Raises ModelError, ConfigError for a source of another type."""
        if isinstance(source, Adapter):
            return self._bank.pack(Adapter(name, source.pairs))
        if source is None:
            raise ConfigError(f"adapter {name!r}: the leader has its tensors; load it on every rank, or give a path")
        if not isinstance(source, str | os.PathLike | Mapping):
            raise ConfigError(
                f"adapter {name!r}: source is of type {type(source).__name__}; give a PEFT directory, a mapping of "
                "names to tensors, or an Adapter"
            )
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"adapter {name!r}: config is of type {type(config).__name__}; give the fields of an "
                "adapter_config.json as a mapping"
            )
        given = source if isinstance(source, Mapping) else Path(source)
        with _short_turns:
            adapter = read_adapter(name, given, self._live, config=config, max_rank=self._bank.max_rank)
            return self._bank.pack(adapter)

    def begin(self, name: str, source: Unread | None, config: PeftFields | None) -> Future[PackedAdapter]:
        """`read` on the thread."""
        if self._thread is None:
            # torch takes the latest count for threads that begin later: it is put back once this one has its own.
            num_threads = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-infer-lora", initializer=_begin_thread)
            self._thread.submit(int).result()
            torch.set_num_threads(num_threads)
        return self._thread.submit(self.read, check_adapter_name(name), source, config)


def _begin_thread() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
