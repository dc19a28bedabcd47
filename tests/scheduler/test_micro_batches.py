"""Micro-batches in flight: whatever the pipeline's depth, tokens are the oracle's, and every stage gets its share."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_device import make_request
from pipelined_world import PipelinedWorld, pipelined
from random_world import random_leader, random_world
from world import Swap

from megatron_infer.scheduler import policy
from megatron_infer.scheduler.request import FinishReason

MIN_SHARE = policy.MIN_SHARE_TOKENS
NUM_SEEDS = 600
NUM_SHARDS = 8


def endless(name, length, max_new, start=10):
    return make_request(name, [start + i for i in range(length)], max_new, stop_ids=frozenset())


def run_schedule(seed, totals):
    rng = random.Random(seed)
    world = pipelined(random_world(rng), rng)
    stem = [rng.randrange(4, 97) for _ in range(24)]
    prompts: list[list[int]] = []
    leaders = [random_leader(world, rng, stem, f"r{i}", prompts) for i in range(rng.randint(1, 16))]
    pending = [leader for leader in leaders if leader is not None][::-1]
    rate, unrest = rng.choice([0.15, 0.5, 1.0]), rng.choice([0.0, 0.2, 1.0])
    while pending or world.scheduler.has_unfinished or world.in_flight_steps:
        while pending and rng.random() < rate:
            world.add(pending.pop())
        if rng.random() < unrest:
            disturb(world, rng, totals)
        world.step()
        totals[f"in flight {len(world.in_flight_steps)}"] += 1
    world.drain()
    totals.update(world.scheduler.stats.as_dict())
    totals.update({f"micro-batches {world.num_micro_batches}": 1, "swapped": world.scheduler.stats.swapped_in})


def disturb(world, rng, totals):
    kind = rng.random()
    unfinished = [request for request in world.requests if request.finish_reason is None]
    if kind < 0.04 and unfinished:
        request = rng.choice(unfinished)
        totals[f"abort{' in flight' * bool(request.in_flight)}"] += 1
        world.scheduler.abort(request)
    elif kind < 0.06 and world.in_flight_steps:
        world.fail_flights()
        totals["failed"] += 1
    elif kind < 0.07:
        world.recompute()
        totals["recompute"] += 1
    elif kind < 0.09:
        world.new_weights(keep=kind < 0.08, version=rng.randint(0, world.version + 1))
        totals["new weights"] += 1
    elif kind < 0.10:
        world.break_next = True
    elif kind < 0.11:
        world.scheduler.reset_prefix_cache()
    world.check()


@pytest.mark.parametrize(
    "seeds",
    [
        range(0, NUM_SEEDS, 2 * NUM_SHARDS),
        *(
            pytest.param(range(n, NUM_SEEDS, NUM_SHARDS), marks=pytest.mark.long if n < 3 else pytest.mark.slow)
            for n in range(NUM_SHARDS)
        ),
    ],
    ids=str,
)
def test_tokens_equal_the_oracle_at_any_depth(seeds):
    totals = Counter()
    for seed in seeds:
        try:
            run_schedule(seed, totals)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    for what in (
        "paused", "evicted", "forked", "prefix_hits", "failed", "recompute", "new weights", "abort", "abort in flight",
        "states_kept", "states_loaded", "swapped", "in flight 1", "in flight 2", "in flight 3", "in flight 4",
    ):  # fmt: skip
        assert totals[what] > 2, f"{what}: {totals[what]} times only"


@pytest.mark.parametrize("num_micro_batches", [2, 3, 4])
@pytest.mark.parametrize("count", [4, 7, 16])
def test_every_decoding_request_is_planned_once_in_as_many_steps_as_stages(num_micro_batches, count):
    world = PipelinedWorld(num_rows=16, num_blocks=256, num_micro_batches=num_micro_batches)
    requests = [world.add(endless(f"r{i}", 3, 40, start=10 + i)) for i in range(count)]
    while len(world.scheduler.admitted_requests.decoding) < count or any(r.num_output < 3 for r in requests):
        world.step()
    for _ in range(4 * num_micro_batches):  # until the micro-batches have evened out
        world.step()
    for _ in range(4):
        planned = Counter(request for _ in range(num_micro_batches) for request in world.step().decode)
        assert set(planned.values()) == {1} and len(planned) == count


def test_decoding_requests_are_divided_evenly():
    world = PipelinedWorld(num_rows=16, num_blocks=256, num_micro_batches=4)
    for i in range(14):
        world.add(endless(f"r{i}", 3, 60, start=10 + i))
    for _ in range(12):
        world.step()
    sizes = [len(world.step().decode) for _ in range(4)]
    assert sorted(sizes) == [3, 3, 4, 4], sizes


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline():
    """No stage waits for the others while a single long prompt is computed."""
    world = PipelinedWorld(num_blocks=256, max_tokens=50, chunked=True, num_micro_batches=3)
    world.add(endless("long", 400, 4, start=4))
    plans = [world.step() for _ in range(4)]
    assert [plan.num_tokens for plan in plans] == [50, 50, 50, 50]
    assert len(world.in_flight_steps) == 2
    world.drain()


def test_prompts_that_arrive_together_are_divided_over_all_micro_batches():
    world = PipelinedWorld(num_rows=16, num_blocks=512, max_tokens=1000, num_micro_batches=2, chunked=True)
    for i in range(8):
        world.add(endless(f"r{i}", 100, 4, start=i))
    assert [world.step().num_tokens for _ in range(2)] == [200, 200]
    assert all(MIN_SHARE <= world.step().num_tokens <= 200 for _ in range(3))
    world.drain()


def test_without_chunking_a_prompt_beyond_its_share_is_computed_whole():
    world = PipelinedWorld(num_rows=4, num_blocks=512, max_tokens=300, num_micro_batches=2)
    world.add(endless("a", 280, 4))
    world.add(endless("b", 90, 4, start=40))
    assert [world.step().num_tokens for _ in range(2)] == [280, 90]
    world.drain()


def test_small_prompts_are_not_split():
    world = PipelinedWorld(num_rows=8, num_blocks=128, max_tokens=300, num_micro_batches=4, chunked=True)
    for i in range(4):
        world.add(endless(f"r{i}", 15, 4, start=i))
    assert world.step().num_tokens == 60 <= MIN_SHARE
    world.drain()


def test_a_failed_step_cancels_the_later_ones_and_ends_its_own_requests_only():
    world = PipelinedWorld(num_rows=8, num_blocks=128, num_micro_batches=3, caching=True, swap=Swap())
    requests = [world.add(endless(f"r{i}", 6, 12, start=10 * i)) for i in range(6)]
    for _ in range(8):
        world.step()
    assert len(world.in_flight_steps) == 2
    failed = set(world.in_flight_steps[0][0].sampled)
    world.fail_flights()
    assert all((r.finish_reason is FinishReason.ERROR) == (r in failed) for r in requests)
    world.drain()
    assert all(r.num_output == 12 for r in requests if r not in failed)
