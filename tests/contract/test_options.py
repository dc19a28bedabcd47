"""The options are a promise: docs/options.md has their names, types and defaults, and any change shows there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
from load_file import ROOT, load_file

import megatron_infer
from megatron_infer.config import inference
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import Layout
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.options import Option, docs_of, options_of
from megatron_infer.errors import ConfigError, RequestError

page = load_file("tools/option_docs.py")
ENUMS = [one.enum for one in options_of(InferenceConfig).values() if one.enum is not None]
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
    "use_cuda_graphs_for_non_decode_steps": (
        "bool",
        False,
    ),  # True there; off here until a report names the checks of graphs ok
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
"""Option of megatron-core's page -> its type and default there."""


@pytest.mark.skipif(not (ROOT / page.OPTIONS).is_file(), reason="the page is not in this tree")
def test_the_page_has_every_option_with_its_type_and_default():
    assert (ROOT / page.OPTIONS).read_text(encoding="utf-8") == page.options_page(), "run python tools/option_docs.py"


@pytest.mark.parametrize("config", page.CLASSES, ids=lambda config: config.__name__)
def test_every_option_is_described_and_declares_known_facts(config):
    facts = set(Option._fields)
    for item in dataclasses.fields(config):
        assert set(item.metadata) <= facts, item.name
        assert len(docs_of(config)[item.name]) > 10, item.name


OF_OTHER_TYPES = {
    "int": (True, 1.5, "1"),
    "float": (True, "1", math.nan, math.inf),
    "int | float": (True, "1", math.nan, math.inf),
    "bool": ("yes", 2),
}


def never_valid(config: type, one: Option) -> Iterator[object]:
    """Values beyond the declared range, and of another type."""
    if one.least is not None or one.above is not None:
        yield one.above if one.least is None else one.least - 1
    if one.most is not None or one.below is not None:
        yield one.below if one.most is None else one.most + 1
    if config is not Layout and (one.kind in OF_OTHER_TYPES or one.words):  # `Layout.check` has its flags' names
        yield from OF_OTHER_TYPES.get(one.kind, ("no such value",))
        if not one.is_optional:
            yield None


WRONG = [
    (config, one.name, value)
    for config in page.CLASSES
    for one in options_of(config).values()
    for value in never_valid(config, one)
]


@pytest.mark.parametrize(("config", "name", "value"), WRONG)
def test_a_value_that_is_never_valid_is_refused_by_name(config, name, value):
    with pytest.raises((ConfigError, RequestError), match=name):
        config(**{name: value})


def test_options_of_megatron_cores_page_come_first_with_its_types_and_defaults():
    declared = {item.name: (item.type, item.default) for item in dataclasses.fields(InferenceConfig)}
    assert list(declared)[: len(SEED_PAGE)] == list(SEED_PAGE)
    assert {name: declared[name] for name in SEED_PAGE} == SEED_PAGE


def test_enums_are_strings_and_names_are_public():
    for kind in (*ENUMS, InferenceConfig, MambaInferenceStateConfig):
        assert getattr(megatron_infer, kind.__name__) is getattr(inference, kind.__name__)
    assert all(isinstance(member, str) for kind in ENUMS for member in kind)


def test_mamba_state_config_has_the_fields_of_the_page_then_ours():
    fields = {item.name: (item.type, item.default) for item in dataclasses.fields(MambaInferenceStateConfig)}
    assert list(fields)[:3] == ["layer_type_list", "mamba_conv_states_shape", "mamba_ssm_states_shape"]
    assert {name: fields[name] for name in list(fields)[3:]} == {
        "conv_states_dtype": ("str | None", None),
        "ssm_states_dtype": ("str | None", None),
    }
