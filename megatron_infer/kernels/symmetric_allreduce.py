"""Sums of small tensors over the GPUs of one host through memory that all of them map (torch's symmetric memory).

A decode step sums a few KiB to a few MiB twice per layer. NCCL's ring takes one hop per rank for it; here it is one
kernel over NVLink:

    up to 256 KiB   one shot: every rank reads the parts of all others
    up to 8 MiB     two shots: every rank sums its share of the elements, then reads the others' shares

Parts are added in order of rank, so that all ranks get the same bits, and an element has the same bits by either way
and at any place. Both are tested before the first use. Larger tensors go through NCCL. One stream at a time: a second
one would deadlock. torch's multimem sum is not used: the order in which a switch adds is not known.

Not yet run on a GPU. Source: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger("megatron_infer")

ONE_SHOT_BYTES = 1 << 18
"""Above it every rank would read more than in a ring."""
MAX_BYTES = 1 << 23
"""512 tokens of 8192 in 16 bit."""
TWO_SHOT_RANKS = (2, 4, 8)
"""Sizes of groups for which torch has the kernel."""
ALIGN_BYTES = 16
"""Bytes that the kernel loads at a time."""
DTYPES = (torch.bfloat16, torch.float32)
PROBE_SIZES = (8, 1000, 4096)
TWO_SHOT_PROBES = (ONE_SHOT_BYTES + ALIGN_BYTES, 3 * ONE_SHOT_BYTES + 5 * ALIGN_BYTES, MAX_BYTES)
"""Bytes, not all of which are the same number of words for each rank."""


class SharedMemory(Protocol):
    """The functions used of torch.distributed._symmetric_memory and torch.ops.symm_mem."""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device, group: Any) -> Tensor:
        """Memory that every rank of `group` maps; collective."""
        ...

    def sum_into(self, shared: Tensor, group: Any, x: Tensor, *, two_shots: bool) -> None:
        """x = the sum of all ranks' x, by way of `shared`, which is as large; collective, enqueued on the
        current stream.

        NotImplementedError: it has no sum in two shots.
        """
        ...


class TorchSharedMemory:
    """torch's symmetric memory (2.11 to 2.13)."""

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device, group: Any) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        shared: Tensor = symmetric.empty(numel, dtype=dtype, device=device)
        symmetric.rendezvous(shared, group)
        return shared

    def sum_into(self, shared: Tensor, group: Any, x: Tensor, *, two_shots: bool) -> None:
        ops = torch.ops.symm_mem
        if not two_shots:  # the copy and the sum are one launch
            ops.one_shot_all_reduce_copy_out(shared, x, "sum", group.group_name, x)
            return
        if group.size() not in TWO_SHOT_RANKS or not hasattr(ops, "two_shot_all_reduce_out"):
            raise NotImplementedError(f"torch has no sum in two shots over {group.size()} ranks")
        shared.copy_(x)
        ops.two_shot_all_reduce_out(shared, "sum", group.group_name, x)


class SymmetricSum:
    """Small sums of one dtype over one group; made on all of its ranks by `connect`."""

    __slots__ = ("_group", "_memory", "max_bytes", "shared")

    def __init__(self, group: Any, memory: SharedMemory, shared: Tensor) -> None:
        self._group, self._memory, self.shared = group, memory, shared
        self.max_bytes = MAX_BYTES
        """Most bytes of a tensor; ONE_SHOT_BYTES where larger ones cannot be had."""

    def takes(self, x: Tensor) -> bool:
        return x.dtype is self.shared.dtype and x.nbytes <= self.max_bytes and not x.nbytes % ALIGN_BYTES

    def sum_of(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in x where it is contiguous."""
        return self.sum_by(x, two_shots=x.nbytes > ONE_SHOT_BYTES)

    def sum_by(self, x: Tensor, *, two_shots: bool) -> Tensor:
        """`sum_of` by the one way or the other."""
        flat = x.contiguous().view(-1)
        self._memory.sum_into(self.shared[: flat.numel()], self._group, flat, two_shots=two_shots)
        return flat.view(x.shape)


def connect(
    group: Any, dtype: torch.dtype, device: torch.device, *, memory: SharedMemory | None = None
) -> tuple[SymmetricSum | None, str]:
    """Collective over `group`, which must be able to sum tensors of `device` -> (the sum, ""), or (None, the reason).

    Either all ranks get one or none does: they compare their obstacles before memory is shared.
    """
    reason = _obstacle(group, dtype, device, is_torch=memory is None)
    if (refused := _any_rank(group, device, reason)) is not None:
        return None, refused
    memory = TorchSharedMemory() if memory is None else memory
    try:
        with torch.inference_mode(False):  # a training forward sums through it as well
            shared = memory.buffer(MAX_BYTES // dtype.itemsize, dtype, device, group)
        reason = None
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = f"shared memory cannot be had: {error}"
    if (refused := _any_rank(group, device, reason)) is not None:
        return None, refused
    connected = SymmetricSum(group, memory, shared)
    if (refused := _any_rank(group, device, _wrong(connected, group, dtype, device))) is not None:
        return None, refused
    if (refused := _any_rank(group, device, _other_bits(connected, group, dtype, device))) is not None:
        connected.max_bytes = ONE_SHOT_BYTES
        log.info("sums over %d bytes go through the process group: %s", ONE_SHOT_BYTES, refused)
    log.info("sums up to %d bytes over %d ranks go through symmetric memory", connected.max_bytes, group.size())
    return connected, ""


def _obstacle(group: Any, dtype: torch.dtype, device: torch.device, *, is_torch: bool) -> str | None:
    """Why this rank cannot take part; every rank compares the hosts of all ranks."""
    host = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
    hosts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(hosts, torch.tensor([host], dtype=torch.int64, device=device), group=group)
    if dtype not in DTYPES:
        return f"it has no sums of {dtype}"
    if any(int(other) != host for other in hosts):
        return "the ranks are on several hosts"
    if not is_torch:
        return None
    if device.type != "cuda":
        return f"runs on GPUs, the ranks are on {device.type}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out"):
        return "this torch has none"
    return None


def _any_rank(group: Any, device: torch.device, reason: str | None) -> str | None:
    """This rank's reason, or that another rank has one; None: no rank has a reason."""
    ok = torch.tensor([int(reason is None)], device=device)
    dist.all_reduce(ok, op=dist.ReduceOp.MIN, group=group)
    if int(ok):
        return None
    return reason if reason is not None else "another rank of the group refused it"


def _wrong(connected: SymmetricSum, group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why its results are wrong: they differ between ranks in some bit, or are no sums; None: they are right."""
    for size in PROBE_SIZES:
        part = _part(size, group, dtype, device)
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        mine = connected.sum_of(part.clone())
        results = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(results, mine, group=group)
        if not all(torch.equal(mine, other) for other in results):
            return "ranks do not get the same bits"
        wanted = torch.stack([one.double() for one in parts]).sum(0)
        if not torch.allclose(mine.double(), wanted, rtol=0.02, atol=0.05):
            return "it gives wrong sums"
    return None


def _other_bits(connected: SymmetricSum, group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why sums in two shots cannot be used: there are none, or their bits are not those of one shot; None: they can."""
    are_same = True
    try:
        for num_bytes in TWO_SHOT_PROBES:  # all of them on every rank, whatever it sees
            part = _part(num_bytes // dtype.itemsize, group, dtype, device)
            one, two = (connected.sum_by(part.clone(), two_shots=two_shots) for two_shots in (False, True))
            are_same &= torch.equal(one, two)
    except NotImplementedError as error:
        return str(error)
    return None if are_same else "sums in two shots have other bits than those in one"


def _part(size: int, group: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """This rank's part of a sum that is tried."""
    generator = torch.Generator().manual_seed(size * group.size() + group.rank())
    return torch.randn(size, generator=generator).to(dtype).to(device)
