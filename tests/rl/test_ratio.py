"""While the weights stay the same, the importance ratio exp(score - engine's log probability) is 1."""

from __future__ import annotations

import random

import pytest
import torch
from session_case import BASE

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

STEPS, VOCAB = 16, 128
MODELS = {
    "attention": lambda: tiny_gpt(init_method_std=0.2),
    "hybrid": lambda: tiny_hybrid("M*-M", init_method_std=0.2),
}


def endless():
    rng = random.Random(0)
    while True:
        yield [rng.randrange(4, VOCAB) for _ in range(rng.randint(3, 20))]


def largest_deviation(model: torch.nn.Module, temperature: float = 1.0, **settings: object) -> tuple[float, int]:
    """(largest deviation of the ratio from 1, samples that outlived an update) over STEPS steps at learning rate 0.

    With `speculative` drafts are verified, and some are kept.
    """
    config = InferenceConfig(**BASE | {"logprobs_mode": "processed"} | settings)
    session = RolloutSession(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    ends = list(range(4, 16))  # answers of different lengths: some are unfinished whenever the weights change
    params = SamplingParams(
        n=2, temperature=temperature, max_tokens=24, stop_token_ids=ends, ignore_eos=True, logprobs=0
    )
    queue, worst, num_carried, num_drafts_kept = None, 0.0, 0, 0
    for _ in range(STEPS):
        with session.generating() as roll:
            queue = queue or RolloutQueue(roll, endless(), params, groups_per_step=2, lag=2)
            samples = [sample for group in queue.next_batch() for sample in group.samples]
            if (found := session.engine.spec_decode_metrics()) is not None:
                num_drafts_kept = found.num_accepted
        with session.training():
            loss = torch.zeros(())
            scores = session.score([s.ids for s in samples], temperature=temperature, grad=True)
            for score, sample in zip(scores, samples, strict=True):
                actual = score[-len(sample.token_ids) :]
                worst = max(worst, ((actual.detach() - torch.tensor(sample.logprobs)).exp() - 1).abs().max().item())
                num_carried += len(sample.spans) > 1
                loss = loss - actual.sum()
            loss.backward()
            assert any(parameter.grad.abs().max() > 0 for parameter in model.parameters() if parameter.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        session.update_weights()
    assert session.weight_version == STEPS
    assert "speculative" not in settings or num_drafts_kept > 4, num_drafts_kept
    return worst, num_carried


@pytest.mark.parametrize("kind", MODELS)
def test_ratio_is_one_in_fp32_although_requests_outlive_updates(kind):
    worst, num_carried = largest_deviation(MODELS[kind]().train())
    assert num_carried > 10
    assert worst < 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_ratio_is_exactly_one_in_exact_mode(kind):
    worst, num_carried = largest_deviation(MODELS[kind]().train(), batch_invariant=True)
    assert num_carried > 10
    assert worst == 0.0


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_ratio_is_exactly_one_in_exact_mode_with_drafts(kind):
    drafts = {"adaptive": False}
    model = MODELS[kind]().train()
    worst, num_carried = largest_deviation(model, temperature=0.05, batch_invariant=True, speculative=drafts)
    assert num_carried > 5
    assert worst == 0.0


@pytest.mark.long
def test_ratio_is_exactly_one_in_exact_mode_with_an_mtp_layer():
    """The trainer's forward runs the layer only where there are labels, and scores are of the model alone."""
    model = tiny_gpt(init_method_std=0.2, mtp_num_layers=1).train()
    drafts = {"method": "mtp", "adaptive": False}
    worst, num_carried = largest_deviation(model, temperature=0.05, batch_invariant=True, speculative=drafts)
    assert num_carried > 5
    assert worst == 0.0
