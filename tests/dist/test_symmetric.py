"""Sums through shared memory: used where all ranks have it and get the same bits, else by nobody and with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks

from megatron_infer.kernels.symmetric_allreduce import MAX_BYTES, connect


class GatheredMemory:
    """Stands in for memory that all ranks see: what the others wrote is gathered when it is read."""

    def __init__(self, *, order: str = "rank", fails_on: int | None = None) -> None:
        self.order, self.fails_on, self.num_sums = order, fails_on, 0

    def buffer(self, numel, dtype, device, group):
        if group.rank() == self.fails_on:
            raise RuntimeError("no peer access")
        return torch.zeros(numel, dtype=dtype, device=device)

    def sum_into(self, shared, group, out):
        parts = [torch.empty_like(shared) for _ in range(group.size())]
        dist.all_gather(parts, shared.contiguous(), group=group)
        if self.order == "own first":
            parts = parts[group.rank() :] + parts[: group.rank()]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        out.copy_(total * 2 if self.order == "wrong" else total)
        self.num_sums += 1


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
    connected, reason = connect(group, torch.float16, CPU, memory=GatheredMemory())
    assert connected is None and "float16" in reason
    connected, reason = connect(group, torch.float32, CPU)
    assert connected is None and "cpu" in reason


@pytest.mark.parametrize("size", [3])
def test_all_ranks_sum_through_it_or_none_does(tmp_path, size):
    run_on_ranks(_sums, size, tmp_path)
