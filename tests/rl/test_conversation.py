"""Conversations keep every drawn token, find their history in the prefix cache, and mask given tokens."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from rollout_case import make_engine
from tokenizers import normalizers, pre_tokenizers
from vocabularies import byte_level, sentencepiece

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, InvalidPrompt, PromptTooLong
from megatron_infer.rl.conversation import Conversation, ConversationTooLong
from megatron_infer.rl.group_tracker import RolloutCall
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.tool_rollouts import TurnLimits, converse, run_conversations, say
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "hello there"}]
BLOCK = 16


@pytest.fixture(scope="module")
def tokenizer():
    made = byte_level()
    made._templates = {"default": TEMPLATE}
    return made


@pytest.fixture(scope="module")
def engine(tokenizer):
    model = tiny_gpt(vocab_size=272, init_method_std=0.2)
    return make_engine(model, tokenizer=tokenizer, prefix="lru")


@pytest.fixture
def roll(engine):
    yield Rollout(engine)
    assert_empty_but_cached(engine)


def assert_empty_but_cached(engine):
    inspect(engine).context.check()
    assert len(engine.output_processor) == 0 and engine.loop.is_idle and not engine.loop.backlog


def drawing(**how):
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 1, "bad_token_ids": range(264, 272)} | how)


def run(coroutine):
    return asyncio.run(coroutine)


def test_drawn_tokens_stay_and_the_history_is_found_in_the_prefix_cache(roll, tokenizer):
    conversation = Conversation(roll.engine, list(range(40, 60)), drawing())
    num_computed = 0
    for added in ("", " tool says 4\n", " tool says 5\n"):
        history = list(conversation.ids)
        conversation.add_text(added)
        assert conversation.ids[: len(history)] == history
        asked = list(conversation.ids)
        turn = run(say(roll, conversation))
        assert conversation.ids == asked + turn.token_ids and len(turn.token_ids) == 20
        assert turn.num_cached_tokens == num_computed // BLOCK * BLOCK  # whole blocks are found
        num_computed = len(conversation.ids) - 1  # the last drawn token was never an input
    canonical = tokenizer.encode(tokenizer.decode(conversation.ids, skip_special=False), add_special=False)
    assert canonical != conversation.ids, "these tokens would survive being tokenised again, and the test shows nothing"


def test_a_sample_records_drawn_and_given_tokens(roll, engine):
    conversation = Conversation(engine, list(range(40, 60)), drawing(return_support=True, top_k=5))
    first = run(say(roll, conversation))
    conversation.add_ids([7, 8, 9])
    engine.set_weight_version(engine.weight_version + 1)
    second = run(say(roll, conversation, drawing(max_tokens=4, return_support=True, top_k=5)))
    conversation.add_text("never answered")
    sample = conversation.sample()
    assert sample.token_ids == [*first.token_ids, 7, 8, 9, *second.token_ids]
    assert sample.loss_mask == [1] * 20 + [0] * 3 + [1] * 4
    assert sample.logprobs[20:23] == sample.raw_logprobs[20:23] == [0.0] * 3
    assert all(value < 0 for i, value in enumerate(sample.logprobs) if sample.loss_mask[i])
    now = engine.weight_version
    assert [(span.first_token, span.policy_version) for span in sample.spans] == [(0, now - 1), (23, now)]
    assert sample.staleness(now) == [1] * 20 + [0] * 4
    assert sample.finish_reason == "length" and sample.info["turns"][1][:3] == [23, 4, "length"]
    assert sample.support is not None and len(sample.support) == 27
    for place, token in enumerate(sample.token_ids):
        drawn = bool(sample.loss_mask[place])
        assert len(sample.support.ids_at(place)) == (5 if drawn else 272)
        assert not drawn or token in sample.support.ids_at(place)
    # The logprobs of a turn are those of a forward over the whole conversation.
    whole = engine.generate(
        [conversation.prompt_ids + sample.token_ids[:23]], drawing(max_tokens=4, top_k=5, return_sampled_logprobs=True)
    )[0].outputs[0]
    assert whole.token_ids == second.token_ids
    assert whole.processed_logprobs == pytest.approx(sample.logprobs[23:], abs=1e-4)


@pytest.mark.parametrize("ended", [True, False])
def test_messages_are_joined_as_the_template_renders_them(roll, tokenizer, ended):
    end = tokenizer.eos_ids[0]
    how = {"bad_token_ids": None, "allowed_token_ids": [70, end], "logit_bias": {end: -1e9 if not ended else 1e9}}
    conversation = Conversation(roll.engine, CHAT, drawing(max_tokens=3, ignore_eos=False, **how))
    prompt = tokenizer.decode(conversation.ids, skip_special=False)
    assert prompt == "<|user|>user\nhello there<|end|>\n<|user|>assistant\n"
    turn = run(say(roll, conversation))
    assert (turn.token_ids[-1] == end) is ended
    before = list(conversation.ids)
    conversation.add_messages([{"role": "tool", "content": "4"}])
    assert conversation.ids[: len(before)] == before
    added = tokenizer.decode(conversation.ids[len(before) :], skip_special=False)
    assert added == ("" if ended else "<|end|>") + "\n<|user|>tool\n4<|end|>\n<|user|>assistant\n"
    text = tokenizer.apply_chat_template(
        [*CHAT, {"role": "assistant", "content": turn.text}, {"role": "tool", "content": "4"}]
    )
    assert tokenizer.decode(conversation.ids, skip_special=False) == text
    if ended:  # joined at a special token: exactly what the whole text gives
        assert conversation.ids == tokenizer.encode(text, add_special=False)


def test_text_after_a_special_token_gets_no_extra_space(roll):
    pieces = sentencepiece()
    pieces.backend.normalizer = normalizers.Replace(" ", "▁")
    pieces.backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    conversation = Conversation(roll.engine, [5, 6], drawing())
    conversation._tokenizer = pieces
    conversation.ids = [*pieces.encode("hello", add_special=False), pieces.eos_ids[0]]
    conversation.add_text("hello")
    whole = pieces.encode("hello</s>hello", add_special=False)
    assert conversation.ids == whole
    alone = pieces.encode("hello", add_special=False)
    assert whole != [*alone, pieces.eos_ids[0], *alone], "this tokenizer puts no space, and the test shows nothing"


def test_messages_need_a_conversation_of_messages_and_a_template_that_renders_answers(roll, tokenizer, monkeypatch):
    plain = Conversation(roll.engine, [5, 6], drawing())
    with pytest.raises(InvalidPrompt, match="began with messages"):
        plain.add_messages(CHAT)
    conversation = Conversation(roll.engine, CHAT, drawing())
    with pytest.raises(InvalidPrompt, match="after an answer"):
        conversation.add_messages(CHAT)
    run(say(roll, conversation))
    monkeypatch.setitem(tokenizer._templates, "default", "{{ messages[0].content }}")
    before = list(conversation.ids)
    with pytest.raises(InvalidPrompt, match="shows an answer 0 times"):
        conversation.add_messages(CHAT)
    assert conversation.ids == before


def test_a_conversation_that_is_too_long_names_its_length_and_is_unchanged(roll):
    conversation = Conversation(roll.engine, [5] * 30, drawing(max_tokens=50), max_total_tokens=60)
    with pytest.raises(ConversationTooLong, match=r"has 61 tokens .* limit is 60 \(max_total_tokens\)") as caught:
        conversation.add_ids([1] * 31)
    assert isinstance(caught.value, PromptTooLong) and (caught.value.got, caught.value.limit) == (61, 60)
    assert str(caught.value).startswith("This model's maximum context length was exceeded")
    assert conversation.ids == [5] * 30
    turn = run(say(roll, conversation))
    assert len(turn.token_ids) == 30 and turn.finish_reason == "length" and conversation.room == 0
    with pytest.raises(ConversationTooLong):
        run(say(roll, conversation))


def counting(stop_at: int):
    """A tool that answers with ids and ends a conversation at its turn `stop_at`."""

    def tool(conversation, turn):
        return None if len(conversation.turns) >= stop_at else [9, 9, len(conversation.turns)]

    return tool


def test_many_conversations_run_at_once_and_are_returned_in_order(roll, engine):
    prompts = [{"prompt_token_ids": [30 + i] * 20, "task": i} for i in range(4)]
    before = inspect(engine).scheduler.stats.as_dict()["forked"]
    groups = run_conversations(roll, prompts, drawing(n=3, temperature=0.9), counting(3))
    assert inspect(engine).scheduler.stats.as_dict()["forked"] - before == 4 * 2, "the first answers share their prompt"
    assert [group.info["task"] for group in groups] == [0, 1, 2, 3]
    for group in groups:
        assert len({tuple(sample.token_ids) for sample in group.samples}) == 3
        for sample in group.samples:
            assert sample.info["ended"] == "tool" and len(sample.info["turns"]) == 3
            assert sample.num_drawn == 60 and len(sample.token_ids) == 66
            assert sample.token_ids[20:23] == [9, 9, 1] and sample.token_ids[43:46] == [9, 9, 2]
            assert sample.loss_mask == ([1] * 20 + [0] * 3) * 2 + [1] * 20


def test_the_engine_draws_for_others_while_a_tool_is_awaited(roll):
    waiting: set[int] = set()
    most, takes_s = 0, 0.2

    async def tool(conversation, turn):
        nonlocal most
        waiting.add(id(conversation))
        most = max(most, len(waiting))
        await asyncio.sleep(takes_s)
        waiting.discard(id(conversation))
        return None if len(conversation.turns) == 2 else "x"

    groups = run_conversations(roll, [[40 + i] * 5 for i in range(8)], drawing(max_tokens=3), tool)
    assert len(groups) == 8 and most > 1
    waiting.clear()
    most, takes_s = 0, 0.01
    run_conversations(roll, [[40 + i] * 5 for i in range(4)], drawing(max_tokens=3), tool, max_concurrent=1)
    assert most == 1


@pytest.mark.parametrize(
    ("limits", "ended", "turns"),
    [(TurnLimits(turns=2), "turns", 2), (TurnLimits(total_tokens=60), "length", 4), (TurnLimits(), "turns", 8)],
)
def test_limits_end_a_conversation_and_are_reported(roll, limits, ended, turns):
    [group] = run_conversations(roll, [5, 6], drawing(max_tokens=15), lambda conversation, turn: [9], limits=limits)
    [sample] = group.samples
    assert (sample.info["ended"], len(sample.info["turns"])) == (ended, turns)
    assert sample.loss_mask[-1] == 1
    assert limits.total_tokens is None or len(sample.ids) <= 60


def test_a_deadline_ends_an_answer_and_a_tool(roll, engine, monkeypatch):
    async def slow(conversation, turn):
        await asyncio.sleep(30)

    limits = TurnLimits(seconds=1.5)
    [group] = run_conversations(roll, [5, 6], drawing(max_tokens=2), slow, limits=limits)
    assert group.samples[0].info["ended"] == "deadline" and group.num_tokens == 2
    step = engine.step

    def slow_step():
        time.sleep(0.1)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    [group] = run_conversations(roll, [5, 6], drawing(max_tokens=100, n=2), slow, limits=limits)
    assert [sample.info["ended"] for sample in group.samples] == ["deadline"] * 2
    assert 0 < group.samples[0].num_drawn < 100 and group.samples[0].finish_reason == "abort"


def test_an_error_of_a_tool_ends_all_and_is_raised(roll, engine):
    def tool(conversation, turn):
        raise RuntimeError("the sandbox is gone")

    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        run_conversations(roll, [[40 + i] * 5 for i in range(4)], drawing(n=2), tool)
    assert_empty_but_cached(engine)


def test_leaving_the_groups_early_aborts_the_others(roll, engine):
    async def main():
        groups = converse(roll, [[4, i] for i in range(9, 15)], drawing(), counting(4))
        first = await anext(groups)
        await groups.aclose()
        return first

    assert len(run(main()).samples) == 1
    assert_empty_but_cached(engine)


def test_invalid_limits_are_refused():
    with pytest.raises(ConfigError, match="turns is a number above 0"):
        TurnLimits(turns=0)


def test_other_rollouts_are_not_affected(roll):
    """Answers of conversations are not delivered by stream(), nor its groups to a conversation."""

    async def main():
        conversation = Conversation(roll.engine, [5, 6], drawing())
        stream = [group async for group in roll.stream([[7, 8], [9, 9]], drawing())]
        turns = await asyncio.gather(say(roll, conversation), _collect(roll))
        return stream, turns

    stream, (turn, groups) = run(main())
    assert len(stream) == len(groups) == 2 and len(turn.token_ids) == 20


async def _collect(roll):
    return [group async for group in roll.stream([[7, 8], [9, 9]], drawing())]


def test_later_turns_of_a_group_with_a_seed_use_different_seeds(roll):
    """With a flat distribution equal seeds would give equal tokens."""
    flat = dict.fromkeys(range(30, 62), 100.0)
    params = SamplingParams(n=4, max_tokens=12, ignore_eos=True, seed=3, logit_bias=flat, temperature=100.0)

    def tool(conversation, turn):
        return [50] if len(conversation.turns) < 2 else None

    runs = [run_conversations(roll, [[40, 41]], params, tool)[0] for _ in range(2)]
    seconds = [sample.token_ids[13:] for sample in runs[0].samples]
    same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in itertools.combinations(seconds, 2)]
    assert max(same) < 6, same
    assert [s.token_ids for s in runs[0].samples] == [s.token_ids for s in runs[1].samples], "the seed still decides"


def test_a_last_turn_without_tokens_leaves_the_sample_unchanged(roll, engine):
    conversation = Conversation(engine, list(range(40, 60)), drawing(return_support=True, top_k=5))
    run(say(roll, conversation))
    before = conversation.sample()
    conversation.add_ids([7, 8, 9])
    call = RolloutCall()
    roll.tracker.begin(call, [conversation.next_request()], carry=False)
    conversation.add_answer(roll.tracker.drop(call, next(iter(call.pending.values()))))
    roll.tracker.end(call)
    after = conversation.sample()
    assert conversation.turns[-1].token_ids == [] and after.finish_reason == "abort"
    assert (after.token_ids, after.loss_mask, after.support) == (before.token_ids, before.loss_mask, before.support)
    assert after.support is not None
