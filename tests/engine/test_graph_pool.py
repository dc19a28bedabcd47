"""A pool's graphs are dropped and refused on all ranks alike, whatever goes wrong on the way to one."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.forward.device import Device
from megatron_infer.forward.graphs import EagerRecorder, GraphPool
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
