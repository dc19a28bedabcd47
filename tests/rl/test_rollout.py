"""Rollouts deliver every group once, as it finishes, and leave nothing in the engine."""

from __future__ import annotations

import asyncio
import time

import pytest
from engines import logprobs_of
from rollout_case import VOCAB, assert_empty, lengths, make_engine, prompts_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InvalidPrompt, PromptTooLong, UnknownRequest, WrongState
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.rollout import Rollout
from megatron_infer.testing.inspect import inspect


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture
def roll(engine):
    yield Rollout(engine)
    assert_empty(engine)


def test_groups_equal_what_the_engine_draws(roll, engine):
    prompts, params = prompts_of(6), lengths(6, n=3)
    expected = engine.generate(prompts, params)
    groups = roll.generate(prompts, params)
    assert [group.index for group in groups] == list(range(6))
    for group, output in zip(groups, expected, strict=True):
        assert group.prompt_ids == output.prompt_token_ids and len(group.samples) == 3
        for sample, drawn in zip(group.samples, output.outputs, strict=True):
            assert sample.token_ids == drawn.token_ids and sample.finish_reason == "length"
            processed = logprobs_of(drawn)
            assert sample.logprobs == pytest.approx(processed, abs=1e-5)
            assert sample.raw_logprobs is not None and sample.raw_logprobs != sample.logprobs
            assert sample.loss_mask == [1] * len(drawn.token_ids)
            assert sample.ids == group.prompt_ids + drawn.token_ids


def test_groups_are_delivered_as_they_finish_with_their_index_and_info(roll):
    prompts = [{"prompt_token_ids": ids, "answer": str(i)} for i, ids in enumerate(prompts_of(6))]
    params = lengths(6)
    seen, reports = [], []
    groups = roll.generate(prompts, params, on_group=seen.append, on_progress=reports.append)
    assert [group.info for group in groups] == [{"answer": str(i)} for i in range(6)]
    finished = sorted(range(6), key=lambda i: params[i].max_tokens)
    assert [params[group.index].max_tokens for group in seen] == [params[i].max_tokens for i in finished]
    assert reports[-1].num_done == reports[-1].num_groups == 6
    assert [p.num_tokens for p in reports] == sorted(p.num_tokens for p in reports)
    assert reports[-1].num_tokens == sum(group.num_tokens for group in groups) == sum(p.max_tokens for p in params)


def test_one_prompt_is_computed_once_for_all_samples(engine):
    before = inspect(engine).scheduler.stats.as_dict()
    [group] = Rollout(engine).generate([5] * 40, SamplingParams(n=8, max_tokens=2, ignore_eos=True))
    after = inspect(engine).scheduler.stats.as_dict()
    assert len(group.samples) == 8
    assert after["prefill_tokens"] - before["prefill_tokens"] < 2 * 40
    assert after["forked"] - before["forked"] == 7


@pytest.mark.parametrize(
    ("prompts", "error", "words"),
    [
        ([[5, 6], [VOCAB + 9]], InvalidPrompt, "prompt 1: .*outside the vocabulary"),
        ([[5] * 400], PromptTooLong, "400 tokens"),
        ([{"answer": 3}], InvalidPrompt, "exactly one of"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], InvalidPrompt, "exactly one of"),
        ([[{"role": "user", "content": "a"}]], InvalidPrompt, "chat template"),
        ("text", InvalidPrompt, "tokenizer"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_any_is_queued(roll, prompts, error, words):
    with pytest.raises(error, match=words):
        roll.generate(prompts, SamplingParams())


def test_the_number_of_params_must_match_the_prompts(roll):
    with pytest.raises(InvalidPrompt, match="2 prompts but 3 SamplingParams"):
        roll.generate([[5], [6]], lengths(3))


def test_leaving_early_aborts_the_rest(roll, engine):
    for group in roll.iterate(prompts_of(6), lengths(6, n=2)):
        first = group
        break
    assert_empty(engine)
    later = roll.generate(prompts_of(3), lengths(3))
    assert first.group_id not in {group.group_id for group in later} and len(later) == 3


def test_an_error_of_a_callback_aborts_the_rest_and_is_raised(roll, engine):
    def on_group(group):
        raise RuntimeError("no reward")

    with pytest.raises(RuntimeError, match="no reward"):
        roll.generate(prompts_of(6), lengths(6), on_group=on_group)
    assert_empty(engine)


def test_other_requests_keep_their_outputs(roll, engine):
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True), request_id="mine")
    assert len(roll.generate(prompts_of(4), lengths(4))) == 4
    actual = [output for output in engine.step() if output.request_id == "mine"]
    assert actual and actual[-1].finished


def test_stream_equals_generate_and_leaves_the_loop_free(roll, engine, monkeypatch):
    prompts, params = prompts_of(6), lengths(6, n=2, temperature=0.0)
    expected = roll.generate(prompts, params)
    step, turns = engine.step, []

    def slow_step() -> list:
        time.sleep(0.05)
        turns.append("step")
        return step()

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.001)
            turns.append("loop")

    monkeypatch.setattr(engine, "step", slow_step)

    async def one() -> list:
        return [group async for group in roll.stream(prompts, params)]

    async def main() -> list:
        watching = asyncio.create_task(watch())
        both = await asyncio.gather(one(), one())
        watching.cancel()
        return both

    for groups in asyncio.run(main()):
        assert sorted(group.index for group in groups) == list(range(6))
        for group in groups:
            assert [s.token_ids for s in group.samples] == [s.token_ids for s in expected[group.index].samples]
    assert turns.count("loop") > 3 * turns.count("step")


def test_a_cancelled_stream_aborts_the_rest(roll, engine):
    async def main() -> None:
        begun = asyncio.Event()
        how = SamplingParams(max_tokens=100, ignore_eos=True)

        async def forever() -> None:
            async for _ in roll.stream(prompts_of(6), how, on_progress=lambda progress: begun.set()):
                pass

        task = asyncio.create_task(forever())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_empty(engine)


@pytest.mark.parametrize("budget", [Budget(groups=2), Budget(tokens=20), Budget(seconds=0.0)])
def test_a_paused_call_leaves_groups_that_the_next_one_delivers(roll, engine, budget):
    prompts, params = prompts_of(6), lengths(6, n=2)
    expected = engine.generate(prompts, params)
    roll.pause_at(budget)
    first = roll.generate(prompts, params)
    left = roll.unfinished
    assert len(first) + len(left) == 6 and left
    alive = sum(
        sample.request.num_output for pending in left for sample in engine.output_processor.get(pending.id).sequences
    )
    assert roll.stats.num_tokens == sum(group.num_tokens for group in first) + alive
    if budget.groups is not None:
        assert len(first) >= 2
    rest = roll.generate([[9, 9]], SamplingParams(max_tokens=1))
    assert roll.stats.num_tokens == sum(group.num_tokens for group in rest) - alive
    assert not roll.unfinished and [g.group_id for g in rest[:-1]] == [pending.id for pending in left]
    together = {group.index: group for group in [*first, *rest[:-1]]}
    for index, output in enumerate(expected):
        assert [s.token_ids for s in together[index].samples] == [s.token_ids for s in output.outputs]


def test_an_aborted_group_is_delivered_with_the_tokens_it_drew(roll, engine):
    def on_progress(progress):
        if progress.num_tokens >= 30 and progress.num_done == 0:
            roll.abort(roll.in_flight[1].id)

    prompts, params = prompts_of(4), SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=3)
    expected = engine.generate(prompts, params)
    groups = roll.generate(prompts, params, on_progress=on_progress)
    assert [group.index for group in groups] == [0, 1, 2, 3]
    for group, output in zip(groups, expected, strict=True):
        for sample, drawn in zip(group.samples, output.outputs, strict=True):
            cut = group.index == 1
            assert sample.finish_reason == ("abort" if cut else "length")
            length = len(sample.token_ids)
            assert sample.token_ids == drawn.token_ids[:length] and (0 < length < 12) == cut
            assert len(sample.logprobs) == length
    assert roll.stats.finished == {"length": 6, "abort": 2} and roll.stats.num_tokens == sum(
        g.num_tokens for g in groups
    )
    assert not roll.tracker.aborted, "the delivered group is remembered for ever"
    with pytest.raises(UnknownRequest, match="in flight: none"):
        roll.abort("rollout/none")


def test_an_unfinished_group_can_be_aborted_with_the_tokens_it_drew(roll, engine):
    roll.pause_at(Budget(tokens=5))
    assert roll.generate([[5, 6, 7]], SamplingParams(n=2, max_tokens=50, ignore_eos=True)) == []
    [pending] = roll.unfinished
    group = roll.abort(pending.id)
    assert [sample.finish_reason for sample in group.samples] == ["abort"] * 2 and 5 <= group.num_tokens < 10
    assert roll.unfinished == []


def test_a_stream_cancelled_while_it_submits_leaves_nothing(roll, engine):
    async def main() -> None:
        async def forever() -> None:
            async for _ in roll.stream(prompts_of(6), SamplingParams(max_tokens=100, ignore_eos=True)):
                pass

        for pauses in range(4):
            task = asyncio.create_task(forever())
            for _ in range(pauses):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert_empty(engine)

    asyncio.run(main())


def test_a_call_while_the_engine_is_suspended_names_the_remedy_and_leaves_nothing(roll, engine):
    with engine.suspended():
        with pytest.raises(WrongState, match=r"call resume\(\) first"):
            roll.generate(prompts_of(2), lengths(2))
        assert len(engine.output_processor) == 0


def test_ctrl_c_aborts_what_was_submitted(roll, engine, monkeypatch):
    step, left = engine.step, [3]

    def interrupted() -> list:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        roll.generate(prompts_of(6), lengths(6, n=2))
    assert_empty(engine)
