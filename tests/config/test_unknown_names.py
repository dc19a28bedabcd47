"""The name that an error proposes is the one that was meant, or there is none."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import unknown_name

SAMPLING = [item.name for item in dataclasses.fields(SamplingParams)]
OPTIONS = [item.name for item in dataclasses.fields(InferenceConfig)]


@pytest.mark.parametrize(
    ("given", "known", "meant"),
    [
        ("temprature", SAMPLING, "temperature"),
        ("max_toknes", SAMPLING, "max_tokens"),
        ("frequence_penalty", SAMPLING, "frequency_penalty"),
        ("freq_penalty", SAMPLING, "frequency_penalty"),
        ("topk", SAMPLING, "top_k"),
        ("stop_token_id", SAMPLING, "stop_token_ids"),
        ("max_new_tokens", SAMPLING, "max_tokens"),
        ("stop_words", SAMPLING, "stop"),
        ("return_log_probs", SAMPLING, "logprobs"),
        ("block_size", OPTIONS, "block_size_tokens"),
        ("max_seq_len", OPTIONS, "max_sequence_length"),
        ("max_model_len", OPTIONS, "max_sequence_length"),
        ("max_num_batched_tokens", OPTIONS, "max_tokens"),
        ("max_batch_size", OPTIONS, "max_requests"),
        ("page_size", OPTIONS, "block_size_tokens"),
        ("prompt_token_ids", SAMPLING, None),
        ("length_penalty", SAMPLING, None),
        ("max_time", SAMPLING, None),
        ("max_length", SAMPLING, None),
        ("top_a", SAMPLING, None),
        ("return_prompt_tokens", SAMPLING, None),
        ("max_input_len", OPTIONS, None),
        ("enable_block_reuse", OPTIONS, None),
    ],
)
def test_a_suggestion_is_what_was_meant_or_none(given, known, meant):
    told = unknown_name("field", given, known)
    assert told == f"unknown field {given!r}" + (f"; did you mean {meant!r}?" if meant else "")
