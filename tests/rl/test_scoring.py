"""Scores are the log probabilities of the training forward, independent of the batch."""

from __future__ import annotations

import pytest
import torch
from model_kinds import LATENT, SOFTCAPPED
from plain_forward import full_logits
from session_case import VOCAB, batch, make_session

from megatron_infer.errors import ConfigError, InvalidPrompt
from megatron_infer.rl.scoring import micro_batches
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

MAKERS = {
    "attention": lambda **how: tiny_gpt(init_method_std=0.2, **how),
    "softcapped": lambda **how: tiny_gpt(**SOFTCAPPED, **how),
    "latent": lambda **how: tiny_gpt(**LATENT, init_method_std=0.2, **how),
    "experts": lambda **how: tiny_gpt(**EXPERTS, **how),
    "hybrid": lambda **how: tiny_hybrid("M*-M", init_method_std=0.2, **how),
}


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (2, 31, 7, 7, 60, 12)]


def one_by_one(model, temperature: float = 1.0) -> list[torch.Tensor]:
    found = []
    for ids in sequences():
        logprobs = torch.log_softmax(full_logits(model, ids)[:-1] / temperature, -1)
        found.append(logprobs.gather(-1, torch.tensor(ids)[1:, None]).squeeze(-1))
    return found


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("limit", "temperature"), [(1, 1.0), (64, 0.7), (8192, 1.0)])
def test_scores_are_those_of_each_sequence_alone(kind, limit, temperature):
    model = MAKERS[kind](hidden_dropout=0.3)
    want = one_by_one(model, temperature)
    model.train()
    session = make_session(model)
    got = session.score(sequences(), micro_batch_tokens=limit, temperature=temperature)
    assert model.training and [len(score) for score in got] == [len(ids) - 1 for ids in sequences()]
    for actual, expected in zip(got, want, strict=True):
        assert actual.dtype == torch.float32 and not actual.requires_grad
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("grad", [False, True])
def test_scores_in_bf16_are_those_of_logits_that_are_not_rounded(grad):
    model, ids = MAKERS["attention"](params_dtype=torch.bfloat16), sequences()[1]
    session, kept = make_session(model), []
    hook = model.output_layer.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
    (got,) = session.score([ids], grad=grad)
    hook.remove()
    logits = kept[0][:, 0].double() @ model.output_layer.weight.detach().double().T

    def scores_of(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)

    assert got.requires_grad == grad
    torch.testing.assert_close(got.detach().double(), scores_of(logits), atol=1e-5, rtol=0)
    assert (scores_of(logits.bfloat16().double()) - scores_of(logits)).abs().max() > 1e-4, "a test that sees rounding"
    assert model(torch.tensor([ids]), torch.arange(len(ids))[None], None).dtype is torch.bfloat16, (
        "the model's own forward"
    )


@pytest.mark.parametrize(
    "wrapper", [lambda model: model, torch.nn.parallel.DistributedDataParallel], ids=["plain", "DDP"]
)
@pytest.mark.parametrize("limit", [12, 8192], ids=["two forwards", "one forward"])
def test_gradients_of_scores_are_those_of_the_models_own_loss(wrapper, limit):
    model, twin = (MAKERS["attention"]() for _ in range(2))
    ids, positions, labels = batch(0)
    twin(ids, positions, None, labels=labels)[:, :-1].mean().backward()
    session = make_session(wrapper(model))
    with session.training():
        scores = session.score(ids.tolist(), grad=True, micro_batch_tokens=limit)
    (-torch.cat(scores).mean()).backward()
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, atol=1e-6, rtol=1e-4)


STARTS = [1, 20, 3, 6, 59, 5]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("start", [1, STARTS], ids=["all", "own"])
def test_scores_from_a_start_on_are_the_last_scores_of_the_whole_sequence(kind, start):
    session = make_session(MAKERS[kind]().train())
    starts = [1] * 6 if start == 1 else start
    whole = session.score(sequences(), micro_batch_tokens=64)
    got = session.score(sequences(), micro_batch_tokens=64, start=start)
    for actual, expected, first in zip(got, whole, starts, strict=True):
        assert len(actual) == len(expected) - first + 1
        # a matrix product of fewer rows may round differently; not in exact mode: test_scoring_exact.py
        torch.testing.assert_close(actual, expected[first - 1 :], atol=2e-6, rtol=0)


def test_the_output_layer_sees_only_positions_that_are_scored():
    model, seen = MAKERS["attention"](), []
    session = make_session(model)
    hook = model.output_layer.register_forward_hook(lambda module, args, out: seen.append(out[0].shape[0]))
    session.score(sequences(), start=STARTS, micro_batch_tokens=128)
    session.score(sequences())
    assert sum(seen[:-1]) == sum(len(ids) - first for ids, first in zip(sequences(), STARTS, strict=True))
    assert seen[-1] == sum(len(ids) - 1 for ids in sequences()), "padding is not scored"
    hook.remove()
    assert not model.output_layer._forward_pre_hooks
    assert model(torch.tensor([[1, 2]]), torch.arange(2)[None], None).shape[1] == 2


def test_gradients_from_a_start_on_are_those_of_a_masked_loss():
    model, twin = (MAKERS["attention"]() for _ in range(2))
    torch.cat(make_session(model).score(sequences(), start=STARTS, grad=True)).square().sum().backward()
    whole = make_session(twin).score(sequences(), grad=True)
    torch.cat([own[first - 1 :] for own, first in zip(whole, STARTS, strict=True)]).square().sum().backward()
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, atol=1e-5, rtol=1e-4)


def test_gradients_can_be_taken_from_within_generating():
    model = MAKERS["attention"]()
    session = make_session(model)
    with session.generating():
        (score,) = session.score([[1, 2, 3]], grad=True)
        assert not torch.is_grad_enabled()
    score.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_padding_of_the_vocabulary_has_no_probability():
    """The engine, too, draws from real tokens only."""
    model = MAKERS["attention"]()
    model.true_vocab_size = VOCAB - 8
    session = make_session(model)
    ids = [[5, 6, 7, 8]]
    with torch.no_grad():
        logits = model(torch.tensor(ids), torch.arange(4)[None], None)[0, :-1, : VOCAB - 8]
    want = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[0, 1:, None]).squeeze(-1)
    torch.testing.assert_close(session.score(ids)[0], want, atol=2e-5, rtol=0)


def test_micro_batches_hold_no_more_tokens_than_they_may():
    lengths = [3, 50, 7, 7, 200, 1, 9]
    found = list(micro_batches(lengths, 64))
    assert sorted(place for places in found for place in places) == list(range(7))
    for places in found:
        assert len(places) == 1 or max(lengths[p] for p in places) * len(places) <= 64


def test_what_cannot_be_scored_is_refused():
    session = make_session(MAKERS["attention"]())
    assert session.score([]) == []
    for wrong, message in (
        ([[1, 2], [3]], "sequence 1 has 1 tokens"),
        ([[1] * 257], "257 tokens, a score takes 2 to 256"),
        ([[1, 128]], "the vocabulary is 0 to 127"),
    ):
        with pytest.raises(InvalidPrompt, match=message):
            session.score(wrong)
    with pytest.raises(ConfigError, match="temperature is 0"):
        session.score([[1, 2]], temperature=0)
    with pytest.raises(ConfigError, match="micro_batch_tokens is 0"):
        session.score([[1, 2]], micro_batch_tokens=0)
    for start, message in (
        (0, "is 0, of 2 tokens"),
        (2, "is 2, of 2 tokens; it must be 1 to 1"),
        ([1, 1], "2 entries"),
    ):
        with pytest.raises(ConfigError, match=message):
            session.score([[1, 2]], start=start)
