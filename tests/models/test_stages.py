"""Which layers a pipeline stage holds: counted as megatron-core counts them."""

from __future__ import annotations

import pytest

from megatron_infer.errors import ConfigError
from megatron_infer.models.mcore_compat import get_num_layers_to_build, layer_offset
from megatron_infer.models.stage_layers import FIRST, LAST, stage_options, stage_span
from megatron_infer.testing.tiny import tiny_config


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_layers", [7, 8, 9, 12, 30])
def test_every_number_of_layers_is_divided_as_megatron_core_builds_it(num_layers, num_stages):
    options = stage_options(num_layers, num_stages, {})
    config = tiny_config(num_layers=num_layers, pipeline_model_parallel_size=num_stages, **options)
    end = 0
    for stage in range(num_stages):
        begin, end_before = layer_offset(config, stage), end
        end = begin + get_num_layers_to_build(config, pp_rank=stage)
        assert stage_span(num_layers, num_stages, stage) == (begin, end)
        assert begin == end_before and end > begin
    assert end == num_layers


@pytest.mark.parametrize("asked", [{FIRST: 2}, {LAST: 1}, {FIRST: 3, LAST: 1}, {FIRST: 1, LAST: 3}])
def test_what_the_caller_asks_for_decides(asked):
    num_layers = sum(asked.values()) + (4 if len(asked) == 2 else 6)
    config = tiny_config(num_layers=num_layers, pipeline_model_parallel_size=3, **asked)
    assert stage_options(num_layers, 3, asked) == {}
    spans = [stage_span(num_layers, 3, stage, asked) for stage in range(3)]
    assert spans == [
        (layer_offset(config, stage), layer_offset(config, stage) + get_num_layers_to_build(config, pp_rank=stage))
        for stage in range(3)
    ]


def test_stages_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="pipeline_parallel=4, but the model has 3 layers"):
        stage_options(3, 4, {})
    with pytest.raises(ConfigError, match="8 layers cannot be divided over 3 pipeline stages"):
        stage_span(8, 3, 0, {FIRST: 3})
