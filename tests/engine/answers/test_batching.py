"""Batching options through the engine: what is held back, for how long, and what an abort finds."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from engines import finish, make_engine, tokens_of

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.groups import num_micro_batches_of
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
PROMPTS = [list(range(5, 30)), list(range(9, 20)), list(range(40, 47))]


class Prefills:
    """Prompts that began in each step that prefills."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self.of_steps: list[list[str]] = []
        engine.loop._observers = (self, *engine.loop._observers)

    def after_step(self, plan: Any, seconds: float, step: int) -> None:
        if plan.prefill:
            self.of_steps.append([chunk.request.id for chunk in plan.prefill])


def test_prompts_that_arrive_within_the_delay_are_computed_together(model):
    plain = make_engine(model)
    expected = tokens_of(plain.generate(PROMPTS, GREEDY))
    engine = make_engine(model, batching="phased", ce_delay_ms=300)
    prefills = Prefills(engine)
    began = time.monotonic()
    engine.add_request(PROMPTS[0], GREEDY, request_id="a")
    assert engine.step() == [] and not prefills.of_steps
    engine.add_request(PROMPTS[1], GREEDY, request_id="b")
    engine.step()
    engine.add_request(PROMPTS[2], GREEDY, request_id="c")
    done = finish(engine)
    assert time.monotonic() - began >= 0.3
    assert prefills.of_steps == [["a", "b", "c"]]
    assert tokens_of(done[name] for name in "abc") == expected
    assert engine.stats().num_steps < 320, "steps that wait do not spin"


def test_a_request_that_is_held_back_can_be_aborted_and_saved(model, tmp_path):
    engine = make_engine(model, batching="phased", ce_delay_ms=60_000)
    engine.add_request(PROMPTS[0], GREEDY, request_id="a")
    engine.step()
    engine.save_requests(tmp_path / "held")
    assert engine.abort("a").outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished()
    other = make_engine(model)
    other.load_requests(tmp_path / "held")
    assert len(finish(other)["a"].outputs[0].token_ids) == 6


def test_an_evicted_request_does_not_wait_again(model):
    engine = make_engine(model, batching="phased", ce_delay_ms=50)
    engine.add_request(PROMPTS[0], GREEDY)
    while not engine.stats().counters["admitted"]:
        engine.step()
    engine.pause("retract")
    engine.unpause()
    engine.step()
    assert engine.stats().counters["admitted"] == 2
    finish(engine)


def test_stages_of_a_pipeline_refuse_more_steps_in_flight():
    stages = SimpleNamespace(pp=object(), pp_size=2)
    assert num_micro_batches_of(stages, InferenceConfig(overlap=True)) == 3
    with pytest.raises(ConfigError, match="the 2 pipeline stages keep 2 steps in flight by themselves; leave it at 1"):
        num_micro_batches_of(stages, InferenceConfig(max_steps_in_flight=2))
