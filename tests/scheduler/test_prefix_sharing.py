"""What requests share through the prefix cache, and from which step on; collisions and failures spoil nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fake_device import continued, make_request, replace_digests
from test_fuzz import run_schedule
from world import World

from megatron_infer.scheduler.context.block_digest import digest_of, parent_of
from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.request import CacheUse, Status
from megatron_infer.scheduler.step_budget import StepBudget

NEVER = frozenset()
ALLOWED, LOGPROBS = CacheUse(), CacheUse(allowed=False)


def prompt(n, start=10):
    return [start + i % 50 for i in range(n)]


def endless(name, tokens, max_new, **kwargs):
    """Runs to its length: no stop ids."""
    return make_request(name, tokens, max_new, stop_ids=NEVER, **kwargs)


def chunks(plan):
    return [(chunk.request.id, chunk.start, chunk.n) for chunk in plan.prefill]


# ------------------------------------------------------------------ from which step on


@pytest.mark.parametrize("keep_cached", [False, True])
def test_requests_of_one_step_compute_their_common_prompt_once(keep_cached):
    world = World(caching=True, keep_cached=keep_cached)
    for name in "abc":
        world.add(endless(name, prompt(10), 4))
    assert chunks(world.step()) == [("a", 0, 10), ("b", 8, 2), ("c", 8, 2)]
    world.drain()


def test_request_shares_a_prompt_that_is_in_flight():
    world = World(caching=True, overlap=True)
    world.add(endless("a", prompt(10), 4))
    world.step()
    assert world.in_flight_steps
    world.add(endless("b", prompt(10), 4))
    assert chunks(world.step()) == [("b", 8, 2)]
    world.drain()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keep_cached", [False, True])
def test_rollouts_of_one_long_prompt_prefill_it_once(overlap, keep_cached):
    world = World(caching=True, keep_cached=keep_cached, overlap=overlap, chunked=True, max_tokens=7, num_blocks=64)
    for name in "abcdef":
        world.add(endless(name, prompt(30), 5))
    world.drain()
    assert world.device.num_prefilled == 30 + 5 * 2, "five of them computed the two tokens behind the last full block"


def test_prompt_of_whole_blocks_is_kept_once_although_its_last_block_is_computed_by_each():
    world = World(caching=True)
    requests = [world.add(endless(name, prompt(8), 4)) for name in "abc"]
    assert chunks(world.step()) == [("a", 0, 8), ("b", 4, 4), ("c", 4, 4)]
    assert len({request.lease.blocks[1] for request in requests}) == 1, "moved to one block at the commit"
    world.drain()


def test_prompt_logprobs_are_computed_from_the_start_and_others_share_what_they_compute():
    world = World(caching=True)
    world.add(endless("a", prompt(10), 2))
    world.add(endless("b", prompt(10), 2, cache=LOGPROBS))
    world.add(endless("c", prompt(10), 2))
    assert chunks(world.step()) == [("a", 0, 10), ("b", 0, 10), ("c", 8, 2)]
    world.drain()


# ------------------------------------------------------------------ late hits


def overtaken(cache=ALLOWED, **kwargs):
    """`b` prefills what `a` is about to draw, and gets a token only in every fifth step: `a` is ahead of it."""
    world = World(caching=True, chunked=True, num_blocks=64, max_tokens=2, **kwargs)
    world.add(endless("a", prompt(2), 60))
    world.step()
    late = world.add(endless("b", continued(prompt(2), 40, 0), 3, cache=cache))
    world.step()
    assert late.scheduled == 1 and late.history.cached_tokens == 0
    while late.status is Status.RUNNING:
        world.scheduler.budget = StepBudget(2 if world.steps % 5 == 0 else 1)
        world.step()
    world.drain()
    return world, late


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keep_cached", [False, True])
def test_prompt_takes_blocks_that_appear_while_it_is_computed(overlap, keep_cached):
    world, late = overtaken(overlap=overlap, keep_cached=keep_cached)
    stats = world.scheduler.stats
    assert world.account.counts["late hits"] >= 5 and late.history.cached_tokens > 30
    assert stats.prefix_hit_tokens == late.history.cached_tokens
    assert (stats.prefix_queries, stats.prefix_hits) == (2, 1), "one admission that found something, however often"
    assert stats.prefix_miss_tokens == world.device.num_prefilled == 2 + 42 - late.history.cached_tokens


def test_prompt_logprobs_forbid_late_hits_too():
    world, late = overtaken(cache=LOGPROBS)
    assert late.history.cached_tokens == 0 and world.device.num_prefilled == 2 + 42
    assert (world.scheduler.stats.prefix_queries, world.scheduler.stats.prefix_miss_tokens) == (1, 2)


def test_other_salt_forbids_late_hits_too():
    _, late = overtaken(cache=CacheUse(salt="x"))
    assert late.history.cached_tokens == 0


def test_block_that_a_late_hit_frees_goes_to_a_paused_request_and_not_to_a_new_one():
    world = World(caching=True, chunked=True, num_blocks=6, paused_limit=6, max_tokens=20)
    world.add(endless("a", prompt(2), 12))
    paused = world.add(endless("c", prompt(2, start=60), 12))
    world.step()
    world.scheduler.budget = StepBudget(3)
    world.add(endless("b", continued(prompt(2), 9, 0), 1))
    world.step()
    world.scheduler.budget = StepBudget(2)  # no room for the rest of b's prompt until a has drawn some of it
    while paused.scheduled < 4:
        world.step()
    late = world.add(endless("d", prompt(2), 3))
    world.scheduler.budget = StepBudget(20)
    assert [chunk[0] for chunk in chunks(world.step())] == ["b"]
    assert world.kinds("c")[-1] == "pause"
    assert world.account.counts["late hits"] == 1 and late.status is Status.WAITING
    world.step()
    assert paused.status is Status.RUNNING
    world.drain()


# ------------------------------------------------------------------ salt


@pytest.mark.parametrize("together", [False, True])
def test_only_equal_salts_share(together):
    world = World(caching=True, keep_cached=True)
    requests = []
    for name, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "y"), ("e", "")):
        requests.append(world.add(endless(name, prompt(10), 2, cache=CacheUse(salt=salt))))
        if not together:
            world.drain()
    world.drain()
    assert [request.history.cached_tokens for request in requests] == [0, 0, 8, 0, 8]


def test_generated_blocks_of_a_salted_request_are_found_under_its_salt_only():
    world = World(caching=True, keep_cached=True)
    cache = CacheUse(salt="x")
    first = world.add(endless("a", prompt(10), 8, cache=cache))
    world.drain()
    same = world.add(endless("b", first.tokens, 2, cache=cache))
    other = world.add(endless("c", first.tokens, 2))
    world.drain()
    assert (same.history.cached_tokens, other.history.cached_tokens) == (16, 0)


# ------------------------------------------------------------------ failure and reset


def test_request_that_a_commit_moved_to_a_block_of_a_failed_step_starts_over():
    world = World(num_blocks=5, caching=True, keep_cached=True, overlap=True, chunked=True, max_tokens=10)
    world.add(endless("before", prompt(5), 1))
    world.drain()
    first = world.add(endless("a", prompt(8), 4, cache=LOGPROBS))  # its first block is known: it publishes at commits
    other = world.add(endless("b", prompt(9), 4))
    assert chunks(world.step()) == [("a", 0, 8), ("b", 4, 2)]
    assert world.context.num_free_blocks == 0
    plan = world.fail_step("early")
    assert chunks(plan) == [("b", 6, 3)] and not plan.decode, "a paused: its next block is missing"
    assert world.account.counts["restarts beside the plan"] == 1
    assert [request.status for request in (first, other)] == [Status.WAITING, Status.WAITING]
    world.drain()


def test_after_a_failed_step_requests_outside_it_continue_and_publish_no_more():
    world = World(caching=True, keep_cached=True)
    inside, outside = (world.add(endless(name, prompt(9, ord(name)), 9)) for name in "ab")
    world.step()
    world.scheduler.budget = StepBudget(1)
    assert list(world.fail_step("late").decode) == [inside]
    world.scheduler.budget = StepBudget(64)
    assert inside.status is Status.WAITING and outside.status is Status.RUNNING
    world.drain()
    later = [world.add(endless(f"{request.id} again", request.tokens, 1)) for request in (inside, outside)]
    world.drain()
    assert [request.history.cached_tokens for request in later] == [16, 0]


@pytest.mark.parametrize("keep_cached", [False, True])
def test_reset_forgets_cached_held_and_planned_blocks(keep_cached):
    world = World(caching=True, keep_cached=keep_cached, overlap=True)
    world.add(endless("old", prompt(9, start=70), 1))
    world.drain()
    running = world.add(endless("a", prompt(10), 12))
    world.step()
    world.step()
    world.add(endless("b", prompt(10, start=30), 12))
    world.step()
    assert world.in_flight_steps
    assert world.scheduler.reset_prefix_cache() == 2 * keep_cached
    assert world.context.pool.contents() == {}
    again = [world.add(endless(f"{start}", prompt(12, start), 1)) for start in (70, 10, 30)]
    twin = world.add(endless("twin", prompt(12), 1))
    world.drain()
    assert [request.history.cached_tokens for request in again] == [0, 0, 0]
    assert twin.history.cached_tokens == 8, "requests after the reset share again"
    assert running.num_output == 12
    later = world.add(endless("later", running.tokens, 1))
    world.drain()
    assert later.history.cached_tokens == 8 * keep_cached, "what `a` drew was not published after the reset"


# ------------------------------------------------------------------ memory


def test_admission_whose_own_matches_were_the_free_blocks_waits_and_is_counted_once():
    world = World(num_blocks=4, caching=True, keep_cached=True, num_rows=4)
    world.add(endless("before", prompt(13), 1))
    world.drain()
    assert world.context.pool.num_cached == 3
    world.add(endless("holder", [90], 3))
    world.step()
    request = world.add(endless("a", prompt(13), 1))
    world.step()
    assert request.status is Status.WAITING and world.context.num_free_blocks == 3
    assert world.scheduler.stats.prefix_queries == 2
    world.drain()
    assert request.history.cached_tokens == 12 and world.scheduler.stats.prefix_queries == 3


@pytest.mark.parametrize("keep_cached", [False, True])
def test_no_block_outlives_the_block_it_follows(keep_cached):
    rng = random.Random(5)
    world = World(num_blocks=24, block_size=2, num_rows=6, max_tokens=16, caching=True, keep_cached=keep_cached)
    world.chunked, seen, depths, branching = True, set(), Counter(), 0
    for i in range(250):
        tokens = [rng.choice([10, 11]) for _ in range(rng.randint(3, 16))]  # four children to every block
        world.add(make_request(f"r{i}", tokens, rng.randint(1, 6)))
        for _ in range(rng.randint(0, 3)):
            world.step()
        contents = world.context.pool.contents()
        preimages = dict(contents.values())
        children = Counter(parent_of(preimage, 2) for preimage in preimages.values())
        branching += any(count > 1 for parent, count in children.items() if parent is not None)
        for digest, preimage in preimages.items():
            seen.add(digest)
            depth = 1
            while (parent := parent_of(preimage, 2)) is not None:
                assert parent in preimages, f"a block at depth {depth} above the end of its chain"
                preimage = preimages[parent]
                depth += 1
            depths[depth] += 1
    world.drain()
    assert len(seen) > 5 * 24 and branching > 50 and max(depths) >= 5, "the load proves nothing"


# ------------------------------------------------------------------ collisions


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_tokens_stay_right_when_digests_have_four_bits(monkeypatch, part):
    replace_digests(monkeypatch, lambda preimage: bytes([digest_of(preimage)[0] & 15]) * 16)
    collisions = Counter()
    publish, lookup = BlockPool.publish, BlockPool.lookup

    def counted_publish(self, block, digest, preimage):
        owner = publish(self, block, digest, preimage)
        collisions["publish"] += owner is None
        return owner

    def counted_lookup(self, digest, preimage):
        block = lookup(self, digest, preimage)
        collisions["lookup"] += block is None and digest in self._block_of
        collisions["hit"] += block is not None
        return block

    monkeypatch.setattr(BlockPool, "publish", counted_publish)
    monkeypatch.setattr(BlockPool, "lookup", counted_lookup)
    for seed in range(10_000 + part, 10_201, 3):
        try:
            run_schedule(seed, Counter())
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert collisions["publish"] > 150 and collisions["lookup"] > 150 and collisions["hit"] > 150, collisions
