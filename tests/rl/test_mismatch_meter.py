"""The mismatch meter has no alarm where both forwards agree, and locates a planted fault where they do not."""

from __future__ import annotations

from functools import partial
from typing import Any

import mismatch_case as case
import pytest
import torch
from mismatch_case import MAKERS, rollout, session_of

from megatron_infer.errors import MismatchAlarm
from megatron_infer.rl.mismatch_figures import Alarm
from megatron_infer.rl.mismatch_layers import MismatchCause
from megatron_infer.rl.mismatch_meter import MismatchMeter
from megatron_infer.testing.inspect import inspect, run_one_by_one

# fault -> (model, function that plants it, cause, kind, layer)
FAULTS: dict[str, tuple[str, Any, MismatchCause, str, int | None]] = {
    "stale Mamba decay": ("hybrid", case.stale_decay, MismatchCause.LAYER, "mamba", 3),
    "wrong softmax scale": ("attention", case.wrong_scale, MismatchCause.LAYER, "attention", 1),
    "dropped sliding window": ("attention", case.dropped_window, MismatchCause.LAYER, "attention", 1),
    "dropped causal mask": ("hybrid", case.dropped_causal_mask, MismatchCause.LAYER, "attention", 1),
    "wrong block table entry": ("experts", case.wrong_table_entry, MismatchCause.LAYER, "attention", 0),
    "stale prefix": ("attention", case.stale_prefix, MismatchCause.STALE_PREFIX, "prefix", None),
    "stale prefix, recurrent": ("hybrid", case.stale_prefix, MismatchCause.STALE_PREFIX, "prefix", None),
    "stale packed mlp": (
        "attention",
        partial(case.stale_copy, weight="decoder.layers.0.mlp.linear_fc2.weight"),
        MismatchCause.LAYER,
        "mlp",
        0,
    ),
    "stale packed output": (
        "hybrid",
        partial(case.stale_copy, weight="output_layer.weight"),
        MismatchCause.LAYER,
        "output",
        None,
    ),
    "router order": ("experts", case.router_order, MismatchCause.LAYER, "moe", 1),
    "broken residual": ("attention", case.broken_residual, MismatchCause.STREAM, "layer", 0),
    "temperature not applied": ("attention", case.no_temperature, MismatchCause.SAMPLER, "sampler", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_detected_and_located_and_without_it_there_is_no_alarm(name, monkeypatch):
    kind, plant, cause, part, layer = FAULTS[name]
    session = session_of(kind)
    meter = MismatchMeter(session, share=1.0)
    for _ in range(2):  # the second round finds prefixes of the first
        quiet = rollout(session, meter)
        assert not quiet.is_alarm and quiet.place is None, str(quiet)
        assert quiet.figures.num_tokens == 144 and quiet.figures.num_processed
    if "stale prefix" in name:  # an update without the fault
        case.retrain(session, seed=1)
        session.update_weights()
        assert not rollout(session, meter).is_alarm
    plant(monkeypatch, session)
    report = rollout(session, meter)
    assert report.is_alarm, str(report)
    place = report.place
    assert (place.cause, place.kind, place.layer) == (cause, part, layer), str(report)
    assert str(place) in str(report)
    stale = {"stale Mamba decay": "scan weights", "stale packed mlp": "packed", "stale packed output": "packed"}
    assert stale.get(name, "") in place.stale_copies
    if name == "router order":
        assert place.routed_elsewhere > 0.3


@pytest.mark.parametrize("kind", MAKERS)
def test_rounding_in_bf16_is_no_alarm(kind):
    session = session_of(kind, params_dtype=torch.bfloat16)
    meter = MismatchMeter(session, share=1.0)
    for _ in range(2):
        report = rollout(session, meter)
        assert not report.is_alarm and report.figures.abs_diff_mean > 1e-3, str(report)


@pytest.mark.parametrize(
    "name", ["wrong softmax scale", "stale Mamba decay", "router order", "temperature not applied"]
)
def test_a_fault_shows_through_the_rounding_of_bf16(name, monkeypatch):
    kind, plant, cause, part, layer = FAULTS[name]
    session = session_of(kind, params_dtype=torch.bfloat16)
    meter = MismatchMeter(session, share=1.0)
    plant(monkeypatch, session)
    place = rollout(session, meter).place
    assert place is not None and (place.cause, place.kind, place.layer) == (cause, part, layer), str(place)


def test_a_router_near_a_tie_is_distinguished_from_a_wrong_one():
    """In bf16 rounding sends a few tokens to other experts; an alarm with too low a limit reports that as ROUTING."""
    session = session_of("experts", params_dtype=torch.bfloat16)
    place = rollout(session, MismatchMeter(session, share=1.0, alarm=Alarm(abs_diff_mean=0.0))).place
    assert (place.cause, place.kind) == (MismatchCause.ROUTING, "moe") and 0 < place.routed_elsewhere < 0.2, str(place)


def test_in_exact_mode_nothing_differs_without_a_fault(monkeypatch):
    session = session_of("attention", batch_invariant=True)
    meter = MismatchMeter(session, share=1.0)
    for _ in range(2):
        figures = rollout(session, meter).figures
        assert figures.abs_diff_max == figures.processed_abs_diff_max == 0 and figures.token_mult_prob_error == 1
    case.stale_prefix(monkeypatch, session)
    assert rollout(session, meter).place.cause is MismatchCause.STALE_PREFIX


def test_an_alarm_is_reported_and_raised_and_the_engine_runs_on(monkeypatch, caplog):
    session = session_of("attention")
    alarms: list[Any] = []
    meter = MismatchMeter(session, share=1.0, alarm=Alarm(raises=True), on_alarm=alarms.append)
    attend = session.model.decoder.layers[1].self_attention.fused.attend
    right = attend.spec
    case.wrong_scale(monkeypatch, session)
    with pytest.raises(MismatchAlarm, match=r"decoder\.layers\.1\.self_attention") as caught:
        rollout(session, meter)
    assert alarms == [caught.value.report] == [meter.last] and "over the limit" in caplog.text
    attend.spec = right
    session.engine.reset_prefix_cache()
    assert not rollout(session, meter).is_alarm
    assert meter.num_windows == 2 and meter.num_alarms == 1
    assert session.model.training is False and inspect(session.engine).context.num_free_rows == 8


def test_without_an_alarm_only_figures_are_reported(monkeypatch):
    session = session_of("attention")
    case.wrong_scale(monkeypatch, session)
    report = rollout(session, MismatchMeter(session, share=1.0, alarm=None))
    assert report.figures.abs_diff_mean > 0.01 and not report.is_alarm and report.place is None
    quick = rollout(session, MismatchMeter(session, share=1.0, attribute=False))
    assert quick.is_alarm and quick.place is None


def test_an_alarm_is_located_outside_of_any_block_too(monkeypatch):
    session = session_of("attention")
    case.wrong_scale(monkeypatch, session)
    meter = MismatchMeter(session, share=1.0)
    with session.generating() as roll:
        groups = roll.generate(case.prompts(), case.DRAWN)
    session.model.train()
    assert meter.observe(groups).place.layer == 1
    assert all(module.training for module in session.model.modules())
    with session.training():
        assert meter.observe(groups).place.layer == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_unfinished_requests_are_unchanged_while_an_alarm_is_located(overlap):
    params = case.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

    def answers(observing: bool) -> list[Any]:
        session = session_of("hybrid", overlap=overlap)
        meter = MismatchMeter(session, share=1.0)
        attend = session.model.decoder.layers[1].self_attention.fused.attend
        attend.spec = case.dataclasses.replace(attend.spec, scale=2 * attend.spec.scale)
        run_one_by_one(session.engine)
        engine = session.engine
        with session.generating() as roll:
            ids = [engine.add_request(prompt, params) for prompt in case.prompts()]
            found = {}
            for step in range(200):
                found |= {out.request_id: out for out in engine.step()}
                if step == 8 and observing:
                    groups = roll.generate([case.prompts()[1]], case.DRAWN)
                    assert meter.observe(groups).place.kind == "attention"
                inspect(engine).context.check()
                if not engine.has_unfinished():
                    break
        return [found[name].outputs[0].token_ids for name in ids]

    assert answers(True) == answers(False)
