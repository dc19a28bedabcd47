"""Log probabilities are those of the distribution named by the mode; prompts are scored in bounded chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_oracle import distribution, make_request, process
from sampling_rows import Rows, random_logits, random_request

from megatron_infer.runner.sampling.logprobs import prompt_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_logprobs_are_the_models_whatever_is_done_to_the_logits(dtype):
    rng = np.random.default_rng(1)
    requests = [random_request(rng, 2000, logprobs=i % 6) for i in range(30)]
    logits = random_logits(rng, 30, 2000, dtype=dtype)
    got = Rows(requests, 2000).sample(logits)
    wanted = torch.log_softmax(logits.float(), -1)
    batch = got.logprobs
    assert batch.index.tolist() == list(range(30)) and batch.counts.tolist() == [i % 6 for i in range(30)]
    token = got.tokens_S
    torch.testing.assert_close(batch.token_logprob, wanted.gather(1, token[:, None])[:, 0])
    for row, (values, logprobs) in enumerate(zip(logits.float().tolist(), wanted.tolist(), strict=True)):
        order = sorted(range(2000), key=lambda i: (-values[i], i))
        assert batch.token_rank[row].item() == order.index(token[row].item()) + 1
        assert batch.top_ids[row].tolist() == order[: batch.top_ids.shape[1]]
        assert batch.top_logprobs[row].tolist() == [logprobs[i] for i in order[: batch.top_ids.shape[1]]]


def test_processed_logprobs_are_the_distribution_drawn_from():
    rng = np.random.default_rng(2)
    requests = [random_request(rng, 60, logprobs=60) for _ in range(200)]
    logits = random_logits(rng, 200, 60, step=0.25)
    got = Rows(requests, 60, mode="processed").sample(logits)
    batch = got.logprobs
    for row, request in enumerate(requests):
        values = process(logits[row].tolist(), request)
        full = torch.empty(60).index_copy_(0, batch.top_ids[row], batch.top_logprobs[row]).tolist()
        if request.params.temperature == 0:  # the drawn one is certain; returned is the distribution it is best in
            wanted = torch.log_softmax(torch.tensor(np.array(values)), 0).tolist()
        else:
            kept = dict(distribution(values, request.params))
            wanted = [math.log(kept[i]) if i in kept else -math.inf for i in range(60)]
        assert full == pytest.approx(wanted, abs=2e-5), f"row {row}: {request.params}"
        token = got.tokens_S[row].item()
        assert batch.token_logprob[row].item() == full[token] > -math.inf
        assert batch.token_rank[row].item() == 1 + sum(
            value > full[token] or (value == full[token] and i < token) for i, value in enumerate(full)
        )


def test_only_rows_that_asked_are_scored():
    requests = [make_request([1], temperature=0, logprobs=2 if i in (1, 4) else None) for i in range(6)]
    rows, logits = Rows(requests, 100), torch.randn(6, 100)
    assert rows.sample(logits).logprobs.index.tolist() == [1, 4]
    assert rows.sample(logits, [4, 0]).logprobs.index.tolist() == [0]
    assert rows.sample(logits, [0, 2, 3]).logprobs is None


def test_more_alternatives_than_tokens_gives_all_tokens():
    got = Rows([make_request([1], temperature=0, logprobs=100)], 10).sample(torch.randn(1, 10)).logprobs
    assert sorted(got.top_ids[0].tolist()) == list(range(10)) and got.counts.tolist() == [10]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_prompt_logprobs_are_the_full_softmax_in_chunks(chunk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 16), torch.randn(16, 530)
    weight[:, 500:] = 50.0  # padding, never to be counted
    targets = torch.randint(0, 500, (20,))
    sizes = []

    def logits_fn(part):
        sizes.append(len(part))
        return (part @ weight).bfloat16()

    logprob, rank, top_ids, top_logprobs = prompt_logprobs(
        hidden, targets, logits_fn, top=4, chunk=chunk, vocab_size=500
    )
    wanted = torch.log_softmax((hidden @ weight).bfloat16()[:, :500].float(), -1)
    own = wanted.gather(1, targets[:, None])
    torch.testing.assert_close(logprob, own[:, 0])
    ids = torch.arange(500)
    assert torch.equal(rank, ((wanted > own) | ((wanted == own) & (ids < targets[:, None]))).sum(1) + 1)
    order = np.lexsort((np.broadcast_to(ids.numpy(), wanted.shape), -wanted.numpy()), axis=-1)[:, :4]
    assert top_ids.tolist() == order.tolist()
    torch.testing.assert_close(top_logprobs, wanted.gather(1, top_ids))
    assert max(sizes) <= chunk and sum(sizes) == 20


def test_a_prompt_of_one_token_has_no_prompt_logprobs():
    def refuse(hidden):
        raise AssertionError("nothing to score")

    logprob, rank, top_ids, top_logprobs = prompt_logprobs(
        torch.randn(0, 16), torch.zeros(0, dtype=torch.int64), refuse, top=3, chunk=8, vocab_size=50
    )
    assert logprob.shape == rank.shape == (0,) and top_ids.shape == top_logprobs.shape == (0, 3)
