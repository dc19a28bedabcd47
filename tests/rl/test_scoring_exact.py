"""In exact mode scores are bitwise equal to the rollouts' log probabilities: with the same weights ratios are 1."""

from __future__ import annotations

import pytest
import torch
from engines import logprobs_of
from session_case import batch, make_session

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels.native import native_build
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

EXACT = {"batch_invariant": True, "enable_chunked_prefill": True, "max_tokens": 16, "enable_prefix_caching": True}
BF16 = {"params_dtype": torch.bfloat16}
MODELS = {
    "fp32": lambda: tiny_gpt(init_method_std=0.2),
    "bf16": lambda: tiny_gpt(init_method_std=0.2, **BF16),
    "hybrid bf16": lambda: tiny_hybrid("M*-ME", init_method_std=0.2, **BF16),
}


@pytest.fixture(autouse=True)
def native():
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(f"native kernels: {error}")


def rollouts(session, step: int, *, temperature: float = 1.0) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """(prompt, tokens, log probabilities) of two prompts with three samples each, with updates in between."""
    params = SamplingParams(n=3, temperature=temperature, max_tokens=8, ignore_eos=True, logprobs=0, seed=step)
    engine, done = session.engine, []
    ids = batch(step)[0]
    with session.generating():
        for row in ids.tolist():
            engine.add_request(row, params, stream="final")
        updates = {2, 5}
        while engine.has_unfinished():
            done += [output for output in engine.step() if output.finished]
            if engine.num_steps % 7 in updates:
                session.update_weights()
    return [
        (
            output.prompt_token_ids,
            sample.token_ids,
            torch.tensor(logprobs_of(sample)),
        )
        for output in done
        for sample in output.outputs
    ]


@pytest.mark.filterwarnings("ignore:enable_prefix_caching=True finds no prefix")
@pytest.mark.parametrize("name", MODELS)
def test_ratios_at_learning_rate_zero_are_one(name):
    session = make_session(MODELS[name](), settings=EXACT)
    optimizer = torch.optim.SGD(session.model.parameters(), lr=0.0)
    for step in range(8 if name == "fp32" else 5):
        samples = rollouts(session, step)
        with session.training():
            session.model.train()
            losses = []
            for (prompt, tokens, old), new in zip(
                samples, session.score([p + t for p, t, _ in samples], grad=True), strict=True
            ):
                drawn = new[len(prompt) - 1 :]
                assert len(tokens) == len(drawn) and torch.equal(torch.exp(drawn - old), torch.ones_like(old))
                losses.append(drawn.sum())
            torch.stack(losses).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.model.eval()
        session.update_weights()
    assert session.weight_version > 5


def test_ratios_are_one_for_fresh_weights_too():
    session = make_session(MODELS["bf16"](), settings=EXACT | {"logprobs_mode": "processed"})
    with session.training(), torch.no_grad():
        for parameter in session.model.parameters():
            parameter.data.mul_(1.1)
    session.update_weights()
    samples = rollouts(session, 0, temperature=0.7)
    scores = session.score([p + t for p, t, _ in samples], temperature=0.7, micro_batch_tokens=1)
    for (prompt, _, old), new in zip(samples, scores, strict=True):
        assert torch.equal(new[len(prompt) - 1 :], old)


@pytest.mark.parametrize("name", MODELS)
def test_scores_from_a_start_on_are_bitwise_those_of_the_whole_sequence(name):
    session = make_session(MODELS[name](), settings=EXACT)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 100, (n,), generator=generator).tolist() for n in (9, 40, 23, 40)]
    starts = [8, 1, 20, 31]
    for how in ({}, {"temperature": 0.6}, {"micro_batch_tokens": 50}, {"grad": True}):
        whole, got = session.score(sequences, **how), session.score(sequences, start=starts, **how)
        for actual, expected, first in zip(got, whole, starts, strict=True):
            assert torch.equal(actual, expected[first - 1 :])


def test_without_exact_mode_the_ratios_are_only_near_one():
    session = make_session(MODELS["bf16"](), settings=EXACT | {"batch_invariant": False})
    samples = rollouts(session, 0)
    scores = session.score([p + t for p, t, _ in samples])
    pairs = zip(samples, scores, strict=True)
    assert any(not torch.equal(new[len(prompt) - 1 :], old) for (prompt, _, old), new in pairs)
