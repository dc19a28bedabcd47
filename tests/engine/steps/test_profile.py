"""engine.profile writes a trace with the parts of each step, and leaves an engine as it was."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from functools import partial
from typing import Any

import engines
import pytest
import torch
from engines import finish
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine import profile
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.memory.device import Device
from megatron_infer.models.specs import gpt_spec
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
make_engine = partial(engines.make_engine, max_sequence_length=96, max_requests=8)
PARTS = ("schedule", "build", "layers", "sampling", "commit")


def ranges_in(path: Any) -> Counter[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def wrapped(engine: DynamicInferenceEngine) -> set[str]:
    inside = inspect(engine)
    objects = (inside.scheduler, inside.runner, inside.runner.builder)
    return {name for one in objects for name in vars(one) if name in ("schedule", "commit", "build", "sample")}


def test_the_trace_has_each_part_of_so_many_steps(model, tmp_path):
    engine = make_engine(model)
    wanted = engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    path = tmp_path / "trace.json"
    assert not wrapped(engine)
    engine.profile(path, steps=3)
    assert wrapped(engine)
    assert engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == wanted
    assert not wrapped(engine) and not engine.loop.listeners
    found = ranges_in(path)
    assert {name: found[name] for name in PARTS} == dict.fromkeys(PARTS, 3)


def test_a_profile_can_be_ended_early_and_taken_again(model, tmp_path):
    engine = make_engine(model, overlap=True)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    engine.profile(first, steps=1000)
    with pytest.raises(ConfigError, match=r"a profile of 1000 more steps is being taken"):
        engine.profile(second)
    engine.add_request([5, 6], GREEDY)
    engine.step()
    engine.profile(None)
    assert ranges_in(first)["schedule"] == 1
    engine.profile(None)  # there is none
    engine.profile(second, steps=2)
    finish(engine)
    assert ranges_in(second)["schedule"] == 2


def test_what_cannot_be_written_is_refused_at_once(model, tmp_path):
    engine = make_engine(model)
    for path in (tmp_path / "none" / "trace.json", tmp_path):
        with pytest.raises(ConfigError, match="no file in an existing folder"):
            engine.profile(path)
    with pytest.raises(ConfigError, match="steps is 0, it must be an integer of at least 1"):
        engine.profile(tmp_path / "trace.json", steps=0)
    assert not wrapped(engine) and not engine.loop.listeners


@pytest.mark.parametrize("detail", ["on", "detailed"])
def test_every_step_has_its_ranges_once_and_tokens_are_the_same(detail, model, tmp_path):
    wanted = make_engine(model).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    engine = make_engine(model, step_ranges=detail)
    for path in (tmp_path / "first.json", tmp_path / "second.json"):  # those of every step stay when a profile ends
        engine.profile(path, steps=3)
        assert engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids == wanted
        found = ranges_in(path)
        assert {name: found[name] for name in PARTS} == dict.fromkeys(PARTS, 3)
        layers = {name: count for name, count in found.items() if name.startswith("layer ")}
        every = {f"layer {number}": 3 for number in range(len(inspect(engine).adopted.layers))}
        assert layers == (every if detail == "detailed" else {})


def test_without_the_option_an_engine_has_no_ranges(model):
    engine = make_engine(model)
    assert not wrapped(engine) and "decode" not in vars(inspect(engine).adopted)


def test_on_a_gpu_ranges_are_nvtx_and_profiles_have_torchs_besides(monkeypatch):
    marked, recorded = [], []

    def mark(names):
        return lambda name: contextlib.nullcontext(names.append(name))

    class Runner:
        def run(self) -> int:
            return 3

    monkeypatch.setattr(torch.cuda.nvtx, "range", mark(marked))
    runner = Runner()
    profile.mark_always([(runner, "run", "layers")], Device("cuda").range)
    of_profile = profile.MethodRanges([(runner, "run", "layers")])
    of_profile.install(mark(recorded))
    assert runner.run() == 3
    of_profile.remove()
    assert runner.run() == 3
    assert (marked, recorded) == (["layers"] * 2, ["layers"])


def test_layers_of_the_models_own_class_have_one_range_and_a_warning_says_so(tmp_path):
    class TheirLayer(TransformerLayer):
        def forward(self, *args, **kwargs):
            hidden, context = super().forward(*args, **kwargs)
            return hidden + 0.25, context

    def spec(config):
        block = gpt_spec(config)
        for layer in block.layer_specs:
            layer.module = TheirLayer
        return block

    with pytest.warns(ConfigWarning, match="step_ranges='detailed': decoder.layers.0 is a class of the user's own"):
        engine = make_engine(tiny_gpt(spec=spec), step_ranges="detailed")
    path = tmp_path / "trace.json"
    engine.profile(path, steps=2)
    engine.generate([[5, 6, 7]], GREEDY)
    found = ranges_in(path)
    assert found["layers"] == 2 and not any(name.startswith("layer ") for name in found)
