"""Reads adapters for an engine and packs them for its slots, on a thread beside the engine's steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.config.lora import check_adapter_name
from megatron_infer.errors import ConfigError
from megatron_infer.models.lora.adapter import Adapter
from megatron_infer.models.lora.bank import AdapterBank, PackedAdapter
from megatron_infer.models.lora.peft import read_adapter
from megatron_infer.utils.short_turns import short_turns

PeftFields = Mapping[str, Any]
"""Those of an adapter_config.json."""
Unread = str | os.PathLike[str] | Mapping[str, Tensor] | Adapter
"""A PEFT directory, tensors by name, or an adapter that was read for another engine."""
_NICE = 5
"""How much less of a busy processor the thread gets than the engine's steps (nice(2))."""


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
        with short_turns:
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
