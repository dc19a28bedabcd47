"""A failed request is an error of the call, which names it and loses nothing; its samples reach no trainer unseen."""

from __future__ import annotations

import asyncio
import itertools
import pickle

import pytest
import torch
from rollout_case import assert_empty, lengths, make_engine, prompts_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError
from megatron_infer.rl.conversation import Conversation
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.oversampling import RolloutShortage
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.samples import RolloutError
from megatron_infer.rl.tool_rollouts import run_conversations, say
from megatron_infer.testing.inspect import inspect

BAD = 77
"""Logits after this token are not finite: a request with it fails, alone."""
PROMPTS = [[token for token in prompt if token != BAD] for prompt in prompts_of(6)]
WITH_BAD = [*PROMPTS[:2], [*PROMPTS[2], BAD], PROMPTS[3], [BAD, 5], PROMPTS[5]]
PARAMS = lengths(6, n=2, bad_token_ids=[BAD])
ONE = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, bad_token_ids=[BAD])
NAMED = r"2 of 6 groups failed: prompt 2 \(group rollout/\d+\): .*not finite.*; prompt 4 \(group rollout/\d+\): "


@pytest.fixture(scope="module")
def engine():
    engine = make_engine()
    with torch.no_grad():
        engine.model.embedding.word_embeddings.weight[BAD] = float("nan")
    return engine


@pytest.fixture(scope="module")
def expected(engine):
    """Tokens of each prompt's samples where no request fails."""
    return [[s.token_ids for s in group.samples] for group in Rollout(engine).generate(PROMPTS, PARAMS)]


@pytest.fixture
def roll(engine):
    yield Rollout(engine)
    assert_empty(engine)


def assert_whole(groups, expected):
    """Only the two requests with the bad token have failed, and the others have the tokens they have without them."""
    assert sorted(group.index for group in groups) == list(range(6))
    for group in groups:
        if group.index in (2, 4):
            assert group.error is not None and {sample.finish_reason for sample in group.samples} == {"error"}
        else:
            assert group.error is None and [sample.token_ids for sample in group.samples] == expected[group.index]


def test_generate_raises_once_all_have_ended_and_has_the_finished_groups(roll, expected):
    seen = []
    with pytest.raises(RolloutError, match=NAMED) as caught:
        roll.generate(WITH_BAD, PARAMS, on_group=seen.append)
    assert [group.index for group in caught.value.groups] == list(range(6))
    assert_whole(caught.value.groups, expected)
    assert [group.index for group in caught.value.failed] == [2, 4]
    assert sorted(group.index for group in seen) == [0, 1, 3, 5]
    assert roll.stats.num_failed == 2 and roll.stats.finished["error"] == 4
    back = pickle.loads(pickle.dumps(caught.value))  # an actor's caller gets it whole
    assert str(back) == str(caught.value) and len(back.groups) == 6


def test_groups_that_failed_are_returned_where_that_is_asked_for(roll, expected):
    assert_whole(roll.generate(WITH_BAD, PARAMS, on_error="return"), expected)
    assert_whole(list(roll.iterate(WITH_BAD, PARAMS, on_error="return")), expected)


def test_iterate_and_stream_give_the_finished_groups_and_raise_at_their_end(roll, expected):
    def iterated(given):
        given.extend(roll.iterate(WITH_BAD, PARAMS))

    async def streamed(given):
        async for group in roll.stream(WITH_BAD, PARAMS):
            given.append(group)

    for draw in (iterated, lambda given: asyncio.run(streamed(given))):
        given = []
        with pytest.raises(RolloutError, match="2 of 6 groups failed") as caught:
            for group in [draw(given)]:
                given += group
        assert sorted(group.index for group in given) == [0, 1, 3, 5]
        assert_whole(caught.value.groups, expected)


def test_a_step_that_raises_is_an_error_of_the_call_and_the_next_call_goes_on(roll, engine, expected, monkeypatch):
    """The README's loop: without a word of error handling nothing truncated is trained on."""

    def broken(step, received_TD=None):
        if step.plan.step > start + 2:
            raise ValueError("a kernel broke")
        return run_layers(step, received_TD)

    runner = inspect(engine).runner
    run_layers, start = runner.run_layers, inspect(engine).scheduler.stats.steps
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_layers", broken)
        with pytest.raises(RolloutError, match="ValueError: a kernel broke"):
            roll.generate(PROMPTS, PARAMS)
    assert_empty(engine)
    assert [[s.token_ids for s in group.samples] for group in roll.generate(PROMPTS, PARAMS)] == expected


def test_collect_does_not_take_a_failed_group_for_a_refused_one(roll):
    feed = iter([*PROMPTS[:2], [BAD, 5], *PROMPTS[3:]])
    with pytest.raises(RolloutError, match=r"of \d groups failed: prompt 2 ") as caught:
        roll.collect(6, feed, ONE, max_in_flight=1)
    assert [(group.index, group.error is None) for group in caught.value.groups] == [(0, True), (1, True), (2, False)]


def test_collect_does_not_run_on_where_every_group_fails(roll):
    with pytest.raises(RolloutError, match="prompt 0 "):
        roll.collect(2, itertools.repeat([BAD, 5]), ONE)


def test_collect_and_queue_draw_another_group_where_that_is_asked_for(roll):
    groups = roll.collect(4, iter(WITH_BAD), ONE, on_error="replace")
    assert sorted(group.index for group in groups) == [0, 1, 3, 5]
    with pytest.raises(RolloutShortage, match="4 of 5 groups accepted and 2 refused or failed"):
        roll.collect(5, iter(WITH_BAD), ONE, on_error="replace")
    queue = RolloutQueue(roll, iter(WITH_BAD), ONE, groups_per_step=2, on_error="replace")
    assert [[group.index for group in batch] for batch in queue] == [[0, 1], [3, 5]] and queue.num_dropped == 2
    queue.close()


def test_collect_hands_over_groups_it_had_carried_once(roll):
    """They are in the error, so the next call does not begin with them."""
    carried = roll.collect(1, iter(PROMPTS[:3]), ONE, oversample=3.0, carry=True)
    with pytest.raises(RolloutError) as caught:
        roll.collect(4, iter([[BAD, 5]] * 4), ONE)
    later = roll.collect(1, iter(PROMPTS[3:]), ONE)
    ids = [group.group_id for group in [*carried, *caught.value.groups, *later]]
    assert len(set(ids)) == len(ids) and sum(one.error is None for one in caught.value.groups) == 2


def test_a_queue_raises_and_keeps_the_finished_groups_for_the_next_call(roll):
    queue = RolloutQueue(roll, iter(WITH_BAD), ONE, groups_per_step=4)
    errors, batches = [], []
    while not batches:
        try:
            batches.append(queue.next_batch())
        except RolloutError as error:
            errors += error.groups
    assert sorted(group.index for group in errors) == [2, 4] and all(group.error for group in errors)
    assert sorted(group.index for group in batches[0]) == [0, 1, 3, 5]
    queue.close()


def test_groups_left_at_a_budget_survive_the_error_of_another_call(roll, expected):
    roll.pause_at(Budget(groups=1))
    first = roll.generate(PROMPTS[:4], PARAMS[:4])
    with pytest.raises(RolloutError) as caught:
        roll.generate([[BAD, 5]], ONE)
    rest = [group for group in caught.value.groups if group.error is None]
    assert sorted(group.index for group in [*first, *rest]) == list(range(4))
    for group in [*first, *rest]:
        assert [sample.token_ids for sample in group.samples] == expected[group.index]


def test_a_conversation_that_fails_ends_alone(roll, engine):
    params = SamplingParams(n=2, max_tokens=3, seed=2, ignore_eos=True, bad_token_ids=[BAD])

    def tool(conversation, turn):
        return [BAD] if conversation.info["fails"] else [9]

    prompts = [{"prompt_token_ids": PROMPTS[i], "fails": i == 1} for i in range(3)]
    with pytest.raises(RolloutError, match=r"1 of 3 groups failed: prompt 1 .*not finite") as caught:
        run_conversations(roll, prompts, params, tool)
    groups = caught.value.groups
    assert [group.index for group in groups] == [0, 1, 2] and [len(group.samples) for group in groups] == [2, 2, 2]
    assert {s.info["ended"] for g in (groups[0], groups[2]) for s in g.samples} == {"turns"}
    for sample in groups[1].samples:
        assert (sample.finish_reason, sample.info["ended"], len(sample.token_ids)) == ("error", "error", 3)
    returned = run_conversations(roll, prompts, params, tool, on_error="return")
    assert [group.error is not None for group in returned] == [False, True, False]
    prompts[1]["prompt_token_ids"] = [BAD, 5]  # the first answer fails
    with pytest.raises(RolloutError, match=r"1 of 3 groups failed: prompt 1 ") as caught:
        run_conversations(roll, prompts, params, tool)
    assert [sample.token_ids for sample in caught.value.failed[0].samples] == [[], []]
    with pytest.raises(RolloutError, match="not finite"):
        asyncio.run(say(roll, Conversation(engine, [BAD, 5], ONE)))


@pytest.mark.parametrize("choice", ["ignore", "replace"])
def test_an_unknown_choice_is_refused_before_anything_is_drawn(roll, choice):
    with pytest.raises(ConfigError, match=r"on_error: unknown choice .* 'raise' or 'return'"):
        roll.generate(PROMPTS, PARAMS, on_error=choice)
    with pytest.raises(ConfigError, match="'raise' or 'replace'"):
        roll.collect(1, PROMPTS, ONE, on_error="return")
