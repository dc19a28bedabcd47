"""The draw that a captured graph can hold gives the tokens of the ordinary one, from device tensors alone."""

from __future__ import annotations

import numpy as np
import torch
from sampling_oracle import make_request
from sampling_rows import PADDING, Rows, random_logits, random_request

from megatron_infer.sampling.params import RowParams
from megatron_infer.sampling.rng import mix, uniform
from megatron_infer.sampling.static import RowMirror, uniform_of

PLAIN = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_token_ids": None,
    "min_tokens": 0,
    "logprobs": None,
    "return_sampled_logprobs": False,
    "return_support": False,
}
"""Nothing that the static draw leaves to the ordinary one."""


def static(rows: Rows, logits_RV: torch.Tensor, order):
    """Draw for rows in `order`, padded by two rows of nobody -> (tokens, bad) of the real ones."""
    order = np.asarray(order)
    nobody = len(rows.requests)
    positions = [len(rows.requests[row].tokens) for row in order]
    rows.sampler.refresh_static()
    logits = torch.nn.functional.pad(logits_RV[torch.from_numpy(order)], (0, PADDING, 0, 2), value=1e4)
    token, bad = rows.sampler.static_sample(
        logits, torch.tensor([*order, nobody, nobody]), torch.tensor([*positions, 0, 0]), rows.pool
    )
    assert rows.pool[torch.from_numpy(order), torch.tensor(positions)].tolist() == token[: len(order)].tolist()
    return token[: len(order)], bad[: len(order)]


def test_uniforms_are_the_hosts_bit_for_bit():
    rng = np.random.default_rng(0)
    ends = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    seeds = np.concatenate([ends, rng.integers(0, 2**64, 4000, dtype=np.uint64)])
    positions = np.concatenate([[0, 1, 2**40, 7], rng.integers(0, 2**32, 4000)]).astype(np.int64)
    got = uniform_of(torch.from_numpy(mix(seeds).view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(got.numpy(), uniform(seeds, positions))


def test_tokens_are_those_of_the_ordinary_draw_in_any_order():
    rng = np.random.default_rng(1)
    for vocab_size, dtype, step in (
        (30, torch.float32, None),
        (3000, torch.bfloat16, 0.125),
        (5003, torch.float32, 0.5),
    ):
        requests = [random_request(rng, vocab_size, **PLAIN) for _ in range(60)]
        logits = random_logits(rng, 60, vocab_size, dtype=dtype, step=step)
        rows = Rows(requests, vocab_size)
        order = rng.permutation(60)
        wanted = rows.sample(logits, order)
        token, bad = static(rows, logits, order)
        assert token.tolist() == wanted.tokens_S.tolist()
        assert not bad.any()


def test_rows_without_a_distribution_are_bad():
    logits = torch.randn(4, 100)
    logits[0], logits[1, 5], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    for params in ({}, {"temperature": 0.0}, {"top_p": 0.5}):
        token, bad = static(Rows([make_request([1], seed=i, **params) for i in range(4)], 100), logits, range(4))
        assert bad.tolist() == [True, True, True, False]
        assert token[:3].tolist() == [0, 0, 0]


def test_a_mirror_follows_rows_that_change_hands_at_the_address_it_began_with():
    rng = np.random.default_rng(2)
    staged = []

    def stage(array):
        staged.append(array.shape)
        return torch.from_numpy(array.copy())

    params = RowParams(9, 50)
    mirror = RowMirror(params, stage)
    address = mirror.columns_4R.data_ptr(), mirror.stream_R.data_ptr()
    for _ in range(30):
        for row in rng.choice(8, size=int(rng.integers(0, 4)), replace=False).tolist():
            if rng.random() < 0.3:
                params.clear(row)
            else:
                params.set(row, random_request(rng, 50))
        staged.clear()
        mirror.refresh()
        mirror.refresh()
        assert len(staged) <= 1 and all(shape[1] <= 3 for shape in staged)
        for row in range(9):
            inverse, top_k, top_p, min_p = mirror.columns_4R[:, row].tolist()
            if params.flags[row] & 1:
                assert (inverse, top_k, top_p, min_p) == (1.0 / params.table[0, row], *params.table[1:4, row])
                assert mirror.stream_R[row].item() == mix(params.seed[row : row + 1]).view(np.int64)[0]
            else:
                assert inverse == 0.0
    assert address == (mirror.columns_4R.data_ptr(), mirror.stream_R.data_ptr())


def test_rows_that_want_more_are_left_to_the_ordinary_draw():
    wishes = [{"logprobs": 0}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 1.0}}, {"return_support": True}]
    wishes += [{"return_sampled_logprobs": True}, {"bad_token_ids": [2]}]
    requests = [make_request([1, 2], top_k=5, temperature=0.0 if i % 2 else 1.0) for i in range(3)]
    requests += [make_request([1, 2], min_tokens=4, stop_ids=[3]), *(make_request([1, 2], **wish) for wish in wishes)]
    sampler = Rows(requests, 50).sampler
    assert sampler.can_be_static(np.array([0, 1, 2]), np.array([2, 2, 2]))
    assert sampler.can_be_static(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    assert not sampler.can_be_static(np.array([0, 3]), np.array([2, 5]))
    assert sampler.can_be_static(np.array([0, 3]), np.array([2, 6]))
    for row in range(4, 4 + len(wishes)):
        assert not sampler.can_be_static(np.array([0, row]), np.array([2, 2]))
