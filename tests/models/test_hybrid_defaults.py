"""A model with recurrent states runs with no option given: sizes fit its states, and prefixes are found."""

from __future__ import annotations

import warnings

import pytest
from hf_models import random_model

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.llm import LLM
from megatron_infer.errors import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("case", ["mamba2_biases", "nemotron_h_experts"])
def test_llm_without_a_config_serves_it_and_finds_prefixes(case, tmp_path):
    random_model(case).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        llm = LLM(str(tmp_path), dtype="float32", threads=1)
    prompt = [5 + i % 90 for i in range(150)]
    first = llm.generate(prompt, GREEDY)[0]
    again = llm.generate(prompt, GREEDY)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 128)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_mapping_sets_some_options_and_leaves_the_others_to_the_machine(tmp_path):
    random_model("mamba2_biases").save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), config={"max_requests": 3, "buffer_size_gb": 0.05}, dtype="float32", threads=1, seed=9)
    config = llm.engine.config
    assert (config.max_requests, config.buffer_size_gb, config.seed) == (3, 0.05, 9)
    assert config.enable_prefix_caching and config.prefix_caching_mamba_gb > 0
    with pytest.raises(ConfigError, match="seed=9 beside a config with seed=4"):
        LLM(str(tmp_path), config={"seed": 4, "buffer_size_gb": 0.05}, dtype="float32", threads=1, seed=9)
    with pytest.raises(ConfigError, match="did you mean 'max_requests'"):
        LLM(str(tmp_path), config={"max_request": 4}, dtype="float32", threads=1)
