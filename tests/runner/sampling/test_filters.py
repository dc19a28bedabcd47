"""The candidates found fast are the sorted ones, and what is kept is what transformers keeps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sampling_oracle import make_request, process
from sampling_rows import Rows, random_logits

from megatron_infer.runner.sampling.filters import DrawParams, best_ids, draw_any, draw_filtered, sorted_ids
from megatron_infer.runner.sampling.logprobs import processed

warpers = pytest.importorskip("transformers.generation.logits_process")


def draw_params(num_rows, *, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, candidates=256, uniform=None):
    columns = torch.empty(5, num_rows, dtype=torch.float64)
    columns[0], columns[1] = 1.0 / temperature, top_k if top_k is not None else 1 << 30
    columns[2], columns[3], columns[4] = top_p, min_p, 0.5 if uniform is None else uniform
    return DrawParams(columns_5M=columns, candidates=candidates, needs_mass=top_k is None and top_p < 1.0)


@pytest.mark.parametrize("step", [None, 1.0], ids=["distinct", "many_equal"])
@pytest.mark.parametrize("vocab_size", [100, 8191, 8192, 49152])
def test_best_ids_are_the_head_of_the_sorted_ones(vocab_size, step):
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, 4, vocab_size, step=step)
    logits[0] = 0.0
    logits[1, ::3] = -float("inf")
    logits[2] *= torch.where(torch.rand(vocab_size) < 0.5, 0.0, -0.0)
    numbers = logits.numpy()
    order = np.lexsort((np.broadcast_to(np.arange(vocab_size), numbers.shape), -numbers), axis=-1)
    assert sorted_ids(logits).tolist() == order.tolist()
    for count in (1, 2, 64, 90):
        assert best_ids(logits, count).tolist() == order[:, :count].tolist()


@pytest.mark.parametrize("step", [None, 0.25], ids=["distinct", "many_equal"])
def test_the_number_of_candidates_never_changes_a_draw(step):
    rng = np.random.default_rng(4)
    logits = random_logits(rng, 24, 6000, step=step)
    uniform = torch.from_numpy(rng.random(24))
    for top_k, top_p, min_p in itertools.product([None, 30, 64, 400], [0.2, 0.99, 1.0], [0.0, 0.05]):
        draws = [
            draw_filtered(logits, draw_params(24, top_k=top_k, top_p=top_p, min_p=min_p, candidates=n, uniform=uniform))
            for n in (64, 256, 6000)
        ]
        for other in draws[1:]:
            assert torch.equal(draws[0].token_M, other.token_M)
            assert torch.equal(draws[0].cut_logit_M, other.cut_logit_M)
            assert torch.equal(draws[0].cut_id_M, other.cut_id_M)


def test_the_largest_uniform_draws_the_last_kept_token_and_zero_the_first():
    logits = torch.linspace(3, 0, 5000).repeat(2, 1)
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    drawn = draw_filtered(logits, draw_params(2, top_k=10, uniform=uniform))
    assert drawn.token_M.tolist() == [0, 9]


@pytest.mark.few
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 5, 200, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.4])
@pytest.mark.parametrize("min_p", [0.0, 0.03])
def test_kept_tokens_and_their_logprobs_are_those_of_transformers(temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(6)
    logits = random_logits(rng, 6, 4000)
    wanted = warpers.TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k is not None:
        wanted = warpers.TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1.0:
        wanted = warpers.TopPLogitsWarper(top_p)(None, wanted)
    if min_p > 0.0:
        wanted = warpers.MinPLogitsWarper(min_p)(None, wanted)
    ours = draw_params(6, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = draw_filtered(logits, ours)
    got = torch.log_softmax(processed(logits.clone(), torch.full((6,), temperature), drawn), -1)
    assert torch.equal(got.isinf(), wanted.isinf())
    torch.testing.assert_close(got, torch.log_softmax(wanted, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("penalty", [0.7, 1.4])
def test_repetition_penalty_is_that_of_transformers(penalty):
    rng = np.random.default_rng(7)
    prompt, output = rng.integers(0, 60, size=20), rng.integers(0, 60, size=10)
    request = make_request(prompt, output, temperature=0, repetition_penalty=penalty, logprobs=60)
    logits = random_logits(rng, 1, 60)
    wanted = warpers.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([request.tokens]), logits.clone())
    assert process(logits[0].tolist(), request) == wanted[0].tolist(), "the oracle itself"
    got = Rows([request], 60, mode="processed").sample(logits).logprobs
    full = torch.empty(60).index_copy_(0, got.top_ids[0], got.top_logprobs[0])
    torch.testing.assert_close(full, torch.log_softmax(wanted[0], -1))


def test_a_draw_on_the_border_of_two_tokens_takes_the_second_and_never_one_without_weight():
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).repeat(4, 1)
    uniform = torch.tensor([0.0, 0.5 - 2.0**-53, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    params = draw_params(4, uniform=uniform)
    for draw in (draw_any, draw_filtered):
        assert draw(logits, params).token_M.tolist() == [1, 1, 2, 2]
