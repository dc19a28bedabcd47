"""Shapes of CUDA graphs: a step finds the smallest that covers it, and what the options promise is in the list."""

from __future__ import annotations

import random

import pytest

from megatron_infer.config.graph_shapes import GraphShape, ShapeIndex, make_shapes
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.errors import ConfigError

MIXED = {"use_cuda_graphs_for_non_decode_steps": True}
ALL_PREFILLS = {**MIXED, "cuda_graph_all_prefills": True, "enable_chunked_prefill": True}


def oracle(shapes, num_tokens, num_prefill, num_decode):
    """By definition: of all that hold the decode rows, the prefill rows and their tokens, the least."""
    found = [
        s
        for s in shapes
        if s.num_decode >= num_decode
        and s.num_prefill >= num_prefill
        and s.num_tokens - s.num_decode >= num_tokens - num_decode
        and (s.num_prefill == 0) == (num_prefill == 0)
    ]
    return min(found, key=lambda s: (s.num_tokens, s.num_prefill, s.num_decode), default=None)


def random_steps(rng: random.Random, max_requests: int, max_tokens: int, count: int = 60):
    for _ in range(count):
        num_decode = rng.randint(0, max_requests)
        num_prefill = rng.randint(0, max_requests - num_decode)
        if num_decode + num_prefill == 0:
            continue
        most = max(num_prefill, max_tokens - num_decode)
        tokens = rng.randint(num_prefill, most) if num_prefill else 0
        yield num_decode + tokens, num_prefill, num_decode


@pytest.mark.parametrize("seed", range(25))
def test_find_gives_what_a_search_of_any_list_gives(seed):
    rng = random.Random(seed)
    shapes = set()
    for _ in range(rng.randint(0, 30)):
        num_decode, num_prefill = rng.randint(0, 20), rng.choice([0, 1, 2, 5, 9])
        if num_decode + num_prefill:
            tokens = 0 if not num_prefill else num_prefill + rng.randint(0, 50)
            shapes.add(GraphShape(num_decode + tokens, num_prefill, num_decode))
    index = ShapeIndex(shapes)
    for _ in range(2):  # the second time from what the first has noted
        for step in random_steps(random.Random(seed), 24, 80, 200):
            assert index.find(*step) == oracle(shapes, *step), step


@pytest.mark.parametrize("seed", range(60))
def test_lists_keep_their_bounds_whatever_the_options(seed):
    rng = random.Random(seed)
    tp = rng.choice([1, 1, 2, 3, 4, 8])
    max_requests = tp * rng.randint(1, 80)
    max_tokens = max_requests + rng.choice([0, 1, 17, 500, 4000])
    config = InferenceConfig(
        num_cuda_graphs=rng.choice([-1, 1, 2, 3, 5, 8, 16, 33]),
        cuda_graph_mixed_prefill_count=rng.choice([None, 0, 1, 4, 16]),
        use_cuda_graphs_for_non_decode_steps=rng.random() < 0.8,
        cuda_graph_sizing_distribution=rng.choice(["exponential", "linear"]),
        cuda_graph_max_tokens=rng.choice([16, 512, 2048]),
    )
    shapes = make_shapes(config, max_requests=max_requests, max_tokens=max_tokens, tensor_parallel_size=tp)
    assert list(shapes) == sorted(set(shapes))
    if config.num_cuda_graphs > 0:
        assert len(shapes) <= config.num_cuda_graphs
    for shape in shapes:
        assert 0 < shape.num_tokens <= max_tokens and shape.num_tokens % tp == 0 and shape.num_decode % tp == 0
        assert 0 < shape.num_rows <= max_requests
        assert shape.num_prefill <= shape.prefill_tokens and bool(shape.num_prefill) == bool(shape.prefill_tokens)
        if shape.num_prefill:
            assert shape.num_tokens <= max(config.cuda_graph_max_tokens, max_requests)
            assert config.use_cuda_graphs_for_non_decode_steps
            assert shape.num_prefill <= (config.cuda_graph_mixed_prefill_count or max_requests)
    index = ShapeIndex(shapes)
    for rows in range(1, max_requests + 1):
        found = index.find(rows, 0, rows)
        assert found is not None and found.is_decode_only, f"{rows} decode rows find no shape"


@pytest.mark.parametrize("seed", range(20))
def test_with_all_prefills_every_step_that_the_room_admits_finds_a_shape(seed):
    rng = random.Random(seed)
    max_requests, max_tokens = rng.randint(2, 60), rng.randint(80, 3000)
    config = InferenceConfig(
        num_cuda_graphs=rng.choice([-1, 2, 4, 9]),
        cuda_graph_mixed_prefill_count=rng.choice([None, 1, 4]),
        **ALL_PREFILLS,
    )
    shapes = make_shapes(config, max_requests=max_requests, max_tokens=max_tokens)
    assert max(s.num_tokens for s in shapes) == max_tokens
    index = ShapeIndex(shapes)
    for num_decode in range(max_requests):
        tokens, rows = index.prefill_room(num_decode)
        assert tokens and rows, f"no row may prefill beside {num_decode}"
        for _ in range(10):
            num_prefill = rng.randint(1, rows)
            count = rng.randint(num_prefill, tokens)
            assert index.find(num_decode + count, num_prefill, num_decode) is not None


def test_exponential_and_linear_lists_are_as_documented():
    sizes = {"max_requests": 8, "max_tokens": 64}
    exponential = {"cuda_graph_sizing_distribution": "exponential", **MIXED}
    shapes = make_shapes(InferenceConfig(num_cuda_graphs=-1, **exponential), **sizes)
    assert [s.num_tokens for s in shapes if s.is_decode_only] == [1, 2, 4, 8]
    assert {s.num_decode for s in shapes if not s.is_decode_only} == {0, 7}
    assert {s.prefill_tokens for s in shapes if s.num_decode == 0 and s.num_prefill} == {16, 32, 64}
    assert max(shapes) == GraphShape(64, 8, 0)
    assert GraphShape(64, 1, 7) in shapes, "a full house must leave a newcomer its shape"
    config = InferenceConfig(num_cuda_graphs=-1)
    linear = make_shapes(config, max_requests=300, max_tokens=512)
    expected = [1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300]
    assert [s.num_tokens for s in linear] == expected


def test_no_graphs_are_no_shapes_and_impossible_demands_are_refused():
    assert make_shapes(InferenceConfig(num_cuda_graphs=None), max_requests=8, max_tokens=64) == ()
    assert ShapeIndex(()).find(1, 0, 1) is None and ShapeIndex(()).prefill_room(0) == (0, 0)
    for options in (
        {"num_cuda_graphs": 1},
        {"num_cuda_graphs": -1, "use_cuda_graphs_for_non_decode_steps": False},
        {"num_cuda_graphs": -1, "cuda_graph_mixed_prefill_count": 0},
    ):
        with pytest.raises(ConfigError, match="cuda_graph_all_prefills"):
            make_shapes(InferenceConfig(**ALL_PREFILLS | options), max_requests=8, max_tokens=64)


def test_a_step_that_only_decodes_never_takes_a_mixed_shape_nor_a_decode_row_a_prefill_rows_place():
    mixed = GraphShape(64, 4, 4)
    assert not mixed.covers(2, 0, 2)
    assert not mixed.covers(8, 2, 5), "the fifth decode row would spill"
    assert mixed.covers(8, 2, 4) and not mixed.covers(65, 2, 4)
    assert not mixed.covers(63, 1, 2), "61 prefill tokens behind 4 decode tokens are 65"
