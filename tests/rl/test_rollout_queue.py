"""A queue gives batches from an engine that generates ahead of training, with the staleness of each group."""

from __future__ import annotations

import itertools
import random

import pytest
from rollout_case import assert_empty, make_engine, prompts_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.oversampling import RolloutShortage
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.rollout_queue import RolloutQueue

PARAMS = SamplingParams(n=2, max_tokens=40, stop_token_ids=list(range(10, 20)))


def endless():
    return ({"prompt_token_ids": ids, "number": i} for i, ids in enumerate(itertools.cycle(prompts_of(20))))


@pytest.fixture
def roll():
    roll = Rollout(make_engine())
    yield roll
    assert_empty(roll.engine)


def train(roll: Rollout, mode: str = "persist") -> None:
    """A training step between two batches."""
    with roll.engine.suspended(mode):
        roll.engine.set_weight_version(roll.engine.weight_version + 1)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("consumption", ["group", "batch"])
def test_steps_get_groups_begun_at_most_lag_versions_ago(roll, lag, consumption):
    queue = RolloutQueue(roll, endless(), PARAMS, groups_per_step=3, lag=lag, consumption=consumption)
    version = roll.engine.weight_version
    ages, names = set(), []
    for step in range(6):
        batch = queue.next_batch()
        assert len(batch) == 3 and roll.engine.weight_version == version + step
        for group in batch:
            age = version + step - group.begun_version
            assert 0 <= age <= lag and group.staleness(version + step) <= age
            ages.add(age)
        names += [group.group_id for group in batch]
        assert queue.stats.staleness_max == max(group.staleness(version + step) for group in batch)
        train(roll, random.Random(step).choice(["persist", "offload", "recompute"]))
    assert len(names) == len(set(names))
    assert max(ages) == lag, "nothing was generated ahead"
    queue.close()


def test_some_tokens_are_drawn_by_newer_weights_than_others(roll):
    long = SamplingParams(max_tokens=60, stop_token_ids=list(range(10, 14)))
    queue = RolloutQueue(roll, endless(), long, groups_per_step=2, lag=2)
    spans = []
    for _ in range(6):
        spans += [sample.spans for group in queue.next_batch() for sample in group.samples]
        train(roll)
    queue.close()
    assert any(len({span.policy_version for span in sample}) > 1 for sample in spans)


def test_groups_too_stale_are_replaced(roll):
    queue = RolloutQueue(roll, endless(), PARAMS, groups_per_step=3, lag=2, max_staleness=1)
    for _ in range(6):
        version = roll.engine.weight_version
        for group in queue.next_batch():
            assert group.staleness(version) <= 1
        train(roll)
        roll.engine.set_weight_version(version + 2)  # two updates in one training step
    assert queue.num_dropped > 0 and queue.stats.num_aborted > 0
    queue.close()


def test_a_group_that_will_be_too_stale_is_aborted_while_in_flight(roll):
    def prompts():
        yield from ({"prompt_token_ids": [5 + i], "number": i} for i in itertools.count())

    # Some of the first groups are drawing when the version increases by two.
    queue = RolloutQueue(roll, prompts(), PARAMS, groups_per_step=2, lag=2, max_staleness=1)
    queue.next_batch()
    drawing = {pending.id for pending in roll.in_flight if roll.tracker.oldest_policy(pending) is not None}
    assert drawing
    roll.engine.set_weight_version(roll.engine.weight_version + 2)
    seen = []
    step = roll.engine.step
    roll.engine.step = lambda: (seen.append({pending.id for pending in roll.in_flight}), step())[1]
    queue.next_batch()
    assert seen and not drawing & seen[0]
    queue.close()


def test_other_calls_run_beside_the_queue_and_take_none_of_its_groups(roll):
    queue = RolloutQueue(roll, endless(), PARAMS, groups_per_step=2, lag=1)
    names = [group.group_id for group in queue.next_batch()]
    between = roll.generate(prompts_of(4), PARAMS)
    assert [group.index for group in between] == list(range(4)) and roll.unfinished == []
    names += [group.group_id for group in queue.next_batch()]
    assert not set(names) & {group.group_id for group in between} and len(set(names)) == 4
    queue.close()


def test_the_automatic_lag_is_that_of_the_engine(roll):
    queue = RolloutQueue(roll, endless(), PARAMS, groups_per_step=2, lag="auto")
    assert queue.lag.lag == roll.engine.sizes.max_requests // (2 * 2) - 1


def test_the_automatic_lag_falls_to_what_a_small_cache_holds_and_each_batch_has_its_own():
    roll = Rollout(make_engine(buffer_size_gb=0.0002, max_requests=32))
    queue = RolloutQueue(roll, endless(), PARAMS, groups_per_step=2, lag="auto")
    limits = [queue.lag.lag]
    for step in range(8):
        names = {group.group_id for group in queue.next_batch()}
        assert len(names) == 2 and queue.stats.lag == limits[-1]
        assert 0 <= queue.stats.lag_mean <= queue.stats.lag_max <= min(step, limits[0])
        limits.append(queue.lag.lag)
        train(roll)
    queue.close()
    assert limits[0] == 32 // (2 * 2) - 1 and max(limits[1:]) < limits[0], limits
    assert_empty(roll.engine)


def test_prompts_that_run_out_end_the_batches_and_the_error_has_the_rest(roll):
    queue = RolloutQueue(roll, prompts_of(7), PARAMS, groups_per_step=3, lag=1)
    assert [len(batch) for batch in queue] == [3, 3]
    with pytest.raises(RolloutShortage) as caught:
        queue.next_batch()
    assert len(caught.value.accepted) == 1
    queue.close()


def test_a_negative_staleness_is_refused(roll):
    with pytest.raises(ConfigError, match="max_staleness is -1"):
        RolloutQueue(roll, endless(), PARAMS, groups_per_step=2, max_staleness=-1)


def test_outputs_of_other_requests_are_returned_although_the_queue_steps(roll):
    """Outputs of a caller's own request, and groups that a paused call had left."""
    long = SamplingParams(n=2, max_tokens=12, ignore_eos=True)
    roll.pause_at(Budget(tokens=2))
    assert roll.generate(prompts_of(2), long) == [] and len(roll.unfinished) == 2
    roll.engine.add_request([5, 6], SamplingParams(max_tokens=3, ignore_eos=True), request_id="mine", stream="final")
    queue = RolloutQueue(roll, endless(), PARAMS, groups_per_step=2, lag=1)
    for _ in range(4):
        queue.next_batch()
    assert [output.request_id for output in roll.engine.step() if output.finished] == ["mine"]
    aborted = roll.abort(roll.unfinished[0].id)
    assert [len(sample.token_ids) for sample in aborted.samples] == [12, 12], "it had ended meanwhile"
    first, second = roll.generate(prompts_of(1), long)
    assert (first.index, second.index) == (1, 0) and roll.unfinished == []
    assert [len(sample.token_ids) for sample in first.samples] == [12, 12] and roll.stats.num_tokens == 24
    queue.close()
