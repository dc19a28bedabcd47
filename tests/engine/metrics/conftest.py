"""A step's snapshot to report."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_infer.engine.metrics.engine_snapshot import StepSnapshot


@pytest.fixture
def snapshot() -> Callable[..., StepSnapshot]:
    def make(**changes: float) -> StepSnapshot:
        values = {
            "step": 7,
            "step_time_s": 0.02,
            "waiting_queue_len": 1,
            "total_requests_dict_size": 6,
            "total_blocks": 40,
            "allocated_blocks": 10,
            "active_unique_blocks": 6,
            "active_request_count": 4,
            "paused_request_count": 1,
            "block_count_avail": 30,
            "active_token_count": 20,
            "total_request_count": 5,
            "max_requests": 16,
            "prefix_cache_hits": 2,
            "prefix_cache_blocks_matched": 3,
        }
        return StepSnapshot(**{**values, **changes})

    return make
