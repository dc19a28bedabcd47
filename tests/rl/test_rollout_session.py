"""Rollouts interrupted by a training step: groups continue under the new weights, and spans record it per token."""

from __future__ import annotations

import pytest
import torch
from rollout_case import BASE, assert_empty, prompts_of

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.tiny import tiny_gpt

PARAMS = SamplingParams(n=2, max_tokens=14, ignore_eos=True, seed=5)


def make_session(mode: str) -> RolloutSession:
    return RolloutSession(tiny_gpt(init_method_std=0.2), InferenceConfig(**BASE), suspend_mode=mode)


def train(session: RolloutSession, **how: str) -> None:
    with session.training(), torch.no_grad():
        for parameter in session.model.parameters():
            parameter.mul_(1.2)
    session.update_weights(**how)


@pytest.mark.parametrize("running", ["keep", "recompute"])
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_partial_rollouts_continue_after_a_training_step_with_a_span_for_each_policy(mode, running):
    session = make_session(mode)
    first = session.weight_version
    with session.generating() as roll:
        roll.pause_at(Budget(tokens=24))
        assert roll.generate(prompts_of(3), PARAMS) == []
    drawn = {
        (group.id, one.index): list(one.request.tokens[one.request.prompt_len :])
        for group in session.engine.output_processor.requests
        for one in group.sequences
    }
    train(session, running=running)
    with session.generating() as roll:
        assert len(roll.unfinished) == 3
        groups = roll.generate(prompts_of(1), PARAMS)
    assert len(groups) == 4 and [group.begun_version for group in groups] == [first] * 3 + [first + 1]
    for group in groups[:3]:
        for index, sample in enumerate(group.samples):
            before = drawn[group.group_id, index]
            assert sample.token_ids[: len(before)] == before and len(sample.token_ids) == 14
            assert sample.spans[1].first_token == len(before)
            assert sample.staleness(first + 1) == [1] * len(before) + [0] * (14 - len(before))
            assert [span.policy_version for span in sample.spans] == [first, first + 1]
            fresh = mode == "recompute" or running == "recompute"
            assert sample.spans[1].kv_version_min == first + fresh
            # Each token's log probability is that of the weights in its span: for the last tokens the present weights,
            # if they attend to no keys and values of older weights.
            if fresh:
                start = len(sample.prompt_ids) + sample.spans[1].first_token
                scored = session.score([sample.ids])[0].tolist()[start - 1 :]
                assert sample.raw_logprobs[sample.spans[1].first_token :] == pytest.approx(scored, abs=2e-4)
    assert_empty(session.engine)
