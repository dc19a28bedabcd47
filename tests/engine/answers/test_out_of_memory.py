"""A step that runs out of memory is retracted and tried again with fewer tokens; only a request that does not fit alone
ends."""

from __future__ import annotations

import logging

import engines
import pytest
import torch
from engines import tokens_of
from rehearsal import DRAFTS, check_drafted, rehearse

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

PROMPTS = [[5 + i, *range(3, 20 + i)] for i in range(6)]
PARAMS = [SamplingParams(max_tokens=8 + i, temperature=0.9, seed=i, ignore_eos=True) for i in range(6)]
MODELS = {"attention": tiny_gpt, "hybrid": tiny_hybrid}


def make_engine(kind: str, **options) -> DynamicInferenceEngine:
    return engines.make_engine(MODELS[kind](), max_requests=8, max_tokens=64, **options)


def limit_tokens(engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, most) -> list[int]:
    """Steps of more tokens than most() run out of memory -> sizes of the steps tried."""
    runner, sizes = inspect(engine).runner, []
    run_layers = runner.run_layers

    def limited(step, received_TD=None):
        sizes.append(step.plan.num_tokens)
        if step.plan.num_tokens > most():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return run_layers(step, received_TD)

    monkeypatch.setattr(runner, "run_layers", limited)
    return sizes


def answers(outputs) -> list[tuple]:
    return [(one.token_ids, one.finish_reason) for output in outputs for one in output.outputs]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"enable_prefix_caching": True}, {"enable_chunked_prefill": True}], ids=str
)
@pytest.mark.parametrize("most", [40, 7, 1])
def test_every_request_has_the_tokens_of_an_engine_with_memory(kind, options, most, monkeypatch, caplog):
    expected = answers(make_engine(kind, **options).generate(PROMPTS, PARAMS))
    engine = make_engine(kind, **options)
    sizes = limit_tokens(engine, monkeypatch, lambda: most)
    with caplog.at_level(logging.WARNING, "megatron_infer"):
        assert answers(engine.generate(PROMPTS, PARAMS)) == expected
    retracted = sum(size > most for size in sizes)
    assert engine.figures().retracted_steps == retracted > 0
    assert "ran out of memory and is tried again with at most" in caplog.text
    inspect(engine).context.check()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_retracted_step_with_drafts_leaves_none_of_them(kind, overlap, monkeypatch):
    """Else a request waits for their commit in every later step that overlaps, and is never forgotten."""
    heard = make_engine(kind).generate(PROMPTS, PARAMS)
    engine = make_engine(kind, overlap=overlap, **DRAFTS)
    rehearse(engine, PROMPTS, tokens_of(heard))
    room = iter([10**9] * 3 + [10, 10**9] * 20)
    limit_tokens(engine, monkeypatch, lambda: next(room, 10**9))
    assert answers(engine.generate(PROMPTS, PARAMS)) == answers(heard)
    assert engine.figures().retracted_steps > 0
    check_drafted(engine)
    assert not inspect(engine).drafts._verifying


def test_the_budget_grows_again_once_there_is_memory(monkeypatch):
    engine, room = make_engine("attention"), [7]
    sizes = limit_tokens(engine, monkeypatch, lambda: room[0])
    engine.generate(PROMPTS[:2], PARAMS[:2])
    assert max(sizes[-5:]) <= 7
    room[0] = 10**9
    long = [SamplingParams(max_tokens=60, ignore_eos=True)] * 4
    for _ in range(6):
        engine.generate([[number, 2, 3] for number in range(4)], long)
    assert inspect(engine).scheduler.budget.tokens == engine.sizes.max_tokens


def test_only_a_request_that_does_not_fit_alone_ends(monkeypatch):
    """Its token 30 never fits, whatever else is in the step."""
    engine = make_engine("attention")
    expected = answers(engine.generate(PROMPTS, PARAMS))
    runner = inspect(engine).runner
    run_layers = runner.run_layers

    def limited(step, received_TD=None):
        if any(
            PROMPTS[2] == request.tokens[: len(PROMPTS[2])] and start >= 24
            for request, start in zip(step.plan.decode, step.plan.decode_starts, strict=True)
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_layers(step, received_TD)

    monkeypatch.setattr(runner, "run_layers", limited)
    outputs = engine.generate(PROMPTS, PARAMS, on_error="return")
    found = answers(outputs)
    assert found[2][1] == "error" and "out of memory" in str(outputs[2].error)
    assert found[2][0] == expected[2][0][: len(found[2][0])]
    assert [one for i, one in enumerate(found) if i != 2] == [one for i, one in enumerate(expected) if i != 2]


def test_other_errors_still_end_the_requests_of_their_step(monkeypatch):
    engine = make_engine("attention")
    runner = inspect(engine).runner

    def broken(step, received_TD=None):
        raise ValueError("not of memory")

    monkeypatch.setattr(runner, "run_layers", broken)
    assert {reason for _, reason in answers(engine.generate(PROMPTS, PARAMS, on_error="return"))} == {"error"}
    assert engine.figures().retracted_steps == 0
