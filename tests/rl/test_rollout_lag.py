"""Groups that a training step consumes were begun at most `lag` steps before it, in any order of finishing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_infer.errors import ConfigError
from megatron_infer.rl.staleness import Granularity, RolloutLag, automatic_lag


@given(
    lag=st.integers(0, 4),
    size=st.integers(1, 5),
    submission=st.sampled_from(Granularity),
    consumption=st.sampled_from(Granularity),
    drops=st.floats(0.0, 0.3),
    changes=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_no_group_is_older_than_the_lag_and_no_step_waits_forever(
    lag, size, submission, consumption, drops, changes, rng
):
    rollout_lag = RolloutLag(lag, groups_per_step=size, submission=submission, consumption=consumption)
    begun: dict[str, int] = {}
    running: set[str] = set()
    consumed: set[str] = set()
    turns = 0
    while rollout_lag.step < 12:
        turns += 1
        assert turns < 10_000, "a step that is never served"
        for _ in range(rollout_lag.room()):
            name = str(len(begun))
            begun[name] = rollout_lag.step
            rollout_lag.begin(name)
            running.add(name)
        assert rollout_lag.num_outstanding <= (lag + 1) * size
        if (step := rollout_lag.step) is not None and (chosen := rollout_lag.take()) is not None:
            assert len(set(chosen)) == size and not consumed & set(chosen) and not running & set(chosen)
            assert all(step - lag <= begun[name] <= step for name in chosen)
            assert rollout_lag.ages == [step - begun[name] for name in chosen]
            consumed |= set(chosen)
            if changes:
                rollout_lag.lag = rng.randint(0, lag)
        elif running:
            name = rng.choice(sorted(running))
            running.discard(name)
            if rng.random() < drops:
                rollout_lag.drop(name)
            else:
                rollout_lag.finish(name)


def test_a_step_takes_finished_groups_and_waits_for_groups_that_would_become_too_old():
    rollout_lag = RolloutLag(1, groups_per_step=2)
    for name in "abcd":
        rollout_lag.begin(name)
    rollout_lag.finish("d")
    assert rollout_lag.take() is None
    rollout_lag.finish("b")
    assert rollout_lag.take() == ["b", "d"]  # not a and c, which are slow
    for name in "ef":
        rollout_lag.begin(name)
        rollout_lag.finish(name)
    rollout_lag.finish("a")
    assert rollout_lag.take() is None, "c would be two steps old at the next"
    rollout_lag.finish("c")
    assert rollout_lag.take() == ["a", "c"]
    assert rollout_lag.room() == 2


def test_a_smaller_lag_is_for_groups_begun_from_then_on_and_megatron_rls_letters_are_taken():
    rollout_lag = RolloutLag(2, groups_per_step=1, submission="G", consumption="B")
    assert (rollout_lag.submission, rollout_lag.consumption) == (Granularity.GROUP, Granularity.BATCH)
    for name in "abc":
        rollout_lag.begin(name)
        rollout_lag.finish(name)
    rollout_lag.lag = 0
    for age, name in enumerate("abc"):
        assert rollout_lag.room() == 0 and rollout_lag.take() == [name] and rollout_lag.ages == [age]
    assert rollout_lag.room() == 1


def test_whole_batches_are_consumed_in_the_order_they_began():
    rollout_lag = RolloutLag(1, groups_per_step=2, consumption="batch")
    for name in "abcd":
        rollout_lag.begin(name)
    for name in "bcd":
        rollout_lag.finish(name)
    assert rollout_lag.take() is None
    rollout_lag.drop("a")
    rollout_lag.begin("e")
    rollout_lag.finish("e")
    assert rollout_lag.take() == ["b", "e"], "what replaces a group takes its place in the batch"
    assert rollout_lag.take() == ["c", "d"]


def test_whole_batches_are_begun_at_once():
    rollout_lag = RolloutLag(1, groups_per_step=3, submission="batch")
    assert rollout_lag.room() == 6
    for name in "abcdef":
        rollout_lag.begin(name)
        rollout_lag.finish(name)
    assert rollout_lag.take() == ["a", "b", "c"]
    assert rollout_lag.room() == 3
    rollout_lag.begin("g")
    assert rollout_lag.room() == 2, "what is missing of a batch may follow"
    rollout_lag.begin("h")
    rollout_lag.begin("i")
    for name in "ghi":
        rollout_lag.finish(name)
    assert rollout_lag.room() == 0
    rollout_lag.drop("h")
    assert rollout_lag.room() == 1, "a batch that lost a group is made whole at once"


@pytest.mark.parametrize(
    ("requests", "samples", "groups", "ranks", "expected"),
    [(128, 8, 16, 2, 1), (128, 8, 16, 1, 0), (64, 8, 16, 1, 0), (1000, 8, 16, 1, 6), (512, 16, 4, 4, 31)],
)
def test_the_automatic_lag_fills_the_engines(requests, samples, groups, ranks, expected):
    lag = automatic_lag(max_requests=requests, samples_per_group=samples, groups_per_step=groups, data_parallel=ranks)
    assert lag == expected
    assert (lag + 1) * groups * samples <= max(ranks * requests, groups * samples)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lag": -1}, "lag is -1"),
        ({"lag": True}, "lag is True"),
        ({"groups_per_step": 0}, "groups_per_step is 0"),
        ({"submission": "batches"}, "did you mean 'batch'"),
        ({"consumption": "rollout"}, "one of group, batch"),
        ({"submission": "R"}, "samples of a group are one request"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RolloutLag(**{"lag": 1, "groups_per_step": 2} | settings)


def test_the_automatic_lag_needs_positive_figures():
    with pytest.raises(ConfigError, match="max_requests is 0"):
        automatic_lag(max_requests=0, samples_per_group=1, groups_per_step=1)
