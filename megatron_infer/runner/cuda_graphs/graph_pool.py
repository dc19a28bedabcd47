"""Captured steps: one graph for each padded shape, captured at start and at each resume, or when a step first needs
it, replayed while addresses stay.

    step --find--> shape --ready--> [captured on a step of padding] --build--> mirror filled --launch--> replay

A graph repeats launches with the addresses and numbers that they had. Everything that differs between steps is
therefore in device memory at fixed addresses: the step's mirror, the cache, the weights. The warm-up and the capture
run on a step of padding alone, which writes to the dummy block, the dummy state slot and the dummy row only.

The number of graphs is bounded by the list of shapes (`num_cuda_graphs`), so that no graph is dropped for another. All
share one pool of memory, since only one runs at a time, and write to the same output buffers, outside of the pool. A
shape whose capture fails or finds no memory runs padded and uncaptured from then on; the reason is logged and counted.

Ranks that compute together capture together:

    prepare, reserve memory --agree--> warm up: collectives run --> capture: none runs --agree--> replay

Where one rank fails before an agreement, no rank has that graph. A rank that fails in the warm-up leaves the others in
a collective: it raises `CollectiveAbandoned`, which ends the engine on all ranks and names it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megatron_infer.config.graph_shapes import CAPTURE_S, GraphShape, ShapeIndex
from megatron_infer.distributed.collective_errors import CollectiveAbandoned, causes, is_of_collective
from megatron_infer.memory.device import Device
from megatron_infer.utils.gc_pause import no_collection
from megatron_infer.utils.named_class import make_named

log = logging.getLogger("megatron_infer")

GRAPHS_VARIABLE = "MEGATRON_INFER_GRAPHS"
"""For debugging only: "module:class" of the `Recorder` to use in place of CUDA graphs, on any device."""
WARM_UPS = 2
"""Runs before a capture: they compile and load kernels and allocate workspaces, which must not happen inside."""
ERROR_MODE = "thread_local"
"""Other threads (a stage's inbox, a checkpoint writer) may allocate and wait while one captures."""
MIB = 1 << 20
SPARE_BYTES = 256 * MIB
"""Device memory that a capture must leave free, beyond what it is expected to take."""


class GraphRefused(RuntimeError):
    """A run did something that a graph cannot hold, while it was captured."""


class Recorded(Protocol):
    """One captured run."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the capture took, as measured."""
        ...

    def replay(self) -> None:
        """Enqueue the run again, on the current stream; the host does not wait."""
        ...


class Recorder(Protocol):
    """Captures runs that share one pool of memory."""

    name: str
    collectives: tuple[str, ...] | None
    """Backends of torch.distributed whose calls it can capture; None: all."""

    def reserve(self, num_bytes: int) -> None:
        """Allocate that much memory and free it for the warm-up; raises torch.OutOfMemoryError where there is none."""
        ...

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call `run`, so that what happens only the first time is done before the capture. Raises what it raises."""
        ...

    def capture(self, run: Callable[[], None]) -> Recorded:
        """Comes after `warm_up`. May call `run` several times; raises what it raises, and nothing has changed then."""
        ...

    def reset(self) -> None:
        """Give the pool's memory back; all that was captured has been dropped."""
        ...


class CudaRecorder:
    """CUDA graphs in one memory pool, captured on a stream beside the current one. Not yet run on a GPU."""

    name = "CUDA graph"
    collectives = ("nccl",)

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device.torch)
        self._pool: Any = torch.cuda.MemPool()
        self._cell = torch.zeros(1, dtype=torch.uint8, device=device.torch)

    def reserve(self, num_bytes: int) -> None:
        with torch.cuda.stream(self._stream):  # the allocator keeps what was freed for the stream it was taken on
            torch.cuda.current_blas_handle()  # its workspace outlives the warm-up: not out of what is reserved
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch)

    def warm_up(self, run: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device.torch)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    run()
        finally:  # what is enqueued reads the mirror that the next step is about to overwrite
            current.wait_stream(self._stream)
        done = self._device.event("warm-up")  # its wait checks that the other ranks are alive
        done.record()
        done.wait()
        torch.cuda.synchronize(self._device.torch)
        torch.cuda.empty_cache()

    def capture(self, run: Callable[[], None]) -> Recorded:
        graph, before, num_uses = torch.cuda.CUDAGraph(), self._device.used_bytes(), self._pool.use_count()
        current = torch.cuda.current_stream(self._device.torch)
        # no_collection: a finalizer (of an engine's cache, for instance) may wait for the device, which ends a capture
        with (
            no_collection(),
            torch.cuda.stream(current),  # a capture that cannot be ended leaves torch.cuda.graph's stream current
            self._undone_on_failure(graph, num_uses),
            torch.cuda.graph(graph, pool=self._pool.id, stream=self._stream, capture_error_mode=ERROR_MODE),
        ):
            run()
        return _CudaRecorded(graph, max(0, self._device.used_bytes() - before))

    @contextlib.contextmanager
    def _undone_on_failure(self, graph: Any, num_uses: int) -> Iterator[None]:
        """Leave allocator, pool and random generators as they were before a capture that raised.

        torch does a part of it by itself, each version another one. Missing are, up to
        * 2.11, the end of the allocator's capture: its cache can never be emptied again (pytorch 180395);
        * 2.12, the end of the default generator's: the next draw, the trainer's dropout too, raises (pytorch 176752);
        * 2.13, the release of the pool: its memory stays taken for good (pytorch 190348).
        """
        try:
            yield
        except BaseException:
            graph.reset()
            index, pool = self._device.torch.index or 0, self._pool.id
            with contextlib.suppress(RuntimeError):  # it has ended already
                torch._C._cuda_endAllocateToPool(index, pool)
            for _ in range(self._pool.use_count() - num_uses):
                torch._C._cuda_releasePool(index, pool)
            self._capture_cell()
            raise

    def _capture_cell(self) -> None:
        """A capture that succeeds, which takes the default generator's state out of its last one. The state itself is
        kept: graphs of the trainer hold it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool.id, capture_error_mode=ERROR_MODE)
            self._cell.zero_()
            graph.capture_end()

    def reset(self) -> None:
        self._pool = torch.cuda.MemPool()
        torch.cuda.empty_cache()


class _CudaRecorded:
    def __init__(self, graph: Any, num_bytes: int) -> None:
        self._graph, self.num_bytes = graph, num_bytes

    def replay(self) -> None:
        self._graph.replay()


def make_recorder(device: Device) -> Recorder | str:
    """The recorder for this device, or why there is none."""
    if named := os.environ.get(GRAPHS_VARIABLE):
        remedy = (
            "give it the form module:class, such as megatron_infer.testing.eager_recorder:EagerRecorder, or unset it"
        )
        recorder: Recorder = make_named(named, variable=GRAPHS_VARIABLE, remedy=remedy)
        return recorder
    return CudaRecorder(device) if device.is_cuda else "there are no graphs on a CPU"


class Capturable(Protocol):
    """A padded step as the pool sees it."""

    def prepare(self, shape: GraphShape) -> None:
        """Build the step that is captured, of padding alone, without communication."""
        ...

    def run(self, shape: GraphShape) -> None:
        """Everything that a graph holds, on the present content of the device's tensors."""
        ...

    def addresses(self) -> Hashable:
        """Addresses of the large tensors: a graph is valid while they stay the same."""
        ...

    def make_outputs(self) -> None:
        """Allocate the output buffers that all shapes share, where they are not there."""
        ...

    def output_bytes(self) -> int:
        """Memory of these buffers now."""
        ...

    def drop_outputs(self) -> None:
        """Give that memory back."""
        ...


@dataclass(slots=True)
class GraphCounts:
    """How steps have run since the engine was built."""

    replays: int = 0
    uncaptured: int = 0
    """Padded to a shape that could not be captured."""
    captures: int = 0
    capture_s: float = 0.0
    eager: Counter[str] = field(default_factory=Counter)
    """Reason -> steps that ran as they are, not padded."""
    invalidated: Counter[str] = field(default_factory=Counter)
    """Reason -> times that all graphs were dropped."""


class GraphPool:
    """The graphs of one engine; for the thread that launches its steps."""

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
        all_at_once: bool = False,
        capture_s: float = CAPTURE_S,
    ) -> None:
        """expected_bytes: what a shape may take; with less free memory it is not captured. expected_outputs: what the
        output buffers of all shapes take; the first shape that is captured needs that too.

        all_at_once: shapes are captured together (`capture_missing`), within capture_s seconds, and none next
        to requests; else each when a step first needs it.

        all_ranks(flag): whether every rank that takes part in a step's collectives gives True; None: no other does.
        """
        self.index = ShapeIndex(shapes)
        self.recorder = recorder
        self.counts = GraphCounts()
        self._step, self._device, self._expected_bytes, self._all_ranks = step, device, expected_bytes, all_ranks
        self._expected_outputs = expected_outputs
        self._all_at_once = all_at_once
        self._capture_s = capture_s
        self._are_missing = all_at_once
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
        """Memory of all graphs, as measured, and of the output buffers."""
        return sum(graph.num_bytes for graph in list(self._graphs.values())) + self._step.output_bytes()

    def ready(self, shape: GraphShape) -> None:
        """Capture the shape if it can be and is not yet; before the step is built, whose tensors this overwrites."""
        if self._all_at_once:
            self._see_addresses()
            self.capture_missing()
        else:
            self._capture(shape)

    def capture_missing(self) -> None:
        """Where shapes are captured together: capture all that were dropped since the last time. All ranks call it."""
        if self._are_missing:
            self.capture_all()

    def _see_addresses(self) -> None:
        addresses = self._step.addresses()
        if addresses != self._addresses:
            known = len(self._graphs) + len(self._refused)
            assert self._all_ranks is None or not known, f"the cache moved below {known} shapes that all ranks know"
            self.drop("the cache moved")
            self._addresses = addresses

    def _capture(self, shape: GraphShape, *, deadline: float = math.inf) -> None:
        self._see_addresses()
        if shape in self._graphs or shape in self._refused:
            return
        started = time.perf_counter()
        reason = self._why_unready(shape) if started < deadline else f"{self._capture_s:g} s for captures are over"
        if not self._agreed(reason is None):
            reason = reason or "another rank has no memory or no time for it"
        if reason is None:
            reason = self._record(shape)
        if reason is None:
            self._count(shape, time.perf_counter() - started)
        else:
            log.warning("no graph of %s: its steps are padded and run eagerly (%s)", shape, reason.splitlines()[0])
            self._refused[shape] = reason

    @torch.inference_mode()
    def capture_all(self) -> list[str]:
        """Capture every shape now, the largest first -> why some could not be."""
        shapes = self.index.shapes
        most = max(map(self._expected_bytes, shapes), default=0)
        log.info("capturing %d graphs: %.1f MiB by estimate", len(shapes), (most + self._missing_outputs()) / MIB)
        before = self.counts.capture_s
        deadline = time.perf_counter() + self._capture_s
        for shape in sorted(shapes, key=lambda one: (one.is_decode_only, one.num_tokens), reverse=True):
            self._capture(shape, deadline=deadline)
        self._are_missing = False
        log.info("%d graphs captured in %.1f s", len(self._graphs), self.counts.capture_s - before)
        return [f"{shape}: {reason}" for shape, reason in self._refused.items()]

    def _count(self, shape: GraphShape, seconds: float) -> None:
        self.counts.captures += 1
        self.counts.capture_s += seconds
        log.info(
            "graph of %d tokens (%d rows prefill, %d decode)%s captured in %.0f ms: %.1f MiB; all %d: %.1f MiB",
            *shape.as_tuple(),
            " with adapters" if shape.has_adapters else "",
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
        """The weights are at these addresses: graphs of other addresses are dropped. All ranks call it together.

        Where weights moved on one rank, all ranks drop their graphs: they can only capture again together.
        """
        if self._weights is not None and not self._agreed(addresses == self._weights):
            self.drop("weights moved")
        self._weights = addresses

    def drop(self, reason: str) -> int:
        """Drop all graphs, and the refusals -> bytes given back. The next resume or step captures shapes again."""
        freed = self.num_bytes
        if self._graphs:
            self._device.synchronize("graphs dropped")  # a replay may still be running
            self.counts.invalidated[reason] += 1
            log.info("%d graphs dropped: %s", len(self._graphs), reason)
        self._graphs.clear()
        self._refused.clear()
        self._are_missing = self._all_at_once
        self._step.drop_outputs()
        self.recorder.reset()
        return freed

    def _agreed(self, flag: bool) -> bool:
        return flag if self._all_ranks is None else self._all_ranks(flag)

    def _why_unready(self, shape: GraphShape) -> str | None:
        """Everything that may fail on this rank alone, before the ranks compute together -> why it failed."""
        try:
            reason = self._no_room(shape)
            if reason is None:  # what outlives the capture first: it must not lie in the segment that is reserved
                self._step.make_outputs()
                self._step.prepare(shape)
                if self._device.is_cuda:
                    self.recorder.reserve(self._expected_bytes(shape))
        except (torch.OutOfMemoryError, MemoryError) as error:  # device or page-locked memory
            reason = f"no memory: {error}"
        except RuntimeError as error:
            reason = str(error) or type(error).__name__
        return reason

    def _record(self, shape: GraphShape) -> str | None:
        """Warm up and capture, together with the other ranks -> why there is no graph of the shape."""
        run = partial(self._step.run, shape)
        graph, reason = None, None
        with self._abandons_others(shape):
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
    def _abandons_others(self, shape: GraphShape) -> Iterator[None]:
        """Where other ranks compute with this one, an error within is raised as CollectiveAbandoned."""
        try:
            yield
        except Exception as error:
            if self._all_ranks is None or is_of_collective(error):
                raise
            what = f"{type(error).__name__}: {error}"
            raise CollectiveAbandoned(f"the first run of {shape}, together with other ranks, raised {what}") from error

    def needed_bytes(self, shape: GraphShape) -> int:
        """Free memory without which the shape is not captured."""
        return self._expected_bytes(shape) + self._missing_outputs() + SPARE_BYTES

    def _missing_outputs(self) -> int:
        return max(0, self._expected_outputs - self._step.output_bytes())

    def _no_room(self, shape: GraphShape) -> str | None:
        if not self._device.is_cuda:
            return None
        self._device.trim()
        free, needed, outputs = self._device.available_bytes(), self.needed_bytes(shape), self._missing_outputs()
        if free < needed:
            of_outputs = f", {outputs:,} of them for the outputs of all shapes" if outputs else ""
            return f"{free:,} bytes are free, {needed:,} may be needed{of_outputs}"
        return None


def why_refused(error: RuntimeError) -> str:
    """Why there is no graph: what was raised first, since CUDA raises again when it ends the capture."""
    found = list(causes(error))
    for one in found:
        if isinstance(one, torch.OutOfMemoryError):
            return f"no memory: {one}"
    return str(found[-1]) or type(found[-1]).__name__
