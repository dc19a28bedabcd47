"""Default options suit a model with recurrent state: it loads, and its prefixes are found."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import ModelShape, StateShape
from megatron_infer.errors import ConfigError

LARGE = StateShape(
    num_layers=24, conv_shape=(1792, 4), ssm_shape=(24, 64, 128), conv_dtype="bfloat16", ssm_dtype="float32"
)


def shape(attention_layers: int, state: StateShape | None = LARGE) -> ModelShape:
    return ModelShape(
        num_layers=24 + attention_layers,
        num_attention_layers=attention_layers,
        num_query_heads=8,
        num_kv_heads=2,
        head_dim=64,
        hidden_size=512,
        vocab_size=1000,
        padded_vocab_size=1000,
        max_position=None,
        kv_dtype_bytes=2,
        dtype="bfloat16",
        num_parameters=1,
        state=state,
    )


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("attention_layers", [0, 4])
@pytest.mark.parametrize(
    "asked", [{}, {"buffer_size_gb": 0.1}, {"mamba_memory_ratio": 0.4}, {"enable_prefix_caching": False}]
)
def test_sizes_resolve_without_a_word_for_any_buffer(asked, attention_layers, is_cuda):
    model = shape(attention_layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        config = machine_config(asked, model, is_cuda=is_cuda, available_bytes=64 * GIB)
        sizes = config.resolve(model, available_bytes=64 * GIB)
    assert sizes.max_requests >= 1 and sizes.num_usable_blocks >= 1
    assert (sizes.num_cached_states > 0) == config.enable_prefix_caching
    assert sizes.num_cached_states * sizes.state_slot_bytes <= max(config.buffer_size_gb * GIB / 8, LARGE.slot_bytes)


def test_states_leave_half_of_the_buffer_to_keys_and_values():
    sizes = machine_config({}, shape(4), is_cuda=False, available_bytes=64 * GIB).resolve(shape(4))
    assert 0.4 < sizes.max_requests * sizes.state_slot_bytes / (4 * GIB) <= 0.5 < sizes.kv_bytes / (4 * GIB) + 0.02


def test_explicit_options_win():
    asked = {"max_requests": 7, "prefix_caching_mamba_gb": 0.5}
    config = machine_config(asked, shape(4), is_cuda=False, available_bytes=8 << 30)
    assert (config.max_requests, config.prefix_caching_mamba_gb) == (7, 0.5)


@pytest.mark.parametrize("as_mapping", [False, True])
def test_sizes_suit_the_dtypes_that_states_are_asked_for_in(as_mapping):
    """Larger states than the model would choose: room for one cached one, in a buffer that holds few."""
    state = MambaInferenceStateConfig(
        ["M", "*"], (1792, 4), (24, 64, 128), conv_states_dtype="float32", ssm_states_dtype="float32"
    )
    asked = {"mamba_inference_state_config": dataclasses.asdict(state) if as_mapping else state, "buffer_size_gb": 0.1}
    config = machine_config(asked, shape(4), is_cuda=False, available_bytes=64 * GIB)
    kept = dataclasses.replace(LARGE, conv_dtype="float32")
    sizes = config.resolve(dataclasses.replace(shape(4), state=kept), available_bytes=64 * GIB)
    assert sizes.num_cached_states == 1 and sizes.state_slot_bytes == kept.slot_bytes > LARGE.slot_bytes


@pytest.mark.parametrize("wrong", [(4, 4), {"conv_states_dtype": ["float32"]}, "float32"])
def test_a_state_config_that_is_none_is_refused_as_such(wrong):
    with pytest.raises(ConfigError, match="mamba_inference_state_config"):
        machine_config({"mamba_inference_state_config": wrong}, shape(4), is_cuda=False, available_bytes=8 << 30)


def test_models_without_state_keep_their_defaults():
    plain = shape(4, state=None)
    assert machine_config({}, plain, is_cuda=False, available_bytes=8 << 30) == machine_config(
        {}, is_cuda=False, available_bytes=8 << 30
    )


def test_swap_without_eviction_is_reported_to_have_no_effect():
    config = machine_config(
        {"preemption_mode": "swap", "swap_buffer_size_gb": 1}, shape(0), is_cuda=False, available_bytes=8 << 30
    )
    with pytest.warns(ConfigWarning, match="no request is ever evicted"):
        config.resolve(shape(0))


@pytest.mark.parametrize("ranks", [1, 3, 6, 7, 12])
@pytest.mark.parametrize("model", [shape(4, state=None), shape(4), shape(0)], ids=["attention", "hybrid", "mamba"])
@pytest.mark.parametrize("asked", [{}, {"max_tokens": 64}, {"buffer_size_gb": 0.5}])
def test_a_number_of_requests_that_was_chosen_here_is_never_refused(ranks, model, asked):
    """SmolLM2 over three ranks: 256 requests are no multiple of three, and no user asked for them."""
    config = machine_config(asked, model, is_cuda=False, available_bytes=64 * GIB, tensor_parallel_size=ranks)
    sizes = config.resolve(model, tensor_parallel_size=ranks, available_bytes=64 * GIB)
    assert sizes.max_requests % ranks == 0 < sizes.max_requests
    with pytest.raises(ConfigError, match=r"max_requests is 8, it must be a multiple of the tensor parallel size 3"):
        chosen = machine_config({"max_requests": 8}, is_cuda=False, available_bytes=8 << 30, tensor_parallel_size=3)
        chosen.resolve(shape(4, state=None), tensor_parallel_size=3)
