"""Options that are chosen for a machine and a model load without a word, and give way to what is asked for."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
from shapes import MAMBA_130M, model_shape

from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.machine_defaults import machine_config, machine_defaults
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import StateShape
from megatron_infer.errors import ConfigError

SMALL = StateShape(num_layers=2, conv_shape=(64, 4), ssm_shape=(4, 8, 16), conv_dtype="bfloat16", ssm_dtype="float32")
PLAIN = model_shape()
HYBRID, MAMBA = model_shape(state=MAMBA_130M), model_shape(state=MAMBA_130M, num_attention_layers=0)
WITH_STATES = {"small states": model_shape(state=SMALL), "large states": HYBRID, "no attention": MAMBA}


def on_cpu(asked, shape=None, *, gib=64, **ranks):
    return machine_config(asked, shape, is_cuda=False, available_bytes=gib * GIB, **ranks)


def test_help_says_machine_for_exactly_the_options_the_machine_decides():
    adapted = set(machine_defaults(is_cuda=False, available_bytes=0))
    base = on_cpu({}, gib=8)
    assert {item.name for item in dataclasses.fields(base) if getattr(base, item.name) != item.default} == adapted
    assert set(machine_defaults(is_cuda=True, available_bytes=0)) < adapted
    assert on_cpu({}, PLAIN, gib=8) == base, "the model's shape changes nothing without states"


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 16},
        {"max_requests": 4096},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False},
        {"max_requests": None, "max_tokens": None},
        {"buffer_size_gb": 1, "seed": 3},
        {"max_requests": 7, "prefix_caching_mamba_gb": 0.5},
    ],
)
def test_machine_default_gives_way_to_what_is_asked(recwarn, is_cuda, asked):
    shape = HYBRID if "prefix_caching_mamba_gb" in asked else None
    config = machine_config(asked, shape, is_cuda=is_cuda, available_bytes=8 * GIB)
    assert {name: getattr(config, name) for name in asked} == asked
    assert config.enable_chunked_prefill or config.max_tokens is None, "a small step would refuse long prompts"
    assert not [warning for warning in recwarn if warning.category is ConfigWarning]


@pytest.mark.parametrize("shape", WITH_STATES.values(), ids=WITH_STATES)
@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("gib", [1, 4, 16, 80])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"buffer_size_gb": 0.1},
        {"mamba_memory_ratio": 0.5},
        {"enable_prefix_caching": False},
        {"max_tokens": 4},
        {"max_requests": None},
    ],
    ids=str,
)
def test_machine_config_of_a_model_with_states_always_resolves_and_is_silent(shape, is_cuda, gib, asked):
    memory, given = gib * GIB, {"buffer_size_gb": 0.6 * gib, **asked} if is_cuda else asked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = machine_config(given, is_cuda=is_cuda, available_bytes=memory, shape=shape)
        sizes = config.resolve(shape, available_bytes=memory)
    assert {name: getattr(config, name) for name in given} == given
    assert sizes.kv_bytes + sizes.state_bytes < 0.8 * memory
    assert sizes.max_requests >= (1 if "buffer_size_gb" in asked else min(4, asked.get("max_tokens", 4)))
    buffer = config.buffer_size_gb * GIB
    assert (sizes.num_cached_states > 0) == config.enable_prefix_caching
    assert sizes.num_cached_states * sizes.state_slot_bytes <= max(buffer / 8, sizes.state_slot_bytes)
    if shape.num_attention_layers and not given:
        assert sizes.max_requests * sizes.state_slot_bytes <= 0.5 * buffer
        assert sizes.full_length_requests >= 1


def test_states_leave_half_of_the_buffer_to_keys_and_values():
    sizes = on_cpu({}, HYBRID).resolve(HYBRID)
    assert 0.4 < sizes.max_requests * sizes.state_slot_bytes / (4 * GIB) <= 0.5 < sizes.kv_bytes / (4 * GIB) + 0.02


@pytest.mark.parametrize("shape", WITH_STATES.values(), ids=WITH_STATES)
@pytest.mark.parametrize("is_cuda", [False, True])
def test_machine_config_fits_the_requests_to_a_buffer_that_is_cut(shape, is_cuda):
    config = machine_config({"buffer_size_gb": 40}, shape, is_cuda=is_cuda, available_bytes=8 * GIB)
    with pytest.warns(ConfigWarning, match="capped to 60%"):
        sizes = config.resolve(shape, available_bytes=8 * GIB)
    assert sizes.max_requests == config.max_requests and sizes.max_requests % 16 == 0


@pytest.mark.parametrize("as_mapping", [False, True])
def test_sizes_suit_the_dtypes_that_states_are_asked_for_in(as_mapping):
    """Larger states than the model would choose: room for one cached one, in a buffer that holds few."""
    own = dataclasses.replace(MAMBA_130M, conv_dtype="bfloat16")
    state = MambaInferenceStateConfig(
        ["M", "*"], own.conv_shape, own.ssm_shape, conv_states_dtype="float32", ssm_states_dtype="float32"
    )
    asked = {"mamba_inference_state_config": dataclasses.asdict(state) if as_mapping else state, "buffer_size_gb": 0.1}
    sizes = on_cpu(asked, model_shape(state=own)).resolve(HYBRID, available_bytes=64 * GIB)
    assert sizes.num_cached_states == 1 and sizes.state_slot_bytes == MAMBA_130M.slot_bytes > own.slot_bytes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_requests": 65, "max_tokens": 64}, "max_requests is 65, the limit is max_tokens = 64"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"buffer_size_gb": math.nan}, "buffer_size_gb"),
        ({"prefix_caching_mamba_gb": "1"}, "prefix_caching_mamba_gb"),
        ({"mamba_inference_state_config": (4, 4)}, "mamba_inference_state_config"),
        ({"mamba_inference_state_config": {"conv_states_dtype": ["float32"]}}, "mamba_inference_state_config"),
        ({"mamba_inference_state_config": "float32"}, "mamba_inference_state_config"),
    ],
)
def test_wrong_options_are_left_to_be_refused_by_name(asked, message):
    with pytest.raises(ConfigError, match=message):
        machine_config(asked, MAMBA, is_cuda=True, available_bytes=8 * GIB)
    with pytest.raises(ConfigError, match=message):
        on_cpu(asked, gib=8)


@pytest.mark.parametrize("ranks", [1, 3, 6, 7, 12])
@pytest.mark.parametrize("model", [PLAIN, HYBRID, MAMBA], ids=["attention", "hybrid", "mamba"])
@pytest.mark.parametrize("asked", [{}, {"max_tokens": 64}, {"buffer_size_gb": 0.5}])
def test_a_number_of_requests_that_was_chosen_here_is_never_refused(ranks, model, asked):
    """SmolLM2 over three ranks: 256 requests are no multiple of three, and no user asked for them."""
    config = on_cpu(asked, model, tensor_parallel_size=ranks)
    sizes = config.resolve(model, tensor_parallel_size=ranks, available_bytes=64 * GIB)
    assert sizes.max_requests % ranks == 0 < sizes.max_requests


def test_a_number_of_requests_that_was_asked_for_must_divide_over_the_ranks():
    chosen = on_cpu({"max_requests": 8}, gib=8, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"max_requests is 8, it must be a multiple of the tensor parallel size 3"):
        chosen.resolve(PLAIN, tensor_parallel_size=3)
