"""Captured steps: one graph a padded shape, captured when a step first needs it, replayed as long as addresses stand.

    step --find--> shape --ready--> [captured on scratch, or as it is] --build--> mirror filled --launch--> replay

A graph repeats launches with the addresses and numbers they had, so that everything that differs between steps is in
device memory at fixed addresses: the step's mirror, the cache, the weights. Capturing and the warm-up before it run on
a step of padding alone: it writes to the dummy block, the dummy slot and the dummy row, and to nothing that lives.

How many: the list of shapes is the bound (`num_cuda_graphs`), so that none is ever dropped for another; all share one
pool of memory, since only one runs at a time, and the outputs have buffers of their own that all write to. A shape
whose capture fails or finds no memory left runs padded and uncaptured from then on; the reason is logged and counted.

Ranks that compute together capture together:

    prepare, take the memory and give it back --agree--> warm up: collectives --> capture: none runs --agree--> replay

What goes wrong on one rank where they agree next is no rank's graph. What goes wrong in the warm-up leaves the others
in a collective: `CollectiveAbandoned`, which ends the engine on all of them, at once and by name.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megatron_infer.comm.collective_errors import CollectiveAbandoned, causes, is_of_collective
from megatron_infer.config.graph_shapes import GraphShape, ShapeIndex
from megatron_infer.errors import ConfigError
from megatron_infer.memory.device import Device
from megatron_infer.utils.gc_pause import no_collection

log = logging.getLogger("megatron_infer")

GRAPHS_VARIABLE = "MEGATRON_INFER_GRAPHS"
"""For debugging only: "module:class" of the `Recorder` to use in place of CUDA graphs, on any device."""
WARM_UPS = 2
"""Runs before a capture: kernels are compiled and loaded, workspaces allocated; none of it may happen inside."""
MIB = 1 << 20
SPARE_BYTES = 256 * MIB
"""Device memory that a capture must leave free, beside what it is expected to take."""


class GraphRefused(RuntimeError):
    """What a graph cannot hold was done while one was captured."""


class Recorded(Protocol):
    """One captured run."""

    @property
    def num_bytes(self) -> int:
        """Device memory that it took, as measured when it was captured."""
        ...

    def replay(self) -> None:
        """Do it again, on the current stream; nobody waits."""
        ...


class Recorder(Protocol):
    """Captures runs that share one pool of memory."""

    name: str
    collectives: tuple[str, ...] | None
    """Backends of torch.distributed whose calls it can hold; None: all."""
    holds_compiled: bool
    """Whether it can hold what torch.compile made."""

    def reserve(self, num_bytes: int) -> None:
        """Take that much memory and keep it for the warm-up; raises torch.OutOfMemoryError where there is none."""
        ...

    def warm_up(self, run: Callable[[], None]) -> None:
        """Do whatever of `run` happens the first time only, by running it. Raises what it raises."""
        ...

    def capture(self, run: Callable[[], None]) -> Recorded:
        """Behind `warm_up`. `run` may be called several times. Raises what it raises."""
        ...

    def reset(self) -> None:
        """All that was captured has been dropped: its memory goes back."""
        ...


class CudaRecorder:
    """CUDA graphs in one memory pool, captured on a stream beside the current one. Not yet run on a GPU."""

    name = "CUDA graph"
    collectives = ("nccl",)
    holds_compiled = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device.torch)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def reserve(self, num_bytes: int) -> None:
        with torch.cuda.stream(self._stream):  # the allocator keeps what was freed for the stream it was taken on
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch)

    def warm_up(self, run: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device.torch)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    run()
        finally:  # whatever of it is enqueued reads the mirror that the next step is about to overwrite
            current.wait_stream(self._stream)
        done = self._device.event("warm-up")  # looks whether the ranks that it waits for are there
        done.record()
        done.wait()
        torch.cuda.synchronize(self._device.torch)
        torch.cuda.empty_cache()

    def capture(self, run: Callable[[], None]) -> Recorded:
        graph, before = torch.cuda.CUDAGraph(), self._device.used_bytes()
        current = torch.cuda.current_stream(self._device.torch)
        # thread_local: other threads (a stage's inbox, a checkpoint writer) may allocate and wait meanwhile
        # no_collection: the finalizer of an engine's cache, say, would wait for the device, which ends a capture
        with (
            no_collection(),
            torch.cuda.stream(current),  # torch.cuda.graph stays on its own where a capture cannot be ended
            self._over_when_it_fails(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            run()
        return _CudaRecorded(graph, max(0, self._device.used_bytes() - before))

    @contextlib.contextmanager
    def _over_when_it_fails(self) -> Iterator[None]:
        """Up to 2.11 torch's allocator takes a capture that could not be ended for one under way, and never again can
        its cache be emptied: neither for a suspend nor for the next capture (pytorch pull request 180395)."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it is over
                torch._C._cuda_endAllocateToPool(self._device.torch.index or 0, self._pool)
            raise

    def reset(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


class _CudaRecorded:
    def __init__(self, graph: Any, num_bytes: int) -> None:
        self._graph, self.num_bytes = graph, num_bytes

    def replay(self) -> None:
        self._graph.replay()


def make_recorder(device: Device) -> Recorder | str:
    """The recorder for this device, or why there is none."""
    if named := os.environ.get(GRAPHS_VARIABLE):
        return _recorder_named(named)
    return CudaRecorder(device) if device.is_cuda else "there are no graphs on a CPU"


def _recorder_named(named: str) -> Recorder:
    module, _, attribute = named.partition(":")
    try:
        recorder: Recorder = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{GRAPHS_VARIABLE} is {named!r}: {error}; give it the form module:class, such as "
            "megatron_infer.testing.eager_recorder:EagerRecorder, or unset it"
        ) from error
    return recorder


class Capturable(Protocol):
    """A padded step as the pool sees it."""

    def prepare(self, shape: GraphShape) -> None:
        """Make the step that is captured: padding alone. It talks to no other rank."""
        ...

    def run(self, shape: GraphShape) -> None:
        """Everything a graph holds, on what the device's tensors hold now."""
        ...

    def addresses(self) -> Hashable:
        """Where the large tensors are now: a graph is good as long as this stays."""
        ...

    def output_bytes(self) -> int:
        """Memory of the outputs that all shapes share."""
        ...

    def drop_outputs(self) -> None:
        """Give that back; the next run makes it anew."""
        ...


@dataclass(slots=True)
class GraphCounts:
    """What became of steps since the engine was built."""

    replays: int = 0
    uncaptured: int = 0
    """Padded to a shape whose graph could not be had."""
    captures: int = 0
    capture_s: float = 0.0
    eager: Counter[str] = field(default_factory=Counter)
    """Reason -> steps that ran as they were."""
    invalidated: Counter[str] = field(default_factory=Counter)
    """Reason -> times that all graphs were dropped."""


class GraphPool:
    """The graphs of one engine. One thread uses it, the one that launches steps."""

    def __init__(
        self,
        shapes: Sequence[GraphShape],
        recorder: Recorder,
        step: Capturable,
        *,
        device: Device,
        expected_bytes: Callable[[GraphShape], int] = lambda shape: 0,
        expected_outputs: int = 0,
        all_ranks: Callable[[bool], bool] | None = None,
    ) -> None:
        """expected_bytes: what a shape may take; less free memory than that and its graph is not captured.
        expected_outputs: what the outputs of all shapes take; the first that is captured needs that, too.

        all_ranks: whether every rank that takes part in a step's collectives says so; None: there are no others.
        """
        self.index = ShapeIndex(shapes)
        self.recorder = recorder
        self.counts = GraphCounts()
        self._step, self._device, self._expected_bytes, self._all_ranks = step, device, expected_bytes, all_ranks
        self._expected_outputs = expected_outputs
        self._graphs: dict[GraphShape, Recorded] = {}
        self._refused: dict[GraphShape, str] = {}
        self._addresses: Hashable = None
        self._weights: Hashable = None

    @property
    def captured(self) -> tuple[GraphShape, ...]:
        """Shapes that have a graph now."""
        return tuple(self._graphs)

    @property
    def refused(self) -> dict[GraphShape, str]:
        """Shapes that could not be captured, and why."""
        return dict(self._refused)

    @property
    def num_bytes(self) -> int:
        """Memory of all graphs, as measured, and of their outputs."""
        return sum(graph.num_bytes for graph in list(self._graphs.values())) + self._step.output_bytes()

    def ready(self, shape: GraphShape) -> None:
        """See that the shape has a graph if it can; before the step is built, as its tensors are overwritten."""
        addresses = self._step.addresses()
        if addresses != self._addresses:
            self.drop("the cache moved")
            self._addresses = addresses
        if shape in self._graphs or shape in self._refused:
            return
        started = time.perf_counter()
        reason = self._why_unready(shape)
        if not self._agreed(reason is None):
            reason = reason or "another rank has no memory for it"
        if reason is None:
            reason = self._record(shape)
        if reason is None:
            self._count(shape, time.perf_counter() - started)
        else:
            log.warning("no graph of %s: its steps are padded and run eagerly (%s)", shape, reason.splitlines()[0])
            self._refused[shape] = reason

    def _count(self, shape: GraphShape, seconds: float) -> None:
        self.counts.captures += 1
        self.counts.capture_s += seconds
        log.info(
            "graph of %d tokens (%d rows prefill, %d decode) captured in %.0f ms: %.1f MiB; all %d: %.1f MiB",
            *shape.as_tuple(),
            1e3 * seconds,
            self._graphs[shape].num_bytes / MIB,
            len(self._graphs),
            self.num_bytes / MIB,
        )

    def launch(self, shape: GraphShape) -> None:
        """Run the step that was built."""
        graph = self._graphs.get(shape)
        if graph is None:
            self.counts.uncaptured += 1
            self._step.run(shape)
            return
        self.counts.replays += 1
        graph.replay()

    def see_weights(self, addresses: Hashable) -> None:
        """The weights are at these addresses: graphs of others are dropped. Every rank calls it when one does.

        Where they moved on one rank all of them drop: to capture again, they have to be together.
        """
        if self._weights is not None and not self._agreed(addresses == self._weights):
            self.drop("weights moved")
        self._weights = addresses

    def drop(self, reason: str) -> int:
        """Give up all graphs and what they refused -> bytes given back; they are captured again when needed."""
        freed = self.num_bytes
        if self._graphs:
            self._device.synchronize("graphs dropped")  # a replay may be under way
            self.counts.invalidated[reason] += 1
            log.info("%d graphs dropped: %s", len(self._graphs), reason)
        self._graphs.clear()
        self._refused.clear()
        self._step.drop_outputs()
        self.recorder.reset()
        return freed

    def _agreed(self, flag: bool) -> bool:
        return flag if self._all_ranks is None else self._all_ranks(flag)

    def _why_unready(self, shape: GraphShape) -> str | None:
        """Everything that may fail on this rank alone, done before the ranks compute together."""
        try:
            reason = self._no_room(shape)
            if reason is None:
                self._step.prepare(shape)
        except (torch.OutOfMemoryError, MemoryError) as error:  # of the device, or page-locked
            reason = f"no memory: {error}"
        except RuntimeError as error:
            reason = str(error) or type(error).__name__
        return reason

    def _record(self, shape: GraphShape) -> str | None:
        """Warm up and capture; the other ranks do the same -> why there is no graph of it."""
        run = partial(self._step.run, shape)
        graph, reason = None, None
        with self._among_others(shape):
            try:
                self.recorder.warm_up(run)
            except RuntimeError as error:
                if self._all_ranks is not None or is_of_collective(error):
                    raise
                return why_refused(error)
            try:
                graph = self.recorder.capture(run)
            except RuntimeError as error:
                if is_of_collective(error):
                    raise
                reason = why_refused(error)
        if not self._agreed(reason is None):
            return reason or "another rank could not capture it"
        if graph is not None:
            self._graphs[shape] = graph
        return reason

    @contextlib.contextmanager
    def _among_others(self, shape: GraphShape) -> Iterator[None]:
        """What raises on this rank leaves the others waiting for it."""
        try:
            yield
        except Exception as error:
            if self._all_ranks is None or is_of_collective(error):
                raise
            what = f"{type(error).__name__}: {error}"
            raise CollectiveAbandoned(f"the first run of {shape}, together with other ranks, raised {what}") from error

    def _no_room(self, shape: GraphShape) -> str | None:
        if not self._device.is_cuda:
            return None
        self._device.trim()
        expected = self._expected_bytes(shape)
        outputs = max(0, self._expected_outputs - self._step.output_bytes())
        free, needed = self._device.available_bytes(), expected + outputs + SPARE_BYTES
        if free < needed:
            of_outputs = f", {outputs:,} of them for the outputs of all shapes" if outputs else ""
            return f"{free:,} bytes are free, {needed:,} may be needed{of_outputs}"
        self.recorder.reserve(expected + outputs)
        return None


def why_refused(error: RuntimeError) -> str:
    """Why there is no graph: what was raised first, as CUDA's word that the capture is over comes on top of it."""
    found = list(causes(error))
    for one in found:
        if isinstance(one, torch.OutOfMemoryError):
            return f"no memory: {one}"
    return str(found[-1]) or type(found[-1]).__name__
