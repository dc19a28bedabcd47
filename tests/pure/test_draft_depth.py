"""How many drafts pay: by the costs of a step and by what was kept of a request's drafts."""

from __future__ import annotations

import random

from fake_device import make_request

from megatron_infer.engine.step_cost_meter import REPORT_STEPS, StepCostMeter
from megatron_infer.scheduler.draft_depth import DraftDepth, StepCosts
from megatron_infer.scheduler.step_plan import StepPlan


def depth_of(depth, request, *, rows=1, most=8):
    return depth.of([request, *(make_request(f"o{row}", [1], 9) for row in range(rows - 1))], most)[0]


def test_a_new_request_is_tried_and_one_whose_drafts_are_wrong_is_not():
    depth, good, bad = DraftDepth(), make_request("good", [1], 99), make_request("bad", [1], 99)
    depth.costs = StepCosts(step_s=0.012, token_s=0.0006)
    tried = depth.of([good, bad], 8)
    assert tried[0] == tried[1] >= 5
    for _ in range(20):
        depth.verified(good, 8, 8)
        depth.verified(bad, 8, 0)
    assert depth.of([good, bad], 8)[0] == 8 and depth.of([good, bad], 8)[1] <= 1


def test_drafts_are_fewer_where_a_token_is_dearer():
    found = []
    for token_s in (0.0001, 0.001, 0.01, 0.1):
        depth, request = DraftDepth(), make_request("r", [1], 99)
        depth.costs = StepCosts(step_s=0.01, token_s=token_s)
        depth.verified(request, 8, 3)
        found.append(depth_of(depth, request))
    assert found == sorted(found, reverse=True) and found[0] == 8 and found[-1] == 0


def test_a_request_that_was_given_up_is_tried_again_in_time():
    depth, request = DraftDepth(), make_request("r", [1], 99)
    depth.costs = StepCosts(step_s=0.011, token_s=0.00085)  # SmolLM2, 32 rows
    assert depth_of(depth, request, rows=32) > 0
    depth.verified(request, 4, 0)
    waited = 0
    while not depth_of(depth, request, rows=32):
        waited += 1
        assert waited < 200
    assert waited > 5


def test_ended_requests_are_forgotten():
    depth = DraftDepth()
    for number in range(1000):
        request = make_request(f"r{number}", [1], 99)
        depth.of([request], 4)
        request.finish("stop", None)
    assert len(depth._records) < 200


def test_the_meter_finds_the_line_through_steps():
    told, rng = [], random.Random(1)
    meter = StepCostMeter(told.append)
    for step in range(40 * REPORT_STEPS):
        tokens = rng.choice([4, 9, 20, 28])
        seconds = 0.01 + 0.0005 * tokens + (1.0 if step % 97 == 5 else 0.0)  # now and then something else runs
        meter.after_step(StepPlan(step=step, num_tokens=tokens), seconds, step)
    assert len(told) == 40
    assert 0.0003 < told[-1].token_s < 0.0009 and 0.007 < told[-1].step_s < 0.02
    meter.after_step(StepPlan(step=0, num_tokens=500, num_prompt_tokens=480), 1e3, 0)
    assert meter.costs == told[-1], "prompts are no readings"


def test_steps_of_one_size_leave_the_share_of_a_token_assumed():
    meter = StepCostMeter(lambda costs: None)
    for step in range(100):
        meter.after_step(StepPlan(step=step, num_tokens=8), 0.016, step)
    assert abs(meter.costs.token_s - 0.001) < 1e-9 and abs(meter.costs.step_s - 0.008) < 1e-9
