"""A pool's graphs are dropped and refused on all ranks alike, whatever goes wrong on the way to one."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.forward.device import Device
from megatron_infer.forward.graphs import CudaRecorder, EagerRecorder, GraphPool
from megatron_infer.graph_shapes import GraphShape

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

    def output_bytes(self) -> int:
        return 0

    def drop_outputs(self) -> None:
        pass


def make_pool(answers: list[bool] | None = None) -> tuple[GraphPool, Step, list[bool]]:
    """answers: what the ranks find together, call by call; None: what this one says. Third: what it said."""
    step, asked = Step(), []

    def all_ranks(flag: bool) -> bool:
        asked.append(flag)
        return answers.pop(0) if answers else flag

    return GraphPool([SHAPE], EagerRecorder(), step, device=Device("cpu"), all_ranks=all_ranks), step, asked


@pytest.mark.parametrize(("here", "elsewhere"), [(False, False), (True, False), (False, True)])
def test_weights_that_moved_on_one_rank_drop_the_graphs_of_all(here, elsewhere):
    pool, _, asked = make_pool([True, not (here or elsewhere)])
    pool.see_weights("there")
    pool.ready(SHAPE)
    pool.see_weights("here" if here else "there")
    assert asked == [True, not here], "once for the capture, once for the weights"
    assert bool(pool.captured) is not (here or elsewhere)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError()])
def test_a_capture_that_cannot_be_prepared_leaves_the_step_uncaptured(error):
    pool, step, _ = make_pool()
    step.in_prepare = error
    pool.ready(SHAPE)
    assert not pool.captured and pool.refused[SHAPE]
    pool.launch(SHAPE)
    assert step.runs == pool.counts.uncaptured == 1


class Stream:
    """torch.cuda.Stream of nothing."""

    def __init__(self, name: object) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        pass


class BrokenGraph:
    """torch.cuda.CUDAGraph of a capture that the driver has given up."""

    def capture_begin(self, *args: object, **options: object) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_capture_that_cannot_be_ended_leaves_its_stream_and_its_memory_pool(monkeypatch):
    """By torch.cuda.graph itself, which on its own leaves the thread where the capture was."""
    main, streams, ended = Stream("main"), [], []
    streams.append(main)

    class On:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before = streams[-1]
            streams.append(self.stream)

        def __exit__(self, *error: object) -> None:
            streams.append(self.before)

    def end(device: int, pool: object) -> None:
        ended.append(pool)
        if len(ended) > 1:
            raise RuntimeError("not currently recording to mempool_id")

    for name, stand_in in {
        "Stream": Stream,
        "current_stream": lambda *args: streams[-1],
        "stream": On,
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *args: (1 << 40, 1 << 41),
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": BrokenGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    step, other = Step(), GraphShape(8, 0, 8)
    pool = GraphPool([SHAPE, other], CudaRecorder(Device("cpu")), step, device=Device("cpu"))

    def run(shape: GraphShape) -> None:
        step.runs += 1
        if streams[-1] is not main and step.runs % 3 == 0:  # two warm-ups before
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step, "run", run)
    for shape in (SHAPE, other):
        pool.ready(shape)
        assert streams[-1] is main and pool.refused[shape] == "operation not permitted when stream is capturing"
    assert ended == ["pool", "pool"]
