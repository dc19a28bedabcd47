"""A pool's graphs are dropped and refused on all ranks alike, whatever goes wrong on the way to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.distributed.collective_errors import CollectiveAbandoned
from megatron_infer.errors import ConfigError
from megatron_infer.memory.device import Device
from megatron_infer.runner.cuda_graphs.graph_pool import (
    GRAPHS_VARIABLE,
    SPARE_BYTES,
    CudaRecorder,
    GraphPool,
    GraphRefused,
    make_recorder,
)
from megatron_infer.testing.eager_recorder import EAGER, EagerRecorder

SHAPE = GraphShape(4, 0, 4)


class Step:
    """Capturable that does nothing, or raises."""

    def __init__(self) -> None:
        self.in_prepare: Exception | None = None
        self.runs = 0

    def prepare(self, shape: GraphShape) -> None:
        if self.in_prepare is not None:
            raise self.in_prepare

    def run(self, shape: GraphShape) -> None:
        self.runs += 1

    def addresses(self) -> int:
        return 1

    def make_outputs(self) -> None:
        pass

    def output_bytes(self) -> int:
        return 0

    def drop_outputs(self) -> None:
        pass


def make_pool(answers: list[bool] | None = None, **settings: Any) -> tuple[GraphPool, Step, list[bool]]:
    """answers: of all ranks together, call by call; None: this rank's. Third: the list of this rank's flags.

    settings: further ones of the pool.
    """
    step, asked = Step(), []

    def all_ranks(flag: bool) -> bool:
        asked.append(flag)
        return answers.pop(0) if answers else flag

    return GraphPool([SHAPE], Recorder(), step, device=Device("cpu"), all_ranks=all_ranks, **settings), step, asked


class Recorder(EagerRecorder):
    """Raises the errors that it is given."""

    in_warm_up: Exception | None = None
    in_capture: Exception | None = None

    def warm_up(self, run: Callable[[], None]) -> None:
        if self.in_warm_up is not None:
            raise self.in_warm_up

    def capture(self, run: Callable[[], None]):
        if self.in_capture is None:
            return super().capture(run)
        try:
            raise self.in_capture
        finally:  # CUDA raises again where a capture ends by an error
            if not isinstance(self.in_capture, GraphRefused):
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(("here", "elsewhere"), [(False, False), (True, False), (False, True)])
def test_weights_that_moved_on_one_rank_drop_the_graphs_of_all(here, elsewhere):
    pool, _, asked = make_pool([True, True, not (here or elsewhere)])
    pool.see_weights("there")
    pool.ready(SHAPE)
    pool.see_weights("here" if here else "there")
    assert asked == [True, True, not here], "before the warm-up, after the capture, once for the weights"
    assert bool(pool.captured) is not (here or elsewhere)


def test_shapes_whose_turn_comes_after_the_seconds_for_captures_run_eagerly_until_the_next_time():
    pool, step, asked = make_pool(all_at_once=True, capture_s=0.0)
    pool.capture_missing()
    assert not pool.captured and asked == [False] and "0 s for captures are over" in pool.refused[SHAPE]
    pool.ready(SHAPE)
    pool.launch(SHAPE)
    assert step.runs == pool.counts.uncaptured == 1 and asked == [False]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError()])
def test_a_capture_that_cannot_be_prepared_leaves_the_step_uncaptured(error):
    pool, step, _ = make_pool()
    step.in_prepare = error
    pool.ready(SHAPE)
    assert not pool.captured and pool.refused[SHAPE]
    pool.launch(SHAPE)
    assert step.runs == pool.counts.uncaptured == 1


def test_memory_that_one_rank_lacks_is_known_before_any_rank_computes():
    for here, elsewhere in ((torch.OutOfMemoryError("no room"), True), (MemoryError("no room"), True), (None, False)):
        pool, step, asked = make_pool([here is None and elsewhere])
        pool.recorder.warm_up = lambda run: pytest.fail("the others are not there")
        step.in_prepare = here
        pool.ready(SHAPE)
        assert asked == [here is None] and ("no room" if here else "another rank") in pool.refused[SHAPE]


def test_the_first_capture_counts_the_outputs_of_all_shapes_and_tells_what_a_graph_took(monkeypatch, caplog):
    step, other, reserved = Step(), GraphShape(8, 0, 8), []
    device = Device("cpu")
    free = [SPARE_BYTES + 100 + 69]
    for name, value in {"is_cuda": True, "trim": lambda: None, "available_bytes": lambda: free[0]}.items():
        monkeypatch.setattr(device, name, value, raising=False)
    pool = GraphPool(
        [SHAPE, other], Recorder(), step, device=device, expected_bytes=lambda shape: 100, expected_outputs=70
    )
    monkeypatch.setattr(pool.recorder, "reserve", reserved.append)
    pool.ready(SHAPE)
    assert "70 of them for the outputs of all shapes" in pool.refused[SHAPE] and not reserved
    pool._refused.clear()
    free[0] += 1
    with caplog.at_level("INFO", "megatron_infer"):
        pool.ready(SHAPE)
    assert SHAPE in pool.captured and reserved == [100]
    assert "graph of 4 tokens (0 rows prefill, 4 decode) captured in" in caplog.text and "MiB" in caplog.text
    monkeypatch.setattr(step, "output_bytes", lambda: 70)
    free[0] -= 70
    pool.ready(other)
    assert other in pool.captured and reserved == [100, 100], "they are there by now"


@pytest.mark.parametrize("alone", [False, True])
def test_memory_that_ends_in_the_warm_up_is_a_refusal_only_where_no_rank_waits(alone):
    pool, _, asked = make_pool()
    pool.recorder.in_warm_up = torch.OutOfMemoryError("no room")
    if alone:
        pool._all_ranks = None
        pool.ready(SHAPE)
        assert "no room" in pool.refused[SHAPE]
        return
    with pytest.raises(CollectiveAbandoned, match="no room"):
        pool.ready(SHAPE)
    assert asked == [True] and not pool.captured


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("no room"), "no memory: no room"),
        (RuntimeError("operation not permitted when stream is capturing"), "not permitted"),
        (GraphRefused("aten::item asks the device"), "asks the device"),
        (None, "another rank could not capture it"),
    ],
)
def test_what_cannot_be_captured_on_one_rank_is_captured_on_none(error, reason):
    pool, step, asked = make_pool([True, False])
    pool.recorder.in_capture = error
    pool.ready(SHAPE)
    assert asked == [True, error is None] and reason in pool.refused[SHAPE]
    pool.launch(SHAPE)
    assert step.runs == pool.counts.uncaptured == 1 and not pool.captured


@pytest.mark.parametrize("where", ["in_warm_up", "in_capture"])
@pytest.mark.parametrize("alone", [False, True])
def test_an_error_of_the_process_group_is_not_taken_for_a_refusal(where, alone):
    pool, _, _ = make_pool()
    if alone:
        pool._all_ranks = None
    setattr(pool.recorder, where, dist.DistBackendError("NCCL error: unhandled system error"))
    with pytest.raises(RuntimeError) as caught:
        pool.ready(SHAPE)
    assert "NCCL error" in str(caught.value) or "NCCL error" in str(caught.value.__context__)
    assert not pool.refused and not isinstance(caught.value, CollectiveAbandoned)


@pytest.mark.parametrize("named", ["replay", "megatron_infer.testing.eager_recorder:Lazy", ":"])
def test_a_recorder_that_cannot_be_imported_is_refused_with_an_example(named, monkeypatch):
    monkeypatch.setenv(GRAPHS_VARIABLE, named)
    with pytest.raises(
        ConfigError, match=f"{GRAPHS_VARIABLE} is '{named}': .*; give it the form module:class, such as"
    ):
        make_recorder(Device("cpu"))
    monkeypatch.setenv(GRAPHS_VARIABLE, EAGER)
    assert isinstance(make_recorder(Device("cpu")), EagerRecorder)


class Stream:
    """torch.cuda.Stream of nothing."""

    def __init__(self, name: object) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        pass


class OldTorch:
    """As much of torch.cuda as captures touch, undoing as little of one that failed as any torch from 2.11 on does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = Stream("main")
        self.streams, self.uses, self.broken, self.draws_in_capture, self.allocates = [self.main], 0, False, False, []
        old = self

        class On:
            def __init__(self, stream: Stream) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before = old.streams[-1]
                old.streams.append(self.stream)

            def __exit__(self, *error: object) -> None:
                old.streams.append(self.before)

        class Pool:
            id = (0, 1)

            def __init__(self) -> None:
                old.uses = 1

            def use_count(self) -> int:
                return old.uses

        class Graph:
            ended = False

            def capture_begin(self, *pool: object, **options: object) -> None:
                old.uses += 1
                old.draws_in_capture = True
                old.allocates.append(Pool.id)

            def capture_end(self) -> None:
                if old.broken:
                    old.broken = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                old.allocates.pop()
                old.draws_in_capture, self.ended = False, True

            def reset(self) -> None:
                if self.ended:
                    old.uses, self.ended = old.uses - 1, False

            def __del__(self) -> None:
                self.reset()

        def end(device: int, pool: object) -> None:
            if not self.allocates:
                raise RuntimeError("not currently recording to mempool_id")
            self.allocates.remove(pool)

        def release(device: int, pool: object) -> None:
            assert not self.allocates, "the pool is still being recorded to"
            self.uses -= 1

        for name, stand_in in {
            "Stream": Stream,
            "current_stream": lambda *args: self.streams[-1],
            "stream": On,
            "synchronize": lambda *args: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda *args: (1 << 40, 1 << 41),
            "MemPool": Pool,
            "CUDAGraph": Graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", release)


@pytest.mark.parametrize("is_invalid", [True, False], ids=["ended by the driver", "raised in Python"])
def test_a_capture_that_fails_leaves_stream_allocator_pool_and_generator_as_they_were(is_invalid, monkeypatch):
    """By torch.cuda.graph itself, which on its own leaves the thread where the capture was."""
    old, step, other = OldTorch(monkeypatch), Step(), GraphShape(8, 0, 8)
    pool = GraphPool([SHAPE, other], CudaRecorder(Device("cpu")), step, device=Device("cpu"))

    def run(shape: GraphShape) -> None:
        step.runs += 1
        if old.streams[-1] is not old.main and step.runs % 3 == 0:  # two warm-ups before
            old.broken = is_invalid
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step, "run", run)
    for shape in (SHAPE, other):
        pool.ready(shape)
        assert old.streams[-1] is old.main
        assert pool.refused[shape] == "operation not permitted when stream is capturing"
        assert not old.draws_in_capture, "the trainer's next draw would raise"
        assert not old.allocates and old.uses == 1, "the pool's memory would stay taken"
    monkeypatch.setattr(step, "run", lambda shape: None)
    pool.drop("new weights")
    pool.ready(SHAPE)
    assert pool.captured == (SHAPE,) and old.uses == 2


def test_what_outlives_a_capture_is_allocated_before_its_memory_is_reserved(monkeypatch):
    """What is carved out of the reserved segment keeps all of it from the capture, whose pool is another."""
    step, device, order = Step(), Device("cpu"), []
    for name, value in {"is_cuda": True, "trim": lambda: None, "available_bytes": lambda: 1 << 40}.items():
        monkeypatch.setattr(device, name, value, raising=False)
    pool = GraphPool([SHAPE], Recorder(), step, device=device, expected_bytes=lambda shape: 100, expected_outputs=70)
    monkeypatch.setattr(step, "make_outputs", lambda: order.append("outputs"))
    monkeypatch.setattr(step, "prepare", lambda shape: order.append("step of padding, row parameters"))
    monkeypatch.setattr(pool.recorder, "reserve", lambda num_bytes: order.append(num_bytes))
    monkeypatch.setattr(pool.recorder, "warm_up", lambda run: order.append("warm-up"))
    pool.ready(SHAPE)
    assert order == ["outputs", "step of padding, row parameters", 100, "warm-up"]
