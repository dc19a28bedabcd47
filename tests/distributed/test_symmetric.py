"""Sums through shared memory: used where all ranks have it and get the same bits, else by nobody and with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks

from megatron_infer.kernels.symmetric_allreduce import MAX_BYTES, ONE_SHOT_BYTES, connect


class GatheredMemory:
    """Stands in for memory that all ranks see: what the others wrote is gathered when it is read."""

    def __init__(self, *, order: str = "rank", two_shots: str | None = "rank", fails_on: int | None = None) -> None:
        """two_shots: the order of sums in two shots; None: there are none."""
        self.order, self.two_shots, self.fails_on = order, two_shots, fails_on
        self.num_sums = self.num_two_shots = 0

    def buffer(self, numel, dtype, device, group):
        if group.rank() == self.fails_on:
            raise RuntimeError("no peer access")
        return torch.zeros(numel, dtype=dtype, device=device)

    def sum_into(self, shared, group, x, *, two_shots):
        if two_shots and self.two_shots is None:
            raise NotImplementedError("no second shot here")
        shared.copy_(x)
        parts = [torch.empty_like(shared) for _ in range(group.size())]
        dist.all_gather(parts, shared.contiguous(), group=group)
        order = self.two_shots if two_shots else self.order
        if order == "own first":
            parts = parts[group.rank() :] + parts[: group.rank()]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        x.copy_(total * 2 if order == "wrong" else total)
        self.num_sums += 1
        self.num_two_shots += two_shots


CPU = torch.device("cpu")


def _sums(rank: int, size: int, folder: Path) -> None:
    group = dist.group.WORLD
    for dtype in (torch.float32, torch.bfloat16):
        memory = GatheredMemory()
        connected, reason = connect(group, dtype, CPU, memory=memory)
        assert connected is not None and reason == ""
        before = memory.num_sums
        x = torch.full((6, 8), float(rank + 1), dtype=dtype)
        assert connected.takes(x)
        assert torch.equal(connected.sum_of(x.t()).t(), torch.full((6, 8), 6.0, dtype=dtype))
        assert memory.num_sums == before + 1
        before = memory.num_two_shots
        for num_bytes, shots in ((ONE_SHOT_BYTES, 0), (ONE_SHOT_BYTES + 16, 1), (MAX_BYTES, 2)):
            x = torch.full((num_bytes // dtype.itemsize,), float(rank + 1), dtype=dtype)
            assert connected.takes(x) and torch.equal(connected.sum_of(x), torch.full_like(x, 6.0))
            assert memory.num_two_shots == before + shots
        assert not connected.takes(torch.zeros(MAX_BYTES // dtype.itemsize + 8, dtype=dtype))
        assert not connected.takes(torch.zeros(3, dtype=dtype)), "the kernel loads 16 bytes at a time"
        assert not connected.takes(torch.zeros(8, dtype=torch.float64))
    for memory, why in (
        (GatheredMemory(order="own first"), "same bits"),
        (GatheredMemory(order="wrong"), "wrong sums"),
        (GatheredMemory(fails_on=1), "no peer access"),
    ):
        connected, reason = connect(group, torch.float32, CPU, memory=memory)
        assert connected is None
        assert why in reason or reason == "another rank of the group refused it", reason
        assert why in reason or rank != 1
    for other in ("own first", "wrong", None):
        # small sums go on by themselves, on all ranks alike
        connected, reason = connect(group, torch.bfloat16, CPU, memory=GatheredMemory(two_shots=other))
        assert connected is not None and reason == ""
        x = torch.full((ONE_SHOT_BYTES // 2,), float(rank + 1), dtype=torch.bfloat16)
        assert connected.takes(x) and torch.equal(connected.sum_of(x), torch.full_like(x, 6.0))
        assert not connected.takes(torch.zeros(ONE_SHOT_BYTES // 2 + 8, dtype=torch.bfloat16))
    connected, reason = connect(group, torch.float16, CPU, memory=GatheredMemory())
    assert connected is None and "float16" in reason
    connected, reason = connect(group, torch.float32, CPU)
    assert connected is None and "cpu" in reason


@pytest.mark.long
@pytest.mark.parametrize("size", [3])
def test_all_ranks_sum_through_it_or_none_does(tmp_path, size):
    run_on_ranks(_sums, size, tmp_path)
