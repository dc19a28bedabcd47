"""Process groups in which a trainer broadcasts new weights to the ranks of engines, as clients of vLLM and SGLang form
them.

    trainer, rank 0                            engines, rank_offset + their own ranks
    opens a TCPStore at address:port  <------  join: all ranks of the group meet there
    broadcast(tensor)  --------------------->  receive: into memory of the size that was announced over HTTP

Nothing that comes is unpickled: names, types and shapes are known before, and the group carries the tensors' bytes.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.errors import ConfigError, WeightUpdateError

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""Name of a torch backend -> the devices that it is for."""
KINDS = ("torch", "stateless")
"""How a group is formed. torch: as `init_process_group` with a group's name does it. stateless: as vLLM's
TorchDistTransport does it, with a barrier after each broadcast."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
MAX_NAME_CHARS, MAX_DIMENSIONS, MAX_TENSORS = 512, 8, 1 << 17
MARK_BYTES = 16


class TensorSpec(NamedTuple):
    """A tensor that is to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def checked_specs(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, most_elements: int
) -> list[TensorSpec]:
    """The tensors that are to come; most_elements: of all of them. Raises WeightUpdateError; nothing is allocated."""
    if not len(names) == len(dtypes) == len(shapes) <= MAX_TENSORS:
        text = f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes came"
        raise WeightUpdateError(f"{text}; there must be as many of each, {MAX_TENSORS:,} at most")
    found, num_elements = [], 0
    for name, given, shape in zip(names, dtypes, shapes, strict=True):
        dtype = given.removeprefix("torch.")
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise WeightUpdateError(f"a name has {len(name)} characters, the limit is {MAX_NAME_CHARS}")
        if dtype not in DTYPES:
            raise WeightUpdateError(f"{name} is {dtype[:40]}; known are {', '.join(DTYPES)}", tensor=name)
        if len(shape) > MAX_DIMENSIONS or any(not 0 <= size < 1 << 48 for size in shape):
            raise WeightUpdateError(f"{name} has no shape: {str(list(shape))[:80]}", tensor=name)
        num_elements += math.prod(shape)
        if num_elements > most_elements:
            text = f"{name} {list(shape)}: one call may have {most_elements:,} elements, twice those of the model"
            raise WeightUpdateError(text, tensor=name)
        found.append(TensorSpec(name, getattr(torch, dtype), tuple(shape)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Where a group meets, and who is in it."""

    address: str
    """An IP address."""
    port: int
    world_size: int
    rank_offset: int
    """The rank of the first engine's first rank."""
    backend: str
    """"": what the device of this rank has."""
    kind: str
    prefix: str
    """Of its keys in the store: the name of a group of kind torch, the trainer's URI for a stateless one."""

    def checked(self, num_ranks: int, device: torch.device) -> GroupAddress:
        """The same with a backend. Raises ConfigError unless engines of `num_ranks` ranks on such devices can be
        members."""
        if not self.backend:
            return replace(self, backend="nccl" if device.type == "cuda" else "gloo").checked(num_ranks, device)
        if self.backend not in BACKENDS or self.kind not in KINDS:
            raise ConfigError(f"backend is {self.backend[:40]!r}; one of {', '.join(BACKENDS)}")
        if self.backend == "nccl" and self.kind == "stateless":
            text = "NCCL by vLLM's names is not served: its rendezvous hands over a pickle"
            raise ConfigError(f"{text}; take /init_weights_update_group, or gloo")
        if self.backend == "nccl" and device.type != "cuda":
            raise ConfigError(f"backend nccl with engines on {device.type}; take gloo")
        if not 1 <= self.rank_offset <= self.world_size - num_ranks:
            raise ConfigError(
                f"world_size is {self.world_size} with rank_offset {self.rank_offset}: the trainer is rank 0, and the "
                f"{num_ranks} ranks of the engines need a world_size of {max(1, self.rank_offset) + num_ranks} at least"
            )
        return self


class Membership(Protocol):
    """One rank's place in a group. Errors are RuntimeError: the trainer is gone or late, or sends what was not said."""

    def place(self, num_ranks: int) -> int:
        """Take places for an engine's ranks; engines take theirs one after the other -> the first, from 0."""
        ...

    def join(self, rank: int) -> None:
        """Wait for all ranks of the group. rank: among all ranks of engines."""
        ...

    def receive(self, num_bytes: int) -> Tensor:
        """The next broadcast -> its bytes, valid until the next call."""
        ...

    def close(self) -> None:
        """Leave at once. What the trainer still sends fails there."""
        ...


def tensors(
    receive: Callable[[int], Tensor], specs: Sequence[TensorSpec], *, buffer_bytes: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Receive `specs` in order -> (name, tensor), valid until the next one. Raises WeightUpdateError.

    receive: `Membership.receive`. buffer_bytes: None: one broadcast each. Else vLLM's packing: whole tensors are joined
    until they have more bytes.
    """
    part: list[TensorSpec] = []
    size = 0
    for place, spec in enumerate(specs, start=1):
        part.append(spec)
        size += spec.num_bytes
        if buffer_bytes is not None and size <= buffer_bytes and place < len(specs):
            continue
        try:
            pieces = receive(size).split([one.num_bytes for one in part])
        except RuntimeError as error:
            name = part[0].name
            raise WeightUpdateError(f"{name} did not come from the trainer: {error}", tensor=name) from error
        for one, piece in zip(part, pieces, strict=True):
            is_aligned = piece.storage_offset() % one.dtype.itemsize == 0
            yield one.name, (piece if is_aligned else piece.clone()).view(one.dtype).view(one.shape)
        part, size = [], 0


class TrainerGroup:
    """A `Membership` of this process."""

    def __init__(self, where: GroupAddress, *, device: torch.device, timeout_s: float) -> None:
        """Connects to the trainer's store. timeout_s: of the connection, of `join` and of each broadcast."""
        self._where = where
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        _wait_for_port(where, time.monotonic() + timeout_s)
        self._store = dist.TCPStore(where.address, where.port, where.world_size, False, timeout=self._timeout)
        self._group: Any = None

    def place(self, num_ranks: int) -> int:
        key = f"megatron_infer/{self._where.prefix}/{self._where.rank_offset}"
        return int(self._store.add(key, num_ranks)) - num_ranks

    def join(self, rank: int) -> None:
        where, store = self._where, self._store
        of_torch = (where.prefix, f"{where.prefix}/", f"{BACKENDS[where.backend]}/")
        for prefix in of_torch if where.kind == "torch" else (where.prefix,):
            store = dist.PrefixStore(prefix, store)
        rank += where.rank_offset
        if where.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, where.world_size, timeout=self._timeout)
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * self._timeout  # the wait for a broadcast ends sooner, and raises
        self._group = dist.ProcessGroupNCCL(store, rank, where.world_size, options)

    def receive(self, num_bytes: int) -> Tensor:
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self.receive_into(flat)
        return flat

    def receive_into(self, flat: Tensor) -> None:
        mark = torch.randint(256, (min(MARK_BYTES, flat.numel()),), dtype=torch.uint8, device=flat.device)
        end = flat[flat.numel() - mark.numel() :]
        end.copy_(mark)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._timeout
        self._group.broadcast([flat], options).wait(self._timeout)
        if self._where.kind == "stateless":
            self._group.barrier().wait(self._timeout)
        if mark.numel() == MARK_BYTES and torch.equal(end, mark):
            raise RuntimeError(f"fewer than the {flat.numel():,} bytes came that the shapes and dtypes make")

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _wait_for_port(where: GroupAddress, deadline: float) -> None:
    """The trainer may open its store after it has asked for the group."""
    while True:
        try:
            socket.create_connection((where.address, where.port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing listens at {where.address}:{where.port}: {error}") from None
            time.sleep(0.05)
