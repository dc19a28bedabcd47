"""Figures of a rollout follow from its groups."""

from __future__ import annotations

import pytest
from scrape import Writer

from megatron_infer.engine.metrics.wandb import WandbSink
from megatron_infer.rl.samples import RolloutGroup, RolloutSample
from megatron_infer.rl.stats import percentile, stats_of
from megatron_infer.scheduler.request import VersionSpan


def sample(length: int, spans: list[tuple[int, int, int, int]], reason: str = "stop") -> RolloutSample:
    return RolloutSample(
        prompt_ids=[1, 2],
        token_ids=[3] * length,
        spans=[VersionSpan(*span) for span in spans],
        finish_reason=reason,
        loss_mask=[1] * length,
    )


GROUPS = [
    RolloutGroup(
        group_id="rollout/0",
        prompt_ids=[1, 2],
        samples=[sample(4, [(0, 3, 3, 3), (2, 5, 3, 5)]), sample(1, [(0, 3, 3, 3)], "length")],
        num_cached_tokens=1,
    ),
    RolloutGroup(group_id="rollout/1", prompt_ids=[1], samples=[sample(3, [(0, 5, 5, 5)])]),
]


def test_figures_are_those_of_the_drawn_tokens():
    stats = stats_of(GROUPS, version=6, seconds=2.0, num_rejected=3)
    assert (stats.num_groups, stats.num_samples, stats.num_tokens, stats.num_rejected) == (2, 3, 8, 3)
    assert stats.finished == {"stop": 2, "length": 1}
    assert (stats.staleness_min, stats.staleness_max) == (1, 3)
    assert stats.staleness_mean == pytest.approx((3 * 3 + 1 * 5) / 8)
    assert stats.last_token_staleness_mean == pytest.approx((1 + 3 + 1) / 3)
    assert stats.kv_staleness_max == 3
    assert (stats.tokens_per_s, stats.groups_per_s) == (4.0, 1.0)
    assert stats.length_percentiles == {50: 3, 90: 4, 99: 4} and stats.length_max == 4


def test_given_tokens_have_no_staleness():
    one = GROUPS[0].samples[0]
    masked = RolloutSample(prompt_ids=one.prompt_ids, token_ids=one.token_ids, spans=one.spans, loss_mask=[1, 0, 0, 1])
    assert masked.staleness(6) == [3, 1] and masked.kv_staleness(6) == [3, 3] and masked.num_drawn == 2


def test_without_groups_all_figures_are_zero():
    stats = stats_of([], version=0, seconds=0.0)
    assert set(stats.as_metrics().values()) == {0.0}


@pytest.mark.parametrize(("share", "expected"), [(0, 1), (1, 1), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)])
def test_a_percentile_is_the_smallest_value_that_covers_its_share(share, expected):
    assert percentile(range(1, 11), share) == expected


def test_a_sink_writes_them_under_their_own_axis():
    writer = Writer()
    WandbSink(writer).write_rollout(stats_of(GROUPS, version=6, seconds=2.0).as_metrics())
    [row] = writer.rows
    assert row["rollout/finished_length"] == 1.0 and row["rollout/tokens_per_s"] == 4.0
    assert row["rollout/length_p90"] == 4.0 and row[dict(writer.metrics)["rollout/*"]] == 6.0
    assert all(type(value) is float for value in row.values())
