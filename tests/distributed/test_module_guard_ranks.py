"""Every change of a model's modules at every time, on both of two tensor-parallel ranks, is served or refused.

What tests/engine/adopt/test_module_guard.py holds for one process; a change on one rank alone is in test_tp_calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks
from module_guard_case import CHANGES, SETTINGS, TIMES

from megatron_infer.testing.tiny import tiny_gpt


def run_changes(rank: int, size: int, folder: Path, time: str, names: list[str]) -> None:
    new_groups(tensor_model_parallel_size=size)
    for name in names:
        models = [
            tiny_gpt(**SETTINGS, seed=seed, randomize=False, tensor_model_parallel_size=size) for seed in (1, 2, 1)
        ]
        try:
            TIMES[time](CHANGES[name], *models)
        except BaseException as error:
            error.add_note(f"change: {name}")
            raise
        torch.distributed.barrier()


@pytest.mark.long
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("part", range(2))
def test_every_change_on_two_ranks_is_served_or_refused(time: str, part: int, tmp_path: Path) -> None:
    run_on_ranks(run_changes, 2, tmp_path, time, [*CHANGES][part::2])
