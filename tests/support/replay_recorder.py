"""A stand-in for CUDA graphs on a machine without a GPU: records every call that reaches a kernel, and repeats those.

It refuses what a graph cannot hold, and fails where a graph would give wrong results:
* Python numbers are those of the capture: a length, an offset or a flag of the host that is read in a capture shows as
  a wrong answer in the next step;
* reading a value from the device (`.item()`, `nonzero`, a comparison on the host) raises GraphRefused;
* reading memory that the host has allocated for this run alone (`torch.tensor`, `torch.from_numpy`) raises it too: a
  replay would read it after it is freed.
Collectives of gloo are repeated like other calls, and waited for. Memory is not reused, and there are no streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_infer.kernels.triton.launch import listening
from megatron_infer.runner.cuda_graphs.graph_pool import GraphRefused

REPLAY = f"{__name__}:ReplayRecorder"
"""For `MEGATRON_INFER_GRAPHS`."""
ASKING = frozenset(
    {
        "aten::item",  # composite operations stay whole under inference mode
        "aten::_local_scalar_dense",
        "aten::argwhere",
        "aten::where",
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::masked_select",
        "aten::bincount",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::allclose",
        "aten::_assert_async",
    }
)
"""Operations whose result, or its shape, the host has to know first (`where` with one argument only)."""
READING = frozenset(
    {
        Tensor.tolist,
        Tensor.numpy,
        Tensor.item,
        Tensor.cpu,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__array__,
    }
)
"""Methods that read a tensor on the host; on a CPU some of them call no operation."""
UNDEFINED = ("aten::empty", "aten::new_empty")
"""Their result is undefined: repeating them would hide that it is read."""


class ReplayRecorder:
    """Captures a run by running it twice: to find the memory it reads that was there before, and to record it."""

    name = "replay (stand-in on a CPU)"
    collectives = ("gloo",)

    def reserve(self, num_bytes: int) -> None:
        """Each run allocates its own memory."""

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Tape:
        warm_up = Tape(None)
        with warm_up.recording():
            run()
        tape = Tape(warm_up)
        with tape.recording():
            run()
        return tape

    def reset(self) -> None:
        """Tapes share no memory."""


class Tape:
    """The calls of one run, with the tensors that they had."""

    def __init__(self, warm_up: Tape | None) -> None:
        self._calls: list[Callable[[], None]] = []
        self._given: dict[int, Tensor] = {}
        """Storage that was there before the run -> a tensor that keeps it alive."""
        self._made: dict[int, Tensor] = {}
        self._known = None if warm_up is None else warm_up._given

    def recording(self) -> _Recording:
        return _Recording(self)

    def replay(self) -> None:
        for call in self._calls:
            call()

    @property
    def num_bytes(self) -> int:
        """Memory that the run has allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._made.values())

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    # ------------------------------------------------------------------ while it is recorded

    def take(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        self.check(name, args)
        inputs = self.see(name, (args, kwargs))
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        fresh = [place for place, leaf in enumerate(outputs) if _storage(leaf) not in inputs]
        for place in fresh:
            self._made[_storage(outputs[place])] = outputs[place]
        is_collective = name.startswith("c10d::")
        if name.startswith(UNDEFINED) or not (fresh or func._schema.is_mutable or is_collective):
            return out  # views: they need no replay

        def again() -> None:
            out = func(*args, **kwargs)
            if is_collective:
                tree_leaves(out)[-1].wait()
            results = _tensors(out)
            for place in fresh:
                outputs[place].copy_(results[place])

        self._calls.append(again)
        return out

    def take_launch(
        self, launch: Any, kernel: Any, grid: Any, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        self.see(getattr(kernel, "__name__", "a kernel"), args)
        self._calls.append(lambda: launch(kernel, grid, *args, **options))

    def see(self, name: str, arguments: Any) -> set[int]:
        """Record which memory a call reads -> its storages."""
        storages = set()
        for tensor in _tensors(arguments):
            storage = _storage(tensor)
            storages.add(storage)
            if storage in self._made or storage in self._given:
                continue
            if self._known is not None and storage not in self._known:
                raise GraphRefused(
                    f"{name} reads {tuple(tensor.shape)} {tensor.dtype} of host memory that is allocated for each run; "
                    "a replay would find the content of the capture, or freed memory"
                )
            self._given[storage] = tensor
        return storages

    def check(self, name: str, args: Any) -> None:
        if asks(name, args):
            raise GraphRefused(f"{name} asks the device for a value while a graph is captured")


class _NoReading(TorchFunctionMode):
    """Refuses what reads tensors on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING:
            raise GraphRefused(f"Tensor.{func.__name__} asks the device for a value while a graph is captured")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Every operation of torch and every launch of a Triton kernel goes to the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._others = contextlib.ExitStack()

    def __enter__(self) -> Any:
        self._others.enter_context(listening(self._tape.take_launch))
        self._others.enter_context(_NoReading())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._others.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tape.take(func, args, kwargs or {})


def asks(name: str, args: Any) -> bool:
    """Whether the host has to wait for the device in a call of this operation."""
    if name == "aten::index" or name.startswith("aten::index_put"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "aten::repeat_interleave":
        return len(args) < 2 or isinstance(args[1], Tensor)
    return name in ASKING and (name != "aten::where" or len(args) == 1)


def _tensors(thing: Any) -> list[Tensor]:
    """Those with memory in tuples, lists and dicts; much faster than torch's trees, which know more kinds."""
    if isinstance(thing, Tensor):
        return [thing] if _has_memory(thing) else []
    if isinstance(thing, dict):
        thing = thing.values()
    elif not isinstance(thing, list | tuple):
        return []
    return [tensor for one in thing for tensor in _tensors(one)]


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_mkldnn


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
