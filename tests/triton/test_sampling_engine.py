"""Seeded requests get the same tokens from an engine on each backend, whatever they ask for."""

from __future__ import annotations

import warnings

import pytest
import torch
from engines import make_engine
from replay_recorder import REPLAY

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.kernels.triton.launch import listening
from megatron_infer.runner.cuda_graphs.graph_pool import GRAPHS_VARIABLE
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.triton

WAYS = (
    {},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "return_sampled_logprobs": True},
    {"top_k": 7, "logprobs": 2},
    {"min_p": 0.05, "repetition_penalty": 1.3, "bad_token_ids": [3, 4], "logprobs": 0, "return_sampled_logprobs": True},
)


STATIC = ("draw_kernel", "static")


@pytest.fixture(scope="module")
def model(device):
    torch.manual_seed(1)
    return tiny_gpt(vocab_size=60, max_sequence_length=64, init_method_std=0.2).to(device)


def tokens_of(model, ways=WAYS, **settings):
    engine = make_engine(model, max_sequence_length=64, max_requests=8, **settings)
    params = [SamplingParams(seed=i, max_tokens=3, ignore_eos=True, **way) for i, way in enumerate(ways)]
    kernels = set()

    def note(launch, kernel, grid, args, options):
        kernels.add((kernel.__name__, "static") if options.get("STATIC") else kernel.__name__)

    with listening(note):
        outputs = engine.generate([[1 + i, 2, 3] for i in range(len(ways))], params)
    graphs = inspect(engine).runner.graphs
    assert graphs is None or bool(graphs.drawn_outside) == any("repetition_penalty" in way for way in ways)
    answers = [output.outputs[0] for output in outputs]
    details = [(one.logprobs, one.raw_logprobs, one.processed_logprobs) for one in answers]
    return [one.token_ids for one in answers], details, kernels


def test_seeded_tokens_are_the_same_on_every_backend(model, device, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    got, _, kernels = tokens_of(model)
    assert {"draw_kernel", "best_kernel", "score_kernel"} <= kernels
    for name in ("torch",) if device.type == "cuda" else ("torch", "native"):
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        assert tokens_of(model)[0] == got
    assert len({tuple(tokens) for tokens in got}) > 1


def test_padded_and_replayed_steps_draw_the_same_tokens_with_the_same_details(model, device, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    *plain, _ = tokens_of(model)
    if device.type == "cpu":
        monkeypatch.setenv(GRAPHS_VARIABLE, REPLAY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        captured = {"num_cuda_graphs": 2, "cuda_graph_max_tokens": 24, "use_cuda_graphs_for_non_decode_steps": True}
        *replayed, kernels = tokens_of(model, WAYS[:-1], **captured)
        *outside, _ = tokens_of(model, **captured)
    if any("every step runs eagerly" in str(warning.message) for warning in caught):
        pytest.skip("no step of this model can be captured here")
    for tokens, details, wanted in ((*outside, plain), (*replayed, [of_requests[:-1] for of_requests in plain])):
        assert tokens == wanted[0]
        found, expected = (list(numbers(one)) for one in (details, wanted[1]))
        assert found == pytest.approx(expected, abs=1e-5), "a CPU's linears round by the number of rows"
    assert STATIC in kernels


def numbers(details):
    """Log probabilities, ranks and token ids of nested details, in order."""
    for one in details:
        if one is None:
            yield -1.0
        elif isinstance(one, dict):
            yield from (number for token, entry in one.items() for number in (token, entry.logprob, entry.rank))
        elif isinstance(one, list | tuple):
            yield from numbers(one)
        else:
            yield one


def test_log_probabilities_of_prompts_are_the_same_on_every_backend(model, device, monkeypatch):
    scores = []
    for name in ("triton", "torch"):
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        engine = make_engine(model, max_sequence_length=64)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
        scores.append(engine.generate([[1, 2, 3, 4, 5, 6]], [params])[0].prompt_logprobs)
    for ours, theirs in zip(*scores, strict=True):
        if ours is None:
            assert theirs is None
            continue
        assert list(ours) == list(theirs)
        for token, one in ours.items():
            assert one.rank == theirs[token].rank and abs(one.logprob - theirs[token].logprob) < 1e-5
