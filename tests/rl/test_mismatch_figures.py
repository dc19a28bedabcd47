"""The mismatch meter's figures: which tokens count, the formulas, and where figures are exported."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import mismatch_case as case
import pytest
import torch
from mismatch_case import rollout, session_of

from megatron_infer.engine.metrics.definitions import MISMATCH
from megatron_infer.engine.metrics.registry import Registry
from megatron_infer.engine.metrics.wandb import WandbSink
from megatron_infer.errors import ConfigError
from megatron_infer.rl.mismatch_figures import Alarm, MismatchFigures, Tally
from megatron_infer.rl.mismatch_meter import MismatchMeter
from megatron_infer.rl.samples import group_of


def test_figures_match_their_formulas():
    diffs = [0.0, 0.05, -0.2, 0.3]
    tally = Tally()
    assert [tally.add(diff) for diff in diffs] == [True, True, True, True]
    got, d = tally.figures(seconds=1.0, weight_version=3), torch.tensor(diffs, dtype=torch.float64)
    want = {
        "num_tokens": 4,
        "abs_diff_mean": d.abs().mean(),
        "abs_diff_max": 0.3,
        "kl_k1": -d.mean(),
        "kl_k3": (d.exp() - 1 - d).mean(),
        "token_mult_prob_error": d.abs().exp().mean(),
        "ratio_mean": d.exp().mean(),
        "share_outside": 0.5,
        "weight_version": 3,
    }
    for name, value in want.items():
        assert getattr(got, name) == pytest.approx(float(value)), name
    assert not tally.add(0.1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30])
def test_values_that_are_not_finite_trip_every_alarm(wrong):
    tally = Tally()
    tally.add(0.0)
    tally.add(wrong)
    tally.add_processed(wrong, 0.0)
    over = Alarm().tripped(tally.figures(seconds=0.0, weight_version=0))
    assert {"abs_diff_mean", "abs_diff_max", "token_mult_prob_error", "sampler_excess_mean"} <= set(over)


def test_samples_are_chosen_by_their_ids_alone_and_in_the_given_share():
    session = session_of("attention")
    names = [(f"rollout/{i}", j) for i in range(500) for j in range(4)]
    meters = [MismatchMeter(session, share=0.05), MismatchMeter(session, share=0.05)]
    chosen = [[name for name in names if meter._is_chosen(*name)] for meter in meters]
    assert chosen[0] == chosen[1] and 60 < len(chosen[0]) < 140
    other = MismatchMeter(session, share=0.05, seed=1)
    assert [name for name in names if other._is_chosen(*name)] != chosen[0]
    every = MismatchMeter(session, share=1.0)
    assert all(every._is_chosen(*name) for name in names)


def test_tokens_of_other_weights_are_counted_and_not_compared():
    session = session_of("attention")
    meter = MismatchMeter(session, share=1.0, alarm=Alarm(raises=True))
    params = case.SamplingParams(max_tokens=20, temperature=0.7, ignore_eos=True, seed=1)
    with session.generating() as roll:
        first = roll.generate(case.prompts()[:1], params)
        assert meter.observe(first, params).figures.num_stale_tokens == 0
        case.retrain(session)
        assert meter.observe(first, params) is None, "weights that changed without a word were taken for the old ones"
        session.update_weights()
        assert meter.observe(first, params) is None
        fresh = roll.generate(case.prompts()[:1], params)
        both = meter.observe([*first, *fresh], params)
    assert both.figures.num_stale_tokens == 20 and both.figures.num_tokens == 20 and not both.is_alarm


def test_only_tokens_after_an_update_that_recomputed_the_keys_are_compared():
    session = session_of("attention")
    meter = MismatchMeter(session, share=1.0, alarm=Alarm(raises=True))
    params = case.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, return_sampled_logprobs=True)
    for running, compared in (("recompute", 15), ("keep", 0)):
        with session.generating():
            engine = session.engine
            engine.add_request(case.prompts()[1], params)
            outputs: list[Any] = []
            for _ in range(5):
                outputs += engine.step()
            case.retrain(session)
            session.update_weights(running=running)
            while engine.has_unfinished():
                outputs += engine.step()
            report = meter.observe([group_of(outputs[-1])], params)
        assert (0 if report is None else report.figures.num_tokens) == compared, running


def test_given_tokens_are_not_compared_and_samples_without_logprobs_are_counted():
    session = session_of("attention")
    meter = MismatchMeter(session, share=1.0)
    with session.generating() as roll:
        (group,) = roll.generate(case.prompts()[:1], case.DRAWN)
        first, second = group.samples
        first.loss_mask[5:9] = [0] * 4
        first.raw_logprobs[5:9] = [-50.0] * 4
        second.raw_logprobs = None
        report = meter.observe([group])
    assert report.figures.num_tokens == 20 and report.figures.num_unscored == 1 and not report.is_alarm


def test_joined_tallies_are_the_tally_of_all_tokens():
    numbers = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    whole, parts = Tally(), [Tally(), Tally()]
    for index, (diff, raw) in enumerate(numbers):
        for tally in (whole, parts[index % 2]):
            tally.add(diff)
            tally.add_processed(raw, diff)
            tally.others["num_stale_tokens"] += 1
            tally.num_samples += 1
    figures = whole.figures(seconds=0.0, weight_version=3)
    for one, other in (parts, reversed(parts)):
        joined = one.joined(other).figures(seconds=0.0, weight_version=3)
        for name in joined.__dataclass_fields__:
            assert getattr(joined, name) == pytest.approx(getattr(figures, name)), name
    excess = [max(abs(raw) - abs(diff), 0.0) for diff, raw in numbers]
    assert figures.sampler_excess_mean == pytest.approx(sum(excess) / len(numbers))


def test_figures_go_to_wandb_and_to_a_registry_with_helps_and_units():
    rows: list[dict[str, float]] = []
    axes: list[tuple[str, str | None]] = []
    writer = SimpleNamespace(
        log=rows.append, define_metric=lambda name, step_metric=None: axes.append((name, step_metric))
    )
    registry, session = Registry(), session_of("attention")
    meter = MismatchMeter(session, share=1.0, sinks=[WandbSink(writer)], registry=registry)
    report = rollout(session, meter)
    rollout(session, meter)
    assert len(rows) == 2 and rows[0]["mismatch/num_tokens"] == 144
    assert axes.count(("mismatch/*", "mismatch/weight_version")) == 1
    assert set(rows[0]) == {f"mismatch/{name}" for name in MismatchFigures.__dataclass_fields__} - {"mismatch/worst"}
    families = {family.name: family for family in registry.collect()}
    assert list(families) == [spec.full_name for spec in MISMATCH.values()] and len(families) == len(rows[0])
    gauge = families["megatron_infer_mismatch_abs_diff_mean_nats"]
    assert next(iter(gauge.series.values())).value == meter.last.figures.abs_diff_mean > 0
    assert report.figures.worst.position > 0 and meter.num_tokens == 288


def test_figures_are_exported_with_the_engines_own_unless_a_registry_is_given():
    session = session_of("attention")
    report = rollout(session, MismatchMeter(session, share=1.0))
    beside = {one.name: one.series[()].value for one in session.engine.figures().beside}
    assert len(beside) == len(MISMATCH)
    assert beside["megatron_infer_mismatch_kl_k3_nats"] == report.figures.kl_k3
    assert beside["megatron_infer_mismatch_num_tokens"] == report.figures.num_tokens == 144


def test_invalid_arguments_are_refused():
    session = session_of("attention")
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match="share is"):
            MismatchMeter(session, share=share)
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        MismatchMeter(session, alarm="autp")
    with pytest.raises(ConfigError, match=r"token_mult_prob_error is 0\.5"):
        Alarm(token_mult_prob_error=0.5)
    assert MismatchMeter(session).observe([]) is None
