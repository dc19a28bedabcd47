"""Callers of one engine share its rows and the time of its steps; one caller alone has all of both."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_device import make_request
from test_fuzz import run_schedule
from world import World

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.scheduler.caller_shares import AWAY, FIRST, PRESENT_STEPS
from megatron_infer.scheduler.step_costs import StepCosts

COSTS = StepCosts(plain=[(1, 1.0), (64, 10.0)])
"""A step takes a second, and a seventh for each token after the first."""


def asked(name, caller, *, num_prompt=4, max_new=200, priority=0):
    prompt = [sum(map(ord, name)) % 80 + 4 + i % 7 for i in range(num_prompt)]
    params = SamplingParams(priority=priority)
    request = make_request(name, prompt, max_new, stop_ids=frozenset(), params=params)
    request.caller = caller
    return request


def rows_of(world):
    return Counter(request.caller for request in world.scheduler.admitted_requests.live())


def make_world(**fields):
    world = World(**{"num_blocks": 400, "block_size": 8, "num_rows": 16, "max_tokens": 64, "chunked": True} | fields)
    world.scheduler.set_step_costs(COSTS)
    return world


@pytest.mark.security
@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_evened_out_by_as_few_evictions_as_that_takes(overlap):
    world = make_world(overlap=overlap)
    for i in range(40):
        world.add(asked(f"a{i}", 1))
    for _ in range(5):
        world.step()
    assert rows_of(world) == {1: 16}
    for i in range(40):
        world.add(asked(f"b{i}", 2))
    for _ in range(40):
        world.step()
    assert rows_of(world) == {1: 8, 2: 8}
    world.add(asked("c", 3))
    for _ in range(40):
        world.step()
    assert rows_of(world)[3] == 1 and sum(kind == "evict" for _, kind, _ in world.events) == 9
    oldest = world.scheduler.admitted_requests.live()[0]
    assert oldest.id == "a0" and not oldest.history.num_evictions


def test_room_made_for_a_long_prompt_is_not_taken_by_others():
    """It needs the blocks of ten of the sixteen rows."""
    world = make_world(num_blocks=100)
    for i in range(60):
        world.add(asked(f"a{i}", 1, max_new=380))
    for _ in range(40):
        world.step()
    late = asked("b", 2, num_prompt=480, max_new=5)
    world.add(late)
    for _ in range(36):
        world.step()
    assert late.finish_reason is not None
    assert sum(kind == "evict" for _, kind, _ in world.events) <= 14


def test_no_caller_evicts_more_urgent_requests_or_a_callers_only_row():
    world = make_world(num_rows=2)
    world.add(asked("a0", 1, priority=-1))
    world.add(asked("a1", 1, priority=-1))
    world.step()
    world.add(asked("b", 2))
    for _ in range(20):
        world.step()
    assert rows_of(world) == {1: 2}
    world.add(asked("c", 3, priority=-1))
    for _ in range(20):
        world.step()
    assert rows_of(world) == {1: 1, 3: 1}


def test_caller_who_comes_and_goes_finds_its_row_free():
    world = make_world(num_rows=8)
    for i in range(20):
        world.add(asked(f"a{i}", 1, max_new=370))
    world.step()
    for i in range(10):
        world.add(asked(f"b{i}", 2, max_new=2))
        for _ in range(6):
            world.step()
    assert sum(kind == "evict" for _, kind, _ in world.events) == 1 and rows_of(world) == {1: 7}
    for _ in range(PRESENT_STEPS):
        world.step()
    assert rows_of(world) == {1: 8}


def test_caller_whose_requests_ended_slows_no_prompt_of_others():
    world = make_world(max_tokens=256)
    world.add(asked("b", 2, max_new=2))
    while world.scheduler.admitted_requests.num_live or world.scheduler.queue.requests:
        world.step()
    world.add(asked("a", 1, num_prompt=600, max_new=2))
    assert [world.step().num_tokens for _ in range(3)] == [256, 256, 88]


def test_caller_of_a_token_now_and_then_costs_others_little():
    """The machine could compute 40 tokens in (1 + 39 / 7) seconds."""
    world = make_world(num_rows=40, num_blocks=3000)
    for i in range(200):
        world.add(asked(f"a{i}", 1, max_new=150))
    for _ in range(15):
        world.step()
    sizes = []
    for i in range(400):
        if i % 100 == 0:
            world.add(asked(f"b{i}", 2, max_new=1))
        sizes.append(world.step().num_tokens)
    seconds = sum(COSTS.seconds(size, verifying=False) for size in sizes)
    assert sum(sizes) / seconds > 0.7 * 40 / COSTS.seconds(40, verifying=False)
    assert sum(size < 10 for size in sizes) <= 4 * 4
    assert COSTS.seconds(max(sizes[1:]), verifying=False) <= FIRST, "it waits for a short step"


@pytest.mark.parametrize("was_idle", [False, True])
def test_steps_are_long_again_when_a_caller_has_been_away_for_long(was_idle):
    world = make_world(num_rows=40, num_blocks=3000)
    world.add(asked("b", 2, max_new=1))
    while was_idle and (world.scheduler.admitted_requests.num_live or world.scheduler.queue.requests):
        world.step()
    for i in range(200):
        world.add(asked(f"a{i}", 1, max_new=150))
    sizes = [world.step().num_tokens for _ in range(PRESENT_STEPS + 60)]
    assert COSTS.seconds(max(sizes[40:PRESENT_STEPS]), verifying=False) <= AWAY and max(sizes[-20:]) >= 40


def test_short_prompt_of_a_caller_who_waits_for_a_first_token_is_computed_at_once():
    world = make_world(num_rows=40)
    for caller in (1, 2, 3):
        for i in range(8):
            world.add(asked(f"{caller}.{i}", caller))
    for _ in range(20):
        world.step()
    world.add(late := asked("late", 4, num_prompt=9))
    plan = world.step()
    assert late.scheduled == 9 and COSTS.seconds(plan.num_tokens, verifying=False) <= FIRST
    assert {request.caller for request in plan.decode} == {1, 2, 3}


@pytest.mark.security
def test_many_prompts_of_a_caller_lengthen_a_step_for_the_first_of_them_alone():
    """Those that decode wait for that one, and for no more than their share of the others."""
    world = make_world()
    for i in range(8):
        world.add(asked(f"a{i}", 1))
    for _ in range(5):
        world.step()
    late = [asked(f"b{i}", 2, num_prompt=6) for i in range(6)]
    for one in late:
        world.add(one)
    plan = world.step()
    assert [one.scheduled for one in late] == [6, 0, 0, 0, 0, 0] and len(plan.decode) >= 1
    while any(one.finish_reason is None for one in late):
        world.step()


def test_prompts_of_callers_that_all_prefill_fill_their_steps():
    """Nobody waits for a short step: requests that are only scored never decode."""
    world = make_world(num_rows=32, max_tokens=64)
    for caller in (1, 2):
        for i in range(8):
            world.add(asked(f"{caller}.{i}", caller, num_prompt=20, max_new=1))
    assert min(world.step().num_tokens for _ in range(4)) > 40


def test_short_prompts_again_and_again_halve_the_rows_of_others_at_most():
    world = make_world(num_rows=40, num_blocks=3000)
    for i in range(32):
        world.add(asked(f"a{i}", 1))
    for _ in range(20):
        world.step()
    counts = []
    for i in range(40):
        world.add(asked(f"b{i}", 2, num_prompt=10, max_new=1))
        counts.append(sum(request.caller == 1 for request in world.step().decode))
    assert min(counts) >= 1 and sum(counts) >= 40 * 5 / 2


@pytest.mark.parametrize(("costs", "least"), [(COSTS, 5), (StepCosts(plain=[(1, 5.0), (64, 5.3), (2048, 30.0)]), 32)])
def test_caller_of_prompts_alone_leaves_the_others_their_half(costs, least):
    world = make_world(num_rows=40, num_blocks=3000, max_tokens=256)
    world.scheduler.set_step_costs(costs)
    for i in range(32):
        world.add(asked(f"a{i}", 1))
    for _ in range(20):
        world.step()
    for i in range(30):
        world.add(asked(f"b{i}", 2, num_prompt=300, max_new=1))
        plan = world.step()
        assert sum(request.caller == 1 for request in plan.decode) >= least, i


@pytest.mark.security
@pytest.mark.parametrize("overlap", [False, True])
def test_step_of_several_callers_is_little_longer_than_one_token(overlap):
    world = make_world(num_rows=40, overlap=overlap)
    for i in range(30):
        world.add(asked(f"a{i}", 1, num_prompt=20))
    for _ in range(15):
        world.step()
    assert world.step().num_tokens == 30, "one caller is not limited"
    world.add(asked("b", 2, num_prompt=10))
    for _ in range(3):
        world.step()
    took, begun = Counter(), {request: request.num_output for request in world.scheduler.running}
    for i in range(60):
        world.add(asked(f"late{i}", 1, num_prompt=30, max_new=1))
        plan = world.step()
        assert COSTS.seconds(plan.num_tokens, verifying=False) <= 1.5
        assert any(request.id == "b" for request in plan.decode)
        took.update(request.caller for request in plan.decode)
    alone = [request for request in begun if request.caller == 1]
    gained = [request.num_output - begun[request] for request in alone]
    assert min(gained) >= 60 * 2 // 30 - 2 and max(gained) - min(gained) <= 2, "a caller's rows take turns"
    assert took[2] == 60


def test_prompts_of_two_callers_share_a_step():
    world = make_world(max_tokens=32)
    for i in range(4):
        world.add(asked(f"a{i}", 1, num_prompt=300, max_new=4))
    world.step()
    world.add(asked("b", 2, num_prompt=40, max_new=4))
    for _ in range(4):
        world.step()
    (late,) = [request for request in world.scheduler.running if request.caller == 2]
    assert late.num_output >= 1


def test_no_request_waits_for_ever_among_callers_that_keep_coming():
    world = make_world(num_rows=4, num_blocks=60)
    mine = [asked(f"m{i}", 1, max_new=12) for i in range(6)]
    for one in mine:
        world.add(one)
    for i in range(500):
        world.add(asked(f"x{i}", 2 + i % 7, max_new=3))
        world.step()
        if all(one.finish_reason is not None for one in mine):
            return
    pytest.fail(str([one.num_output for one in mine]))


def test_what_is_decided_follows_from_commands_and_results_alone():
    """Requests have other addresses in the second run, so that no order of a set may count."""
    for seed in range(1, 16):
        first, second = (run_schedule(seed, Counter()).events for _ in range(2))
        assert first == second, seed
