"""What an eviction costs counts the recurrent state, which is small beside what it saves."""

from __future__ import annotations

import pytest
from fake_device import make_request
from world import Swap, World

from megatron_infer.config.inference import PreemptionMode
from megatron_infer.config.model_shape import StateShape, kv_block_bytes
from megatron_infer.scheduler.policy import CostModel, blocks_needed

PCIE_BYTES_PER_S = 25e9
# Nemotron-H-8B: 24 Mamba-2, 4 attention layers; states in fp32
NEMOTRON_STATE = StateShape(
    num_layers=24, conv_shape=(10240, 4), ssm_shape=(128, 64, 128), conv_dtype="bfloat16", ssm_dtype="float32"
)
NEMOTRON_BLOCK = kv_block_bytes(num_layers=4, block_size=256, num_kv_heads=8, head_dim=128, dtype_bytes=2)
NEMOTRON = CostModel(
    prefill_s_per_token=5e-5,
    copy_s_per_block=NEMOTRON_BLOCK / PCIE_BYTES_PER_S,
    copy_s_per_state=NEMOTRON_STATE.slot_bytes / PCIE_BYTES_PER_S,
)


def test_a_swap_takes_blocks_and_state_both_ways():
    costs = CostModel(copy_s_per_block=2.0, copy_s_per_state=1.0)
    assert costs.swap_s(3) == 14.0 and costs.swap_s(0) == 2.0
    assert CostModel(copy_s_per_block=2.0).swap_s(3) == 12.0, "a model without state pays for none"


@pytest.mark.parametrize("num_tokens, swaps", [(64, False), (512, True), (4096, True), (32768, True)])
def test_a_hybrid_is_worth_swapping_from_a_few_hundred_tokens(num_tokens, swaps):
    assert NEMOTRON_STATE.slot_bytes == 102_629_376
    assert (NEMOTRON.swap_s(blocks_needed(num_tokens, 256)) < NEMOTRON.recompute_s(num_tokens)) is swaps


@pytest.mark.parametrize("copy_s_per_state, how", [(1e-9, "swap"), (1e9, "recompute")])
def test_auto_counts_the_state(copy_s_per_state, how):
    costs = CostModel(prefill_s_per_token=1e-3, copy_s_per_block=1e-9, copy_s_per_state=copy_s_per_state)
    swap = Swap(slots=64, mode=PreemptionMode.AUTO, costs=costs)
    world = World(num_blocks=7, block_size=4, paused_limit=0, max_tokens=64, swap=swap)
    for index, name in enumerate("abc"):
        world.add(make_request(name, [10 * index + i for i in range(8)], 6, stop_ids=frozenset()))
    world.drain()
    assert {payload["how"] for _, kind, payload in world.events if kind == "evict"} == {how}
