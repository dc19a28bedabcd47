"""Pipeline stages with different layers assign the same blocks and slots."""

from __future__ import annotations

import dataclasses

import pytest
from shapes import model_shape

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.model_shape import StateShape
from megatron_infer.config.stage_sizes import agree, stage_limits

STATE = StateShape(num_layers=2, conv_shape=(8, 4), ssm_shape=(2, 4, 8), conv_dtype="float32", ssm_dtype="float32")
BASE = model_shape(
    num_attention_layers=2, num_kv_heads=2, max_position=256, kv_dtype_bytes=4, dtype="float32", is_stage=True
)
STAGES = {
    "attention": BASE,
    "more attention": dataclasses.replace(BASE, num_attention_layers=5),
    "hybrid": dataclasses.replace(BASE, state=STATE),
    "mamba": dataclasses.replace(BASE, num_attention_layers=0, state=STATE),
    "neither": dataclasses.replace(BASE, num_attention_layers=0),
}


def agreed(*names, host=(0, 0), **settings):
    config = InferenceConfig(
        **{"buffer_size_gb": 0.001, "block_size_tokens": 16, "max_sequence_length": 256} | settings
    )
    shapes = [STAGES[name] for name in names]
    sizes = [config.resolve(shape) for shape in shapes]
    limits = [stage_limits(shape, one, host) for shape, one in zip(shapes, sizes, strict=True)]
    least = [min(column) for column in zip(*limits, strict=True)]
    return sizes, [agree(one, least) for one in sizes]


@pytest.mark.parametrize(
    "names",
    [("attention", "more attention"), ("mamba", "attention"), ("hybrid", "neither"), ("neither", "mamba", "hybrid")],
)
def test_stages_plan_with_the_same_numbers(names):
    alone, together = agreed(*names, enable_prefix_caching=True, prefix_caching_mamba_gb=0.0001, host=(9, 5))
    planned = ("num_blocks", "max_requests", "max_blocks_per_row", "num_cached_states", "paused_block_limit")
    assert len({tuple(getattr(one.sizes, name) for name in planned) for one in together}) == 1
    assert len({(one.host, one.recurrent) for one in together}) == 1
    for name, before, one in zip(names, alone, together, strict=True):
        shape = STAGES[name]
        assert one.sizes.max_requests <= before.max_requests
        assert not shape.num_attention_layers or one.sizes.kv_bytes <= before.kv_bytes, "its memory holds its part"
        states = one.sizes.max_requests + 1 + one.sizes.num_cached_states
        assert one.sizes.num_state_slots == (states if shape.state else 0)
        assert [row.name for row in one.sizes.table()] == [row.name for row in before.table()]
    assert together[0].host == (
        9 if any(STAGES[n].num_attention_layers for n in names) else 0,
        5 * any(STAGES[n].state is not None for n in names),
    )


def test_the_stage_with_the_most_layers_decides_on_blocks():
    alone, together = agreed("attention", "more attention")
    assert alone[0].num_blocks > 2 * alone[1].num_blocks
    assert together[0].sizes.num_blocks == together[1].sizes.num_blocks == alone[1].num_blocks
    assert "as the pipeline stages agreed" in together[0].sizes.how["num_blocks"]
    assert together[1].sizes.how["num_blocks"] == alone[1].how["num_blocks"]


def test_without_attention_anywhere_blocks_never_lack():
    _, together = agreed("mamba", "neither", host=(0, 4))
    sizes = together[1].sizes
    assert sizes.num_blocks == sizes.max_requests * sizes.max_blocks_per_row + 1 and sizes.kv_bytes == 0


def test_a_share_for_states_is_that_of_the_stages_that_keep_some():
    alone, together = agreed("hybrid", "attention", mamba_memory_ratio=0.5)
    assert alone[1].num_blocks > 1.9 * alone[0].num_blocks == 1.9 * together[1].sizes.num_blocks
