"""How many drafts pay: by the costs of steps and by how often drafts like these were kept."""

from __future__ import annotations

import random

import pytest
from fake_device import make_request

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.engine.step_cost_meter import REPORT_STEPS, StepCostMeter
from megatron_infer.scheduler.draft_depth import NO_PROPOSAL, PLAIN_EVERY, DraftDepth, Proposal
from megatron_infer.scheduler.step_costs import StepCosts
from megatron_infer.scheduler.step_plan import ON_DEVICE, PrefillChunk, StepPlan

CHEAP = StepCosts(plain=[(1, 0.012), (8, 0.016)], verifying=[(2, 0.0125), (9, 0.017)])
"""One row of SmolLM2: a step costs as much as 18 of its drafts."""
DEAR = StepCosts(plain=[(32, 0.036)], verifying=[(33, 0.037), (64, 0.066), (256, 0.25)])
"""32 rows: a draft costs nearly as much as a token."""


def proposal(run: int, most: int = 8, first: int = 50) -> Proposal:
    return Proposal(list(range(first, first + most)), "ngram", run)


def rows_of(count: int) -> list:
    return [make_request(f"r{row}", [1], 999) for row in range(count)]


def run(depth: DraftDepth, requests: list, proposals: list, right: float = 1.0, steps: int = 60, rng=None) -> list[int]:
    """Steps in which a draft is right with this probability -> drafts of the last step that had any for each."""
    rng, last = rng or random.Random(0), [0] * len(requests)
    for _ in range(steps):
        for request, one in zip(requests, proposals, strict=True):
            depth.proposed(request, one)
        depths = depth.of(requests, proposals)
        for row, (request, one) in enumerate(zip(requests, proposals, strict=True)):
            kept = 0
            while kept < depths[row] and rng.random() < right:
                kept += 1
            if depths[row]:
                depth.verified(request, depths[row], kept)
                last[row] = depths[row]
            is_right = rng.random() < right
            request.tokens += [one.tokens[0] if is_right and one.tokens else 7] * (1 if not depths[row] else kept + 1)
    return last


def test_long_runs_are_drafted_further_than_short_ones():
    depth, requests = DraftDepth(), rows_of(2)
    depth.costs = CHEAP
    short, long = depth.expected(requests, [proposal(2), proposal(12)])
    assert short < long == 8


def test_drafts_are_fewer_where_a_token_is_dearer():
    found = []
    for token_s in (0.0001, 0.001, 0.01, 0.1):
        depth = DraftDepth()
        line = [(tokens, 0.01 + token_s * tokens) for tokens in (1, 20)]
        depth.costs = StepCosts(plain=line, verifying=line)
        found += depth.expected(rows_of(1), [proposal(5)])
    assert found == sorted(found, reverse=True) and found[0] == 8 and found[-1] == 0


def test_a_step_that_verifies_may_cost_more_than_its_tokens():
    depth, requests = DraftDepth(), rows_of(1)
    depth.costs = StepCosts(plain=CHEAP.plain, verifying=[(2, 0.09), (9, 0.1)])
    assert depth.expected(requests, [proposal(16)]) == [0]


def test_what_is_drawn_without_drafts_tells_how_often_they_would_be_kept():
    found = {}
    for right in (0.0, 1.0):
        depth, requests = DraftDepth(), rows_of(4)
        depth.costs = StepCosts(plain=[(4, 0.01)], verifying=[(5, 1e3)])  # nothing pays
        assert run(depth, requests, [proposal(4)] * 4, right) == [0] * 4
        depth.costs = CHEAP
        found[right] = depth.expected(rows_of(1), [proposal(4)])[0]
    assert found == {0.0: 0, 1.0: 8}


def test_a_request_is_told_apart_from_the_others():
    depth, (good, bad) = DraftDepth(), rows_of(2)
    depth.costs = StepCosts(plain=[(32, 0.036)], verifying=[(33, 0.0368), (48, 0.049)])
    for _ in range(20):
        for request, kept in ((good, 4), (bad, 0)):
            depth.proposed(request, proposal(3))
            depth.verified(request, 4, kept)
            request.tokens += [1] * (kept + 1)
    others = rows_of(30)
    depths = depth.expected([good, bad, *others], [proposal(3), proposal(3), *[NO_PROPOSAL] * 30])
    assert depths[0] > depths[1] == 0


@pytest.mark.parametrize("rows", [1, 32])
def test_drafts_that_do_not_pay_take_a_hundredth_of_the_time(rows):
    depth, requests = DraftDepth(), rows_of(rows)
    depth.costs = StepCosts(plain=[(1, 0.012)], verifying=[(2, 0.03), (9, 0.04)]) if rows == 1 else DEAR
    proposals, taken = [proposal(2)] * rows, {False: 0.0, True: 0.0}
    run(depth, requests, proposals, right=0.3)
    for step in range(1000):
        for request in requests:
            depth.proposed(request, proposals[0])
        depths = depth.of(requests, proposals)
        cost = depth.costs.seconds(rows + sum(depths), verifying=any(depths))
        plain = depth.costs.seconds(rows, verifying=False)
        taken[False] += plain
        taken[True] += cost - plain if any(depths) else 0.0
        for number, request in enumerate(requests):
            request.tokens.append(50 if (step + number) % 3 == 0 else 7)
    assert 0 < taken[True] < 0.015 * taken[False]


def test_a_draft_model_that_was_always_wrong_is_tried_again():
    """Only what is verified tells: its tokens are not known where none is."""
    depth, requests = DraftDepth(), rows_of(1)
    depth.costs = CHEAP
    drawn_by_model = Proposal([ON_DEVICE] * 4, "draft")
    run(depth, requests, [drawn_by_model], right=0.0, steps=3000)
    assert run(depth, requests, [drawn_by_model], right=1.0, steps=6000) == [4]


def test_one_step_in_fifty_goes_without_drafts_to_be_measured():
    depth, requests = DraftDepth(), rows_of(1)
    depth.costs = CHEAP
    drafted = []
    for _ in range(10 * (PLAIN_EVERY + 1)):
        depth.proposed(requests[0], proposal(16))
        drafted.append(depth.of(requests, [proposal(16)])[0])
        if drafted[-1]:
            depth.verified(requests[0], 8, 8)
        requests[0].tokens += [1]
    assert drafted.count(0) == 10 and drafted[0] == 0


SHORT = StepCosts(plain=[(16, 0.008)], verifying=[(17, 0.009), (32, 0.02)])
"""16 rows that take half a millisecond each."""


def looks(depth: DraftDepth, requests: list, proposals: list, steps: int) -> list[list[int]]:
    """Rows that propose, of each step; nothing that was proposed is drawn."""
    found = []
    for _ in range(steps):
        asked = depth.looking(requests)
        found.append(asked)
        for row in asked:
            depth.proposed(requests[row], proposals[row])
        depths = depth.of(requests, [one if row in asked else NO_PROPOSAL for row, one in enumerate(proposals)], asked)
        for row, count in enumerate(depths):
            if count:
                depth.verified(requests[row], count, 0)
        for request in requests:
            request.tokens.append(7)
    return found


def test_requests_that_draft_nothing_rest_between_proposals_where_steps_are_short():
    depth, requests = DraftDepth(), rows_of(16)
    depth.costs = SHORT
    looks(depth, requests, [NO_PROPOSAL] * 16, 8)
    sizes = [len(rows) for rows in looks(depth, requests, [NO_PROPOSAL] * 16, 400)]
    assert set(sizes) == {0, 16} and 400 / 10 <= sizes.count(16) <= 400 / 5
    requests[15] = rows_of(1)[0]
    joined = looks(depth, requests, [NO_PROPOSAL] * 16, 408)
    assert all(15 in rows for rows in joined[:8]) and not all(15 in rows for rows in joined[8:16])
    assert {len(rows) for rows in joined[200:]} == {0, 16}  # it looks with the others in the end
    wrong = looks(depth, requests, [proposal(1, most=1)] * 16, 400)
    assert 400 * 16 / 10 <= sum(map(len, wrong)) <= 400 * 16 / 2  # but for those that are tried again


def test_a_text_that_repeats_itself_is_looked_at_in_all_places():
    depth, requests, seen = DraftDepth(), rows_of(16), [0] * 4
    depth.costs = SHORT
    for step in range(400):
        asked = depth.looking(requests)
        if 0 in asked:
            seen[step % 4] += 1
        depth.of(requests, [NO_PROPOSAL] * 16, asked)
    assert min(seen) > 5, seen


@pytest.mark.parametrize("why", ["steps are long", "a grammar forces tokens", "drafts pay"])
def test_no_request_rests(why):
    depth, requests = DraftDepth(), rows_of(16)
    depth.costs = StepCosts(plain=[(16, 0.032)]) if why == "steps are long" else SHORT
    if why == "a grammar forces tokens":
        params = SamplingParams(structured=StructuredOutput(regex="a*"))
        requests = [make_request(f"r{row}", [1], 999, params=params) for row in range(16)]
    if why == "drafts pay":
        depth.costs = StepCosts(plain=[(16, 0.008)], verifying=[(17, 0.008), (256, 0.0081)])
        found = []
        for _ in range(40):
            found.append(any(map(depth.rests, requests)))
            for request in requests:
                depth.proposed(request, proposal(16))
            for request, count in zip(requests, depth.of(requests, [proposal(16)] * 16), strict=True):
                if count:
                    depth.verified(request, count, count)
                request.tokens.append(50)
        assert not any(found)
        return
    assert all(len(rows) == 16 for rows in looks(depth, requests, [proposal(1, most=1)] * 16, 60))


def test_ended_requests_are_forgotten():
    depth = DraftDepth()
    for number in range(1000):
        request = make_request(f"r{number}", [1], 99)
        depth.proposed(request, proposal(3))
        request.finish("stop", None)
    assert len(depth._records) < 200


def step_of(tokens: int, drafts: int = 0) -> StepPlan:
    request = make_request("r", [1], 99)
    chunk = PrefillChunk(request=request, start=0, n=1 + drafts, samples=True, drafts=(1,) * drafts)
    return StepPlan(step=0, num_tokens=tokens, prefill=(chunk,) if drafts else ())


def test_the_meter_finds_what_steps_take_with_and_without_drafts():
    told, rng = [], random.Random(1)
    meter = StepCostMeter(told.append)
    for step in range(40 * REPORT_STEPS):
        tokens, drafts = rng.choice([4, 9, 20, 28]), rng.choice([0, 3])
        seconds = 0.01 + 0.0005 * tokens + 0.002 * bool(drafts) + (1.0 if step % 97 == 5 else 0.0)
        meter.after_step(step_of(tokens, drafts), seconds, step)
    for tokens in (4, 9, 20, 28):
        for verifying in (False, True):
            found = told[-1].seconds(tokens, verifying=verifying)
            assert found == pytest.approx(0.01 + 0.0005 * tokens + 0.002 * verifying, rel=0.1), (tokens, verifying)
    before = meter.costs
    meter.after_step(StepPlan(step=0, num_tokens=500, num_prompt_tokens=480), 1e3, 0)
    assert meter.costs == before, "prompts are no readings"


def test_a_disturbed_minute_does_not_change_how_many_drafts_pay():
    """The pace changes while nearly all steps verify, and those without drafts were measured at another one."""
    rng, told = random.Random(2), []
    meter = StepCostMeter(told.append)
    paces = [1.0, 3.0, 1.0, 2.0, 5.0, 0.7]
    worst = 1.0
    for step in range(300 * len(paces)):
        pace = paces[step // 300] * rng.uniform(0.9, 1.2) * (4.0 if rng.random() < 0.01 else 1.0)
        drafts = 0 if step % (PLAIN_EVERY + 1) == 0 else 7
        meter.after_step(step_of(1 + drafts, drafts), pace * (0.017 if drafts else 0.012), step)
        if step > 100:
            costs = told[-1]
            ratio = costs.seconds(8, verifying=True) / costs.seconds(1, verifying=False) / (0.017 / 0.012)
            worst = max(worst, ratio, 1 / ratio)
    assert worst < 1.35
    assert told[-1].seconds(8, verifying=True) == pytest.approx(0.017 * 0.7, rel=0.25)


def test_the_first_step_of_a_size_is_no_measure_of_it():
    told: list[StepCosts] = []
    meter = StepCostMeter(told.append)
    for step in range(4):
        meter.after_step(step_of(1), 0.012, step)
        meter.after_step(step_of(8, 7), 0.9 if step == 0 else 0.017, step)
    ratio = told[-1].seconds(8, verifying=True) / told[-1].seconds(1, verifying=False)
    assert ratio == pytest.approx(0.017 / 0.012, rel=0.1)


def test_steps_that_take_no_time_by_the_clock_are_no_readings():
    told = []
    meter = StepCostMeter(told.append)
    for step, seconds in enumerate([0.0, 0.0, 0.0, 0.012, 0.0, 0.012]):
        meter.after_step(step_of(1), seconds, step)
    assert len(told) == 2 and told[-1].seconds(1, verifying=False) == pytest.approx(0.012)


def test_costs_between_and_beyond_what_was_measured():
    costs = StepCosts(plain=[(1, 0.009), (8, 0.016)])
    assert costs.seconds(8, verifying=False) == costs.seconds(8, verifying=True) == 0.016
    assert costs.seconds(4.5, verifying=True) == pytest.approx(0.0125)
    assert costs.seconds(24, verifying=True) == pytest.approx(0.032)
    assert StepCosts().seconds(1, verifying=False) < StepCosts().seconds(9, verifying=True)
    assert StepCosts(verifying=[(9, 0.017)]).seconds(1, verifying=False) == pytest.approx(0.009)
