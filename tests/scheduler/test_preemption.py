"""When blocks run out: which request is preempted, how it comes back, and that every request finishes."""

from __future__ import annotations

import pytest
from fake_device import make_group, make_request
from world import Swap, World

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.request import Status, VersionSpan

RECOMPUTE, SWAP, AUTO = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP, PreemptionMode.AUTO
NEVER = frozenset()
SWAPPING = Swap(slots=64, mode=SWAP)


def endless(name, num_prompt, max_new, start=10, **kwargs):
    return make_request(name, [start + i % 50 for i in range(num_prompt)], max_new, stop_ids=NEVER, **kwargs)


def crowd(num_prompt=6, max_new=9, names="abc", **kwargs):
    """Requests that cannot all grow to their end at once."""
    world = World(**({"num_blocks": 16, "block_size": 2, "paused_limit": 0, "max_tokens": 32} | kwargs))
    for name in names:
        world.add(endless(name, num_prompt, max_new, start=ord(name)))
    return world


def until(world, condition):
    while not condition():
        world.step()
        assert world.scheduler.has_unfinished, "the condition never held"


def evicted(world):
    return [name for name, kind, _ in world.events if kind == "evict"]


def hows(world):
    return {payload["how"] for _, kind, payload in world.events if kind == "evict"}


# ------------------------------------------------------------------ which request


def test_price_is_seconds_per_block_gained_and_rises_with_evictions_and_with_the_pause():
    base = {"num_gained": 4, "num_evictions": 0, "steps_paused": 0}
    assert policy.eviction_price(0.8, **base) == pytest.approx(0.2)
    assert policy.eviction_price(0.8, **(base | {"num_evictions": 1})) == pytest.approx(0.4)
    assert policy.eviction_price(0.8, **(base | {"steps_paused": policy.PATIENCE_STEPS})) == pytest.approx(0.4)
    assert CostModel(prefill_s_per_token=2.0).recompute_s(3) == 6.0
    assert CostModel(copy_s_per_block=2.0).swap_s(3) == 12.0


VICTIMS = {
    # b's last block is nearly empty, c's and d's are full: b loses the fewest tokens for each of its blocks
    "costs least for a freed block": (12, [("a", 8, 20), ("b", 9, 20), ("c", 12, 20), ("d", 16, 20)], {}, ["b"]),
    # b and c lose three tokens a block, but one block is enough, and b loses three tokens in all
    "costs least for the blocks that are needed": (6, [("a", 8, 6), ("b", 3, 6), ("c", 9, 6)], {}, ["b"]),
    "is the youngest of equal prices": (6, [("a", 8, 7), ("b", 8, 7), ("c", 8, 7)], {}, ["c"]),
    "was not evicted before": (6, [("a", 8, 7), ("b", 8, 7), ("c", 8, 7)], {"c": 1}, ["b"]),
}
"""By what the victim is: blocks, requests (name, prompt, new), how often they were evicted, and the victim."""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("why", VICTIMS)
def test_the_victim_is_the_request_that(why, overlap):
    num_blocks, requests, evictions, expected = VICTIMS[why]
    world = World(num_blocks=num_blocks, block_size=4, paused_limit=0, max_tokens=64, overlap=overlap)
    for place, (name, num_prompt, max_new) in enumerate(requests):
        request = world.add(endless(name, num_prompt, max_new, start=10 * (place + 1)))
        request.history.num_evictions = evictions.get(name, 0)
    until(world, lambda: evicted(world))
    assert evicted(world) == expected
    world.drain()


def test_a_request_that_would_free_nothing_is_no_victim():
    """g#0 and g#1 share all their blocks when they need their next one: evicting either would free none."""
    world = World(num_blocks=7, block_size=4, paused_limit=0, max_tokens=64)
    world.add(endless("a", 8, 4, start=60))
    world.add(make_group("g", [10 + i for i in range(12)], 9, 2, stop_ids=NEVER))
    world.add(endless("z", 8, 2, start=80))
    world.step()
    assert world.context.num_free_blocks == 0
    world.step()
    assert evicted(world) == ["z"]
    world.drain()


def test_victim_with_room_of_its_own_stays_paused_until_it_is_idle():
    """a and b need a block, c does not and is the cheapest: it must not run in between."""
    world = World(num_blocks=6, block_size=4, paused_limit=0, max_tokens=64, overlap=True)
    world.add(endless("a", 8, 6))
    world.add(endless("b", 8, 6, start=30))
    world.add(endless("c", 5, 6, start=40))
    world.step()
    world.step()
    assert [request.id for request in world.scheduler.paused] == list("abc")
    world.step()
    assert world.kinds("c") == ["admit", "pause", "evict"] and world.scheduler.num_running == 2
    world.drain()


def test_no_more_are_evicted_than_the_paused_limit_asks_for():
    world = World(num_blocks=4, block_size=4, paused_limit=2, max_tokens=64)
    for index, name in enumerate("abcd"):
        world.add(endless(name, 4, 5, start=10 * index))
    world.step()
    world.step()
    assert evicted(world) == ["d"]
    assert [request.id for request in world.scheduler.paused] == ["b", "c"]
    world.drain()


def test_one_victim_in_flight_is_enough_where_its_blocks_are():
    """a needs a block, and d has two: c goes on."""
    world = World(num_blocks=6, block_size=4, paused_limit=0, max_tokens=64, overlap=True)
    world.add(endless("a", 8, 6))
    world.add(endless("c", 5, 3, start=30))
    world.add(endless("d", 5, 3, start=40))
    until(world, lambda: evicted(world))
    assert evicted(world) == ["d"] and "pause" not in world.kinds("c")
    world.drain()


def test_price_counts_recompute_where_the_host_has_no_room():
    """c is the younger, but too large for the host: to get it back would mean to compute it."""
    costs = CostModel(prefill_s_per_token=1.0, copy_s_per_block=1e-9)
    world = World(num_blocks=7, block_size=4, paused_limit=0, max_tokens=64, swap=Swap(slots=2, mode=AUTO, costs=costs))
    world.add(endless("a", 8, 6))
    world.add(endless("b", 8, 6, start=30))
    world.add(endless("c", 12, 6, start=40))
    world.step()
    world.step()
    assert evicted(world) == ["b"] and hows(world) == {"swap"}
    world.drain()


def test_victim_that_is_no_longer_needed_is_not_evicted():
    """The oldest finishes in the very step after which the victim would have gone."""
    world = World(num_blocks=6, block_size=4, paused_limit=0, max_tokens=64, overlap=True)
    world.add(endless("a", 4, 4))
    world.add(endless("b", 8, 9, start=30))
    world.add(endless("c", 8, 9, start=40))
    world.step()
    world.step()
    b = world.requests[1]
    assert world.scheduler.paused, "no request lacked a block"
    world.scheduler.abort(world.requests[0])
    world.drain()
    assert b.history.num_evictions == 0


def test_a_request_about_to_end_spares_others_an_eviction():
    """With overlap a's last token is in flight when b needs a block: b waits one step instead of evicting c."""
    world = World(num_blocks=6, block_size=4, paused_limit=0, max_tokens=64, overlap=True)
    world.add(endless("a", 6, 2))
    world.add(endless("b", 7, 3, start=30))
    world.add(endless("c", 5, 3, start=40))
    world.drain()
    assert evicted(world) == [] and world.scheduler.stats.paused == 1


# ------------------------------------------------------------------ how it comes back


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_swapped_request_continues_where_it_was(overlap, caching):
    world = crowd(overlap=overlap, caching=caching, swap=SWAPPING)
    world.drain()
    stats = world.scheduler.stats
    assert hows(world) == {"swap"} and stats.swapped_in == stats.swapped_out == stats.evicted > 0
    assert world.device.num_computed == 3 * (6 + 8), "something was computed twice"
    assert stats.recomputed_tokens == 0
    assert stats.swap_blocks_out + stats.swap_blocks_in == world.device.num_swaps_and_loads > 0
    assert sum(request.history.num_swaps for request in world.requests) == stats.swapped_in


def test_auto_takes_the_cheaper_way_by_the_latest_costs():
    cheap, dear = CostModel(copy_s_per_block=1e-9), CostModel(copy_s_per_block=1e9)
    world = crowd(swap=Swap(slots=64, mode=AUTO, costs=cheap))
    world.drain()
    assert hows(world) == {"swap"}
    world = crowd(swap=Swap(slots=64, mode=AUTO, costs=dear))
    world.drain()
    assert hows(world) == {"recompute"} and not world.device.num_swaps_and_loads
    world = crowd(swap=Swap(slots=64, mode=AUTO, costs=dear))
    world.scheduler.set_costs(cheap)
    world.drain()
    assert hows(world) == {"swap"}


@pytest.mark.parametrize("mode", [SWAP, AUTO])
def test_full_host_means_recompute(mode):
    world = crowd(swap=Swap(slots=2, mode=mode, costs=CostModel(copy_s_per_block=1e-9)))
    world.drain()
    assert hows(world) == {"recompute"}
    assert world.scheduler.stats.recomputed_tokens == sum(p["num_tokens"] for _, k, p in world.events if k == "evict")


def swapped_world(**kwargs):
    """A world in which one request is on the host, its copies done."""
    world = crowd(swap=SWAPPING, **kwargs)
    until(world, lambda: world.scheduler.preemption.swapped)
    (request,) = world.scheduler.preemption.swapped
    return world, request


def test_swap_in_leaves_the_same_headroom_as_an_admission(monkeypatch):
    world, request = swapped_world()
    monkeypatch.setattr(policy, "admission_headroom", lambda num_live, num_blocks: num_blocks if num_live else 0)
    world.scheduler.abort(world.scheduler.running[-1])  # there would be room for it
    while world.scheduler.num_running:
        assert request in world.scheduler.preemption.swapped
        world.step()
    world.drain()
    assert request.history.num_swaps == 1


def test_swapped_request_keeps_its_kv_over_new_weights_and_publishes_no_more():
    world, request = swapped_world(caching=True, keep_cached=True)
    num_drawn = request.num_output
    world.new_weights(keep=True)
    until(world, lambda: request.lease is not None)
    assert not request.lease.publishes and request.history.num_swaps == 1
    assert request.history.spans == [VersionSpan(0, 0, 0, 0), VersionSpan(num_drawn, 1, 0, 1)]
    world.drain()


def test_requeue_all_drops_what_is_on_the_host():
    world, request = swapped_world()
    world.new_weights(keep=False)
    world.check()
    assert world.context.swap.num_free == 64 and request.status is Status.WAITING
    world.drain()
    assert request.history.num_swaps == 0


@pytest.mark.parametrize("moment", ["way out", "way back"])
def test_copies_lost_with_a_failed_step_are_not_counted_on(moment):
    world = crowd(swap=SWAPPING)
    stats = world.scheduler.stats
    while True:
        before = stats.swapped_out if moment == "way out" else stats.swapped_in
        plan = world.scheduler.schedule()
        if (stats.swapped_out if moment == "way out" else stats.swapped_in) > before:
            break
        tokens = world.device.run(plan, world.version)
        world.in_flight_steps = [(plan, tokens, world.device.origins)]
        world.commit_previous()
    assert plan.copies_before, "nothing was to be copied"
    world.context.take_table_writes()
    world.device.host = [None] * 64
    live = world._scheduled()
    world.account.counts["never computed"] += sum(chunk.n for chunk in plan.prefill)
    world.scheduler.cancel(plan)
    world.account.restart(live)
    world.check()
    assert world.context.swap.num_free == 64
    world.drain()


def test_copies_wait_for_a_step_with_tokens():
    """A plan without tokens runs nothing: what it wants moved is moved before the next step that does run."""
    world = crowd(swap=SWAPPING)
    until(world, lambda: world.scheduler.num_running == 3)
    assert world.context.take_copies() == ()
    world.scheduler.preemption.evict(world.scheduler.running[-1])
    assert len(world.context._copies) > 0
    world.drain()


# ------------------------------------------------------------------ no request starves


@pytest.mark.few
@pytest.mark.parametrize("demand", [2, 4, 8])
@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limit", [0, 12])
def test_every_request_finishes_however_small_the_pool_is(demand, mode, overlap, limit):
    """Demand: blocks of all requests at their end, in multiples of the pool. `drain` compares tokens with the oracle
    and wants rows, blocks and host slots back."""
    num_blocks, size = 48, 4
    world = World(
        num_blocks=num_blocks,
        block_size=size,
        num_rows=64,
        max_tokens=64,
        chunked=True,
        paused_limit=limit,
        caching=demand == 4,
        keep_cached=demand == 4,
        overlap=overlap,
        swap=Swap(slots=24, mode=mode, costs=CostModel(copy_s_per_block=0.8e-4)),
    )
    asked = index = 0
    while asked < demand * num_blocks:
        num_prompt, max_new = 5 + 7 * index % 19, 8 + 11 * index % 31
        world.add(endless(f"r{index}", num_prompt, max_new, start=index))
        asked += policy.blocks_needed(num_prompt + max_new - 1, size)
        index += 1
    world.drain()
    stats = world.scheduler.stats
    assert stats.evicted == sum(request.history.num_evictions for request in world.requests) == len(evicted(world))
    assert stats.evicted > 0 and stats.admitted == index + stats.evicted
    assert stats.swapped_in == stats.swapped_out and stats.swapped_out <= stats.evicted
    assert bool(stats.swapped_out) == (mode is not RECOMPUTE)
    assert stats.swap_blocks_out + stats.swap_blocks_in == world.device.num_swaps_and_loads
    order = [int(name[1:]) for name, kind, _ in world.events if kind == "finish"]
    overtaken = [sum(later > name for later in order[:place]) for place, name in enumerate(order)]
    assert max(overtaken) <= 20, f"{max(overtaken)} younger requests finished before one"


def test_oldest_request_runs_in_every_step_from_its_admission_to_its_end():
    world = crowd(num_prompt=4, max_new=20, names="abcdefgh", num_blocks=20)
    oldest = world.requests[0]
    world.step()
    for _ in range(19):
        assert oldest in world.step().decode
    assert oldest.finish_reason is not None
    world.drain()


def test_a_pause_ended_by_a_requeue_does_not_make_the_next_one_dearer():
    world = crowd(paused_limit=30)
    until(world, lambda: world.scheduler.num_running == 3)
    since = world.scheduler.preemption._paused_since
    since.update((request, -1000) for request in world.scheduler.running)  # as a requeue in between leaves them
    until(world, lambda: world.scheduler.paused)
    paused = world.scheduler.paused
    assert [world.scheduler.preemption._paused_since[request] >= 0 for request in paused] == [True] * len(paused)
    world.drain()
