"""Over-sampling ends with the groups that were wanted and aborts the rest; no group of one call reaches another."""

from __future__ import annotations

import itertools
import random

import pytest
from rollout_case import assert_empty, make_engine, prompts_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, InvalidPrompt
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.oversampling import RolloutShortage
from megatron_infer.rl.rollout import Rollout

PARAMS = SamplingParams(n=2, max_tokens=30, temperature=1.0, stop_token_ids=list(range(10, 30)))


def endless(seed: int = 0):
    return ({"prompt_token_ids": ids, "number": i} for i, ids in enumerate(itertools.cycle(prompts_of(20, seed))))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def engine(request):
    return make_engine(overlap=request.param)


@pytest.fixture
def roll(engine):
    yield Rollout(engine)
    assert_empty(engine)


def test_no_late_reply_reaches_a_later_call(roll, engine):
    prompts, rng = endless(), random.Random(0)
    seen: set[str] = set()
    asked: list[str] = []

    def accept(group):
        asked.append(group.group_id)
        return rng.random() < 0.6

    for _ in range(6):
        asked.clear()
        groups = roll.collect(4, prompts, PARAMS, accept=accept, oversample=2.0)
        assert_empty(engine)
        assert len(groups) >= 4 and {group.group_id for group in groups} <= set(asked)
        assert not seen & set(asked) and len(asked) == len(set(asked))
        seen |= set(asked)
        assert roll.stats.num_rejected == len(asked) - len(groups)
        assert roll.stats.num_aborted > 0


def test_groups_in_flight_follow_oversample_and_the_limit(roll, engine):
    most = []
    roll.collect(4, endless(), PARAMS, oversample=2.0, on_progress=lambda p: most.append(len(engine.output_processor)))
    assert most[0] == 8
    most.clear()
    roll.collect(4, endless(), PARAMS, max_in_flight=3, on_progress=lambda p: most.append(len(engine.output_processor)))
    assert max(most) == 3


def test_prompts_are_read_no_further_than_needed_and_continue_in_the_next_call(roll):
    prompts = endless()
    first = roll.collect(3, prompts, PARAMS, oversample=1.0)
    second = roll.collect(3, prompts, PARAMS, oversample=1.0)
    assert sorted(group.info["number"] for group in [*first, *second]) == list(range(len(first) + len(second)))


def test_surplus_is_returned_or_carried_over(roll):
    same = SamplingParams(max_tokens=3, ignore_eos=True)
    prompts = itertools.repeat([5, 6, 7])
    assert len(roll.collect(3, prompts, same, oversample=2.0)) == 6
    first = roll.collect(4, prompts, same, oversample=2.0, carry=True)
    assert len(first) == 4 and roll.stats.num_groups == 4
    drawn = roll.stats.num_tokens
    second = roll.collect(4, prompts, same, oversample=2.0, carry=True)
    assert len(second) == 4 and roll.stats.num_tokens == 0 < drawn
    assert not {group.group_id for group in first} & {group.group_id for group in second}


def test_an_error_of_the_filter_leaves_carried_groups_to_the_next_call(roll):
    def fails(group):
        raise ValueError("no answer")

    prompts, same = iter(prompts_of(40)), SamplingParams(n=2, max_tokens=6, ignore_eos=True)
    roll.collect(2, prompts, same, oversample=4.0, carry=True)
    carried_over = {*roll.tracker.undelivered}
    assert carried_over
    with pytest.raises(ValueError, match="no answer"):
        roll.collect(len(carried_over) + 1, prompts, same, accept=fails)
    assert roll.tracker.undelivered == carried_over, "groups that cannot be delivered are kept"
    assert {group.group_id for group in roll.collect(len(carried_over), prompts, same)} == carried_over
    assert not roll.tracker.undelivered


def test_without_a_filter_the_first_groups_to_finish_are_taken(roll):
    groups = roll.collect(5, endless(), PARAMS, oversample=2.0)
    assert len(groups) >= 5 and all(len(group.samples) == 2 for group in groups)


def test_running_out_of_prompts_raises_with_the_accepted_groups(roll):
    with pytest.raises(RolloutShortage, match="2 of 4 groups accepted and 1 refused") as caught:
        roll.collect(4, prompts_of(3), PARAMS, accept=lambda group: group.index != 1)
    assert sorted(group.index for group in caught.value.accepted) == [0, 2]


def test_an_error_of_the_filter_or_of_a_prompt_aborts_everything(roll, engine):
    def accept(group):
        raise RuntimeError("no reward")

    with pytest.raises(RuntimeError, match="no reward"):
        roll.collect(4, endless(), PARAMS, accept=accept)
    assert_empty(engine)
    with pytest.raises(InvalidPrompt, match="prompt 2: token id 999"):
        roll.collect(2, iter([[5], [6], [999]]), PARAMS, accept=lambda group: False)
    assert_empty(engine)


def test_groups_in_flight_can_be_kept_for_the_next_call(roll):
    prompts = endless()
    first = roll.collect(3, prompts, PARAMS, oversample=2.0, keep_in_flight=True)
    left = {pending.id for pending in roll.unfinished}
    assert left and not left & {group.group_id for group in first}
    second = roll.collect(len(left), prompts, PARAMS, oversample=1.0)
    assert left & {group.group_id for group in second}


def test_a_budget_ends_collect_with_fewer_groups(roll):
    roll.pause_at(Budget(groups=2))
    groups = roll.collect(6, endless(), PARAMS)
    assert 2 <= len(groups) < 6 and roll.unfinished
    roll.abort_all()


def test_groups_left_by_earlier_calls_are_aborted_with_the_rest(roll):
    roll.pause_at(Budget(tokens=1))
    roll.generate([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(roll.unfinished) == 1
    assert len(roll.collect(2, endless(), PARAMS)) >= 2
    assert roll.unfinished == []


@pytest.mark.parametrize(
    ("options", "words"),
    [({"oversample": 0.5}, "oversample is 0.5"), ({"max_in_flight": 0}, "max_in_flight is 0")],
)
def test_invalid_options_are_refused(roll, options, words):
    with pytest.raises(ConfigError, match=words):
        roll.collect(2, endless(), PARAMS, **options)
