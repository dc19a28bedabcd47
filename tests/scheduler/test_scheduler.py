"""The scheduler, one promise at a time, on the fake device that checks every cache entry."""

from __future__ import annotations

import pytest
from fake_device import EOS, make_group, make_request
from world import World

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import RequestError
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.request import CacheUse, FinishReason, Status, VersionSpan
from megatron_infer.scheduler.step_plan import StepResult

NEVER = frozenset()


def prompt(n, start=10):
    return [start + i % 50 for i in range(n)]


def endless(name, num_prompt, max_new, start=10, **kwargs):
    """Runs to its length: no stop ids."""
    return make_request(name, prompt(num_prompt, start), max_new, stop_ids=NEVER, **kwargs)


def names(requests):
    return [request.id for request in requests]


def step_with(world, token):
    """A step in which every request draws `token` -> requests that it ended."""
    plan = world.scheduler.schedule()
    world.context.take_table_writes()
    return world.scheduler.commit(plan, StepResult([token] * len(plan.sampled))).ended


# ------------------------------------------------------------------ order and budget


def test_several_prompts_are_prefilled_in_one_step_in_order_of_arrival():
    world = World(max_tokens=20)
    for name in "abc":
        world.add(endless(name, 8, 4))
    plan = world.step()
    assert [(chunk.request.id, chunk.start, chunk.n) for chunk in plan.prefill] == [("a", 0, 8), ("b", 0, 8)]
    plan = world.step()
    assert names(plan.decode) == ["a", "b"] and names(p.request for p in plan.prefill) == ["c"]
    assert list(plan.sampled) == [*plan.decode, plan.prefill[0].request]


def test_decode_counts_against_the_budget_and_goes_first():
    world = World(max_tokens=10, chunked=True)
    world.add(endless("a", 4, 9))
    world.step()
    world.add(endless("b", 30, 2))
    plan = world.step()
    assert names(plan.decode) == ["a"] and plan.prefill[0].n == 9 and plan.num_tokens == 10
    world.drain()


def test_prompts_are_chunked_several_at_once():
    world = World(max_tokens=10, chunked=True)
    world.add(endless("a", 14, 2))
    world.add(endless("b", 14, 2))
    chunks = [[(p.request.id, p.start, p.n, p.first, p.samples) for p in world.step().prefill] for _ in range(3)]
    assert chunks == [
        [("a", 0, 10, True, False)],
        [("a", 10, 4, False, True), ("b", 0, 6, True, False)],
        [("b", 6, 8, False, True)],
    ]
    world.drain()


def test_unchunked_prompt_as_large_as_a_step_gets_its_turn_among_decoders():
    world = World(max_tokens=8, num_blocks=64)
    for name in "abc":
        world.add(endless(name, 2, 20))
    world.step()
    world.add(endless("large", 8, 2))
    for i in range(60):
        world.add(endless(f"s{i}", 2, 20))
    world.drain()
    admitted = [name for name, kind, _ in world.events if kind == "admit"]
    assert admitted.index("large") <= 3 + policy.MAX_OVERTAKEN


def test_more_decoders_than_budget_run_oldest_first():
    world = World(max_tokens=4, num_rows=8, num_blocks=64)
    world.add(make_group("r", prompt(4), 8, 6, stop_ids=NEVER))
    world.step()
    assert names(world.step().decode) == ["r#0", "r#1", "r#2", "r#3"]
    world.drain()


def test_request_that_does_not_fit_is_overtaken_a_bounded_number_of_times():
    world = World(num_blocks=20, num_rows=4, block_size=4, max_tokens=200)
    world.add(endless("holder", 4, 60))
    world.step()
    world.add(endless("large", 72, 2))
    for i in range(200):
        world.add(endless(f"s{i}", 3, 2))
    world.drain()
    admitted = [name for name, kind, _ in world.events if kind == "admit"]
    assert 3 < admitted.index("large") - 1 <= policy.MAX_OVERTAKEN


def test_step_looks_past_a_bounded_number_of_requests_that_do_not_fit():
    for num_large, admitted in ((policy.LOOKAHEAD, ["small"]), (policy.LOOKAHEAD + 1, [])):
        world = World(num_blocks=20, num_rows=16, block_size=4, max_tokens=400)
        world.add(endless("holder", 4, 60))
        world.step()
        for i in range(num_large):
            world.add(endless(f"large{i}", 72, 2))
        world.add(endless("small", 3, 2))
        assert [chunk.request.id for chunk in world.step().prefill] == admitted


def test_readmitted_request_computes_its_known_tokens_before_it_decodes():
    for computed, chunks, starts in ((4, [(4, 3)], []), (5, [(5, 2)], []), (6, [], [6])):
        world = World(num_blocks=20, block_size=4)
        request = endless("a", 4, 9)
        request.tokens += [7, 8, 9]
        request.history.spans.append(VersionSpan(0, 0, 0, 0))
        assert world.scheduler.readmit(request, computed) is not None
        plan = world.scheduler.schedule()
        assert [(chunk.start, chunk.n) for chunk in plan.prefill] == chunks and list(plan.decode_starts) == starts


# ------------------------------------------------------------------ decode, stop, length


def test_overlap_counts_on_a_token_that_is_in_flight():
    world = World(overlap=True)
    request = world.add(endless("a", 4, 5))
    world.step()
    plan = world.step()
    assert list(plan.decode_starts) == [4] and plan.num_tokens == 1
    assert len(request.tokens) == 5 and request.in_flight == 1
    world.drain()


def test_stop_id_ends_and_names_itself_only_if_it_was_asked_for():
    world = World()
    eos = world.add(make_request("eos", prompt(4), 9))
    asked = world.add(
        make_request("asked", prompt(4), 9, params=SamplingParams(stop_token_ids=[EOS]), stop_ids=frozenset({EOS}))
    )
    assert step_with(world, EOS) == [eos, asked]
    assert (eos.finish_reason, eos.stop_reason) == (FinishReason.STOP, None)
    assert (asked.finish_reason, asked.stop_reason) == (FinishReason.STOP, EOS)
    assert eos.tokens[-1] == EOS and eos.lease is None


def test_token_of_a_request_that_stopped_meanwhile_is_dropped_and_its_lease_kept_until_then():
    world = World(overlap=True)
    request = world.add(endless("a", 4, 9))
    world.step()
    world.step()
    tokens = list(request.tokens)
    world.scheduler.finish(request, FinishReason.STOP, "end")
    assert request.lease is not None and not world.scheduler.has_unfinished
    world.commit_previous()
    assert request.tokens == tokens and request.lease is None and request.stop_reason == "end"
    world.drain()


def test_finished_request_cannot_be_finished_again():
    world = World()
    request = world.add(endless("a", 4, 1))
    step_with(world, 50)
    world.scheduler.abort(request)
    assert request.finish_reason is FinishReason.LENGTH and world.kinds().count("finish") == 1


def test_request_that_could_never_finish_is_refused_with_figures():
    world = World(num_blocks=4, block_size=4)
    with pytest.raises(RequestError, match=r"17 stored tokens.* 16 for one sequence"):
        world.scheduler.add(endless("a", 5, 13))
    with pytest.raises(RequestError, match="room to draw another"):
        world.scheduler.add(endless("a", 5, 0))
    with pytest.raises(RequestError, match="one token at least"):
        world.scheduler.add(endless("a", 0, 5))
    assert not world.scheduler.has_unfinished


# ------------------------------------------------------------------ pause, resume, evict


def starved(paused_limit, **kwargs):
    """Three requests of which only two can grow to their end."""
    world = World(num_blocks=16, block_size=2, paused_limit=paused_limit, max_tokens=32, **kwargs)
    for name in "abc":
        world.add(endless(name, 6, 9, start=ord(name)))
    return world


@pytest.mark.parametrize("overlap", [False, True])
def test_request_without_a_block_pauses_and_resumes_within_the_limit(overlap):
    world = starved(paused_limit=12, overlap=overlap)
    world.drain()
    stats = world.scheduler.stats
    assert stats.paused >= 1 and stats.resumed >= 1
    assert next(name for name, kind, _ in world.events if kind == "pause") == "b", "the oldest found its block first"


def test_paused_requests_resume_oldest_first():
    world = World(num_blocks=5, block_size=4, paused_limit=5)
    world.add(endless("a", 5, 3))
    for name in "bcd":
        world.add(endless(name, 4, 3, start=ord(name)))
    world.step()
    world.step()
    assert names(world.scheduler.paused) == list("bcd")
    world.step()
    world.step()  # a has finished and left two blocks
    assert names(world.scheduler.paused) == ["d"]
    world.drain()
    assert [name for name, kind, _ in world.events if kind == "resume"] == list("bcd")


def test_evicted_request_waits_ahead_of_new_ones():
    world = starved(paused_limit=0)
    world.add(endless("d", 20, 9))
    while not world.scheduler.stats.evicted:
        world.step()
    assert names(world.scheduler.waiting) == ["c", "d"]
    c = world.requests[2]
    assert (c.status, c.scheduled, c.lease) == (Status.WAITING, 0, None) and c.num_output > 0
    world.drain()


def test_eviction_with_a_cache_recomputes_only_what_was_lost():
    world = World(num_blocks=16, block_size=2, paused_limit=0, caching=True, keep_cached=True)
    for name in "abc":
        world.add(endless(name, 6, 9, start=ord(name)))
    world.drain()
    readmissions = [p["cached_tokens"] for name, kind, p in world.events if kind == "admit"][3:]
    assert world.scheduler.stats.evicted and any(readmissions)


def test_admission_leaves_headroom_to_running_requests():
    world = World(num_blocks=32, block_size=4, num_rows=16, max_tokens=500)
    for i in range(8):
        world.add(endless(f"r{i}", 12, 12))
    world.step()
    assert world.context.num_free_blocks == 8
    world.add(endless("exact", 32, 2))
    assert not world.step().prefill, "it would leave nothing to eight that run"
    world.drain()


# ------------------------------------------------------------------ groups


def test_siblings_share_one_prefill():
    world = World(block_size=4, num_rows=8)
    leader = world.add(make_group("g", prompt(10), 6, 4, stop_ids=NEVER))
    assert world.scheduler.num_waiting == 4
    plan = world.step()
    (chunk,) = plan.prefill
    assert chunk.forks == leader.siblings and chunk.samples and plan.num_tokens == 10
    assert list(plan.sampled) == [leader, *leader.siblings]
    assert len(plan.copies_after) == 3 and {copy.source for copy in plan.copies_after} == {leader.lease.blocks[2]}
    assert all(child.scheduled == 10 and child.history.cached_tokens == 10 for child in leader.siblings)
    assert world.context.num_free_blocks == 32 - (3 + 3)
    world.drain()
    assert world.device.num_computed == 10 + 4 * 5
    assert world.scheduler.stats.forked == 3


def test_siblings_without_a_row_are_forked_from_one_of_them_later():
    world = World(num_rows=2)
    leader = world.add(make_group("g", prompt(10), 3, 4, stop_ids=NEVER))
    plan = world.step()
    assert names(plan.prefill[0].forks) == ["g#1"]
    assert names(world.scheduler.waiting) == ["g#2"] and world.scheduler.num_waiting == 2
    world.drain()
    assert world.device.num_computed == 2 * 10 + 4 * 2, "the prompt was computed twice, not four times"
    assert all(request.finish_reason is FinishReason.LENGTH for request in (leader, *leader.siblings))


# ------------------------------------------------------------------ abort


def test_abort_of_a_request_that_was_never_added_is_caught():
    with pytest.raises(AssertionError, match="never added"):
        World().scheduler.abort(endless("a", 4, 2))


# ------------------------------------------------------------------ prefix cache and weights


def test_prompt_logprobs_forbid_a_hit_until_a_token_is_drawn():
    world = World(caching=True, keep_cached=True)
    world.add(endless("a", 10, 8))
    world.drain()
    request = world.add(endless("b", 10, 8, cache=CacheUse(allowed=False)))
    world.step()
    assert request.history.cached_tokens == 0
    world.step()
    world.commit_previous()
    world.scheduler.requeue_all()
    world.step()
    assert request.history.cached_tokens > 0
    world.drain()


def test_leases_of_mixed_weights_publish_no_more_when_a_weight_version_returns():
    world = World(caching=True, keep_cached=True)
    world.add(endless("a", 10, 20))
    world.step()
    world.new_weights(keep=True, version=1)
    for _ in range(8):
        world.step()
    world.new_weights(keep=True, version=0)
    world.drain()
    assert world.context.pool.num_cached == 2


def test_set_root_with_a_step_in_flight_is_caught():
    world = World(overlap=True)
    world.add(endless("a", 10, 20))
    world.step()
    with pytest.raises(AssertionError, match="in flight"):
        world.scheduler.set_root(b"new", version=1)
    with pytest.raises(AssertionError, match="in flight"):
        world.scheduler.requeue_all()


def test_requeue_all_keeps_tokens_and_order_of_arrival():
    world = World(num_rows=2)
    for name in "abcd":
        world.add(endless(name, 6, 9))
    for _ in range(3):
        world.step()
    tokens = [list(request.tokens) for request in world.requests]
    world.scheduler.requeue_all()
    world.check()
    assert names(world.scheduler.waiting) == list("abcd")
    assert [request.tokens for request in world.requests] == tokens
    assert world.context.num_free_rows == 2
    world.drain()


# ------------------------------------------------------------------ accounts


def test_events_agree_with_the_counters_and_the_requests():
    world = starved(paused_limit=3)
    world.drain()
    stats = world.scheduler.stats
    kinds = world.kinds()
    counts = (stats.admitted, stats.paused, stats.resumed, stats.evicted, stats.finished)
    assert tuple(map(kinds.count, ("admit", "pause", "resume", "evict", "finish"))) == counts
    assert stats.paused == sum(request.history.num_pauses for request in world.requests)
    assert stats.evicted == sum(request.history.num_evictions for request in world.requests)
    assert stats.decode_tokens + stats.prefill_tokens == world.device.num_computed
    assert stats.as_dict()["finished"] == 3


def test_nothing_to_do_is_an_empty_plan():
    world = World()
    plan = world.scheduler.schedule()
    assert plan.num_tokens == 0 and world.scheduler.commit(plan, StepResult()) == ((), [])
    assert not world.scheduler.has_unfinished
