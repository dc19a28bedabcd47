"""Finds what would make the host wait for a GPU, on a machine without one: a step is run with its tensors told apart.

Memory counts as the device's when it was there before the watch began, was made with `device=`, was computed from such,
or was handed over by `Device.to_device`; what numpy or `torch.tensor` made is the host's. Hits are
* a value asked of a device tensor (.item(), .tolist(), bool(), nonzero, a boolean mask, ...),
* a host tensor that meets device tensors without having gone through `Device` (a copy from pageable memory),
* a device tensor looked at by numpy or moved to the CPU without `Device.begin_read`.
Kernels that read memory by its address are not looked into.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from replay_recorder import asks
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_infer.memory.device import Device, HostRead

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
FROM_HOST = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"}


class SyncWatch:
    """watch = SyncWatch(monkeypatch), before the engine is made; `with watch: engine.step()`; then `watch.hits`:
    "path.py: function:line: what" -> how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hits: Counter[str] = Counter()
        self._device: dict[int, Any] = {}
        """Storage -> something that keeps it alive, so that its address is not taken by another."""
        self._suspended = 0
        self._stack = contextlib.ExitStack()
        self.is_active = False
        _open_seams(self, monkeypatch)

    def __enter__(self) -> SyncWatch:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self.tag(thing)
        self.is_active = True
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Dispatched(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_active = False
        self._stack.close()
        self._device.clear()

    @contextlib.contextmanager
    def suspended(self):
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    @property
    def looks(self) -> bool:
        return not self._suspended

    def tag(self, thing: Any) -> None:
        for tensor in _tensors(thing):
            storage = tensor.untyped_storage()
            self._device.setdefault(storage._cdata, storage)

    def untag(self, thing: Any) -> None:
        for tensor in _tensors(thing):
            self._device.pop(tensor.untyped_storage()._cdata, None)

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._device

    def any_device(self, thing: Any) -> bool:
        return any(self.is_device(tensor) for tensor in _tensors(thing))

    def hit(self, what: str) -> None:
        frame = sys._getframe(1)
        while frame is not None and "/megatron_infer/" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = "?" if frame is None else frame.f_code.co_filename.partition("/megatron_infer/")[2]
        name = "" if frame is None else f"{frame.f_code.co_name}:{frame.f_lineno}"
        self.hits[f"{place}: {name}: {what}"] += 1


class _Functions(TorchFunctionMode):
    """What Python calls."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, kwargs = self.watch, kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not watch.looks or name in ("__get__", "untyped_storage", "data_ptr"):
            return func(*args, **kwargs)
        first_is_device = bool(args) and isinstance(args[0], Tensor) and watch.any_device(args[0])
        if name in READS and first_is_device:
            watch.hit(f".{name}()")
            with watch.suspended():
                return func(*args, **kwargs)
        if name == "to" and isinstance(args[0], Tensor):
            where = [arg for arg in (*args[1:], kwargs.get("device")) if isinstance(arg, torch.device | str)]
            if where and first_is_device and where[0] == "cpu":
                watch.hit('.to("cpu")')
            elif where and isinstance(where[0], torch.device) and not first_is_device:
                watch.hit("pageable memory copied by .to(device)")
                with watch.suspended():
                    out = func(*args, **kwargs).clone()
                watch.tag(out)
                return out
        if name in FROM_HOST:
            out = func(*args, **kwargs)
            if kwargs.get("device") is not None and not any(isinstance(arg, Tensor) for arg in args):
                watch.hit(f"torch.{name}(..., device=)")
                watch.tag(out)
            return out
        out = func(*args, **kwargs)
        if kwargs.get("device") is not None or watch.any_device((args, kwargs)):
            watch.tag(out)
        return out


class _Dispatched(TorchDispatchMode):
    """What torch's own code calls for it."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, kwargs = self.watch, kwargs or {}
        if not watch.looks:
            return func(*args, **kwargs)
        name, inputs = func._schema.name, list(_tensors((args, kwargs)))
        on_device = [tensor for tensor in inputs if watch.is_device(tensor)]
        if on_device:
            if asks(name, args):
                watch.hit(f"{name} asks for a value")
            strangers = [tensor for tensor in inputs if tensor.dim() and not watch.is_device(tensor)]
            if strangers:
                watch.hit(f"{name} meets a host tensor")
        with watch.suspended():
            out = func(*args, **kwargs)
        if on_device:
            watch.tag(out)
        return out


def _open_seams(watch: SyncWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Device` is the way between host and device."""
    to_device = Device.to_device

    def tagged(self: Device, array: np.ndarray) -> Tensor:
        with watch.suspended():
            out = to_device(self, array)
        if watch.is_active:
            watch.tag(out)
        return out

    def seam(method: Any) -> Any:
        def run(*args: Any) -> Any:
            with watch.suspended():
                return method(*args)

        return run

    monkeypatch.setattr(Device, "to_device", tagged)
    wait = HostRead.wait

    def waited(self: HostRead) -> tuple[Tensor, ...]:
        with watch.suspended():
            out = wait(self)
        watch.untag(out)  # what was under way when the watch began
        return out

    monkeypatch.setattr(HostRead, "wait", waited)
    for owner, name in ((Device, "upload"), (HostRead, "__init__")):
        monkeypatch.setattr(owner, name, seam(getattr(owner, name)))


def _tensors(thing: Any):
    for leaf in tree_leaves(thing):
        if isinstance(leaf, Tensor) and not leaf.is_mkldnn:
            yield leaf
