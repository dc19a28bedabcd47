"""The C++ draw gives the tokens and cuts of the torch path it stands in for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sampling_oracle import make_request
from sampling_rows import Rows, random_logits, random_request

from megatron_infer.kernels import native_build
from megatron_infer.kernels.native_draw import NativeDraw
from megatron_infer.sampling.filters import Shape, draw_any, draw_filtered


@pytest.fixture(scope="module")
def native():
    try:
        return NativeDraw(native_build.load())
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))


def same(native, logits, columns):
    got = native(logits, columns)
    unfiltered = (columns[1] >= logits.shape[1]) & (columns[2] >= 1) & (columns[3] <= 0)
    for filtered, draw in ((False, draw_any), (True, draw_filtered)):
        rows = (unfiltered != filtered).nonzero().flatten()
        if not len(rows):
            continue
        shape = Shape(columns_5M=columns[:, rows], candidates=256, needs_mass=True)
        wanted = draw(logits[rows].float(), shape)
        assert torch.equal(got[0][rows], wanted.token_M)
        assert torch.equal(got[1][rows], wanted.top_M)
        if filtered:
            assert torch.equal(got[2][rows], wanted.cut_logit_M)
            assert torch.equal(got[3][rows], wanted.cut_id_M)
        else:
            assert bool((got[2][rows] == -torch.inf).all()) and bool((got[3][rows] == logits.shape[1]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("step", [None, 0.5], ids=["distinct", "many_equal"])
@pytest.mark.parametrize("vocab_size", [1, 17, 1000, 5003, 49152])
def test_tokens_and_cuts_are_those_of_torch(native, vocab_size, dtype, step):
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
    logits = random_logits(rng, len(grid), vocab_size, dtype=dtype, step=step)
    if vocab_size > 100:
        logits[::4, rng.random(vocab_size) < 0.7] = -torch.inf
        logits[1::7] = 0.0
        logits[1::7, ::2] = -0.0
    same(native, logits, columns)


def test_thousands_of_draws_from_flat_rows_are_those_of_torch(native):
    rng = np.random.default_rng(1)
    logits = random_logits(rng, 1, 20_000).expand(2000, -1)
    columns = torch.ones(5, 2000, dtype=torch.float64)
    columns[1], columns[3] = 20_000, 0.0
    columns[4] = torch.from_numpy(rng.random(2000))
    same(native, logits, columns)


def test_a_sampler_with_it_gives_the_same_output(native):
    rng = np.random.default_rng(2)
    requests = [random_request(rng, 3000) for _ in range(64)]
    logits = random_logits(rng, 64, 3000, dtype=torch.bfloat16, step=0.25)
    for mode in ("raw", "processed"):
        plain = Rows(requests, 3000, mode=mode).sample(logits)
        fast = Rows(requests, 3000, mode=mode, draw=native).sample(logits)
        assert torch.equal(plain.tokens_S, fast.tokens_S)
        assert torch.equal(plain.logprobs.token_logprob, fast.logprobs.token_logprob)
        assert torch.equal(plain.logprobs.top_logprobs, fast.logprobs.top_logprobs)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_rows_without_a_distribution_are_bad(native, poison, params):
    logits = torch.randn(4, 1003)
    logits[1] = poison
    logits[3, 1002] = poison
    requests = [make_request([1], seed=i, **params) for i in range(4)]
    got = Rows(requests, 1003, draw=native).sample(logits)
    assert got.bad_S.tolist() == [False, True, False, poison != -float("inf")]
    assert got.tokens_S[1] == 0 and (got.tokens_S < 1003).all()
