"""A session measures what it delivers against the forward that trains, unasked, and changes nothing by that."""

from __future__ import annotations

import asyncio
import logging

import mismatch_case as case
import pytest
import torch
from mismatch_case import MAKERS
from session_case import copied, make_session

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, MismatchAlarm
from megatron_infer.rl.mismatch_figures import Alarm
from megatron_infer.rl.mismatch_meter import SESSION_SAMPLES, SESSION_SHARE
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.samples import RolloutError
from megatron_infer.rl.tool_rollouts import run_conversations
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import stock_spec, tiny_gpt

ALL = {"share": 1.0}
DRAWN = SamplingParams(n=2, max_tokens=6, temperature=0.9, ignore_eos=True, seed=3)


def session_of(kind="attention", meter=ALL, **how):
    return make_session(MAKERS[kind](**how), settings={"check_invariants": False}, meter=meter)


def generate(session, params=DRAWN, **how):
    with session.generating() as roll:
        return roll.generate(case.prompts(), params, **how)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_session_measures_its_rollouts_and_they_agree(kind):
    session = session_of(kind)
    for window in (1, 2):
        groups = generate(session)
        figures = session.meter.last.figures
        assert figures.num_tokens == sum(group.num_tokens for group in groups) and session.meter.num_windows == window
        assert not session.meter.last.is_alarm and 0 < figures.abs_diff_max < 1e-4


def test_it_is_on_by_default_and_turned_off_by_none_and_takes_arguments_of_the_meter():
    assert session_of(meter="auto").meter.share == SESSION_SHARE
    assert session_of(meter={"alarm": None}).meter.share == SESSION_SHARE
    session = session_of(meter=None)
    generate(session)
    assert session.meter is None
    for meter, words in (
        ("on", "'auto', None, or arguments"),
        ({"shares": 1}, "did you mean 'share'"),
        ({"share": 2}, "share is 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            session_of(meter=meter)


def test_an_alarm_is_a_warning_that_names_the_layer_and_figures_that_are_exported(monkeypatch, caplog):
    session = session_of()
    case.wrong_scale(monkeypatch, session)
    for window in (1, 2):
        caplog.clear()
        groups = generate(session)
        assert len(groups) == 3 and session.meter.num_alarms == window
        assert "over the limit" in caplog.text and "decoder.layers.1.self_attention" in caplog.text
        monkeypatch.setattr(session.meter._search, "locate", None)  # it is located once while it goes on
    exported = {one.name: metric.value for one in session.engine.figures().beside for metric in one.series.values()}
    assert exported["megatron_infer_mismatch_abs_diff_mean_nats"] > 0.1
    raising = session_of(meter={"share": 1.0, "alarm": Alarm(raises=True)})
    case.wrong_scale(monkeypatch, raising)
    raising.model.train()
    with pytest.raises(MismatchAlarm):
        generate(raising)
    assert raising.model.training


def test_small_rollouts_share_a_window_until_it_has_tokens_enough(monkeypatch):
    """An alarm by one unlikely token would be no verdict; the place is searched with samples of the present weights."""
    session = session_of(meter={"share": 1.0, "alarm": Alarm(min_tokens=7)})  # a window of 56
    generate(session)
    assert session.meter.last is None
    case.retrain(session)
    session.update_weights()
    generate(session)
    assert session.meter.last.figures.num_tokens == 72 and session.meter.last.figures.num_samples == 12
    generate(session)
    case.wrong_scale(monkeypatch, session)
    session.engine.reset_prefix_cache()
    generate(session)
    assert session.meter.num_windows == 2 and session.meter.last.is_alarm
    assert session.meter.last.place.name == "decoder.layers.1.self_attention"


def train(meter, *, nested):
    """Rollouts and training steps with dropout and momentum -> tokens, losses, weights and the generator's state."""
    torch.manual_seed(7)
    session = session_of(meter=meter, hidden_dropout=0.1, attention_dropout=0.1)
    session.model.train()
    optimizer = torch.optim.SGD(session.model.parameters(), lr=0.1, momentum=0.9)
    tokens, losses = [], []

    def step(number):
        ids = torch.randint(4, 128, (2, 12))
        positions = torch.arange(12)[None].expand(2, -1)
        loss = session.model(ids, positions, None, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for number in range(3):
        with session.generating() as roll:
            groups = roll.generate(case.prompts(), DRAWN)
            tokens.append([(s.token_ids, s.logprobs) for group in groups for s in group.samples])
            if nested:
                with session.training():
                    step(number)
                session.update_weights()
        if not nested:
            with session.training():
                step(number)
            session.update_weights()
    windows = 0 if session.meter is None else session.meter.num_windows
    return windows, (tokens, losses, [p.detach().clone() for p in session.model.parameters()], torch.get_rng_state())


@pytest.mark.parametrize("nested", [False, True])
def test_training_has_the_same_bits_with_it_and_without(nested):
    (windows, measured), (_, plain) = train(ALL, nested=nested), train(None, nested=nested)
    assert windows == 3
    assert measured[:2] == plain[:2]
    assert all(torch.equal(one, other) for one, other in zip(measured[2], plain[2], strict=True))
    assert torch.equal(measured[3], plain[3])


def test_what_is_drawn_is_measured_before_other_weights_come():
    session = session_of()
    other = copied(session.model)
    case.retrain(session)
    session.update_weights()
    with session.generating() as roll:
        roll.generate(case.prompts(), DRAWN)
        session.update_weights(other)
        assert session.meter.num_windows == 1
        roll.generate(case.prompts(), DRAWN)
        session.transition(copied(other))
        assert session.meter.num_windows == 2
        roll.generate(case.prompts(), DRAWN)
        case.retrain(session)
        session.update_weights()  # in place: these samples cannot be compared any more
    assert session.meter.num_windows == 2 and not session.meter.num_alarms
    assert session.meter.last.figures.num_stale_tokens == 0


def test_every_way_of_drawing_is_measured():
    session = session_of()
    one = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    prompts = case.prompts()

    async def streamed(roll):
        return [group async for group in roll.stream(prompts, one)]

    def queued(roll):
        queue = RolloutQueue(roll, iter(prompts), one, groups_per_step=3)
        batch = queue.next_batch()
        queue.close()
        return batch

    ways = {
        "iterate": lambda roll: list(roll.iterate(prompts, one)),
        "stream": lambda roll: asyncio.run(streamed(roll)),
        "collect": lambda roll: roll.collect(2, iter(prompts), one),
        "queue": queued,
        "conversations": lambda roll: run_conversations(roll, prompts, one, lambda conversation, turn: [9, 10]),
    }
    for name, draw in ways.items():
        with session.generating() as roll:
            groups = draw(roll)
        drawn = sum(group.num_tokens for group in groups)
        assert session.meter.last.figures.num_tokens == drawn > 0, name
        assert session.meter.last.figures.abs_diff_max < 1e-4, name


def test_a_model_that_cannot_be_scored_is_reported_once_and_generates(caplog):
    """megatron-core's own attention does not run on a CPU; the engine's does."""
    session = make_session(tiny_gpt(spec=stock_spec, init_method_std=0.2), meter=ALL)
    with caplog.at_level(logging.WARNING, "megatron_infer"):
        for _ in range(2):
            assert len(generate(session)) == 3
            with session.training():
                session.update_weights()
    assert caplog.text.count("no mismatch meter for this session from here on: scoring a sample raised") == 1


def test_failed_groups_and_blocks_that_end_with_an_error_are_not_measured():
    session = make_session(tiny_gpt(init_method_std=0.2), meter=ALL)
    with torch.no_grad():
        session.model.embedding.word_embeddings.weight[77] = float("nan")
    params = SamplingParams(max_tokens=9, ignore_eos=True, bad_token_ids=[77])
    with session.generating() as roll:
        groups = roll.generate([[5, 6], [77, 6]], params, on_error="return")
    assert session.meter.last.figures.num_tokens == groups[0].num_tokens
    with pytest.raises(RolloutError), session.generating() as roll:
        roll.generate([[5, 6], [77, 6]], params)
    assert session.meter.num_windows == 1


def test_a_block_without_an_end_keeps_few_samples():
    session = session_of()
    with session.generating() as roll:
        for _ in range(3):
            roll.generate([[5, 6]], SamplingParams(n=SESSION_SAMPLES // 2, max_tokens=1, seed=1))
    assert session.meter.last.figures.num_samples == SESSION_SAMPLES
    assert inspect(session.engine).context.num_free_rows == 8


@pytest.mark.parametrize("kind", ["attention", "experts"])
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_limits_are_wider_where_rollouts_multiply_in_few_bits(weight_dtype, kind):
    from megatron_infer.kernels.native import native_build

    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))
    session = make_session(MAKERS[kind](), settings={"weight_dtype": weight_dtype}, meter=ALL)
    assert session.meter.alarm == Alarm.of(weight_dtype, experts=kind == "experts")
    generate(session, SamplingParams(n=8, max_tokens=24, ignore_eos=True, seed=3))
    figures = session.meter.last.figures
    narrower = Alarm.of("float32" if weight_dtype == "int8" else "int8")
    assert figures.abs_diff_mean > narrower.abs_diff_mean and not session.meter.last.is_alarm
