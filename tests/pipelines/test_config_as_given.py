"""A config as it was given: its dump makes it again, a field implies its policy, one without effect is a warning."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from model_files import MIB, in_effect, resolved

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.kernels.triton import launch
from megatron_infer.pipelines import PipelineConfig, resolve

pytestmark = pytest.mark.usefixtures("models_folder")


def test_what_does_nothing_is_said_to_do_nothing():
    with pytest.warns(ConfigWarning, match="execute_empty_batches=True has no effect: expert-parallel ranks are one"):
        config = resolved(execute_empty_batches=True)
    assert "take part in every step" in config.effective["execute_empty_batches"].note
    assert config.resolved.engine == resolved().resolved.engine
    with pytest.warns(ConfigWarning, match="host_kvcache_swap_space_gb=4.0 has no effect: acts only with enable_kv"):
        resolved(host_kvcache_swap_space_gb=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        resolved(execute_empty_batches=False)
        resolved(host_kvcache_swap_space_gb=4.0, enable_kvcache_swapping_to_host=True)


@pytest.mark.parametrize("level", ["1", "2"])
def test_a_level_of_dependent_launches_turns_them_on_where_a_gpu_can(level, monkeypatch):
    monkeypatch.setenv(launch.PDL_VARIABLE, "0")  # and taken back at the end, whatever was set
    with pytest.warns(ConfigWarning, match=f"pdl_level='{level}' has no effect: for GPUs"):
        config = resolved(pdl_level=level)
    assert in_effect(config, "pdl_level") == ("0", "argument") and os.environ[launch.PDL_VARIABLE] == "0"
    monkeypatch.setattr(launch, "_can_overlap", lambda device: True)
    monkeypatch.setattr(resolve.Asked, "is_cuda", True)
    for one, overlaps in (("0", False), (level, True)):
        config = resolved(pdl_level=one)
        assert in_effect(config, "pdl_level")[0] == one
        assert launch.overlapping(torch.device("cuda"))["PDL"] is overlaps
    assert f"{launch.PDL_VARIABLE}=1" in config.effective["pdl_level"].note


PHASED = {
    "max_queue_size_tg": 4,
    "min_batch_size_tg": 2,
    "ce_delay_ms": 1.5,
    "enable_prioritize_first_decode": True,
}


@pytest.mark.parametrize("name", PHASED)
def test_a_field_that_acts_in_phases_implies_them(name):
    config = resolved(max_batch_size=6, **{name: PHASED[name]})
    assert config.resolved.engine.batching == "phased" and getattr(config.resolved.engine, name) == PHASED[name]
    setting = config.effective["enable_in_flight_batching"]
    assert (setting.value, setting.source) == ("phased", "derived") and setting.note == f"batching is phased for {name}"
    assert resolved(max_batch_size=6, **{name: PHASED[name]}, batching="phased") != config
    default = PipelineConfig.model_fields[name].default
    assert resolved(**{name: default}).resolved.engine.batching == "prefill_first"


@pytest.mark.parametrize("mode", ["python", "json"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_length": 64, "kv_cache_page_size": 32},
        {"device": "cpu", "dtype": "float32", "buffer_size_gb": 0.02, "max_requests": 3, "max_tokens": 32},
        {"max_queue_size_tg": 2},
        {"speculative": {"method": "ngram", "adaptive": False}},
        {"speculative_method": "standalone", "draft_model_path": "llama"},
        {"preemption_mode": "swap", "swap_buffer_size_gb": 0.01},
        {"enable_lora": True, "max_num_loras": 2, "quantization_encoding": "float32"},
    ],
    ids=lambda given: next(iter(given), "defaults"),
)
def test_a_dump_makes_the_config_that_it_is_of(given, mode):
    config = resolved(**given)
    again = PipelineConfig(**config.model_dump(mode=mode))
    again.resolve(free_bytes=1024 * MIB)
    assert again == config and again.resolved.engine == config.resolved.engine
    assert again.resolved.server == config.resolved.server and again.resolved.llm == config.resolved.llm
    assert {name: one.value for name, one in again.effective.items()} == {
        name: one.value for name, one in config.effective.items()
    }
