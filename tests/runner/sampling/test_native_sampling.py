"""The C++ draws and scores are those of the torch code they stand in for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sampling_oracle import make_request
from sampling_rows import Rows, random_logits, random_request

from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.native_sampling import NativeSampling
from megatron_infer.runner.sampling.filters import DrawParams, draw_any, draw_filtered
from megatron_infer.runner.sampling.logprobs import score


@pytest.fixture(scope="module")
def native():
    try:
        return NativeSampling(native_build.load())
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))


def same(native, logits, columns):
    got = native.draw(logits, columns)
    unfiltered = (columns[1] >= logits.shape[1]) & (columns[2] >= 1) & (columns[3] <= 0)
    for filtered, draw in ((False, draw_any), (True, draw_filtered)):
        rows = (unfiltered != filtered).nonzero().flatten()
        if not len(rows):
            continue
        params = DrawParams(columns_5M=columns[:, rows], candidates=256, needs_mass=True)
        wanted = draw(logits[rows].float(), params)
        assert torch.equal(got[0][rows], wanted.token_M)
        assert torch.equal(got[1][rows], wanted.top_M)
        if filtered:
            assert torch.equal(got[2][rows], wanted.cut_logit_M)
            assert torch.equal(got[3][rows], wanted.cut_id_M)
        else:
            assert bool((got[2][rows] == -torch.inf).all()) and bool((got[3][rows] == logits.shape[1]).all())


@pytest.mark.few
@pytest.mark.parametrize("step", [None, 0.5], ids=["distinct", "many_equal"])
@pytest.mark.parametrize("vocab_size", [1, 17, 1000, 5003, 49152])
def test_tokens_and_cuts_are_those_of_torch(native, vocab_size, step):
    rng = np.random.default_rng(vocab_size)
    grid = list(
        itertools.product(
            [0.1, 1.0, 4.0], [1, 5, 64, 300, 2000, 1 << 30], [1e-9, 0.5, 0.95, 1.0], [0.0, 1e-3, 0.5, 1.0]
        )
    )
    if vocab_size > 10_000:
        grid = grid[::5]
    columns = torch.tensor(grid, dtype=torch.float64).T.contiguous()
    columns[0] = 1 / columns[0]
    columns[1].clamp_(max=vocab_size)
    columns = torch.cat([columns, torch.from_numpy(rng.random((1, len(grid))))])
    columns[4, 0], columns[4, -1] = 0.0, 1 - 2.0**-53
    logits = random_logits(rng, len(grid), vocab_size, step=step)
    if vocab_size > 100:
        logits[::4, rng.random(vocab_size) < 0.7] = -torch.inf
        logits[1::7] = 0.0
        logits[1::7, ::2] = -0.0
    same(native, logits, columns)


def test_thousands_of_draws_from_flat_rows_are_those_of_torch(native):
    rng = np.random.default_rng(1)
    logits = random_logits(rng, 1, 8000).expand(2000, -1)
    columns = torch.ones(5, 2000, dtype=torch.float64)
    columns[1], columns[3] = 8000, 0.0
    columns[4] = torch.from_numpy(rng.random(2000))
    same(native, logits, columns)


def test_a_sampler_with_it_gives_the_same_output(native):
    rng = np.random.default_rng(2)
    requests = [random_request(rng, 3000) for _ in range(64)]
    logits = random_logits(rng, 64, 3000, step=0.25)
    for mode in ("raw", "processed"):
        plain = Rows(requests, 3000, mode=mode).sample(logits)
        fast = Rows(requests, 3000, mode=mode, kernels=native).sample(logits)
        assert torch.equal(plain.tokens_S, fast.tokens_S)
        assert torch.equal(plain.logprobs.token_rank, fast.logprobs.token_rank)
        assert torch.equal(plain.logprobs.top_ids, fast.logprobs.top_ids)
        torch.testing.assert_close(plain.logprobs.token_logprob, fast.logprobs.token_logprob, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(plain.logprobs.top_logprobs, fast.logprobs.top_logprobs, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_rows_without_a_distribution_are_bad(native, poison, params):
    logits = torch.randn(4, 1003)
    logits[1] = poison
    logits[3, 1002] = poison
    requests = [make_request([1], seed=i, **params) for i in range(4)]
    got = Rows(requests, 1003, kernels=native).sample(logits)
    assert got.bad_S.tolist() == [False, True, False, poison != -float("inf")]
    assert got.tokens_S[1] == 0 and (got.tokens_S < 1003).all()


@pytest.mark.parametrize("vocab_size", [1, 17, 1003, 49152])
def test_scores_are_those_of_torch(native, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, 40, vocab_size + 3, step=0.25)[:, :vocab_size]
    logits[::5, rng.random(vocab_size) < 0.5] = -torch.inf
    logits[:, 0] = 0.0
    token = torch.from_numpy(rng.integers(0, vocab_size, 40))
    token[:8] = logits[:8].float().argmax(-1)
    token[8], token[9] = 0, vocab_size - 1
    exact = torch.log_softmax(logits.double(), -1)
    for top in {0, 1, min(20, vocab_size), min(100, vocab_size)}:
        got, wanted = native.score(logits, token, top), score(logits, token, top)
        assert torch.equal(got[1], wanted[1])
        assert torch.equal(got[2], wanted[2])
        # float64 is the judge: torch's own sum over a large vocabulary in fp32 is off by up to 1e-5
        torch.testing.assert_close(got[0], exact.gather(1, token[:, None])[:, 0].float(), atol=5e-7, rtol=5e-7)
        torch.testing.assert_close(got[3], exact.gather(1, wanted[2]).float(), atol=5e-7, rtol=5e-7)


@pytest.mark.parametrize("width", [1, 15, 16, 129, 5000, 49152])
def test_argmax_gives_the_lowest_index_of_a_tie_and_its_logit(native, width):
    logits = torch.randn(6, width + 3)[:, :width]  # rows of a padded vocabulary
    logits[0] = -1e30
    logits[1] = -torch.inf
    logits[2, width // 2 :] = 9.0
    logits[3, -1] = 9.0
    logits[4, : width // 3 + 1] = 9.0
    token, largest = native.argmax(logits)
    assert token.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(largest, logits.amax(-1).float())


def test_argmax_passes_over_nan_but_shows_it(native):
    logits = torch.full((3, 40), torch.nan)
    logits[0, 17] = -3.0
    logits[1:] = 1.0
    logits[2, 39] = torch.nan
    token, largest = native.argmax(logits)
    assert token.tolist() == [17, 0, 0] and largest.isnan().tolist() == [True, False, True]


@pytest.mark.parametrize("top", [0, 5])
def test_a_score_that_takes_over_the_argmax_has_the_same_bits(native, top):
    logits = random_logits(np.random.default_rng(5), 40, 5003)
    logits[7, 11], logits[8] = torch.nan, -torch.inf
    token, largest = native.argmax(logits)
    known = torch.full_like(token, -1), largest
    alone, taken = native.score(logits, token, top), native.score(logits, token, top, known=known)
    for wanted, got in zip(alone, taken, strict=True):
        assert torch.equal(wanted.view(torch.int32), got.view(torch.int32))


def test_scores_of_a_row_of_nan_are_nan(native):
    logits = torch.randn(2, 500)
    logits[1, 3] = torch.nan
    logprob, _, ids, logprobs = native.score(logits, torch.tensor([5, 5]), 4)
    assert logprob.isnan().tolist() == [False, True] and bool(logprobs[1].isnan().all())
    assert bool(((ids >= 0) & (ids < 500)).all())


@pytest.mark.parametrize("top", [0, 5])
def test_a_score_that_takes_over_what_the_draw_summed_up_has_the_same_bits(native, top):
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 60, 5003)
    logits[7, 11], logits[8] = torch.nan, -torch.inf
    columns = torch.ones(5, 60, dtype=torch.float64)
    columns[1], columns[3] = 5003, 0.0
    columns[0, 20:30] = 1 / 0.7  # the sum of another temperature does not serve
    columns[1, 30:40], columns[2, 40:50] = 40, 0.9
    columns[4] = torch.from_numpy(rng.random(60))
    token, largest, _, _, mass = native.draw(logits, columns)
    assert bool((mass[:7] > 0).all()) and bool((mass[50:] > 0).all())
    assert not mass[[7, 8, *range(20, 40)]].any()
    alone, taken = native.score(logits, token, top), native.score(logits, token, top, known=(mass, largest))
    for wanted, got in zip(alone, taken, strict=True):
        assert torch.equal(wanted.view(torch.int32), got.view(torch.int32))


def test_log_probabilities_do_not_depend_on_the_company_a_row_is_drawn_in(native):
    rng = np.random.default_rng(4)
    params = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_p": 0.9}, {"logit_bias": {3: 2.0}}, {"top_k": 5}]
    requests = [make_request([1], seed=i, logprobs=0, return_sampled_logprobs=True, **p) for i, p in enumerate(params)]
    logits = random_logits(rng, len(requests), 3000)
    for mode in ("raw", "processed"):
        whole = Rows(requests, 3000, mode=mode, kernels=native).sample(logits)
        for place, request in enumerate(requests):
            alone = Rows([request], 3000, mode=mode, kernels=native).sample(logits[place : place + 1])
            assert alone.tokens_S[0] == whole.tokens_S[place]
            assert alone.logprobs.token_logprob[0] == whole.logprobs.token_logprob[place]
            assert alone.token_details.values["raw"][0] == whole.token_details.values["raw"][place]
            assert alone.token_details.values["processed"][0] == whole.token_details.values["processed"][place]
