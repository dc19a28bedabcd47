"""A config is valid or refused: with what was wrong, what was given, the limit, and what to do."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import types
import warnings

import numpy as np
import pytest
from shapes import model_shape

from megatron_infer.config.inference import ConfigWarning, InferenceConfig, PrefixCachingEvictionPolicy
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import StateShape
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.errors import ConfigError

SHAPE = model_shape(max_position=1024)

WRONG = [
    ("block_size_tokens", 0, "at least 1"),
    ("block_size_tokens", "16", "integer"),
    ("buffer_size_gb", 0, "above 0"),
    ("buffer_size_gb", math.nan, "finite"),
    ("buffer_size_gb", "2", "number of GiB"),
    ("paused_buffer_size_gb", -1, "0 or more"),
    ("paused_buffer_size_gb", 21, "the limit is buffer_size_gb = 20"),
    ("mamba_memory_ratio", 1.5, "between 0 and 1"),
    ("mamba_inference_state_config", (4, 4), "MambaInferenceStateConfig.from_model"),
    ("max_tokens", 2.5, "integer or None"),
    ("unified_memory_level", 2, "levels are 0 and 1"),
    ("kv_cache_management_mode", "offlod", "did you mean 'offload'"),
    ("kv_cache_management_mode", None, "one of persist, offload, recompute"),
    ("cuda_graph_all_prefills", True, "enable_chunked_prefill"),
    ("use_flashinfer_fused_rope", "yes", "True or False"),
    ("metrics_writer", object(), "wandb module"),
    ("seed", 2**64, "limit is 2\\*\\*64 - 1"),
    ("logprobs_mode", "rawe", "did you mean 'raw'"),
    ("sampling_backend", "flashinfer", "one of auto, triton, native, torch"),
    ("preemption_mode", "swap", "swap_buffer_size_gb above 0"),
    ("prefix_caching_routing_alpha", 1.5, "number from 0 to 1"),
    ("request_metadata_types", "float32", "list of"),
    ("request_metadata_types", [("scale", "float32")], "each entry is"),
    ("request_metadata_types", [("", "float32", True)], "non-empty"),
    ("request_metadata_types", [("a", "float32", True), ("a", "int8", True)], "twice"),
    ("request_metadata_types", [("a", "complex64", True)], "one of torch.bool"),
    ("request_metadata_types", [("a", "int8", 1)], "True or False"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_value_is_refused_by_name(name, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        InferenceConfig(**{name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "excluded",
    [
        {"attention_backend": "torch"},
        {"sampling_backend": "torch"},
        {"linear_backend": "vendor"},
        {"use_flashinfer_fused_rope": True},
    ],
)
def test_exact_mode_excludes_kernels_of_others(excluded):
    with pytest.raises(ConfigError, match="excludes batch_invariant=True"):
        InferenceConfig(batch_invariant=True, **excluded)
    assert InferenceConfig(batch_invariant=True, attention_backend="native", sampling_backend="native").batch_invariant


def test_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'block_size_tokens'"):
        InferenceConfig(blok_size_tokens=16)
    with pytest.raises(ConfigError, match="did you mean 'block_size_tokens'"):
        InferenceConfig.from_dict({"blok_size_tokens": 16})


def test_unified_memory_excludes_offload():
    with pytest.raises(ConfigError, match="excludes kv_cache_management_mode"):
        InferenceConfig(unified_memory_level=1, kv_cache_management_mode="offload")


def test_enums_accept_their_strings():
    config = InferenceConfig(enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    assert config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU
    assert InferenceConfig(kv_cache_management_mode="persist") == InferenceConfig()


def test_flashinfer_rope_left_to_us_is_accepted():
    assert InferenceConfig(use_flashinfer_fused_rope=None).use_flashinfer_fused_rope is None


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        InferenceConfig().seed = 3


def test_config_survives_copy_pickle_replace_and_dict():
    config = InferenceConfig(
        buffer_size_gb=0.5, enable_prefix_caching=True, prefix_caching_eviction_policy="lru", seed=7
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert dataclasses.replace(config, seed=7) == config
    assert InferenceConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["prefix_caching_eviction_policy"] == "lru"
    with pytest.raises(ConfigError):
        dataclasses.replace(config, seed=-1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"materialize_only_last_token_logits": False}, "only the rows that are needed"),
        ({"prefix_caching_eviction_policy": "lru"}, "nothing is cached"),
        ({"cuda_graph_max_tokens": 64, "num_cuda_graphs": 0}, "cuda_graph_max_tokens act only with num_cuda_graphs"),
        ({"metrics_writer": types.SimpleNamespace(log=print)}, "no metrics are written"),
        ({"prefix_caching_mamba_gb": 1}, "prefix_caching_mamba_gb=1.0 acts only with enable_prefix_caching=True"),
    ],
)
def test_value_without_effect_warns(values, message):
    with pytest.warns(ConfigWarning, match=message):
        InferenceConfig(**values)


def test_default_config_and_usual_options_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InferenceConfig()
        InferenceConfig(
            enable_prefix_caching=True, prefix_caching_eviction_policy="lru", overlap=True, buffer_size_gb=1.5
        )
        InferenceConfig().resolve(SHAPE, available_bytes=100 << 30)


def test_buffer_beyond_memory_warns_and_is_cut():
    config = InferenceConfig(buffer_size_gb=4, paused_buffer_size_gb=1)
    with pytest.warns(
        ConfigWarning, match=r"4.00 GiB, more than 80% of the 4.00 GiB available: capped to 60% = 2.40 GiB"
    ):
        sizes = config.resolve(SHAPE, available_bytes=4 << 30)
    assert sizes.kv_bytes <= 0.6 * (4 << 30)
    assert sizes.paused_block_limit == int(0.6 * (1 << 30)) // sizes.block_bytes
    assert "capped" in {row.name: row.how for row in sizes.table()}["num_blocks"]


@pytest.mark.parametrize("size", [0, -1])
def test_tensor_parallel_size_must_be_positive(size):
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        InferenceConfig().resolve(SHAPE, tensor_parallel_size=size)


HYBRID = model_shape(
    state=StateShape(num_layers=2, conv_shape=(64, 4), ssm_shape=(4, 8, 16), conv_dtype="bfloat16", ssm_dtype="float32")
)  # 1,024 + 4,096 bytes
STATE_CONFIG = MambaInferenceStateConfig(["M", "*", "M", "-"], (64, 4), (4, 8, 16), ssm_states_dtype="bfloat16")


def test_snapshots_count_against_the_memory_that_is_there():
    config = InferenceConfig(buffer_size_gb=1, enable_prefix_caching=True, prefix_caching_mamba_gb=1, max_requests=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.resolve(HYBRID, available_bytes=3 << 30)
    with pytest.warns(ConfigWarning, match="1.00 GiB, more than 80% of the 1.00 GiB available"):
        config.resolve(HYBRID, available_bytes=2 << 30)


def test_what_is_left_to_the_device_is_the_fast_path_on_a_gpu():
    names = ("num_cuda_graphs", "cuda_graph_capture", "overlap")

    def decided(is_cuda, **given):
        config = InferenceConfig(**given)
        kept = config.on_device(is_cuda=is_cuda)
        assert dataclasses.replace(kept, **{name: getattr(config, name) for name in names}) == config
        return tuple(getattr(kept, name) for name in names)

    assert decided(True) == (-1, "start", True)
    assert decided(False) == (0, "first_use", False)
    asked = {"num_cuda_graphs": 8, "cuda_graph_capture": "first_use", "overlap": False}
    assert decided(True, **asked) == decided(False, **asked) == (8, "first_use", False)
    assert decided(True, num_cuda_graphs=0) == (0, "start", True)


def test_swap_without_eviction_is_reported_to_have_no_effect():
    config = InferenceConfig(preemption_mode="swap", swap_buffer_size_gb=1)
    with pytest.warns(ConfigWarning, match="no request is ever evicted"):
        config.resolve(dataclasses.replace(HYBRID, num_attention_layers=0))


def test_prefix_cache_without_snapshots_says_that_it_finds_nothing():
    with pytest.warns(
        ConfigWarning, match=r"finds no prefix .* without prefix_caching_mamba_gb \(a state takes 0.0000"
    ):
        assert InferenceConfig(enable_prefix_caching=True).resolve(HYBRID).num_cached_states == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InferenceConfig(enable_prefix_caching=True).resolve(SHAPE)
        InferenceConfig(enable_prefix_caching=True, prefix_caching_mamba_gb=1).resolve(HYBRID)
        InferenceConfig().resolve(HYBRID)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_type_list": ["M", "*", "Q"]}, r"layer_type_list\[2\] is 'Q'; the symbols are M \* - E G"),
        ({"layer_type_list": ["*", "-"]}, "neither a Mamba layer"),
        ({"mamba_conv_states_shape": (64,)}, "2 positive integers"),
        ({"mamba_ssm_states_shape": (4, 0, 16)}, r"\(4, 0, 16\), it must be 3 positive integers"),
        ({"conv_states_dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"ssm_states_dtype": "int8"}, "one of float32, bfloat16, float16, or None"),
    ],
)
def test_wrong_state_config_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(STATE_CONFIG, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers_type_list": ["M"]}, "unknown field 'layers_type_list'; did you mean 'layer_type_list'"),
        ({"layer_type_list": ["M"]}, "lacks mamba_conv_states_shape, mamba_ssm_states_shape; .*from_model"),
    ],
)
def test_state_config_of_plain_values_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        InferenceConfig(mamba_inference_state_config=values)


def test_state_config_survives_the_dict_of_its_config():
    config = InferenceConfig(mamba_inference_state_config=STATE_CONFIG, mamba_memory_ratio=0.5)
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain["mamba_inference_state_config"]["mamba_ssm_states_shape"] == [4, 8, 16]
    assert InferenceConfig.from_dict(plain) == config


def _mixer(conv: tuple[int, ...] = (64, 4), ssm: tuple[int, ...] = (4, 8, 16)) -> object:
    return types.SimpleNamespace(mixer=types.SimpleNamespace(mamba_state_shapes_per_request=lambda: (conv, ssm)))


def _model(kinds: list[str] | None, *, wrapped: bool = False, layers: list[object] | None = None) -> object:
    decoder = types.SimpleNamespace(layers=layers)
    if kinds is not None:
        decoder.layer_type_list = kinds
    model = types.SimpleNamespace(decoder=decoder)
    return types.SimpleNamespace(module=types.SimpleNamespace(module=model)) if wrapped else model


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_config_of_a_model_without_recurrence_is_none(wrapped):
    assert MambaInferenceStateConfig.from_model(_model(None, wrapped=wrapped)) is None
    assert MambaInferenceStateConfig.from_model(_model(["*", "-"], wrapped=wrapped)) is None
    assert MambaInferenceStateConfig.from_model(types.SimpleNamespace()) is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_config_of_a_hybrid_model_is_what_its_mixers_say(wrapped):
    layers = [_mixer(), object(), _mixer(), object()]
    config = MambaInferenceStateConfig.from_model(_model(["M", "*", "M", "-"], wrapped=wrapped, layers=layers))
    assert config == dataclasses.replace(STATE_CONFIG, ssm_states_dtype=None)


def test_state_config_of_a_list_of_one_chunk_is_that_of_the_chunk():
    model = _model(["M", "*", "M", "-"], layers=[_mixer(), object(), _mixer(), object()])
    assert MambaInferenceStateConfig.from_model([model]) == MambaInferenceStateConfig.from_model(model) is not None


def test_state_config_of_several_chunks_is_that_of_their_layers_in_order():
    chunks = [
        _model(["M", "*"], layers=[_mixer(), object()], wrapped=True),
        _model(["M", "-"], layers=[_mixer(), object()]),
    ]
    whole = _model(["M", "*", "M", "-"], layers=[_mixer(), object(), _mixer(), object()])
    assert MambaInferenceStateConfig.from_model(chunks) == MambaInferenceStateConfig.from_model(whole) is not None


def test_mamba_layers_of_different_states_are_refused():
    with pytest.raises(ConfigError, match=r"recurrent layer 1 keeps states of .*\(8, 8, 16\).* recurrent layer 0"):
        MambaInferenceStateConfig.from_model(_model(["M", "M"], layers=[_mixer(), _mixer(ssm=(8, 8, 16))]))


def test_numbers_of_speculation_are_plain_ones():
    given = SpeculativeConfig(method="ngram", num_speculative_tokens=np.int64(2))
    assert type(given.num_speculative_tokens) is int
