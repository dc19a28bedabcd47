"""The draw that a captured graph can hold gives the tokens of the ordinary one, from device tensors alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from sampling_oracle import make_request
from sampling_rows import UNEDITED, Rows, drawn_captured, random_logits, random_request, same_outputs, spoil

from megatron_infer.kernels.draw_columns import Asks, Column
from megatron_infer.runner.cuda_graphs.captured_draw import RowMirror, uniform_of
from megatron_infer.runner.sampling.rng import mix, uniform
from megatron_infer.runner.sampling.row_params import RETURNS, RowFlags, RowParams


def test_uniforms_are_the_hosts_bit_for_bit():
    rng = np.random.default_rng(0)
    ends = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    seeds = np.concatenate([ends, rng.integers(0, 2**64, 4000, dtype=np.uint64)])
    positions = np.concatenate([[0, 1, 2**40, 7], rng.integers(0, 2**32, 4000)]).astype(np.int64)
    got = uniform_of(torch.from_numpy(mix(seeds).view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(got.numpy(), uniform(seeds, positions))


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_answers_are_those_of_the_ordinary_draw_whatever_rows_want_and_in_any_order(mode):
    rng = np.random.default_rng(1)
    for vocab_size, dtype, step in (
        (30, torch.float32, None),
        (2040, torch.bfloat16, 0.125),
        (5003, torch.float32, 0.5),
    ):
        rows = Rows([random_request(rng, vocab_size, **UNEDITED) for _ in range(60)], vocab_size, mode=mode)
        logits, order = random_logits(rng, 60, vocab_size, dtype=dtype, step=step), rng.permutation(60)
        assert rows.can_draw(order)
        got = drawn_captured(rows, logits, order)
        same_outputs(got, rows.sample(logits, order))
        assert not got.bad_S.any()


def test_rows_without_a_distribution_are_bad():
    logits = torch.randn(4, 100)
    logits[0], logits[1, 5], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    for params in ({}, {"temperature": 0.0}, {"top_p": 0.5}):
        got = drawn_captured(Rows([make_request([1], seed=i, **params) for i in range(4)], 100), logits, range(4))
        assert got.bad_S.tolist() == [True, True, True, False]
        assert got.tokens_S[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_small_vocabularies_and_odd_numbers_change_nothing(mode):
    """Temperatures lie around the greedy one; some steps have NaN, infinities or equal logits only."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        vocab_size = int(rng.choice([1, 2, 5, 33, 64, 65, 300]))

        def request(rng=rng):
            ways = {
                "temperature": float(rng.choice([0.0, 1e-6, 1e-5, 0.01, 1.0, 5.0])),
                "top_k": int(rng.integers(0, 9)),
                "top_p": float(rng.choice([1e-9, 0.5, 1.0])),
                "min_p": float(rng.choice([0.0, 1e-9, 1.0])),
                "logprobs": [None, 0, 3][int(rng.integers(3))],
                "return_sampled_logprobs": bool(rng.random() < 0.5),
                "return_support": bool(rng.random() < 0.5),
            }
            some = {name: value for name, value in ways.items() if rng.random() < 0.5}
            return make_request([0] * int(rng.choice([1, 30])), seed=int(rng.integers(99)), **some)

        rows = Rows([request() for _ in range(8)], vocab_size, mode=mode)
        for _ in range(2):
            logits = spoil(rng, random_logits(rng, 8, vocab_size, dtype=torch.bfloat16, step=0.5))
            order = rng.permutation(8)
            same_outputs(drawn_captured(rows, logits, order), rows.sample(logits, order))
            rows.put(int(order[0]), request())


def test_a_refresh_that_was_interrupted_is_done_again():
    calls = []

    def stage(array):
        calls.append(array)
        if len(calls) == 2:  # after that of the mirror's beginning
            raise KeyboardInterrupt
        return torch.from_numpy(array.copy())

    params = RowParams(3, 50)
    mirrors = [RowMirror(params, stage), RowMirror(params, lambda array: torch.from_numpy(array.copy()))]
    params.set(1, make_request([1, 2], temperature=0.7))
    with pytest.raises(KeyboardInterrupt):
        mirrors[0].refresh()
    for mirror in mirrors:
        mirror.refresh()
    assert torch.equal(mirrors[0].columns_NR, mirrors[1].columns_NR) and mirrors[0].columns_NR[Column.INVERSE, 1]


def test_a_row_is_drawn_by_what_it_wants_now_not_by_what_its_last_request_did():
    rng, vocab_size = np.random.default_rng(4), 60
    logits = random_logits(rng, 8, vocab_size)
    rows = Rows([random_request(rng, vocab_size, **UNEDITED) for _ in range(8)], vocab_size)
    for _ in range(12):
        same_outputs(drawn_captured(rows, logits, range(8)), rows.sample(logits))
        for row in rng.choice(8, size=3, replace=False).tolist():
            plain = make_request([1, 2], seed=row)
            rows.put(row, random_request(rng, vocab_size, **UNEDITED) if rng.random() < 0.7 else plain)


def test_a_mirror_follows_rows_that_change_hands_at_the_address_it_began_with():
    rng = np.random.default_rng(2)
    staged = []

    def stage(array):
        staged.append(array.shape)
        return torch.from_numpy(array.copy())

    params = RowParams(9, 50)
    mirror = RowMirror(params, stage)
    address = mirror.columns_NR.data_ptr()
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
            inverse, top_k, top_p, min_p = mirror.columns_NR.view(torch.float64)[:4, row].tolist()
            if params.flags[row] & 1:
                assert (inverse, top_k, top_p, min_p) == (1.0 / params.table[0, row], *params.table[1:4, row])
                assert mirror.columns_NR[Column.STREAM, row].item() == mix(params.seed[row : row + 1]).view(np.int64)[0]
            else:
                assert inverse == 0.0
            returned = bool(params.flags[row] & RETURNS["return_sampled_logprobs"])
            assert mirror.columns_NR[Column.ASKS, row].item() == (Asks.RAW | Asks.OWN if returned else 0)
    assert address == mirror.columns_NR.data_ptr()


EDITS = [
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": {7: 1.0}},
    {"allowed_token_ids": [3]},
    {"bad_token_ids": [3]},
    {"min_tokens": 4, "stop_ids": [5]},
]


def test_what_a_graph_does_not_do_is_left_to_the_ordinary_draw_and_counted():
    requests = [make_request([1, 2], **asked) for asked in (*EDITS, {"logprobs": 3})]
    rows, plain = Rows(requests, 50), len(EDITS)
    assert rows.can_draw([plain]) and rows.can_draw([]) and not rows.captured.drawn_outside
    for row in range(plain):
        assert not rows.can_draw([plain, row]), EDITS[row]
    later = dataclasses.replace(rows.inputs([plain - 1]), positions=np.array([6]))
    assert rows.captured.can_draw(later), "its stop ids are free by then"
    rows.params.flags[0] |= RowFlags.GRAMMAR
    assert not rows.can_draw([0])
    assert rows.captured.drawn_outside == {"penalties or edited logits": plain, "structured output": 1}


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"logprobs": 2}, {"return_support": True, "top_k": 3}])
def test_outputs_that_look_at_whole_rows_are_drawn_outside_where_ranks_hold_parts_of_them(asked):
    rows = Rows([make_request([1, 2], **asked), make_request([1, 2], return_sampled_logprobs=True)], 50)
    assert rows.can_draw([0, 1])
    rows.captured._gather = lambda logits: logits
    assert rows.can_draw([1]) and not rows.can_draw([0, 1])
    assert rows.captured.drawn_outside == {"ranks, alternatives or supports, of a vocabulary in parts": 1}
