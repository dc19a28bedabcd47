"""Engines for the tests of rollouts."""

from __future__ import annotations

import random
from typing import Any

import engines

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

VOCAB = 128
BASE: dict[str, Any] = engines.BASE | {"buffer_size_gb": 0.02, "logprobs_mode": "processed"}


def make_engine(model: Any = None, **settings: Any) -> DynamicInferenceEngine:
    model = tiny_gpt(init_method_std=0.2) if model is None else model
    return engines.make_engine(model, **BASE | settings)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(rng.randint(3, 50))] for _ in range(count)]


def lengths(count: int, **how: Any) -> list[SamplingParams]:
    """Parameters with which requests finish at different times, not in the order of their prompts."""
    how = {"ignore_eos": True, "temperature": 0.9, "logprobs": 0} | how
    return [SamplingParams(max_tokens=3 + (7 * i) % 11, seed=i, **how) for i in range(count)]


def assert_empty(engine: DynamicInferenceEngine) -> None:
    """No request, block or row is left in the engine."""
    inspect(engine).context.check()
    assert len(engine.output_processor) == 0 and engine.loop.is_idle and not engine.loop.backlog
    scheduler = inspect(engine).scheduler
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_paused == 0
    assert inspect(engine).context.num_free_blocks == engine.sizes.num_usable_blocks
