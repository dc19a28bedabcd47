"""Recurrent states in any dtype that a state config can name: kept, moved and read as that dtype through the engine."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from model_kinds import RECURRENT, buffers, make_model, prefix_caching

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.inspect import inspect

VOCAB, BLOCK = 128, 16
DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
"""Of convolution and SSM states."""
TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}
"""Of a log probability, where states are rounded every 24 tokens."""


@pytest.fixture(scope="module", params=RECURRENT)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    return make_model(kind, vocab_size=VOCAB)


def make_engine(model: torch.nn.Module, dtypes: tuple[str, str], **settings: Any) -> DynamicInferenceEngine:
    found = MambaInferenceStateConfig.from_model(model)
    state = dataclasses.replace(found, conv_states_dtype=dtypes[0], ssm_states_dtype=dtypes[1])
    base = {"buffer_size_gb": 0.02, "block_size_tokens": BLOCK, "max_sequence_length": 160, "max_requests": 8}
    config = InferenceConfig(**base | settings, mamba_inference_state_config=state, check_invariants=True)
    return DynamicInferenceEngine(model, config)


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
    (prompt,) = prompts(1)
    output = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0))[0]
    ids = prompt + output.outputs[0].token_ids
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0].float().log_softmax(-1)
    close = max(TOLERANCE[name] for name in dtypes)
    for i, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
        assert abs(entry[token].logprob - float(expected[len(prompt) + i - 1, token])) < close


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_a_state_that_went_to_the_host_comes_back_as_it_was(model, kind, dtypes):
    """Swapped one by one and offloaded with the pool: the tokens of a run with room, where prompts are never cut."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in make_engine(model, dtypes).generate(prompts(6), params)]
    tight = buffers(model, blocks=16, block_size=BLOCK, max_requests=8)
    engine = make_engine(
        model, dtypes, **tight, preemption_mode="swap", swap_buffer_size_gb=0.02, kv_cache_management_mode="offload"
    )
    ids = [engine.add_request(prompt, params) for prompt in prompts(6)]
    answers = {}
    while engine.has_unfinished():
        answers |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        if engine.stats().num_steps in (5, 20):
            engine.suspend()
            engine.resume()
    assert [answers[request] for request in ids] == expected
    assert (engine.stats().counters["swapped_in"] > 0) == (kind == "hybrid")  # else blocks take no memory


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_a_prefix_is_continued_from_a_kept_state_of_its_dtype(model, kind, dtypes):
    """Behind a whole block a hit computes what the one did that left the state, so all later ones agree."""
    engine = make_engine(model, dtypes, **prefix_caching(kind))
    stem = prompts(1)[0][:32]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.generate([stem], params)
    first, second = (engine.generate([[*stem, 5, 6]], params)[0].outputs[0].token_ids for _ in range(2))
    assert engine.stats().counters["states_loaded"] == 2
    assert first == second
