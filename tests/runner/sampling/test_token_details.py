"""A token's details: its log probability in the model's distribution and in the one drawn from, and its support."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_oracle import distribution, make_request, process
from sampling_rows import Rows, random_logits, random_request

from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.native_sampling import NativeSampling
from megatron_infer.outputs.token_support import TokenSupport, lone_row, support_row
from megatron_infer.runner.sampling.returned_details import ALONE, WHOLE

BOTH = {"return_sampled_logprobs": True, "return_support": True}


@pytest.fixture(params=["torch", "native"])
def kernels(request):
    if request.param == "torch":
        return None
    try:
        return NativeSampling(native_build.load())
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))


def support_of(batch, entry: int, token: int) -> list[int]:
    place, vocab = int(batch.places["support"][entry]), batch.vocab_size
    if place == WHOLE:
        row = np.empty(0, np.int32)
    else:
        row = lone_row(token, vocab) if place == ALONE else support_row(batch.values["support"][place].numpy(), vocab)
    return TokenSupport.of_rows(vocab, [row]).ids_at(0).tolist()


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_token_carries_both_log_probabilities_and_its_support_whatever_the_mode(kernels, mode):
    rng = np.random.default_rng(3)
    requests = [random_request(rng, 70, **BOTH) for _ in range(200)]
    logits = random_logits(rng, 200, 70, step=0.25)
    got = Rows(requests, 70, mode=mode, kernels=kernels).sample(logits)
    raw = torch.log_softmax(logits.double(), -1)
    for row, request in enumerate(requests):
        token, values = got.tokens_S[row].item(), process(logits[row].tolist(), request)
        kept = distribution(values, request.params)
        assert got.token_details.values["raw"][row].item() == pytest.approx(raw[row, token].item(), abs=2e-6)
        assert got.token_details.values["processed"][row].item() == pytest.approx(math.log(dict(kept)[token]), abs=5e-6)
        assert support_of(got.token_details, row, token) == sorted(i for i, _ in kept), f"row {row}: {request.params}"


def test_a_row_without_wishes_is_told_to_be_whole_and_a_greedy_one_to_be_alone(kernels):
    kinds = [
        {},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 2.0},
        {"temperature": 0},
        {"top_k": 3},
        {"min_p": 0.5},
    ]
    requests = [make_request([1, 2], **BOTH, **kind) for kind in kinds] + [make_request([1], top_k=2)]
    got = Rows(requests, 300, kernels=kernels).sample(torch.randn(7, 300, generator=torch.manual_seed(0)))
    assert got.token_details.index.tolist() == list(range(6))
    assert got.token_details.places["support"].tolist() == [WHOLE, WHOLE, WHOLE, ALONE, 0, 1]
    assert got.token_details.values["processed"][3].item() == 0.0 > got.token_details.values["raw"][3].item()
    assert len(support_of(got.token_details, 4, 0)) == 3


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.9, "logprobs": 3}])
def test_asking_changes_no_token_and_no_logprob_of_any_row(kernels, params):
    logits = torch.randn(8, 500, generator=torch.manual_seed(1))
    others = [make_request([5], seed=i, **params) for i in range(4)]
    plain = Rows([make_request([1], seed=i, **params) for i in range(4)] + others, 500, kernels=kernels).sample(logits)
    asked = [make_request([1], seed=i, **params, **BOTH) for i in range(4)]
    detailed = Rows(asked + others, 500, kernels=kernels).sample(logits)
    assert plain.tokens_S.tolist() == detailed.tokens_S.tolist() and plain.token_details is None
    assert detailed.token_details.index.tolist() == [0, 1, 2, 3]
    if plain.logprobs is not None:
        assert torch.equal(plain.logprobs.token_logprob, detailed.logprobs.token_logprob)
        assert torch.equal(detailed.logprobs.token_logprob[:4], detailed.token_details.values["raw"])


def test_min_tokens_is_in_the_support_only_while_it_holds():
    requests = [make_request([1, 2], [7] * n, stop_ids=[9], min_tokens=2, **BOTH) for n in (1, 2)]
    got = Rows(requests, 50).sample(torch.zeros(2, 50))
    assert support_of(got.token_details, 0, 0) == [i for i in range(50) if i != 9]
    assert got.token_details.places["support"].tolist() == [0, WHOLE]
    assert got.token_details.values["processed"].tolist() == pytest.approx([-math.log(49), -math.log(50)])


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 65, 1000, 50257])
def test_a_support_takes_the_smaller_of_two_forms_and_gives_the_same_ids(vocab):
    rng = np.random.default_rng(vocab)
    counts = sorted({1, min(2, vocab), -(-vocab // 32) - 1 or 1, -(-vocab // 32), vocab // 2 or 1, vocab})
    wanted = [np.sort(rng.choice(vocab, size=count, replace=False)).tolist() for count in counts]
    rows = []
    for ids in wanted:
        kept = np.zeros(8 * 8 * -(-vocab // 64), dtype=np.uint8)
        kept[ids] = 1
        rows.append(support_row(np.packbits(kept, bitorder="little"), vocab))
        assert len(rows[-1]) == min(len(ids), -(-vocab // 32))
    support = TokenSupport.of_rows(vocab, [np.empty(0, np.int32), *rows])
    assert support.is_whole(0) and support.mask(0).all() and support.mask(0).shape == (vocab,)
    for position, ids in enumerate(wanted, start=1):
        assert not support.is_whole(position) and support.ids_at(position).tolist() == ids
        assert support.mask(position).nonzero()[0].tolist() == ids
    assert support.ids_at(-1).tolist() == wanted[-1] and TokenSupport.of_rows(vocab, support.rows()) == support
    assert (
        lone_row(vocab - 1, vocab).tolist()
        == TokenSupport.of_rows(vocab, [lone_row(vocab - 1, vocab)]).rows()[0].tolist()
    )
    assert TokenSupport.of_rows(vocab, [lone_row(vocab - 1, vocab)]).ids_at(0).tolist() == [vocab - 1]
    with pytest.raises(IndexError, match=f"token {len(support)} of {len(support)}"):
        support.mask(len(support))


def test_renormalised_logits_are_the_distribution_drawn_from_and_let_gradients_through():
    logits = torch.randn(40, 200, generator=torch.manual_seed(4), dtype=torch.float32)
    shapes = [{"temperature": 0.6, "top_k": 17}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.4}, {}]
    requests = [make_request([1], seed=i, **BOTH, **shapes[i % 4]) for i in range(40)]
    got = Rows(requests, 200).sample(logits)
    for row, request in enumerate(requests):
        token = got.tokens_S[row].item()
        place, bits = int(got.token_details.places["support"][row]), got.token_details.values["support"]
        words = np.empty(0, np.int32) if place == WHOLE else support_row(bits[place].numpy(), 200)
        support = TokenSupport.of_rows(200, [words])
        leaf = torch.nn.functional.pad(logits[row], (0, 6), value=9.0).requires_grad_()
        log_probs = support.renormalise(leaf, 0, temperature=request.params.temperature)
        assert log_probs.shape == (200,)
        assert abs(log_probs[token].item() - got.token_details.values["processed"][row].item()) < 1e-6
        log_probs[token].backward()
        assert leaf.grad.isfinite().all() and leaf.grad.nonzero().flatten().tolist() == support.ids_at(0).tolist()
