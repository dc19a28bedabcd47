"""Recurrent states in any dtype that a state config can name: kept, moved and read as that dtype through the engine."""

from __future__ import annotations

import dataclasses
import math
import random
from functools import partial
from typing import Any

import engines
import pytest
import torch
from engines import each_of, run, suspending, tokens_of
from model_kinds import RECURRENT, make_model
from plain_forward import full_logits, worst_error

from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.inspect import inspect

VOCAB = 128
DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
"""Of convolution and SSM states."""
TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}
"""Of a log probability, where states are rounded every 24 tokens."""
kind = each_of(RECURRENT)


def make_engine(model: torch.nn.Module, dtypes: tuple[str, str], **settings: Any) -> DynamicInferenceEngine:
    found = MambaInferenceStateConfig.from_model(model)
    state = dataclasses.replace(found, conv_states_dtype=dtypes[0], ssm_states_dtype=dtypes[1])
    return engines.make_engine(model, max_requests=8, mamba_inference_state_config=state, **settings)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, VOCAB) for _ in range(rng.randint(30, 100))] for _ in range(count)]


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_log_probabilities_are_those_of_the_training_path_but_for_rounding(model, dtypes):
    engine = make_engine(model, dtypes, enable_chunked_prefill=True, max_tokens=24)
    states, shape = inspect(engine).store.states, engine.shape.state
    kept = states.layer(0)
    assert (kept.conv_SCW.dtype, kept.ssm_SHPN.dtype) == tuple(getattr(torch, name) for name in dtypes)
    content = math.prod(shape.conv_shape) * kept.conv_SCW.itemsize + math.prod(shape.ssm_shape) * kept.ssm_SHPN.itemsize
    assert 0 <= engine.sizes.state_slot_bytes - shape.num_layers * content < 128  # padding
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    close = max(TOLERANCE[name] for name in dtypes)
    assert worst_error(engine.generate(prompts(1), params), partial(full_logits, model), greedy=False) < close


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_a_state_that_went_to_the_host_comes_back_as_it_was(model, kind, dtypes):
    """Swapped one by one and offloaded with the pool: the tokens of a run with room, where prompts are never cut."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    work = [(prompt, params) for prompt in prompts(6)]
    expected = tokens_of(run(make_engine(model, dtypes), work))
    swap = {"preemption_mode": "swap", "swap_buffer_size_gb": 0.02, "kv_cache_management_mode": "offload"}
    engine = make_engine(model, dtypes, pool_blocks=16, **swap)
    assert tokens_of(run(engine, work, suspending("offload", 5, 20))) == expected
    assert (engine.stats().counters["swapped_in"] > 0) == (kind != "mamba")  # whose blocks take no memory


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_a_prefix_is_continued_from_a_kept_state_of_its_dtype(model, kind, dtypes):
    """Behind a whole block a hit computes what the one did that left the state, so all later ones agree."""
    engine = make_engine(model, dtypes, prefix="lru")
    stem = prompts(1)[0][:32]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.generate([stem], params)
    first, second = (engine.generate([[*stem, 5, 6]], params)[0].outputs[0].token_ids for _ in range(2))
    assert engine.stats().counters["states_loaded"] == 2
    assert first == second


def test_state_config_of_a_live_model_is_its_own(model):
    config = MambaInferenceStateConfig.from_model(torch.nn.ModuleDict({"module": model}))
    state = engines.make_engine(model).shape.state
    assert (config.mamba_conv_states_shape, config.mamba_ssm_states_shape) == (state.conv_shape, state.ssm_shape)
    assert sum(symbol in "MGP" for symbol in config.layer_type_list) == state.num_layers
    assert MambaInferenceStateConfig.from_model(make_model("attention")) is None
    chosen = dataclasses.replace(config, ssm_states_dtype="bfloat16")
    store = inspect(engines.make_engine(model, mamba_inference_state_config=chosen)).runner.store
    assert store.states.layer(0).ssm_SHPN.dtype == torch.bfloat16
