"""Draws whose candidates FlashInfer (a stand-in of it) finds give the tokens of torch's, bit for bit."""

from __future__ import annotations

import sys

import fake_packages
import numpy as np
import pytest
import torch
from sampling_oracle import make_request
from sampling_rows import Rows, random_logits, random_request, same_outputs

from megatron_infer.cuda_graphs.captured_draw import DRAWS_BEHIND
from megatron_infer.kernels import flashinfer_topk, optional_packages

CPU = torch.device("cpu")


@pytest.fixture
def search(monkeypatch):
    """FlashInfer's, which notes in `counts` how many candidates it was asked for."""
    fake_packages.install(monkeypatch, "flashinfer")
    found = flashinfer_topk.FlashInferSearch()

    def noted(values_MV, count):
        noted.counts.append(count)
        return found(values_MV, count)

    noted.counts = []
    return noted


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_tokens_and_their_details_are_those_of_torch_beside_any_other_rows(search, mode):
    rng = np.random.default_rng(7)
    for vocab_size, dtype, step in ((700, torch.float32, None), (3000, torch.bfloat16, 0.5)):
        bounds = [{"top_k": int(k)} for k in rng.choice([1, 2, 7, 50, 64, 65, 200, 256, 257], size=16)]
        requests = [random_request(rng, vocab_size, temperature=0.9, **bound) for bound in bounds]
        logits = random_logits(rng, 16, vocab_size, dtype=dtype, step=step)
        rows, torchs = Rows(requests, vocab_size, mode=mode, search=search), Rows(requests, vocab_size, mode=mode)
        torchs.pool = rows.pool
        few = [row for row, bound in enumerate(bounds) if bound["top_k"] <= 64]
        some = [row for row, bound in enumerate(bounds) if bound["top_k"] <= 256]
        for order in (few, some, range(16), *([row] for row in range(16))):
            same_outputs(rows.sample(logits, order), torchs.sample(logits, order))
    assert {64, 256} == set(search.counts)


def test_among_equal_logits_lower_ids_are_kept_whatever_the_sign_of_zero(search):
    logits = torch.full((1, 400), -1.0)
    logits[0, 5:200], logits[0, 200:] = -0.0, 0.0
    requests = [make_request([1], seed=seed, top_k=3) for seed in range(60)]
    drawn = Rows(requests, 400, search=search).sample(logits.expand(60, -1))
    assert search.counts == [64] and set(drawn.tokens_S.tolist()) == {5, 6, 7}


def test_a_vocabulary_without_more_ids_than_candidates_and_rows_without_a_bound_are_sorted(search):
    rng = np.random.default_rng(3)
    for vocab_size, params in ((64, {"top_k": 3}), (900, {"top_p": 0.9}), (900, {"top_k": 257})):
        requests, logits = [make_request([1], seed=4, **params)], random_logits(rng, 1, vocab_size)
        same_outputs(
            Rows(requests, vocab_size, search=search).sample(logits), Rows(requests, vocab_size).sample(logits)
        )
    assert search.counts == []


def test_rows_without_a_distribution_are_bad_and_nothing_is_drawn_in_a_graph(search):
    logits = torch.randn(4, 500)
    logits[0], logits[1, 5], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    rows = Rows([make_request([1], seed=i, top_k=9) for i in range(4)], 500, search=search)
    assert rows.sample(logits).bad_S.tolist() == [True, True, True, False] and search.counts == [64]
    assert not rows.can_draw([0]) and rows.captured.drawn_outside == {DRAWS_BEHIND: 1}


def test_why_it_cannot_search_here_is_told(monkeypatch):
    assert flashinfer_topk.unavailable(CPU) == "runs on a GPU, the model is on cpu"
    monkeypatch.setattr(flashinfer_topk, "not_on_gpu", lambda device: None)
    monkeypatch.setattr(flashinfer_topk, "no_compiler", lambda: None)
    monkeypatch.setattr(flashinfer_topk, "missing", optional_packages.missing.__wrapped__)  # without its cache
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert flashinfer_topk.unavailable(CPU) == "flashinfer-python is not installed"
    fake_packages.install(monkeypatch, "flashinfer")
    monkeypatch.setattr(optional_packages, "version", lambda distribution, module: "0.7.2")
    assert flashinfer_topk.unavailable(CPU) is None
    monkeypatch.setattr(sys.modules["flashinfer.topk"], "can_implement_filtered_topk", lambda: False)
    assert "128 KiB of shared memory" in flashinfer_topk.unavailable(CPU)
    monkeypatch.setattr(optional_packages, "version", lambda distribution, module: "0.7.1")
    assert flashinfer_topk.unavailable(CPU) == "needs flashinfer-python 0.7.2 or newer, this is 0.7.1"
