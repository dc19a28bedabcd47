"""Random schedules against the oracle: whatever the scheduler decides, tokens are those of an engine without cache."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import restarted_world
from fake_device import VOCAB
from random_world import random_costs, random_leader, random_world

from megatron_infer.scheduler import draft_depth, policy
from megatron_infer.scheduler.draft_depth import DraftDepth
from megatron_infer.scheduler.request import FinishReason

NUM_SEEDS = 900
NUM_SHARDS = 6


def run_schedule(seed, totals):
    rng = random.Random(seed)
    world = random_world(rng, drafting=0.5)
    calm = rng.random() < 0.3  # nothing from outside: the scheduler's own decisions only
    stem = [rng.randrange(4, VOCAB) for _ in range(24)]
    prompts: list[list[int]] = []
    echo = rng.choice([0.3, 0.9])
    if echo > 0.5:
        world = random_world(rng, drafting=0.5, max_tokens=rng.randint(1, 6), caching=True, chunked=True)
    leaders = [random_leader(world, rng, stem, f"r{i}", prompts, echo=echo) for i in range(rng.randint(1, 14))]
    pending = [leader for leader in leaders if leader is not None][::-1]
    rate, unrest = rng.choice([0.15, 0.5, 1.0]), rng.choice([0.2, 1.0])
    while pending or world.scheduler.has_unfinished or world.in_flight_steps:
        while pending and rng.random() < rate:
            world.add(pending.pop())
        if not calm and rng.random() < unrest:
            disturb(world, rng, totals, pending)
        world.step()
        assert world.steps < 4000, f"seed {seed} does not end"
    world.drain()
    tally(world, totals)
    totals.update(overlap=world.overlap, schedules=1)
    if world.drafts is not None:
        stats = world.drafts.stats
        totals.update(drafted=stats.num_drafted, accepted=stats.num_accepted, verified=stats.num_verifications)
    computed = world.scheduler.stats.decode_tokens + world.scheduler.stats.prefill_tokens
    totals.update(world.account.counts)
    assert world.device.num_computed >= computed - world.max_tokens * totals["failed"]
    return world


def tally(world, totals):
    totals.update(world.scheduler.stats.as_dict())
    device = world.device
    totals.update(copies=device.num_copies, swaps_and_loads=device.num_swaps_and_loads)
    totals.update({"states copied": device.num_state_copies, "states captured": device.num_captures})
    if world.recurrent:
        totals["recurrent"] += 1
        totals["states swapped in"] += world.scheduler.stats.swapped_in
    totals[f"swapped {world.swap.mode.value}"] += world.scheduler.stats.swapped_in


def restart(world, rng, totals, pending):
    most = max(request.max_total for request in [*world.requests, *pending])
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = policy.blocks_needed(most - 1, block_size) + rng.choice([0, 1, rng.randint(0, 12)])
    likely = rng.choice([0.5, 1.0])
    tally(world, totals)
    restarted_world.restart(
        world,
        num_blocks=max(num_blocks, 1),
        block_size=block_size,
        num_rows=rng.randint(1, 8),
        slots=rng.choice([0, rng.randint(1, num_blocks + 1), 2 * num_blocks + 2]),
        version=world.version + (rng.random() < 0.3),
        keeps_kv=lambda: rng.random() < likely,
    )
    totals["restarts"] += 1


def disturb(world, rng, totals, pending):
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
        world.scheduler.set_costs(random_costs(rng))
    elif kind < 0.145 and unfinished:
        restart(world, rng, totals, pending)
        if rng.random() < 0.3:  # before readmitted requests are in a step, or in their first
            world.fail_step(rng.choice(["before", "early", "late"]))
            totals["failed"] += 1
        elif rng.random() < 0.5:
            disturb(world, rng, totals, pending)
    world.check()


@pytest.mark.parametrize(
    "seeds",
    [
        range(0, NUM_SEEDS, 3 * NUM_SHARDS),
        *(
            pytest.param(range(n, NUM_SEEDS, NUM_SHARDS), marks=pytest.mark.long if n < 3 else pytest.mark.slow)
            for n in range(NUM_SHARDS)
        ),
    ],
    ids=str,
)
def test_tokens_equal_the_oracle_in_random_schedules(seeds, monkeypatch):
    totals = Counter()
    monkeypatch.setattr(draft_depth, "IDLE_STEPS", 1)  # requests rest a step after nothing was drafted for them
    rests = DraftDepth.rests
    monkeypatch.setattr(DraftDepth, "rests", lambda *args: totals.update(rests=rests(*args)) or rests(*args))
    for seed in seeds:
        try:
            run_schedule(seed, totals)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    # The schedules must have exercised what they are meant to prove.
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
        "readmitted",
        "states_kept",
        "states_loaded",
        "states captured",
        "states copied",
        "drafted",
        "accepted",
        "verified",
        "rests",
    ):
        assert totals[what] > 10, f"{what}: {totals[what]} times only"
    assert totals["states swapped in"] and totals["late hits"] and totals["shared returns"], totals
    assert totals["swapped auto"] and totals["swapped swap"] and not totals["swapped recompute"], totals
    for status in ("waiting", "running", "running in flight", "paused"):
        assert totals[f"abort {status}"], f"abort {status}: {totals}"


if __name__ == "__main__":
    sums = Counter()
    for seed in range(NUM_SEEDS):
        try:
            run_schedule(seed, sums)
        except Exception:
            print("seed", seed)
            raise
    print(dict(sums))
