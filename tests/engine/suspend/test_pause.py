"""pause, unpause, set_weight_version: requests stand still and go on, and every token says which weights made it."""

from __future__ import annotations

import asyncio
import operator
import threading
import warnings
from typing import Any

import engines
import pytest
import torch
from engines import finish, submit, tokens_of
from model_kinds import KINDS, RECURRENT, make_model, recurrent_part
from test_async_llm import make_async

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, StaleCache, TransitionFailed, TransitionTimeout, WrongState
from megatron_infer.models.weights.derived import DerivedCache
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.scheduler.request import VersionSpan
from megatron_infer.testing.inspect import inspect

PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
PROMPTS = [list(range(i + 4, i + 30 + i)) for i in range(4)]


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    return engines.make_engine(model, **{"prefix": "lru", "max_sequence_length": 128, "max_requests": 8} | settings)


@pytest.fixture
def kind() -> str:
    return "attention"


every_kind = pytest.mark.parametrize("kind", KINDS)
"""For what depends on what a model keeps of a sequence, or derives from its weights."""


@pytest.fixture
def model(kind) -> torch.nn.Module:
    return make_model(kind)


def named_tokens(done: dict[str, RequestOutput]) -> dict[str, list[int]]:
    return dict(zip(done, tokens_of(done.values()), strict=True))


def start(engine: DynamicInferenceEngine, steps: int = 5) -> None:
    submit(engine, [(prompt, PARAMS) for prompt in PROMPTS])
    for _ in range(steps):
        engine.step()


@pytest.fixture
def expected(model):
    engine = make_engine(model)
    start(engine, 0)
    return named_tokens(finish(engine))


@every_kind
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_pause_and_unpause_change_no_token(model, expected, mode, overlap):
    engine = make_engine(model, overlap=overlap)
    start(engine)
    engine.pause(mode)
    assert engine.state == "paused" and engine.stats().state == "paused"
    assert engine.stats().num_running == (4 if mode == "keep" else 0)
    late = engine.add_request(PROMPTS[0], PARAMS)
    while engine.can_step():
        engine.step()
    with pytest.raises(WrongState, match=r"step\(\) while the engine is PAUSED; call unpause\(\)"):
        engine.step()
    with pytest.raises(WrongState, match="PAUSED"):
        engine.generate([PROMPTS[0]], PARAMS)
    engine.unpause()
    done = named_tokens(finish(engine))
    assert done.pop(late) == expected["0"]
    assert done == expected
    prefilled = engine.stats().counters["prefill_tokens"]
    assert (prefilled > sum(map(len, PROMPTS)) + len(PROMPTS[0])) == (mode == "retract")


@every_kind
def test_pause_abort_ends_everyone_with_what_it_has(model, expected):
    engine = make_engine(model)
    start(engine)
    engine.pause("abort")
    assert engine.has_unfinished() and engine.can_step()
    outputs = {output.request_id: output for output in engine.step()}
    assert not engine.has_unfinished()
    for name, output in outputs.items():
        sample = output.outputs[0]
        assert output.finished and sample.finish_reason == "abort"
        assert 0 < len(sample.token_ids) < 16 and sample.token_ids == expected[name][: len(sample.token_ids)]
    assert outputs.keys() == expected.keys()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.unpause()
    assert engine.generate([PROMPTS[1]], PARAMS)[0].outputs[0].token_ids == expected["1"]


def test_wrong_words_are_refused_before_anything_happens(model):
    engine = make_engine(model)
    start(engine)
    with pytest.raises(ConfigError, match="did you mean 'keep'"):
        engine.pause("keepp")
    with pytest.raises(ConfigError, match="integer of 0 or more"):
        engine.set_weight_version(-1)
    with pytest.raises(ConfigError, match="did you mean 'recompute'"):
        engine.set_weight_version(3, running="recomputed")
    with pytest.raises(WrongState, match=r"unpause\(\) while the engine is RUNNING"):
        engine.unpause()
    assert engine.state == "running" and engine.stats().weight_version == 0
    assert len(finish(engine)) == 4


def test_a_version_below_an_earlier_one_is_taken_with_a_warning(model):
    engine = make_engine(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.set_weight_version(7)
        engine.set_weight_version(7)
        engine.set_weight_version(9)
    with pytest.warns(UserWarning, match=r"set_weight_version\(3\): the engine had version 9 before.* give 10 or more"):
        engine.set_weight_version(3)
    assert engine.weight_version == 3
    with pytest.warns(UserWarning, match="had version 9 before"):
        engine.set_weight_version(8)  # higher than the present one, and tokens of an earlier one may have it


def change(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@every_kind
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_spans_tell_which_weights_made_each_token(model, running, overlap):
    engine = make_engine(model, overlap=overlap)
    start(engine, 6)
    engine.pause()  # commits what is in flight: what has been drawn is exact
    drawn = {name: engine.output_processor.get(name).sequences[0].request.num_output for name in "0123"}
    assert all(drawn.values())
    change(model, 1)
    engine.set_weight_version(7, running=running)
    engine.add_request(PROMPTS[0], PARAMS, request_id="new", stream="final")
    engine.unpause()
    done = finish(engine)
    for name, count in drawn.items():
        want = [VersionSpan(0, 0, 0, 0), VersionSpan(count, 7, 0 if running == "keep" else 7, 7)]
        assert done[name].outputs[0].spans == want
    assert done["new"].outputs[0].spans == [VersionSpan(0, 7, 7, 7)]
    fresh = make_engine(model).generate([PROMPTS[0]], PARAMS)[0].outputs[0]
    assert done["new"].outputs[0].token_ids == fresh.token_ids, "stale KV was served to a new request"
    assert engine.stats().weight_version == 7


@every_kind
def test_a_version_used_twice_never_matches_the_cache_of_its_first_use(model):
    engine = make_engine(model)
    engine.set_weight_version(3)
    engine.generate(PROMPTS[:1], PARAMS)
    change(model, 2)
    engine.set_weight_version(4)
    change(model, 3)
    with pytest.warns(UserWarning, match="had version 4 before"):
        engine.set_weight_version(3)
    hits = engine.stats().counters["prefix_hits"]
    again = engine.generate(PROMPTS[:1], PARAMS)[0]
    assert engine.stats().counters["prefix_hits"] == hits
    assert again.outputs[0].token_ids == make_engine(model).generate(PROMPTS[:1], PARAMS)[0].outputs[0].token_ids


@every_kind
def test_writes_through_data_while_paused_are_noticed(model):
    engine = make_engine(model)
    start(engine)
    engine.pause()
    for parameter in model.decoder.parameters():
        parameter.data.mul_(-1.2)
    engine.unpause()
    done = finish(engine)
    assert engine.stats().weight_version == 1
    assert all(output.outputs[0].spans[-1][1:4] == (1, 0, 1) for output in done.values())
    engine.verify_weights()


# ---------------------------------------------------------------------- derived copies


def test_a_planted_stale_copy_is_caught(model):
    engine = make_engine(model)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    kept = {"sum": weight.sum().item()}
    engine.weights.derived.register(
        DerivedCache(
            name="a forgetful cache",
            refresh=lambda: None,
            differs=lambda: None if kept["sum"] == weight.sum().item() else "its sum",
        )
    )
    engine.verify_weights()
    change(model, 5)
    with pytest.raises(TransitionFailed, match="a forgetful cache") as caught:
        engine.set_weight_version(1)
    assert isinstance(caught.value.__cause__, StaleCache)
    kept["sum"] = weight.sum().item()
    engine.set_weight_version(1)
    engine.verify_weights()


@every_kind
def test_derived_copies_are_refreshed_and_their_staleness_shows(model, kind):
    engine = make_engine(model)
    packed, scan = engine.kernels.packed, ["scan weights"] if kind in RECURRENT else []
    assert set(engine.weights.derived.names) == {"packed weights", "rotary tables", *scan}
    mixer = recurrent_part(model) if scan else None
    attention = None if scan else model.decoder.layers[0].self_attention
    linear = (
        mixer.in_proj if scan else attention.linear_q_up_proj if kind in ("latent", "sparse") else attention.linear_qkv
    )
    own = {
        "mamba": [],
        "latent": ["inv_freq_extra"],
        "sparse": ["inv_freq_extra"],
        "softcapped": ["inv_freq", "rope_local.inv_freq"],
    }
    rope = attention.rotary_pos_emb if kind in ("latent", "sparse") else getattr(model, "rotary_pos_emb", None)
    plants: dict[str, list[torch.Tensor]] = {
        "packed weights": [linear.weight.data] if packed.num_weights else [],
        "rotary tables": [operator.attrgetter(name)(rope) for name in own.get(kind, ["inv_freq"])],
        "scan weights": [mixer.A_log.data] if scan else [],
    }
    assert any(plants.values())
    for name, tensors in plants.items():
        for tensor in tensors:
            tensor[0] += 1
            with pytest.raises(StaleCache, match=name):
                engine.verify_weights()
            engine.refresh_weights()
            engine.verify_weights()
    with pytest.raises(ValueError, match="registered already"):
        engine.weights.derived.register(DerivedCache(name="rotary tables", refresh=print, differs=lambda: None))


def test_copies_that_stay_over_a_suspend_follow_an_update_within_it(model):
    engine = make_engine(model)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    kept: dict[str, float] = {}
    engine.weights.derived.register(
        DerivedCache(
            name="a small copy",
            refresh=lambda: kept.update(sum=weight.sum().item()),
            differs=lambda: None if kept["sum"] == weight.sum().item() else "its sum",
        )
    )
    engine.refresh_weights()
    engine.suspend("recompute")
    engine.resume({"weights"})
    change(model, 6)
    engine.set_weight_version(3)
    engine.verify_weights()
    change(model, 7)
    engine.resume()
    engine.verify_weights()
    assert engine.stats().weight_version == 4


@every_kind
def test_an_update_that_failed_half_way_leaves_no_mix_of_derived_copies(model):
    """Written through .data under running requests, so that nothing but the failed call tells of it."""
    engine = make_engine(model)
    start(engine)
    for parameter in model.decoder.parameters():
        parameter.data.mul_(-1.2)

    def full(what: str) -> None:
        if what == "the weights' checksums":
            raise MemoryError("planted")

    engine.lifecycle.observers.append(full)
    with pytest.raises(TransitionFailed, match="planted"):
        engine.set_weight_version(9)
    engine.lifecycle.observers.clear()
    engine.add_request(PROMPTS[0], PARAMS, request_id="new", stream="final")
    done = finish(engine)
    engine.verify_weights()
    fresh = make_engine(model).generate([PROMPTS[0]], PARAMS)[0].outputs[0]
    assert done["new"].outputs[0].token_ids == fresh.token_ids, "stale KV was served under new weights"
    assert done["0"].outputs[0].spans[-1][1:4] == (1, 0, 1)


# ---------------------------------------------------------------------- asyncio


def test_async_streams_stand_still_and_go_on(model, expected):
    async def main() -> None:
        async with make_async(make_engine(model)) as llm:
            stream = llm.generate(PROMPTS[2], PARAMS, stream="delta")
            tokens = [*(await anext(stream)).outputs[0].token_ids]
            await llm.pause()
            with pytest.raises(WrongState, match="PAUSED"):
                await llm.pause()
            await llm.set_weight_version(1)
            other = asyncio.ensure_future(anext(llm.generate(PROMPTS[0], PARAMS, stream="final")))
            await asyncio.sleep(0.05)
            assert not other.done() and llm.llm.engine.state == "paused"
            await llm.unpause()
            async for output in stream:
                tokens += output.outputs[0].token_ids
            assert tokens == expected["2"]
            assert (await other).outputs[0].token_ids == expected["0"]
            ended = asyncio.ensure_future(anext(llm.generate(PROMPTS[1], PARAMS, stream="final")))
            await asyncio.sleep(0)
            await llm.pause("abort")
            assert (await ended).outputs[0].finish_reason in ("abort", "length")
            await llm.unpause()

    asyncio.run(main())


class GatedStep:
    """An engine's step that says when it has begun and waits for a gate: no test of a race by the clock."""

    def __init__(self, engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.begun, self.gate = engine.step, threading.Event(), threading.Event()
        monkeypatch.setattr(engine, "step", self)

    def __call__(self) -> list[Any]:
        self.begun.set()
        self.gate.wait(20)
        return self.step()


def test_async_command_behind_a_long_step_times_out_and_is_not_carried_out(model, monkeypatch):
    engine = make_engine(model)
    step = GatedStep(engine, monkeypatch)

    async def main() -> None:
        async with make_async(engine) as llm:
            stream = llm.generate(PROMPTS[0], PARAMS, stream="final")
            answer = asyncio.ensure_future(anext(stream))
            assert await asyncio.to_thread(step.begun.wait, 20)
            with pytest.raises(TransitionTimeout, match="step under way"):
                await llm.pause(timeout_s=0.05)
            step.gate.set()
            assert (await answer).finished and engine.state == "running"

    asyncio.run(main())


def test_async_commands_and_requests_of_a_caller_that_left_are_not_carried_out(model, monkeypatch):
    engine = make_engine(model)
    step = GatedStep(engine, monkeypatch)
    step.gate.set()

    async def main() -> None:
        async with make_async(engine) as llm:
            stream = llm.generate(PROMPTS[0], PARAMS)
            await anext(stream)
            step.gate.clear()
            step.begun.clear()
            assert await asyncio.to_thread(step.begun.wait, 20)  # a step is under way and stays so
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(llm.pause(), 0.02)
            step.gate.set()
            assert len((await anext(stream)).outputs[0].token_ids) > 1 and engine.state == "running"
            # Its request gets in, the caller leaves before it hears of it.
            monkeypatch.setattr(engine, "step", step.step)
            add, entered, left = engine.add_request, threading.Event(), threading.Event()

            def slow_add(*args: Any, **options: Any) -> str:
                entered.set()
                left.wait(20)
                return add(*args, **options)

            monkeypatch.setattr(engine, "add_request", slow_add)
            caller = asyncio.ensure_future(anext(llm.generate(PROMPTS[1], PARAMS, request_id="left")))
            assert await asyncio.to_thread(entered.wait, 20)
            caller.cancel()
            await asyncio.wait({caller})
            left.set()
            async for _ in stream:
                pass
            await asyncio.wrap_future(llm._thread.call(lambda: None))  # whatever was to be done has been done
            assert "left" not in engine.output_processor
            assert inspect(engine).scheduler.stats.finished == 2
            assert len(llm._thread._sinks) == 0

    asyncio.run(main())
