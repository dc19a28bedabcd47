"""Recurrent states in the prefix cache: when one is kept, when one is loaded, and when it is dropped."""

from __future__ import annotations

import pytest
from fake_device import continued, make_request, replace_digests
from world import World

from megatron_infer.scheduler.context.block_digest import DIGEST_SIZE, digest_of
from megatron_infer.scheduler.context.build_context import build_context
from megatron_infer.scheduler.context.cached_state_slots import CachedStateSlots
from megatron_infer.scheduler.request import CacheUse

PROMPT = list(range(10, 40))
ROOT = b"root"


def world(**fields):
    settings = {"block_size": 4, "num_blocks": 64, "caching": True, "keep_cached": True, "num_cached_states": 8}
    return World(**(settings | fields))


def make_context():
    return build_context(
        num_blocks=16,
        block_size=4,
        num_rows=4,
        max_blocks_per_row=8,
        prefix_caching=True,
        recurrent=True,
        num_cached_states=4,
    )


def finish(world, name, tokens, max_new=3, **kwargs):
    request = world.add(make_request(name, tokens, max_new, stop_ids=frozenset(), **kwargs))
    world.drain()
    return request


def finish_beside(world, name, tokens, max_new=1):
    """Others run until it is finished, and no longer."""
    request = world.add(make_request(name, tokens, max_new, stop_ids=frozenset()))
    while request.finish_reason is None:
        world.step()
    return request


def test_equal_prompt_continues_from_the_last_block_boundary():
    w = world()
    finish(w, "first", PROMPT)
    again = finish(w, "second", PROMPT)
    assert again.history.cached_tokens == 28, "29 tokens may be found, 28 are whole blocks"
    assert w.scheduler.stats.states_loaded == 1


def test_state_is_kept_where_prompts_begin_to_differ():
    """The second prompt finds blocks without a state behind them; the third continues from the one the second left."""
    w = world()
    head = PROMPT[:17]
    finish(w, "a", head + [50] * 10)
    assert finish(w, "b", head + [51] * 10).history.cached_tokens == 0
    assert finish(w, "c", head + [52] * 10).history.cached_tokens == 16


def test_equal_prompts_that_arrive_together_are_computed_once():
    w = world(num_rows=8)
    for i in range(6):
        w.add(make_request(f"r{i}", PROMPT, 4, stop_ids=frozenset()))
    w.drain()
    assert w.device.num_prefilled == len(PROMPT) + 5 * 2, "one whole, the others behind position 28"


def test_answer_is_found_by_the_next_turn():
    w = world()
    first = finish(w, "turn 1", PROMPT, max_new=12)
    second = finish(w, "turn 2", [*first.tokens, 60, 61, 62])
    assert second.history.cached_tokens == 40, "of 42 tokens, 41 of them computed"


def test_states_of_answers_never_evict_those_of_prompts():
    w = world(num_cached_states=2, num_rows=2)
    finish(w, "a", PROMPT)
    finish(w, "b", PROMPT[::-1])
    finish(w, "long", [70, 71], max_new=40)
    assert finish(w, "a again", PROMPT).history.cached_tokens == 28
    assert finish(w, "b again", PROMPT[::-1]).history.cached_tokens == 28


def test_state_of_an_answer_is_the_first_to_be_evicted():
    w = world(num_cached_states=2)
    finish(w, "a", PROMPT)
    finish(w, "long", [70, 71], max_new=20)
    assert w.context.states.slots.num_cached == 2
    finish(w, "b", PROMPT[::-1])
    assert finish(w, "a again", PROMPT).history.cached_tokens == 28


def test_newer_prompts_evict_the_least_recently_used_state():
    w = world(num_cached_states=2)
    first, second, third = PROMPT, PROMPT[::-1], [x + 40 for x in PROMPT]
    for name, prompt in (("a", first), ("b", second), ("a again", first), ("c", third)):
        finish(w, name, prompt)
    assert [finish(w, f"last {i}", p).history.cached_tokens for i, p in enumerate((first, third, second))] == [
        28,
        28,
        0,
    ]


def test_earlier_state_of_an_answer_stays_once_it_was_loaded():
    w = world()
    answer = continued([70, 71], 40, 0)
    w.add(make_request("long", [70, 71], 40, stop_ids=frozenset()))
    while not w.context.states.slots.num_cached:
        w.step()
    assert finish_beside(w, "turn", answer[:9]).history.cached_tokens == 4
    w.drain()
    assert finish(w, "late", answer[:6]).history.cached_tokens == 4, "the one that the first turn loaded"


def test_one_answer_keeps_one_state():
    w = world(num_cached_states=8)
    finish(w, "long", [70, 71], max_new=60)
    assert w.context.states.slots.num_cached == 1


def test_late_state_lets_a_prompt_in_progress_skip_tokens():
    w = world(chunked=True, max_tokens=9)
    long = list(range(100, 160))
    w.add(make_request("a", long, 2, stop_ids=frozenset()))
    w.step()
    b = w.add(make_request("b", long, 2, stop_ids=frozenset()))
    w.drain()
    assert b.history.cached_tokens > 0 and w.scheduler.stats.states_loaded >= 1


def test_no_request_waits_for_a_state_that_is_replaced_in_every_step():
    """A decoding request keeps one state: with blocks of one token that is another one after each step."""
    w = world(block_size=1, num_blocks=300)
    start = [70, 71]
    w.add(make_request("decodes", start, 60, stop_ids=frozenset()))
    for _ in range(6):
        w.step()
    follower = w.add(make_request("follows", continued(start, 58, 0), 3, stop_ids=frozenset()))
    for _ in range(2):
        w.step()
    assert follower.lease is not None, "it waits as long as the other decodes"
    w.drain()


def test_a_request_that_gains_much_by_waiting_waits_again():
    """Each prompt is the one before and more: the last waits for the state of both of the others in turn."""
    w = world()
    for n in (21, 29, 37):
        w.add(make_request(f"of {n}", list(range(10, 10 + n)), 2, stop_ids=frozenset()))
    w.drain()
    assert w.device.num_prefilled == 21 + (29 - 20) + (37 - 28)


def test_a_chain_of_longer_and_longer_prompts_is_not_computed_one_per_step():
    w = world(num_blocks=2000, num_rows=40, max_tokens=4000, num_cached_states=40)
    for n in range(1, 33):
        w.add(make_request(f"of {n}", list(range(10, 11 + 4 * n)), 1, stop_ids=frozenset()))
    w.drain()
    assert w.steps <= 10, "32 in turn would be 32 steps"


@pytest.mark.parametrize("max_tokens", [4, 7, 14, 27, 28, 29])
def test_state_is_kept_wherever_chunks_end(max_tokens):
    """Behind a chunk it is copied, inside it is captured: one of the two, and the same state."""
    w = world(chunked=True, max_tokens=max_tokens)
    finish(w, "first", PROMPT, max_new=1)
    assert w.device.num_state_copies + w.device.num_captures == w.scheduler.stats.states_kept == 1
    assert w.device.num_state_copies == (28 % max_tokens == 0)
    assert finish(w, "second", PROMPT).history.cached_tokens == 28
    assert w.scheduler.stats.states_loaded == 1


def test_prompt_in_chunks_that_finds_blocks_without_states_is_hashed_once(monkeypatch):
    """Every chunk looks for a state further on: the work of a step must not grow with the prompt's length."""
    long = list(range(1000, 1400))
    w = world(chunked=True, max_tokens=8, num_blocks=300)
    finish(w, "first", long)
    w.context.states.forget_all()
    num_hashed = 0

    def counted(preimage):
        nonlocal num_hashed
        num_hashed += 1
        return digest_of(preimage)

    replace_digests(monkeypatch, counted)
    assert finish(w, "second", long).history.cached_tokens == 0
    assert num_hashed <= 3 * 100, "a block is found, announced and published"


def test_digest_that_has_got_another_meaning_since_it_was_looked_up_is_no_hit(monkeypatch):
    replace_digests(  # of a second block the digest of what is before it
        monkeypatch,
        lambda preimage: digest_of(preimage[:DIGEST_SIZE] if len(preimage) == 2 * DIGEST_SIZE else preimage),
    )
    head, root = [1, 2, 3, 4], ROOT
    context = make_context()

    def compute(tokens):
        context.states.begin_step()
        lease = context.admit(tokens, root=root)
        assert lease.cached == 0 and context.extend(lease, len(tokens))
        context.states.keep(lease, tokens, 0, len(tokens))
        context.publish_planned(lease, tokens, len(tokens))
        return lease

    tokens = [*head, 5, 6, 7, 8, 9]
    gone = compute(tokens)
    context.states.forget_all()
    waiting = context.admit(tokens, root=root)
    assert context.extend(waiting, len(tokens)) and context.states._by_row[waiting.row].hashed == gone.digests
    context.release(gone)
    other = compute([*head, 9, 9, 9, 9, 9])
    assert other.digests == context.states._by_row[waiting.row].hashed and context.states.slots.num_cached == 1
    context.states.begin_step()
    assert context.catch_up(waiting, tokens, 0) == 0 and not context.states.load(waiting)
    assert context.catch_up(other, [*head, 9, 9, 9, 9, 9], 0) == 8
    context.check()


def test_pending_state_is_attached_when_the_prompt_moves_to_the_published_block():
    """Two leases compute the same; the second's blocks wait for a commit, and it moves to the first's before that."""
    context, tokens = make_context(), list(range(14))
    first, second = (context.admit(tokens, root=ROOT) for _ in range(2))
    context.states._by_row[second.row].keep_at.add(8)
    context.states.begin_step()
    for lease in (first, second):
        assert context.extend(lease, 14)
        context.states.keep(lease, tokens, 0, 8)
        context.publish_planned(lease, tokens, 8)
    assert list(context.states._by_row[second.row].pending) == [8]
    context.states.begin_step()
    context.states.keep(first, tokens, 8, 14)
    context.publish_planned(first, tokens, 14)
    context.states.begin_step()
    assert context.catch_up(second, tokens, 8) == 12
    assert not context.states._by_row[second.row].pending and context.states.slots.num_cached == 2
    context.check()


def test_lease_that_ends_gives_back_its_pending_states():
    context, tokens = make_context(), list(range(14))
    lease = context.admit(tokens, root=ROOT)
    assert context.extend(lease, 14)
    context.states.begin_step()
    assert context.states.keep(lease, tokens, 0, 14)
    context.release(lease)
    context.check()
    assert not context.states.slots.slots_of(())


def test_prompts_with_a_common_head_keep_one_state_behind_it_and_compute_it_once():
    """The first keeps none there, as it is the only prompt yet; the second does, and the others wait for it."""
    w = world(num_blocks=200, num_rows=16, max_tokens=1000, num_cached_states=20)
    head = PROMPT[:17]
    for i in range(10):
        w.add(make_request(f"r{i}", head + [50 + i] * 13, 1, stop_ids=frozenset()))
    w.drain()
    assert w.device.num_prefilled == 2 * 30 + 8 * (30 - 16)
    assert w.scheduler.stats.states_kept == 10 + 1


def test_states_of_former_weights_leave_room_for_answers():
    """An answer keeps its state only in a free slot: states that are never looked for again must not fill the slots."""
    w = world(num_cached_states=2, num_rows=2)
    finish(w, "a", PROMPT)
    finish(w, "b", PROMPT[::-1])
    assert w.context.states.slots.num_cached == 2
    w.new_weights(keep=True)
    first = finish(w, "turn 1", [70, 71], max_new=20)
    assert finish(w, "turn 2", [*first.tokens, 60]).history.cached_tokens == 20


def test_running_requests_hold_no_pending_state_after_a_reset():
    """Equal prompts computed side by side: the second's state has no block before the step's commit."""
    w = world(num_cached_states=2, overlap=True)
    alone = CacheUse(allowed=False)
    for name in ("first", "second"):
        w.add(make_request(name, PROMPT, 40, stop_ids=frozenset(), cache=alone))
    w.step()
    assert w.context.states.slots.slots_of(()), "no state waits for its block"
    w.scheduler.reset_prefix_cache()
    w.check()
    assert not w.context.states.slots.slots_of(())
    w.drain()


def test_prompt_in_progress_at_a_reset_keeps_no_more_states():
    w = world(chunked=True, max_tokens=9)
    w.add(make_request("begun", PROMPT, 20, stop_ids=frozenset()))
    w.step()
    w.scheduler.reset_prefix_cache()
    for _ in range(12):
        w.step()
        assert not w.context.states.slots.slots_of(())
    assert w.scheduler.stats.states_kept == 0
    w.drain()


def test_copies_of_a_failed_step_are_not_repeated():
    w = world()
    w.add(make_request("decodes", [70, 71], 20, stop_ids=frozenset()))
    for _ in range(3):
        w.step()
    plan = w.fail_step("before")
    assert plan.decode_starts == [4], "where a block ends and its state is copied"
    assert not w.context.take_copies()


def test_least_recently_used_state_is_evicted():
    pool = CachedStateSlots(first_slot=5, count=2)
    pool.begin_step()
    for block in (1, 2):
        pool.attach(pool.take(evict=True), block, evict_first=False)
    assert pool.take(evict=True) is None, "both are written by this step"
    pool.begin_step()
    pool.load(1)
    assert pool.take(evict=False) is None
    pool.attach(pool.take(evict=True), 3, evict_first=False)
    assert pool.is_ready(1) and not pool.is_ready(2) and pool.is_coming(3)
    pool.check([], {1, 3})


def test_slot_freed_within_a_step_is_not_taken_again_in_that_step():
    """A state kept behind a cached block, which a later admission of the same plan takes the memory of."""
    pool = CachedStateSlots(first_slot=5, count=1)
    for give_up in (
        lambda slot: pool.attach(slot, 1, evict_first=False) and pool.forget(1),
        lambda slot: pool.release(slot),
    ):
        pool.begin_step()
        slot = pool.take(evict=True)
        give_up(slot)
        assert pool.take(evict=True) is None, "the step would write it twice"
        pool.check([], set())
        pool.begin_step()
        assert pool.take(evict=True) == slot
        pool.release(slot)


def test_second_state_behind_a_block_is_not_kept():
    pool = CachedStateSlots(first_slot=0, count=2)
    pool.begin_step()
    assert pool.attach(pool.take(evict=True), 7, evict_first=False)
    assert not pool.attach(pool.take(evict=True), 7, evict_first=False)
    pool.check([], {7})
    with pytest.raises(AssertionError, match="not published"):
        pool.check([], set())


def test_held_states_are_those_of_rows_and_behind_held_blocks():
    w = world(num_rows=4)
    finish(w, "gone", PROMPT[::-1])
    w.add(make_request("live", PROMPT, 8, stop_ids=frozenset()))
    w.step()
    live = next(r for r in w.requests if r.id == "live")
    held = w.context.held_state_slots()
    assert live.lease.row in held and len(held) == 2 and held[1] > w.num_rows
    w.context.forget_free()
    assert w.context.states.slots.num_cached == 1
