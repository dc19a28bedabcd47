"""A GPU that runs late, on a machine without one: what torch is asked to compute waits in streams until somebody looks.

    host:    op op upload op read | op op upload op read ......... wait for the first read
    stream:  [ op op copy op copy   op op copy op copy ]  --as far as that read, in order-->

Whoever calls torch while the device is `on` gets a tensor of garbage at once and its content when the stream gets
there, as late as anything allows or (keeps_up) a random way behind. Host memory is written when the host writes it: an
array that is changed, or a pinned buffer that is lent again, while a copy has yet to read it gives wrong answers. So do
* work on the side stream (warm-ups, copies to the host) that no event orders;
* what a graph bakes in: while one is captured nothing runs, a replay repeats the calls, and the memory that was made
  inside is garbage again after each;
* memory of the pool given back while something that waits still uses it.
Values asked for (.item(), .tolist(), nonzero) wait, as they would. It knows no kernels but torch's.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay_recorder import READING, asks
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from megatron_infer.engine import build_engine, build_graphs
from megatron_infer.memory import pool
from megatron_infer.memory import store as store_module
from megatron_infer.memory.copy_pipeline import CopyPipeline, Stream
from megatron_infer.memory.device import Device, HostRead
from megatron_infer.memory.regions import choose
from megatron_infer.memory.regions.pinned import PinnedPool
from megatron_infer.runner.cuda_graphs.graph_pool import CudaRecorder

MAIN, SIDE, SCATTER = STREAMS = 0, 1, 2
ON = {Stream.STEPS: MAIN, Stream.COPY: SIDE, Stream.SCATTER: SCATTER}
PATIENCE = 50
"""Looks at an event between which the host enqueues nothing."""


class LateGpu:
    """gpu = LateGpu(monkeypatch), before the engine is made; `with gpu.on(): engine.step()`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seed: int = 0, keeps_up: float = 0.0) -> None:
        """keeps_up: how likely it is that a call lets the device go on a bit."""
        self.rng, self.keeps_up = random.Random(seed), keeps_up
        self.queues: tuple[deque, ...] = (deque(), deque(), deque())
        """Calls, and marks (stream, count) to be waited for."""
        self.enqueued, self.done = [0, 0, 0], [0, 0, 0]
        self.stream = MAIN
        self.captured: Tape | None = None
        self.counts: Counter[str] = Counter()
        """What happened: calls, flushes, unknown shapes, replays."""
        self.furthest = 0
        """The most calls the device ever was behind."""
        self._asked, self._asked_at = 0, [0, 0, 0]
        self._quiet = True
        self._host: dict[int, Any] = {}
        """Storage of the host -> what keeps it alive."""
        self._shapes: dict[Any, list[tuple[Any, ...]] | None] = {}
        _install(self, monkeypatch)

    # ------------------------------------------------------------------ the device

    def enqueue(self, call: Callable[[], object]) -> None:
        if self.captured is not None:
            self.captured.calls.append(call)
            return
        self.queues[self.stream].append(call)
        self.enqueued[self.stream] += 1
        self.counts["calls"] += 1
        self.furthest = max(self.furthest, len(self.queues[self.stream]))
        if self.keeps_up and self.rng.random() < self.keeps_up:
            which = self.rng.choice(STREAMS)
            self.reach(which, min(self.enqueued[which], self.done[which] + self.rng.randint(1, 40)))

    def mark(self, stream: int) -> tuple[int, int]:
        return stream, self.enqueued[stream]

    def hold(self, stream: int, mark: tuple[int, int]) -> None:
        """What comes after on `stream` waits for the mark."""
        if mark[0] != stream:
            self.queues[stream].append(mark)
            self.enqueued[stream] += 1

    def reach(self, stream: int, count: int) -> None:
        """Run what has to be run for so many entries of a stream to be done."""
        with self.aside(), _disable_current_modes(), torch.inference_mode():
            while self.done[stream] < count:
                entry = self.queues[stream][0]
                if isinstance(entry, tuple):
                    self.reach(*entry)
                self.queues[stream].popleft()
                self.done[stream] += 1
                if not isinstance(entry, tuple):
                    entry()

    def let_time_pass(self) -> None:
        """Somebody only asks how far the device is: for ever, if it never went on."""
        self._asked = self._asked + 1 if self._asked_at == self.enqueued else 0
        self._asked_at = list(self.enqueued)
        if self._asked > PATIENCE:
            self.flush()

    def flush(self) -> None:
        assert self.captured is None, "the host waits while a graph is captured"
        self.counts["flushes"] += 1
        for stream in STREAMS:
            self.reach(stream, self.enqueued[stream])

    # ------------------------------------------------------------------ queries

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with _Reads(self), _Calls(self):
            self._quiet = False
            try:
                yield
                self.flush()
            except BaseException:
                for queue in self.queues:
                    queue.clear()  # wrong content must not be waited for
                self.done = list(self.enqueued)
                raise
            finally:
                self._quiet = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Work of the host, done at once."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @property
    def is_quiet(self) -> bool:
        return self._quiet

    def pinned(self, num_bytes: int) -> Tensor:
        with self.aside(), torch.inference_mode(False):
            return torch.full((num_bytes,), 0x77, dtype=torch.uint8)

    def keep_on_host(self, tensors: Any) -> None:
        for tensor in _tensors(tensors):
            storage = tensor.untyped_storage()
            self._host[storage._cdata] = storage

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    # ------------------------------------------------------------------ one call

    def take(self, func: Any, args: Any, kwargs: Any, mode: TorchDispatchMode) -> Any:
        name, schema = func._schema.name, func._schema
        inputs = _tensors((args, kwargs))
        if inputs and all(map(self.is_host, inputs)):
            out = func(*args, **kwargs)
            self.keep_on_host(out)
            return out
        if asks(name, args):
            self.flush()
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with mode:
                return func.decompose(*args, **kwargs)
        if schema.is_mutable:
            self.enqueue(lambda: func(*args, **kwargs))
            return _mutated(schema, args, kwargs)
        if any(one.alias_info is not None for one in schema.returns):
            return func(*args, **kwargs)
        shapes = self._shapes_of(func, args, kwargs)
        if shapes is None:
            self.counts[f"unknown: {name}"] += 1
            self.flush()
            return func(*args, **kwargs)
        outputs = [garbage(torch.empty_strided(*shape[:2], dtype=shape[2])) for shape in shapes]
        if self.captured is not None:
            self.captured.made += outputs

        def run() -> None:
            for output, result in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                output.copy_(result)

        if not name.startswith(("aten::empty", "aten::new_empty")):
            self.enqueue(run)
        if len(schema.returns) == 1 and not str(schema.returns[0].type).startswith("List"):
            return outputs[0]
        return outputs if len(schema.returns) == 1 else tuple(outputs)

    def _shapes_of(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Any, ...]] | None:
        """(shape, strides, dtype) of the results; None: known only by running it."""
        key = (func, _key(args), _key(kwargs))
        if key not in self._shapes:
            try:
                meta_args, meta_kwargs = tree_map(_meta, (args, kwargs))
                if not _tensors((args, kwargs)):
                    meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
                found = _tensors(func(*meta_args, **meta_kwargs))
                self._shapes[key] = [(tuple(one.shape), one.stride(), one.dtype) for one in found]
            except (NotImplementedError, RuntimeError):
                self._shapes[key] = None
        return self._shapes[key]


def garbage(tensor: Tensor) -> Tensor:
    """Filled with what shows."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(1) if tensor.dtype is torch.bool else tensor.fill_(0x5A)


class Tape:
    """A captured graph."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.made: list[Tensor] = []


class _Calls(TorchDispatchMode):
    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.gpu.is_quiet:
            return func(*args, **kwargs)
        return self.gpu.take(func, args, kwargs, self)


class _Reads(TorchFunctionMode):
    """What looks at a tensor without an operation."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING and not self.gpu.is_quiet and not all(map(self.gpu.is_host, _tensors(args))):
            self.gpu.flush()
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- what the engine sees of it


class LateDevice(Device):
    """The package's own code for a GPU, over host memory."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__("cpu")
        self._gpu, self.is_cuda = gpu, True
        self.pinned = PinnedPool(lambda: self.event("upload"), pin=gpu.pinned)

    def check_available(self) -> None:
        """It is, whatever torch was built for."""

    def device_buffer(self, num_bytes: int) -> Tensor:
        with self._gpu.aside():
            return super().device_buffer(num_bytes)

    def upload(self, host: Any, target: Tensor) -> None:
        with self._gpu.aside():
            super().upload(host, target)

    def to_device(self, array: Any) -> Tensor:
        with self._gpu.aside():
            return super().to_device(array)

    def begin_read(self, *tensors: Tensor) -> HostRead:
        with self._gpu.aside():
            return super().begin_read(*tensors)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._gpu.enqueue(lambda: target.copy_(source))


class LateEvent:
    """torch.cuda.Event."""

    def __init__(self, gpu: LateGpu, **options: Any) -> None:
        self._gpu, self.place = gpu, (MAIN, 0)

    def record(self, stream: LateStream) -> None:
        """stream: of torch's own, None would be one of the thread's device, which may be another."""
        assert self._gpu.captured is None, "an event of the host's while a graph is captured"
        self.place = self._gpu.mark(stream.number)

    def query(self) -> bool:
        assert self._gpu.captured is None, "an event is asked while a graph is captured"
        self._gpu.let_time_pass()
        return self._gpu.done[self.place[0]] >= self.place[1]

    def synchronize(self) -> None:
        assert self._gpu.captured is None, "an event is waited for while a graph is captured"
        self._gpu.reach(*self.place)


class LateStream:
    """torch.cuda.Stream: the main one, or the one beside it."""

    def __init__(self, gpu: LateGpu, number: int) -> None:
        self._gpu, self.number = gpu, number

    def wait_stream(self, other: LateStream) -> None:
        self._gpu.hold(self.number, self._gpu.mark(other.number))


class LateGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu, self.tape = gpu, Tape()

    def replay(self) -> None:
        self._gpu.counts["replays"] += 1
        for call in self.tape.calls:
            self._gpu.enqueue(call)
        self._gpu.enqueue(lambda: [garbage(tensor) for tensor in self.tape.made])


class LateStreams:
    """memory.copy_pipeline.DeviceStreams."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu

    def upload(self, numbers: Any) -> Tensor:
        with self._gpu.aside():
            return torch.tensor(numbers, dtype=torch.int64)

    def buffer(self, num_bytes: int) -> Tensor:
        with self._gpu.aside(), torch.inference_mode(False):
            return torch.full((num_bytes,), 0x5A, dtype=torch.uint8)

    def run(self, work: Callable[[], object], on: Stream) -> None:
        with _on_stream(self._gpu, ON[on]):
            if self._gpu.is_quiet:
                self._gpu.enqueue(work)
            else:
                work()

    def record_event(self, on: Stream) -> Any:
        return self._gpu.mark(ON[on])

    def wait_event(self, event: Any, on: Stream) -> None:
        assert self._gpu.captured is None, "a graph would wait for it at every replay"
        self._gpu.hold(ON[on], event)

    def is_done(self, event: Any) -> bool:
        return self._gpu.done[event[0]] >= event[1]

    def seconds(self, first: Any, last: Any) -> float:
        self._gpu.reach(*last)
        return 0.5


@contextlib.contextmanager
def _on_stream(gpu: LateGpu, number: int) -> Iterator[None]:
    before, gpu.stream = gpu.stream, number
    try:
        yield
    finally:
        gpu.stream = before


def _install(gpu: LateGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def captures(graph: LateGraph, *, stream: LateStream, **options: Any) -> Iterator[None]:
        gpu.flush()
        assert options["capture_error_mode"] == "thread_local" and not gc.isenabled()
        gpu.captured = graph.tape
        try:
            with _on_stream(gpu, stream.number):
                yield
        finally:
            gpu.captured = None

    streams = LateStream(gpu, MAIN), LateStream(gpu, SIDE)
    for name, stand_in in {
        "Event": lambda **options: LateEvent(gpu, **options),
        "Stream": lambda *args: streams[SIDE],
        "current_stream": lambda *args: streams[gpu.stream],
        "stream": lambda stream: _on_stream(gpu, stream.number),
        "synchronize": lambda *args: gpu.flush(),
        "empty_cache": lambda: None,
        "set_device": lambda device: None,
        "mem_get_info": lambda *args: (1 << 40, 1 << 41),
        "MemPool": lambda: SimpleNamespace(id=(0, 1), use_count=lambda: 1),
        "current_blas_handle": lambda: 0,
        "CUDAGraph": lambda: LateGraph(gpu),
        "graph": captures,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(build_engine, "Device", lambda name: LateDevice(gpu))
    monkeypatch.setattr(build_graphs, "make_recorder", CudaRecorder)
    pins = PinnedPool(lambda: LateEvent(gpu), keep_bytes=1 << 20, pin=gpu.pinned, unpin=lambda: None)
    monkeypatch.setattr(store_module, "make_pipeline", lambda where: CopyPipeline(LateStreams(gpu), pins))
    for module in (choose, store_module, pool):
        monkeypatch.setattr(module, "wait", lambda where: gpu.flush())
    wait, release, init = HostRead.wait, choose.MappedRegion.release, choose.MappedRegion.restore

    def waited(self: HostRead) -> tuple[Tensor, ...]:
        with gpu.aside():
            out = wait(self)
        gpu.keep_on_host(out)
        return out

    def released(self: choose.MappedRegion) -> None:
        gpu.flush()  # as `CudaRegion` does
        with gpu.aside():
            release(self)

    def restored(self: choose.MappedRegion) -> None:
        with gpu.aside():
            init(self)
            if self._tensor is not None:
                self._tensor.view(torch.uint8).fill_(0xFF)

    monkeypatch.setattr(HostRead, "wait", waited)
    monkeypatch.setattr(choose.MappedRegion, "release", released)
    monkeypatch.setattr(choose.MappedRegion, "restore", restored)


def _mutated(schema: Any, args: Any, kwargs: Any) -> Any:
    """What a call returns that writes to its arguments: those."""
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    written = {
        str(argument.alias_info.before_set): given[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
    }
    results = [written[str(one.alias_info.before_set)] for one in schema.returns if one.alias_info is not None]
    assert len(results) == len(schema.returns), f"{schema} returns something new as well"
    return results[0] if len(results) == 1 else tuple(results) if results else None


def _tensors(thing: Any) -> list[Tensor]:
    """Those in tuples, lists and dicts; much faster than torch's trees, which know more kinds."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        thing = thing.values()
    elif not isinstance(thing, list | tuple):
        return []
    return [tensor for one in thing for tensor in _tensors(one)]


def _key(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return tuple(thing.shape), thing.stride(), thing.dtype
    if isinstance(thing, dict):
        return tuple((name, _key(one)) for name, one in thing.items())
    if isinstance(thing, list | tuple):
        return type(thing), *map(_key, thing)
    return type(thing), thing


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
