"""Rollouts interrupted by a training step: groups continue under the new weights, and spans record it per token."""

from __future__ import annotations

import itertools

import pytest
import torch
from rollout_case import BASE, assert_empty, prompts_of

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.rollout_queue import RolloutQueue
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
    train(session, running=running)
    with session.generating() as roll:
        assert len(roll.unfinished) == 3
        groups = roll.generate(prompts_of(1), PARAMS)
    assert len(groups) == 4 and [group.begun_version for group in groups] == [first] * 3 + [first + 1]
    for group in groups[:3]:
        for sample in group.samples:
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


def test_a_queue_runs_ahead_of_training_steps():
    session = make_session("offload")
    prompts = itertools.cycle(prompts_of(12))
    how = SamplingParams(n=2, max_tokens=40, stop_token_ids=list(range(10, 20)))
    with session.generating() as roll:
        queue = RolloutQueue(roll, prompts, how, groups_per_step=3, lag=1)
    ages = []
    for _ in range(4):
        with session.generating():
            batch = queue.next_batch()
        ages += [session.weight_version - group.begun_version for group in batch]
        train(session)
    assert len(ages) == 12 and set(ages) == {0, 1}
    with session.generating():
        queue.close()
    assert_empty(session.engine)
