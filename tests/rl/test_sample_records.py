"""Samples have the engine's support and routing, for single answers and for conversations."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from rollout_case import make_engine, prompts_of

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl import sample_file
from megatron_infer.rl.conversation import Conversation
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.tool_rollouts import say
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

PARAMS = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=1, top_p=0.7, return_support=True, return_routing=True)


@pytest.fixture(scope="module")
def roll():
    return Rollout(make_engine(tiny_gpt(init_method_std=0.2, **EXPERTS)))


def test_samples_have_support_and_routing_and_sample_files_keep_them(roll):
    prompts = prompts_of(3)
    groups = roll.generate(prompts, PARAMS)
    outputs = roll.engine.generate(prompts, PARAMS)
    back = sample_file.decode(sample_file.encode(groups))
    for group, output, other in zip(groups, outputs, back, strict=True):
        for sample, drawn, again in zip(group.samples, output.outputs, other.samples, strict=True):
            assert sample.token_ids == drawn.token_ids
            assert sample.support == drawn.support == again.support and len(sample.support) == 6
            assert sample.routing.shape == (len(group.prompt_ids) + 5, 2, 2) and sample.routing.dtype == np.uint8
            assert np.array_equal(sample.routing, drawn.routing) and np.array_equal(sample.routing, again.routing)
            assert all(token in sample.support.ids_at(i) for i, token in enumerate(sample.token_ids))


def test_the_routing_of_a_conversation_covers_all_of_it(roll):
    conversation = Conversation(roll.engine, prompts_of(1)[0], PARAMS)
    for _ in range(2):
        asyncio.run(say(roll, conversation))
        conversation.add_ids([7, 8])
    sample = conversation.sample()
    assert sample.token_ids[6:8] == [7, 8] and sample.loss_mask == [1] * 6 + [0] * 2 + [1] * 6
    assert sample.routing.shape[0] == len(sample.ids) - 1
    [alone] = roll.engine.generate(
        [sample.ids[:-1]], SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, return_routing=True)
    )
    assert np.array_equal(alone.outputs[0].routing, sample.routing)
