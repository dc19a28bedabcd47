"""Tokens are those of the slow definition, whatever the batch; rows that cannot be drawn from say so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sampling_oracle import distribution, draw, make_request, process
from sampling_rows import Rows, random_logits, random_request

INF = float("inf")


def expect_oracle(requests, logits):
    got = Rows(requests, logits.shape[1]).sample(logits)
    wanted = [draw(row, request) for row, request in zip(logits.float().tolist(), requests, strict=True)]
    assert not got.bad_S.any()
    assert got.tokens_S.tolist() == wanted


@pytest.mark.parametrize("step", [None, 0.5], ids=["distinct", "many_equal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", [30, 1000, 5003])
def test_tokens_are_the_oracles_for_random_wishes(vocab_size, dtype, step):
    rng = np.random.default_rng(vocab_size)
    requests = [random_request(rng, vocab_size) for _ in range({30: 120, 1000: 60, 5003: 16}[vocab_size])]
    expect_oracle(requests, random_logits(rng, len(requests), vocab_size, dtype=dtype, step=step))


@pytest.mark.parametrize("step", [None, 0.5], ids=["distinct", "many_equal"])
def test_filters_combine_as_defined(step):
    rng = np.random.default_rng(3)
    grid = itertools.product([0.3, 1.0, 5.0], [0, 1, 3, 64, 65, 300, 1000], [1e-9, 0.3, 0.95, 1.0], [0.0, 0.01, 0.7])
    requests = [
        make_request([1], seed=i, temperature=t, top_k=k, top_p=p, min_p=m) for i, (t, k, p, m) in enumerate(grid)
    ]
    expect_oracle(requests, random_logits(rng, len(requests), 1000, step=step))


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(2, 2000)
    logits[0, [700, 701, 1999]] = 3.0
    for dtype in (torch.float32, torch.bfloat16):
        for params in ({}, {"bad_token_ids": [0]}):
            rows = Rows([make_request([1], temperature=0, **params) for _ in range(2)], 2000)
            assert rows.sample(logits.to(dtype)).tokens_S.tolist() == [700, 1 if params else 0]


def test_a_temperature_near_zero_is_greedy():
    logits = torch.zeros(1, 50)
    logits[0, 31] = 1e-3
    assert Rows([make_request([1], temperature=1e-7)], 50).sample(logits).tokens_S.tolist() == [31]


def test_pure_greedy_batches_only_take_the_argmax():
    calls = []

    def argmax(logits):
        calls.append((logits.dtype, tuple(logits.shape)))
        return logits.argmax(-1), logits.amax(-1).float()

    logits = torch.randn(4, 100).bfloat16()
    Rows([make_request([1], temperature=0) for _ in range(4)], 100, argmax=argmax).sample(logits)
    assert calls == [(torch.bfloat16, (4, 100))]


def test_a_row_draws_the_same_token_alone_and_in_any_company():
    rng = np.random.default_rng(11)
    vocab_size = 3000
    requests = [random_request(rng, vocab_size) for _ in range(48)]
    logits = random_logits(rng, len(requests), vocab_size, dtype=torch.bfloat16, step=0.125)
    for mode in ("raw", "processed"):
        rows = Rows(requests, vocab_size, mode=mode)
        alone = [rows.sample(logits, [row]) for row in range(len(requests))]
        for _ in range(12):
            some = rng.permutation(len(requests))[: int(rng.integers(2, 48))]
            together = rows.sample(logits, some)
            assert together.tokens_S.tolist() == [alone[row].tokens_S.item() for row in some]
            if together.logprobs is None:
                continue
            for entry, place in enumerate(together.logprobs.index):
                mine, count = alone[some[place]].logprobs, together.logprobs.counts[entry]
                assert mine.token_logprob[0] == together.logprobs.token_logprob[entry]
                assert mine.token_rank[0] == together.logprobs.token_rank[entry]
                assert torch.equal(mine.top_ids[0, :count], together.logprobs.top_ids[entry, :count])
                assert torch.equal(mine.top_logprobs[0, :count], together.logprobs.top_logprobs[entry, :count])


def test_large_vocabulary_rows_are_independent_of_company_and_threads():
    rng = np.random.default_rng(12)
    vocab_size = 49152
    kinds = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 500, "top_p": 0.99}, {"temperature": 0}]
    requests = [make_request([1], seed=i, **kinds[i % len(kinds)]) for i in range(18)]
    logits = random_logits(rng, 18, vocab_size, dtype=torch.bfloat16)
    rows = Rows(requests, vocab_size)
    alone = [rows.sample(logits, [row]).tokens_S.item() for row in range(18)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert rows.sample(logits).tokens_S.tolist() == alone
    finally:
        torch.set_num_threads(threads)


def test_draws_follow_the_filtered_distribution():
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=24) * 1.5).float()
    count = 4000
    for seed, params in enumerate(
        [
            {},
            {"temperature": 0.6},
            {"top_k": 6},
            {"top_p": 0.8},
            {"min_p": 0.1},
            {"top_k": 10, "top_p": 0.9, "min_p": 0.02},
        ]
    ):
        requests = [make_request([1], seed=1000 * seed + i, **params) for i in range(count)]
        tokens = Rows(requests, 24).sample(logits.expand(count, -1)).tokens_S
        wanted = dict(distribution(process(logits.tolist(), requests[0]), requests[0].params))
        seen = np.bincount(tokens.numpy(), minlength=24)
        assert set(np.flatnonzero(seen)) <= set(wanted), "a token outside the filters was drawn"
        statistic = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in wanted.items())
        freedom = len(wanted) - 1
        assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5, f"{params}: chi-square {statistic:.1f}"


def test_same_seed_and_position_give_the_same_token_after_a_restart():
    logits = torch.randn(1, 500)
    first = Rows([make_request([1, 2, 3], seed=-5)], 500).sample(logits).tokens_S
    again = Rows([make_request([9], [8, 7], seed=2**64 - 5)], 500).sample(logits).tokens_S
    assert torch.equal(first, again)


def test_min_tokens_ends_for_a_row_that_stays_in_the_batch():
    logits = torch.zeros(2, 40)
    logits[:, 7] = 9.0
    requests = [make_request([1], temperature=0, min_tokens=2, stop_ids=[7]) for _ in range(2)]
    rows = Rows(requests, 40)
    seen = []
    for _ in range(4):
        seen.append(rows.sample(logits).tokens_S.tolist())
        for request in requests:
            request.tokens.append(0)
    assert seen == [[0, 0], [0, 0], [7, 7], [7, 7]]


def test_a_row_that_changes_hands_takes_the_new_requests_parameters():
    logits = torch.randn(2, 64).expand(2, 64)
    best, second = logits[0].topk(2).indices.tolist()
    rows = Rows([make_request([1], temperature=0, bad_token_ids=[best]), make_request([1], temperature=0)], 64)
    assert rows.sample(logits).tokens_S[0].item() == second
    rows.params.set(0, make_request([1], temperature=0, allowed_token_ids=[3]))
    assert rows.sample(logits).tokens_S[0].item() == 3
    rows.params.set(0, make_request([1], temperature=0))
    assert rows.sample(logits).tokens_S[0].item() == best
    rows.params.set(0, make_request([1], temperature=0, bad_token_ids=[best]))
    rows.params.clear(0)
    assert rows.sample(logits).tokens_S[0].item() == best
    assert not rows.params.extras


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9, "top_k": 90}])
def test_one_token_left_is_always_drawn(params):
    rng = np.random.default_rng(1)
    requests = [
        make_request([1], seed=1, bad_token_ids=[i for i in range(2000) if i != 1234], **params),
        make_request([1], seed=2, allowed_token_ids=[1999], **params),
        make_request([1], seed=3, allowed_token_ids=[0, 1], bad_token_ids=[0], **params),
    ]
    got = Rows(requests, 2000).sample(random_logits(rng, 3, 2000))
    assert got.tokens_S.tolist() == [1234, 1999, 1] and not got.bad_S.any()


@pytest.mark.parametrize("poison", [float("nan"), INF])
@pytest.mark.parametrize("whole_row", [True, False])
def test_rows_without_a_distribution_are_bad_and_the_others_are_not(poison, whole_row):
    rng = np.random.default_rng(2)
    kinds = [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0, "repetition_penalty": 1.5}]
    requests = [make_request([1, 2], seed=i, logprobs=2, **kinds[i // 2]) for i in range(10)]
    logits = random_logits(rng, 10, 3000)
    clean = Rows(requests, 3000).sample(logits)
    logits[::2, slice(None) if whole_row else slice(17, 18)] = poison

    def passing_over_nan(x):
        return x.nan_to_num(-INF).argmax(-1), x.amax(-1).float()

    for dtype in (torch.float32, torch.bfloat16):
        got = Rows(requests, 3000, argmax=passing_over_nan).sample(logits.to(dtype))
        assert got.bad_S.tolist() == [True, False] * 5
        assert got.tokens_S[::2].tolist() == [0] * 5
        if dtype == torch.float32:
            assert torch.equal(got.tokens_S[1::2], clean.tokens_S[1::2])


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_row_with_every_token_masked_is_bad(params):
    masked = make_request([1], allowed_token_ids=[3, 4], bad_token_ids=[3, 4], **params)
    got = Rows([masked, make_request([1], temperature=0)], 300).sample(torch.randn(2, 300))
    assert got.bad_S.tolist() == [True, False]


def test_a_row_of_many_steps_draws_what_the_oracle_draws_at_each():
    rng = np.random.default_rng(9)
    ways = [
        {"temperature": 0, "frequency_penalty": 1.5},
        {"temperature": 0, "presence_penalty": 2.0, "repetition_penalty": 1.2},
        {"frequency_penalty": -0.5, "top_k": 5},
        {"temperature": 0.5, "top_p": 0.9, "min_tokens": 4},
    ]
    requests = [make_request([1, 2, 3], seed=i, stop_ids=[0], **way) for i, way in enumerate(ways)]
    rows = Rows(requests, 12)
    rows.pool = torch.zeros(len(ways) + 1, 64, dtype=torch.int32)
    for _ in range(40):
        for row, request in enumerate(requests):
            rows.pool[row, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
        logits = random_logits(rng, len(requests), 12)
        tokens = rows.sample(logits).tokens_S.tolist()
        assert tokens == [draw(row, request) for row, request in zip(logits.tolist(), requests, strict=True)]
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)


def test_a_draw_that_was_interrupted_leaves_no_counts_behind(monkeypatch):
    rows = Rows([make_request([1, 2], [7, 7, 8], temperature=0, frequency_penalty=1.0)], 30)
    logits = torch.zeros(1, 30)
    logits[0, 7], logits[0, 9] = 3.0, 0.5
    assert rows.sample(logits).tokens_S.tolist() == [7]

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_fill_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rows.sample(logits)
    assert rows.sample(logits).tokens_S.tolist() == [7]
