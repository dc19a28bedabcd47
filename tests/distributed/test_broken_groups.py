"""A collective that fails ends the engine on every rank, also where all ranks fail alike: its group is of no use."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import new_groups, run_on_ranks, stage_ends

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.collective_errors import StageLost, is_of_collective
from megatron_infer.errors import RankFailure
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

CALL = 4
"""Of the forward: the one that fails."""
TIMEOUT_S = 40.0


def on_call(function: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    """`function`, with `first` before its CALL-th call."""
    calls = 0

    def wrapped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == CALL:
            first()
        return function(*arguments)

    return wrapped


def ends(rank: int, fail: Callable[[], None] | None, text: str, **layout: Any) -> None:
    """An engine whose forward does `fail` at first ends on this rank with RankFailure, for this call and the next."""
    engine = ranks.make_engine(tiny_gpt(**ranks.GPT, **layout), collective_timeout_s=TIMEOUT_S)
    if fail is not None:
        inspect(engine).adopted.hidden = on_call(inspect(engine).adopted.hidden, fail)
    if rank == 0:
        engine.add_request(list(range(9)), SamplingParams(max_tokens=20, ignore_eos=True))
    started = time.monotonic()
    failures = []
    for _ in range(2):
        with pytest.raises(RankFailure, match=text) as caught:
            for _ in range(12):
                assert not any(output.error for output in engine.step()), "a request was blamed"
        failures.append(caught.value)
    assert failures[0] is failures[1], "the engine went on"
    assert time.monotonic() - started < TIMEOUT_S, "it waited for what had failed"
    engine.rank_group.lockstep.close()


def impatient_group() -> Any:
    """All ranks, whose collectives wait for a second."""
    group = dist.new_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=1))
    return group


def on_rank(rank: int, size: int, folder: Path) -> None:
    groups = [impatient_group() for _ in range(2 * size)]

    def wait_for_each_other() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=groups[rank])
        except RuntimeError as error:
            assert is_of_collective(error)
            raise RuntimeError("the ranks wait for each other") from error  # on both, word for word

    new_groups(tensor_model_parallel_size=size)
    ends(rank, wait_for_each_other, "wait for each other", tensor_model_parallel_size=size)
    new_groups(pipeline_model_parallel_size=size)
    stages = {"pipeline_model_parallel_size": size, **stage_ends(rank, size)}
    for stage in range(size):  # as if it had tensor-parallel ranks, and they had lost each other

        def wait_in_vain(group: Any = groups[size + stage]) -> None:
            dist.all_reduce(torch.ones(1), group=group)

        text = r"[Tt]imed out|timeout|raised on pipeline stage"
        ends(rank, wait_in_vain if rank == stage else None, text, **stages)


@pytest.mark.timeout(200)
def test_a_failed_collective_ends_the_engine_on_all_ranks(tmp_path: Path) -> None:
    """Tensor-parallel ranks that fail with the same words; a stage whose own ranks lost each other."""
    run_on_ranks(on_rank, 2, tmp_path)


def test_errors_of_collectives_are_told_from_others() -> None:
    def raised(action: Callable[[], Any]) -> BaseException:
        try:
            action()
        except BaseException as error:
            return error
        raise AssertionError("nothing was raised")

    def caused() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=object())  # type: ignore[arg-type]
        except Exception as error:
            raise ValueError("other words") from error

    assert is_of_collective(raised(caused))
    assert is_of_collective(StageLost("gone")) and is_of_collective(dist.DistNetworkError("reset"))
    assert not is_of_collective(raised(lambda: torch.ones(2) @ torch.ones(3)))
    assert not is_of_collective(MemoryError("no room"))
    assert is_of_collective(
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")
    )

    def hook(*_: Any) -> None:
        raise RuntimeError("of the caller")

    with pytest.MonkeyPatch.context() as patch:  # torch.distributed calls what is not its own
        patch.setattr(dist.distributed_c10d, "_rank_not_in_group", hook)
        assert not is_of_collective(raised(lambda: dist.all_reduce(torch.ones(1))))
