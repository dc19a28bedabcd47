"""The options are a promise: megatron-core's page under its names, types and defaults, then ours; any change shows."""

from __future__ import annotations

import dataclasses

import megatron_infer
from megatron_infer.config import inference
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig

SEED_PAGE = {
    "block_size_tokens": ("int", 256),
    "buffer_size_gb": ("int | float", 20),  # int there; a fraction of a GiB is allowed here
    "paused_buffer_size_gb": ("int | float | None", None),
    "mamba_memory_ratio": ("float | None", None),
    "max_requests": ("int | None", None),
    "max_tokens": ("int | None", None),
    "unified_memory_level": ("int", 0),
    "kv_cache_management_mode": ("KVCacheManagementMode", inference.KVCacheManagementMode.PERSIST),
    "num_cuda_graphs": ("int | None", None),
    "cuda_graph_mixed_prefill_count": ("int | None", 16),
    "use_cuda_graphs_for_non_decode_steps": ("bool", True),
    "static_kv_memory_pointers": ("bool", False),
    "max_sequence_length": ("int", 2560),
    "mamba_inference_state_config": ("MambaInferenceStateConfig | None", None),
    "pg_collection": ("ProcessGroupCollection | None", None),
    "use_flashinfer_fused_rope": ("bool | None", False),
    "materialize_only_last_token_logits": ("bool", True),
    "enable_chunked_prefill": ("bool", False),
    "enable_prefix_caching": ("bool", False),
    "prefix_caching_eviction_policy": ("PrefixCachingEvictionPolicy", inference.PrefixCachingEvictionPolicy.REF_ZERO),
    "prefix_caching_coordinator_policy": (
        "PrefixCachingCoordinatorPolicy",
        inference.PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK,
    ),
    "track_paused_request_events": ("bool", False),
    "track_generated_token_events": ("bool", False),
    "metrics_writer": ("WandbModule | None", None),
    "logging_step_interval": ("int", 0),
    "request_metadata_types": ("list[tuple[str, torch.dtype, bool]] | None", None),
}
OURS = {
    "attention_backend": ("AttentionChoice", inference.AttentionChoice.AUTO),
    "sampling_backend": ("SamplingChoice", inference.SamplingChoice.AUTO),
    "linear_backend": ("LinearChoice", inference.LinearChoice.AUTO),
    "step_ranges": ("StepRanges", inference.StepRanges.OFF),
    "kv_cache_dtype": ("KVCacheDtype", inference.KVCacheDtype.AUTO),
    "weight_dtype": ("WeightDtype", inference.WeightDtype.AUTO),
    "cuda_graph_sizing_distribution": ("GraphSizing", inference.GraphSizing.EXPONENTIAL),
    "cuda_graph_max_tokens": ("int", 512),
    "cuda_graph_all_prefills": ("bool", False),
    "cuda_graph_capture": ("GraphCapture", inference.GraphCapture.AUTO),
    "overlap": ("bool | None", None),
    "max_steps_in_flight": ("int", 1),
    "batching": ("BatchingPolicy", inference.BatchingPolicy.MIXED),
    "max_queue_size_tg": ("int | None", None),
    "min_batch_size_tg": ("int | None", None),
    "ce_delay_ms": ("int | float", 0.0),
    "enable_prioritize_first_decode": ("bool", False),
    "max_batch_total_tokens": ("int | None", None),
    "admission_watermark": ("float | None", None),
    "speculative": ("SpeculativeConfig | None", None),
    "seed": ("int", 0),
    "logprobs_mode": ("str", "raw"),
    "batch_invariant": ("bool", False),
    "preemption_mode": ("PreemptionMode", inference.PreemptionMode.AUTO),
    "swap_buffer_size_gb": ("int | float", 0),
    "prefix_caching_mamba_gb": ("float | None", None),
    "prefix_caching_routing_alpha": ("float", 1.0),
    "check_invariants": ("bool", False),
    "collective_timeout_s": ("int | float", 120),
    "offset_sampling_seed_by_dp_rank": ("bool", True),
    "lora": ("LoRAConfig | None", None),
    "vocab_size": ("int | None", None),
}
ENUMS = {
    inference.AttentionChoice: {
        "AUTO": "auto",
        "TRITON": "triton",
        "FLASHINFER": "flashinfer",
        "FLASH_ATTN": "flash_attn",
        "NATIVE": "native",
        "TORCH": "torch",
    },
    inference.SamplingChoice: {
        "AUTO": "auto",
        "TRITON": "triton",
        "NATIVE": "native",
        "TORCH": "torch",
    },
    inference.PrefixCachingEvictionPolicy: {"REF_ZERO": "ref_zero", "LRU": "lru"},
    inference.PrefixCachingCoordinatorPolicy: {
        "LONGEST_PREFIX": "longest_prefix",
        "FIRST_PREFIX_BLOCK": "first_prefix_block",
        "ROUND_ROBIN": "round_robin",
        "LOAD_BALANCED": "load_balanced",  # of later versions
    },
    inference.StepRanges: {"OFF": "off", "ON": "on", "DETAILED": "detailed"},
    inference.GraphCapture: {"AUTO": "auto", "START": "start", "FIRST_USE": "first_use"},
    inference.LinearChoice: {"AUTO": "auto", "NATIVE": "native", "VENDOR": "vendor"},
    inference.BatchingPolicy: {"MIXED": "mixed", "PREFILL_FIRST": "prefill_first", "PHASED": "phased"},
    inference.GraphSizing: {"EXPONENTIAL": "exponential", "LINEAR": "linear"},
    inference.KVCacheDtype: {"AUTO": "auto", "FP8_E4M3": "fp8_e4m3"},
    inference.WeightDtype: {"AUTO": "auto", "INT8": "int8", "INT4": "int4"},
    inference.PreemptionMode: {"AUTO": "auto", "RECOMPUTE": "recompute", "SWAP": "swap"},
    inference.KVCacheManagementMode: {"PERSIST": "persist", "OFFLOAD": "offload", "RECOMPUTE": "recompute"},
}


def _declared() -> dict[str, tuple[str, object]]:
    return {item.name: (item.type, item.default) for item in dataclasses.fields(InferenceConfig)}


def test_fields_types_and_defaults_are_those_of_the_page_then_ours():
    assert _declared() == SEED_PAGE | OURS
    assert list(_declared()) == [*SEED_PAGE, *OURS]


def test_enums_have_the_members_of_the_page_and_are_strings():
    for enum, members in ENUMS.items():
        assert {member.name: member.value for member in enum} == members
        assert all(isinstance(member, str) for member in enum)


def test_mamba_state_config_has_the_fields_of_the_page_then_ours():
    fields = {item.name: (item.type, item.default) for item in dataclasses.fields(MambaInferenceStateConfig)}
    assert list(fields)[:3] == ["layer_type_list", "mamba_conv_states_shape", "mamba_ssm_states_shape"]
    assert {name: fields[name] for name in list(fields)[3:]} == {
        "conv_states_dtype": ("str | None", None),
        "ssm_states_dtype": ("str | None", None),
    }


def test_default_config_is_valid():
    assert {name: getattr(InferenceConfig(), name) for name in SEED_PAGE | OURS} == {
        name: default for name, (_, default) in (SEED_PAGE | OURS).items()
    }


def test_names_are_public():
    for name in ("InferenceConfig", "MambaInferenceStateConfig", *(enum.__name__ for enum in ENUMS)):
        assert getattr(megatron_infer, name) is getattr(inference, name)
