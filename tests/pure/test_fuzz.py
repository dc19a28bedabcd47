"""Random schedules against the oracle: whatever the scheduler does, tokens are those of an engine without a cache."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_device import VOCAB, random_costs, random_leader, random_world

from megatron_infer.schedule.request import FinishReason

NUM_SEEDS = 800
NUM_SHARDS = 4


def run_schedule(seed, totals):
    rng = random.Random(seed)
    world = random_world(rng)
    calm = rng.random() < 0.3  # no disturbance from outside: the scheduler's own decisions only
    stem = [rng.randrange(4, VOCAB) for _ in range(24)]
    prompts: list[list[int]] = []
    leaders = [random_leader(world, rng, stem, f"r{i}", prompts) for i in range(rng.randint(1, 14))]
    pending = [leader for leader in leaders if leader is not None][::-1]
    rate = rng.choice([0.15, 0.5, 1.0])
    while pending or world.scheduler.has_unfinished or world.previous:
        while pending and rng.random() < rate:
            world.add(pending.pop())
        if not calm:
            disturb(world, rng, totals)
        world.step()
        assert world.steps < 4000, f"seed {seed} does not end"
    world.drain()
    totals.update(world.scheduler.stats.as_dict())
    totals.update(overlap=world.overlap, copies=world.device.num_copies, moves=world.device.num_moves, schedules=1)
    totals[f"swapped {world.swap.mode.value}"] += world.scheduler.stats.swapped_in
    computed = world.scheduler.stats.decode_tokens + world.scheduler.stats.prefill_tokens
    totals.update(world.books.counts)
    assert world.device.num_computed >= computed - world.max_tokens * totals["failed"]
    return world


def disturb(world, rng, totals):
    kind = rng.random()
    unfinished = [request for request in world.requests if request.finish_reason is None]
    if kind < 0.03 and unfinished:
        request = rng.choice(world.scheduler.paused or unfinished)
        totals[f"abort {request.status.value}{' in flight' * bool(request.in_flight)}"] += 1
        world.scheduler.abort(request)
    elif kind < 0.05 and unfinished:
        world.scheduler.finish(rng.choice(unfinished), FinishReason.STOP, "a stop string")
        totals["stop strings"] += 1
    elif kind < 0.06:
        world.recompute()
        totals["recompute"] += 1
    elif kind < 0.08:
        world.new_weights(keep=kind < 0.07, version=rng.randint(0, world.version + 1))
        totals["new weights"] += 1
    elif kind < 0.09:
        world.fail_step(rng.choice(["before", "early", "late"]))
        totals["failed"] += 1
    elif kind < 0.10:
        world.break_next = True
    elif kind < 0.11:
        dropped, free = world.scheduler.reset_prefix_cache(), world.context.num_free_blocks
        assert world.context.pool.num_cached == 0 and world.context.num_free_blocks == free
        totals.update(resets=1, dropped=dropped)
    elif kind < 0.13:
        world.scheduler.pressure.costs = random_costs(rng)
    world.check()


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_tokens_equal_the_oracle_in_random_schedules(shard):
    totals = Counter()
    for seed in range(shard, NUM_SEEDS, NUM_SHARDS):
        try:
            run_schedule(seed, totals)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    # The schedules must have visited what they are meant to prove.
    for what in (
        "paused",
        "resumed",
        "evicted",
        "recomputed_tokens",
        "forked",
        "copies",
        "prefix_hits",
        "failed",
        "recompute",
        "new weights",
        "dropped",
    ):
        assert totals[what] > 20, f"{what}: {totals[what]} times only"
    assert totals["swapped auto"] > 10 and totals["swapped swap"] > 10 and not totals["swapped recompute"], totals
    for status in ("waiting", "running", "running in flight", "paused"):
        assert totals[f"abort {status}"] > 3, f"abort {status}: {totals}"


if __name__ == "__main__":
    sums = Counter()
    for seed in range(NUM_SEEDS):
        try:
            run_schedule(seed, sums)
        except Exception:
            print("seed", seed)
            raise
    print(dict(sums))
