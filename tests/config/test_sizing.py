"""Sizes are those of Megatron, and an error says what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import MAMBA_130M, model_shape

from megatron_infer.config.capacity import GIB, blocks_for, cap_to_memory, derive_max_requests, host_places
from megatron_infer.config.inference import ConfigWarning, InferenceConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import ModelShape, StateShape, heads_per_rank
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.errors import CapacityError, ConfigError

SMOLLM2 = model_shape(
    num_layers=30,
    num_attention_layers=30,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    vocab_size=49152,
    max_position=8192,
    num_parameters=134_515_008,
)
MEGATRON_TINY = model_shape()
"""The model of megatron's engine tests: 131,072 bytes a block of 256 tokens."""


def resolve(
    shape: ModelShape,
    *,
    buffer_bytes: int = 2 * GIB,
    paused_bytes: int = 0,
    cached_state_bytes: int | None = None,
    tensor_parallel_size: int = 1,
    **options: Any,
) -> ResolvedSizes:
    """`InferenceConfig.resolve` of options that give so many bytes."""
    if cached_state_bytes is not None:
        options |= {"enable_prefix_caching": True, "prefix_caching_mamba_gb": cached_state_bytes / GIB}
    config = InferenceConfig(buffer_size_gb=buffer_bytes / GIB, paused_buffer_size_gb=paused_bytes / GIB, **options)
    return config.resolve(shape, tensor_parallel_size=tensor_parallel_size)


def test_megatron_engine_test_sizes():
    sizes = resolve(MEGATRON_TINY, buffer_bytes=int(0.1 * GIB), paused_bytes=int(0.02 * GIB), max_sequence_length=512)
    assert (sizes.block_bytes, sizes.num_blocks, sizes.paused_block_limit) == (131_072, 819, 163)
    assert sizes.num_blocks - sizes.paused_block_limit - 1 == 655
    assert sizes.max_requests == 816
    assert sizes.max_tokens == 16384
    assert sizes.max_blocks_per_row == 2


def test_smollm2_sizes():
    sizes = resolve(SMOLLM2)
    assert sizes.block_bytes == 2 * 2 * 30 * 256 * 3 * 64 == 5_898_240
    assert sizes.num_blocks == 364
    assert sizes.num_usable_blocks == 363
    assert sizes.max_requests == 360
    assert sizes.max_blocks_per_row == 10
    assert sizes.full_length_requests == 36
    assert sizes.kv_bytes == 364 * 5_898_240 <= 2 * GIB
    assert sizes.token_pool_bytes == 361 * 2560 * 4
    assert sizes.max_prompt_tokens == 2559
    assert sizes.graph_shapes == ()


@pytest.mark.parametrize(
    ("heads", "tp", "per_rank"), [(2, 8, 1), (8, 8, 1), (8, 2, 4), (1, 4, 1), (16, 8, 2), (3, 2, 1)]
)
def test_kv_heads_of_a_rank_never_fall_below_one(heads, tp, per_rank):
    assert heads_per_rank(heads, tp) == per_rank


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (45, 3)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert blocks_for(tokens, 16) == blocks


@pytest.mark.parametrize(
    ("limit", "tp", "max_tokens", "expected"),
    [
        (818, 1, None, 816),
        (1, 1, None, 1),  # one block still serves one request
        (3, 1, None, 3),
        (7, 1, None, 4),
        (7, 8, 64, None),
        (9, 8, None, 8),
        (100, 3, None, 96),
        (5000, 1, 1024, 1024),
        (5000, 1, 1023, 1020),
        (5000, 8, 20, 16),
    ],
)
def test_derived_requests_divide_and_fit(limit, tp, max_tokens, expected):
    if expected is None:
        with pytest.raises(CapacityError, match="multiple of 8"):
            derive_max_requests(limit, tensor_parallel_size=tp, max_tokens=max_tokens)
    else:
        assert derive_max_requests(limit, tensor_parallel_size=tp, max_tokens=max_tokens) == expected


def test_small_blocks_do_not_derive_more_requests_than_tokens():
    sizes = resolve(MEGATRON_TINY, block_size_tokens=1, buffer_bytes=GIB)
    assert sizes.num_usable_blocks > 16384
    assert sizes.max_requests == sizes.max_tokens == 16384


def test_buffer_below_two_blocks_is_refused_with_the_smallest_that_works():
    with pytest.raises(CapacityError) as caught:
        resolve(SMOLLM2, buffer_bytes=2 * 5_898_240 - 1)
    message = str(caught.value)
    assert "5,898,240" in message
    assert "11,796,480" in message
    gib = float(message.split("buffer_size_gb >= ")[1].split(" ")[0])
    assert resolve(SMOLLM2, buffer_bytes=int(gib * GIB)).num_blocks == 2
    assert resolve(SMOLLM2, buffer_bytes=2 * 5_898_240).num_blocks == 2


def test_paused_share_must_leave_a_block_to_run():
    with pytest.raises(ConfigError, match=r"keep 10 of 10 blocks, the limit is 8"):
        resolve(SMOLLM2, buffer_bytes=10 * 5_898_240, paused_bytes=10 * 5_898_240)
    sizes = resolve(SMOLLM2, buffer_bytes=10 * 5_898_240, paused_bytes=8 * 5_898_240)
    assert sizes.paused_block_limit == 8


def test_given_max_requests_are_taken_verbatim():
    assert resolve(SMOLLM2, max_requests=7).max_requests == 7
    assert resolve(SMOLLM2, max_requests=5000).max_requests == 5000
    with pytest.raises(ConfigError, match="multiple of the tensor parallel size 2"):
        resolve(SMOLLM2, max_requests=1, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"max_requests is 20,000, the limit is max_tokens = 16,384"):
        resolve(SMOLLM2, max_requests=20_000)


def test_sequence_length_is_cut_to_the_models_positions():
    with pytest.warns(ConfigWarning, match="10,000"):
        sizes = resolve(SMOLLM2, max_sequence_length=10_000)
    assert sizes.max_sequence_length == 8192
    assert "10,000" in sizes.how["max_sequence_length"]
    free = dataclasses.replace(SMOLLM2, max_position=None)
    assert resolve(free, max_sequence_length=10_000).max_sequence_length == 10_000


def test_prompt_limit_follows_chunking():
    assert resolve(SMOLLM2, max_tokens=512).max_prompt_tokens == 512
    assert resolve(SMOLLM2, max_tokens=512, enable_chunked_prefill=True).max_prompt_tokens == 2559
    tight = resolve(SMOLLM2, buffer_bytes=3 * 5_898_240, enable_chunked_prefill=True)
    assert tight.max_prompt_tokens == 512


def test_model_that_keeps_nothing_is_refused():
    with pytest.raises(ConfigError, match="neither attention nor Mamba layers"):
        resolve(dataclasses.replace(SMOLLM2, num_attention_layers=0))


# the hybrid of megatron's context tests: 1,048,576 bytes a block of 256 tokens, 41,472 a state
MEGATRON_STATE = StateShape(
    num_layers=1, conv_shape=(544, 4), ssm_shape=(8, 64, 16), conv_dtype="float32", ssm_dtype="float32"
)
MEGATRON_HYBRID = model_shape(
    num_layers=2,
    num_attention_layers=1,
    num_query_heads=8,
    num_kv_heads=8,
    head_dim=64,
    kv_dtype_bytes=4,
    dtype="float32",
    state=MEGATRON_STATE,
)
PURE_MAMBA = dataclasses.replace(MEGATRON_HYBRID, num_layers=1, num_attention_layers=0)
BOTH_BUFFERS = {"buffer_bytes": int(0.05 * GIB), "paused_bytes": int(0.01 * GIB), "max_sequence_length": 512}


def test_state_of_a_request_is_counted_in_whole_cache_lines():
    assert MEGATRON_STATE.slot_bytes == (544 * 4 + 8 * 64 * 16) * 4 == 41_472
    odd = dataclasses.replace(MEGATRON_STATE, num_layers=3, conv_shape=(5, 3), conv_dtype="bfloat16")
    assert (odd.conv_bytes, odd.ssm_bytes) == (128, 3 * 8 * 64 * 16 * 4)  # 90 bytes of conv: two lines
    assert MAMBA_130M.slot_bytes == 19_562_496


@pytest.mark.parametrize(
    ("ratio", "blocks", "paused", "slots", "requests"),
    [(0.2, 40, 8, 310, 36), (0.4, 30, 6, 621, 28), (0.6, 20, 4, 932, 16), (0.8, 10, 2, 1242, 8)],
)
@pytest.mark.parametrize("unified", [False, True])
def test_hybrid_with_a_ratio_is_sized_as_megatron_does(ratio, blocks, paused, slots, requests, unified):
    sizes = resolve(MEGATRON_HYBRID, **BOTH_BUFFERS, mamba_memory_ratio=ratio, unified_memory_level=int(unified))
    assert (sizes.block_bytes, sizes.state_slot_bytes) == (1_048_576, 41_472)
    assert sizes.paused_block_limit == paused
    assert sizes.num_blocks == blocks + (paused if unified else 0)
    assert unified == ("of the paused buffer (unified memory)" in sizes.how["num_blocks"])
    assert sizes.max_requests == min(sizes.num_blocks - 1, slots) // 4 * 4
    assert unified or sizes.max_requests == requests
    assert sizes.num_state_slots == sizes.max_requests + 1
    assert sizes.state_bytes == sizes.num_state_slots * 41_472


def test_a_small_ratio_caps_the_requests():
    sizes = resolve(MEGATRON_HYBRID, **BOTH_BUFFERS, mamba_memory_ratio=0.01)
    assert int((53_687_091 + 10_737_418) * 0.01) // 41_472 == 15
    assert (sizes.num_blocks, sizes.max_requests, sizes.num_state_slots) == (50, 12, 13)
    assert "15 states in mamba_memory_ratio 0.01" in sizes.how["max_requests"]
    given = resolve(MEGATRON_HYBRID, **BOTH_BUFFERS, mamba_memory_ratio=0.01, max_requests=15)
    assert (given.max_requests, given.num_state_slots) == (15, 16)
    with pytest.raises(CapacityError, match=r"max_requests is 16, mamba_memory_ratio=0.01 .* of 15 \(41,472 bytes"):
        resolve(MEGATRON_HYBRID, **BOTH_BUFFERS, mamba_memory_ratio=0.01, max_requests=16)


@pytest.mark.parametrize(("max_requests", "blocks", "paused"), [(4, 51, 10), (100, 48, 9), (1000, 18, 3)])
def test_hybrid_with_max_requests_reserves_exactly_their_states(max_requests, blocks, paused):
    buffers = {**BOTH_BUFFERS, "buffer_bytes": 52 * 1_048_576, "paused_bytes": 10 * 1_048_576 + 50_000}
    total = buffers["buffer_bytes"] + buffers["paused_bytes"]
    share = 1 - max_requests * 41_472 / total
    assert (int(buffers["buffer_bytes"] * share) // 1_048_576, int(buffers["paused_bytes"] * share) // 1_048_576) == (
        blocks,
        paused,
    )
    sizes = resolve(MEGATRON_HYBRID, **buffers, max_requests=max_requests)
    assert (sizes.num_blocks, sizes.paused_block_limit, sizes.max_requests) == (blocks, paused, max_requests)
    assert sizes.num_state_slots == max_requests + 1
    with pytest.raises(CapacityError, match=r"2,000 requests .* need 82,944,000 bytes, the buffers hold 65,061,712"):
        resolve(MEGATRON_HYBRID, **buffers, max_requests=2000)


def test_hybrid_without_a_rule_brings_a_state_with_each_block():
    sizes = resolve(MEGATRON_HYBRID, **BOTH_BUFFERS)
    assert sizes.num_blocks == 53_687_091 // (1_048_576 + 41_472) == 49
    assert (sizes.paused_block_limit, sizes.max_requests, sizes.num_state_slots) == (9, 48, 49)
    assert sizes.kv_bytes + sizes.state_bytes <= 53_687_091


def test_states_that_leave_no_block_are_refused_with_the_smallest_buffer_that_works():
    for changes in ({}, {"mamba_memory_ratio": 0.97}, {"max_requests": 20}, {"mamba_memory_ratio": 0.004}):
        with pytest.raises(CapacityError, match="are needed; set buffer_size_gb >=") as caught:
            resolve(MEGATRON_HYBRID, buffer_bytes=2_097_152, max_sequence_length=512, **changes)
        gib = float(str(caught.value).split("buffer_size_gb >= ")[1].split(" ")[0])
        sizes = resolve(MEGATRON_HYBRID, buffer_bytes=int(gib * GIB), max_sequence_length=512, **changes)
        assert sizes.num_blocks >= 2 and sizes.max_requests >= 1
        with pytest.raises(CapacityError):  # and a little less does not do
            resolve(MEGATRON_HYBRID, buffer_bytes=int((gib - 3e-6) * GIB), **changes)


def test_pure_mamba_gives_the_buffer_to_states():
    sizes = resolve(PURE_MAMBA, **BOTH_BUFFERS)
    assert (sizes.block_bytes, sizes.kv_bytes, sizes.paused_block_limit) == (0, 0, 0)
    assert sizes.max_requests == (53_687_091 // 41_472 - 1) // 4 * 4 == 1292
    assert sizes.num_state_slots == 1293 and sizes.state_bytes <= 53_687_091
    assert (sizes.max_blocks_per_row, sizes.num_usable_blocks) == (2, 2 * 1292)
    assert sizes.full_length_requests == 1292, "a row never lacks a block"
    assert "take no memory" in sizes.how["block_bytes"]
    half = resolve(PURE_MAMBA, **BOTH_BUFFERS, mamba_memory_ratio=0.5)
    assert half.max_requests == (26_843_545 // 41_472 - 1) // 4 * 4
    unified = resolve(PURE_MAMBA, **BOTH_BUFFERS, unified_memory_level=1)
    assert unified.max_requests == ((53_687_091 + 10_737_418) // 41_472 - 1) // 4 * 4


def test_pure_mamba_takes_the_requests_it_has_states_for():
    sizes = resolve(PURE_MAMBA, **BOTH_BUFFERS, max_requests=1293)
    assert (sizes.max_requests, sizes.num_state_slots) == (1293, 1294)
    with pytest.raises(CapacityError, match=r"max_requests is 1,294, the buffer holds the recurrent states of 1,293"):
        resolve(PURE_MAMBA, **BOTH_BUFFERS, max_requests=1294)
    with pytest.raises(CapacityError, match=r"at least 82,944 are needed; set buffer_size_gb >= 0.000078$"):
        resolve(PURE_MAMBA, buffer_bytes=82_943)
    assert resolve(PURE_MAMBA, buffer_bytes=82_944).max_requests == 1


@pytest.mark.parametrize("shape", [MEGATRON_HYBRID, PURE_MAMBA])
def test_cached_states_come_on_top_of_the_buffer(shape):
    plain = resolve(shape, **BOTH_BUFFERS)
    sizes = resolve(shape, **BOTH_BUFFERS, cached_state_bytes=10 * 41_472 + 5)
    assert (plain.num_cached_states, sizes.num_cached_states) == (0, 10)
    assert sizes.max_requests == plain.max_requests and sizes.num_state_slots == plain.num_state_slots + 10
    assert sizes.state_bytes == sizes.num_state_slots * 41_472
    assert "414,725 bytes (prefix_caching_mamba_gb" in sizes.how["num_cached_states"]
    assert sizes.num_blocks == plain.num_blocks + (0 if shape.num_attention_layers else 20)
    with pytest.raises(CapacityError, match=r"gives 41,471 bytes, one recurrent state takes 41,472; set .* 0.000039"):
        resolve(shape, **BOTH_BUFFERS, cached_state_bytes=41_471)


def test_attention_models_have_no_states():
    with pytest.warns(ConfigWarning, match="prefix_caching_mamba_gb=1.0 has no effect"):
        sizes = resolve(SMOLLM2, cached_state_bytes=1 << 30)
    figures = (sizes.state_slot_bytes, sizes.num_cached_states, sizes.num_state_slots, sizes.state_bytes)
    assert figures == (0, 0, 0, 0)
    state = MambaInferenceStateConfig(["M", "*"], (64, 4), (4, 8, 16))
    for option in ({"mamba_memory_ratio": 0.5}, {"mamba_inference_state_config": state}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))} is set, but the model keeps no recurrent state"):
            resolve(SMOLLM2, **option)


def test_host_memory_is_divided_between_blocks_and_states():
    half = {"block_bytes": 5, "slot_bytes": 10, "max_requests": 16, "max_blocks_per_row": 8}
    assert host_places(100, **half) == (14, 3)
    assert host_places(0, **half) == host_places(14, **half) == (0, 0), "a state without a block is of no use"
    assert host_places(15, **half) == (1, 1)
    assert host_places(10_000, **half) == (1968, 16), "no more states than requests"
    assert host_places(100, **{**half, "slot_bytes": 0}) == (20, 0)
    assert host_places(100, **{**half, "block_bytes": 0}) == (0, 0), "a request that needs no blocks is never evicted"
    for swap_bytes in range(3000):
        num_blocks, num_states = host_places(swap_bytes, **half)
        assert num_blocks * 5 + num_states * 10 <= swap_bytes
        assert num_states == 0 or num_blocks >= num_states, (swap_bytes, num_blocks, num_states)


def test_buffer_above_four_fifths_of_memory_is_cut_to_three_fifths():
    assert cap_to_memory(800, 80, None) == (800, 80, "")
    assert cap_to_memory(800, 80, 1000) == (800, 80, "")
    buffer_bytes, paused_bytes, note = cap_to_memory(801, 80, 1000)
    assert (buffer_bytes, paused_bytes) == (600, 59)
    assert "60%" in note


@pytest.mark.parametrize("shape", [MEGATRON_HYBRID, PURE_MAMBA])
@pytest.mark.parametrize(
    "changes", [{}, {"mamba_memory_ratio": 0.5}, {"max_requests": 8}, {"cached_state_bytes": GIB}], ids=str
)
def test_table_explains_states(shape, changes):
    rows = {row.name: row for row in resolve(shape, **BOTH_BUFFERS, **changes).table()}
    assert all(row.how and row.unit for row in rows.values())
    assert "1 Mamba layers x (conv (544, 4) float32" in rows["state_slot_bytes"].how
    assert (rows["state_slot_bytes"].unit, rows["num_state_slots"].unit) == ("bytes", "slots")


def test_table_explains_every_size_once():
    sizes = resolve(SMOLLM2)
    rows = sizes.table()
    names = [row.name for row in rows]
    assert names == [item.name for item in dataclasses.fields(sizes) if item.name != "how"]
    assert set(sizes.how) == set(names)
    assert all(row.how and row.unit for row in rows)
    by_name = {row.name: row.value for row in rows}
    assert by_name["num_blocks"] == 364
    assert by_name["graph_shapes"] == "none"


@settings(max_examples=200, deadline=None)
@given(
    buffer_bytes=st.integers(1, 1 << 36),
    is_pure=st.booleans(),
    ratio=st.none() | st.floats(0.01, 0.99),
    max_requests=st.none() | st.integers(1, 2000),
    cached_state_bytes=st.none() | st.integers(1, 1 << 30),
)
def test_sizes_of_hybrids_that_resolve_are_consistent(buffer_bytes, is_pure, ratio, max_requests, cached_state_bytes):
    options = {"mamba_memory_ratio": ratio, "max_requests": max_requests, "cached_state_bytes": cached_state_bytes}
    try:
        sizes = resolve(PURE_MAMBA if is_pure else MEGATRON_HYBRID, buffer_bytes=buffer_bytes, **options)
    except ConfigError:
        return
    slot = sizes.state_slot_bytes
    assert sizes.num_state_slots == sizes.max_requests + 1 + sizes.num_cached_states
    assert sizes.kv_bytes + (sizes.max_requests + is_pure) * slot <= buffer_bytes
    assert sizes.num_cached_states * slot <= (cached_state_bytes or 0)
    assert max_requests in (None, sizes.max_requests) and sizes.max_requests >= 1
    if is_pure:
        assert sizes.num_usable_blocks >= sizes.max_requests * sizes.max_blocks_per_row


@settings(max_examples=200, deadline=None)
@given(
    buffer_bytes=st.integers(1, 1 << 40),
    paused_share=st.floats(0, 1),
    block_size=st.integers(1, 512),
    max_tokens=st.none() | st.integers(1, 100_000),
    tp=st.integers(1, 16),
)
def test_sizes_that_resolve_are_consistent(buffer_bytes, paused_share, block_size, max_tokens, tp):
    options = {"block_size_tokens": block_size, "max_tokens": max_tokens, "tensor_parallel_size": tp}
    try:
        sizes = resolve(
            MEGATRON_TINY, buffer_bytes=buffer_bytes, paused_bytes=int(buffer_bytes * paused_share), **options
        )
    except ConfigError:
        return
    assert sizes.kv_bytes <= buffer_bytes < sizes.kv_bytes + sizes.block_bytes
    assert 1 <= sizes.max_requests <= min(sizes.num_usable_blocks, sizes.max_tokens)
    assert sizes.max_requests % tp == 0
    assert sizes.paused_block_limit <= sizes.num_blocks - 2
    assert sizes.max_blocks_per_row * block_size >= sizes.max_sequence_length
