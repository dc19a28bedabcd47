"""Verification by rejection: what comes out of drafts and tests follows the model's distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chi_square import homogeneity
from sampling_oracle import make_request

from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput
from megatron_infer.runner.speculative.residual import DraftSampler, Proposals, ResidualSampler

VOCAB, COUNT, CHUNK = 24, 100_000, 20_000
CHANCE = 0.01
PARAMS = {
    "cool": {"temperature": 0.5},
    "warm": {"temperature": 1.0},
    "hot": {"temperature": 1.6},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k, min_p": {"temperature": 0.9, "top_k": 12, "min_p": 0.02},
    "bias": {"temperature": 0.8, "logit_bias": {3: 1.5}, "bad_token_ids": [5]},
}


@pytest.mark.parametrize("count", [CHUNK, pytest.param(COUNT, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", PARAMS)
def test_tokens_follow_the_distribution_of_one_by_one(kind, count):
    rng = np.random.default_rng(3)
    target, guess = (torch.from_numpy(rng.normal(size=VOCAB) * 1.5).float() for _ in range(2))
    guess = 0.6 * target + 0.4 * guess
    params = RowParams(2, VOCAB)
    for row, seed in ((0, 5), (1, 6)):
        params.set(row, make_request([3, 7], seed=seed, logprobs=0, **PARAMS[kind]))
    pool = torch.tensor([[3, 7] + [9] * 6] * 2, dtype=torch.int32)
    found: list[Proposals] = []
    proposing, plain = DraftSampler(params, padded_vocab_size=VOCAB), Sampler(params, padded_vocab_size=VOCAB)
    verifying = ResidualSampler(params, padded_vocab_size=VOCAB, proposals=lambda: found[0])
    drawn, wanted, num_kept, expected_kept = np.zeros(VOCAB), np.zeros(VOCAB), 0, 0.0
    for first in range(2, count, CHUNK):
        positions = np.arange(first, first + CHUNK)
        own, other = (
            SamplerInput(rows=np.full(CHUNK, row, dtype=np.int32), positions=positions, token_pool=pool)
            for row in (0, 1)
        )
        proposing.kept = []
        proposed = proposing.sample(guess.expand(CHUNK, -1), own)
        ((probs, bad),) = proposing.kept
        found[:] = [Proposals(places=np.arange(CHUNK), token_N=proposed.tokens_S, probs_NV=probs, bad_N=bad)]
        out = verifying.sample(target.expand(CHUNK, -1), own)
        one_by_one = plain.sample(target.expand(CHUNK, -1), other)
        drawn += np.bincount(out.tokens_S, minlength=VOCAB)
        wanted += np.bincount(one_by_one.tokens_S, minlength=VOCAB)
        num_kept += int((out.tokens_S == proposed.tokens_S).sum())
        proposing.kept = []
        one = SamplerInput(rows=own.rows[:1], positions=positions[:1], token_pool=pool)
        proposing.sample(target[None], one)
        expected_kept += CHUNK * float(torch.minimum(probs[0], proposing.kept[0][0][0]).sum())
        assert out.logprobs is not None
        wanted_logprob = target.log_softmax(-1)[out.tokens_S]
        assert torch.allclose(out.logprobs.token_logprob, wanted_logprob, atol=1e-5), "not those of the target"
    assert abs(num_kept - expected_kept) < 4 * (count / 4) ** 0.5, "not as often as the two distributions allow"
    assert homogeneity(drawn, wanted) > CHANCE


def test_greedy_rows_and_drafts_without_a_distribution_are_kept_where_they_equal_the_draw():
    params = RowParams(2, VOCAB)
    params.set(0, make_request([3], seed=5, temperature=0))
    params.set(1, make_request([3], seed=5, temperature=1.0))
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(4, VOCAB))).float()
    inputs = SamplerInput(
        rows=np.array([0, 0, 1, 1], dtype=np.int32),
        positions=np.array([1, 2, 1, 2]),
        token_pool=torch.zeros(2, 9, dtype=torch.int32),
    )
    wanted = Sampler(params, padded_vocab_size=VOCAB).sample(logits, inputs).tokens_S
    broken = Proposals(
        places=np.arange(4),
        token_N=torch.zeros(4, dtype=torch.int64),
        probs_NV=torch.full((4, VOCAB), torch.nan),
        bad_N=torch.ones(4, dtype=torch.bool),
    )
    out = ResidualSampler(params, padded_vocab_size=VOCAB, proposals=lambda: broken).sample(logits, inputs)
    assert out.tokens_S.tolist() == wanted.tolist()
