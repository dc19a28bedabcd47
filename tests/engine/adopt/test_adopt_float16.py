"""Models in float16: the engine computes what the model's own forward does, within that dtype's rounding."""

from __future__ import annotations

import pytest
import torch
from engines import logprobs_of
from model_kinds import KINDS, make_model, prefix_caching
from plain_forward import full_logits

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError

PROMPT = list(range(4, 40))
SIZES = {"buffer_size_gb": 0.02, "block_size_tokens": 16, "max_sequence_length": 128, "max_requests": 4}
HALF = {"params_dtype": torch.float16, "fp16": True}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_fp32_within_rounding_through_chunks_hits_and_suspends(kind):
    model = make_model(kind, **HALF)
    wide = make_model(kind)
    wide.load_state_dict({k: v.float() if torch.is_tensor(v) else v for k, v in model.state_dict().items()})
    engine = DynamicInferenceEngine(
        model, InferenceConfig(**SIZES, max_tokens=16, enable_chunked_prefill=True, **prefix_caching(kind))
    )
    asked = SamplingParams(max_tokens=20, temperature=0.0, logprobs=0, ignore_eos=True)
    for mode in (None, "persist", "offload", "recompute"):
        if mode is not None:
            engine.suspend(mode)
            engine.resume()
        sample = engine.generate([PROMPT], asked)[0].outputs[0]
        ids = PROMPT + sample.token_ids
        expected = full_logits(wide, ids).log_softmax(-1)[len(PROMPT) - 1 : -1]
        drawn = expected.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        # the median: a router's choice between two close experts may be another one
        assert (drawn - torch.tensor(logprobs_of(sample))).abs().median() < 0.01
        assert (expected.max(1).values - drawn).median() < 0.01, "not the most likely token"
    assert engine.stats().counters["prefix_hit_tokens"] > 0


@pytest.mark.parametrize(
    "option", [{"batch_invariant": True}, {"weight_dtype": "int8"}, {"linear_backend": "native"}], ids=str
)
def test_options_that_need_native_kernels_refuse_it_by_name(option):
    if torch.cuda.is_available():
        pytest.skip("native kernels are a CPU's")
    with pytest.raises(ConfigError, match=r"needs float32 or bfloat16, got torch\.float16"):
        DynamicInferenceEngine(make_model("attention", **HALF), InferenceConfig(**SIZES, **option))
