"""The last pipeline stage launches a step while it waits for the tokens of the one before."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_infer.runner.in_flight import RunnerOutput
from megatron_infer.runner.parallel.stage_runner import StageRunner
from megatron_infer.scheduler.step_plan import StepPlan, StepResult

LIMIT_S = 30


class Link:
    """`StageLink` of the last of two stages, alone."""

    rank, is_first, is_last = 1, False, True
    num_stages, num_chunks = 2, 1

    def __init__(self) -> None:
        self.results: list = []

    def compare(self, numbers):
        return np.array([numbers, numbers])

    def receive(self, num_tokens, *, routing_width, chunk):
        return None, None, None

    def nothing_received(self, num_tokens):
        return None

    def send(self, *args, **kwargs):
        pass

    def send_result(self, message):
        self.results.append(message)


class Runner:
    """`ModelRunner` whose device is done with a step once `done[step]` is set."""

    store = builder = sampler = graphs = None

    def __init__(self) -> None:
        self.model = SimpleNamespace(routing_of_chunks=None)
        self.device = SimpleNamespace(make_current=lambda: None)
        self.done = [threading.Event() for _ in range(3)]
        self.launched = [threading.Event() for _ in self.done]
        self.fails_in_sample = False

    def shape_of(self, plan):
        return None

    def prepare(self, local, table_writes):
        pass

    def run_layers(self, local, received, *, chunk):
        self.launched[local.plan.step].set()

    def finish(self, local, hidden):
        pass

    def sample(self, local, masks):
        if self.fails_in_sample:
            raise MemoryError("no room for the logits")


@pytest.fixture
def stage(monkeypatch):
    runner, link = Runner(), Link()

    def read(local):
        assert runner.done[local.plan.step].wait(LIMIT_S)
        return RunnerOutput(StepResult([local.plan.step]), None, [], [])

    monkeypatch.setattr("megatron_infer.runner.in_flight.LocalStep.read", read)
    return StageRunner(runner, link), runner, link


def launch(stage: StageRunner, number: int):
    step = stage.forward(StepPlan(step=number, decode=(), prefill=(), sampled=()), ())
    stage.sample(step)
    return step


def test_the_last_stage_launches_the_next_step_before_it_has_read_the_last(stage):
    stage, runner, link = stage
    steps = [launch(stage, number) for number in range(3)]
    assert all(launched.wait(LIMIT_S) for launched in runner.launched), "a launch waits for the step before"
    assert not link.results and not steps[0].is_done()
    for done in runner.done:
        done.set()
    assert [step.read().result.tokens for step in steps] == [[0], [1], [2]]
    assert [message.failure for message in link.results] == [None] * 3


def test_a_draw_that_fails_on_the_last_stage_is_sent_to_all(stage):
    stage, runner, link = stage
    runner.fails_in_sample = True
    output = launch(stage, 0).read()
    assert output.is_out_of_memory and link.results[0].failure.is_out_of_memory
