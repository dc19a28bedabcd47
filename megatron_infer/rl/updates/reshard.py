"""A live trainer of another layout as a weight source: its shards are sent from rank to rank in buckets.

    every rank     its source and target layouts -> plan (once; later updates only compare a fingerprint)
    round k        the k-th bucket of every pair of ranks: packed, sent and received at once, unpacked into live
                   tensors while the next round is in flight

No rank gathers a whole tensor of which it holds a shard. Trainer and engine may be the same processes or different ones
of one world; backends are gloo and nccl.
"""

from __future__ import annotations

import functools
import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_infer.distributed.backends import backend_on
from megatron_infer.errors import ConfigError, WeightUpdateError
from megatron_infer.kernels.freed_weights import unpack_weights
from megatron_infer.models.sharded_weights import GatheredParts
from megatron_infer.rl.updates.digest import (
    checksum_of,
    combine_digests,
    decode_digests,
    digests_of,
    encode_digests,
)
from megatron_infer.rl.updates.inventory import Inventory, LocalTensor, listed
from megatron_infer.rl.updates.reshard_plan import (
    RankLayouts,
    ReshardPlan,
    RowTransfer,
    TransferMessage,
    messages_of,
    reshard_plan,
)
from megatron_infer.rl.updates.sources import RowSink
from megatron_infer.rl.updates.target import UpdateTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """Figures of one update on this rank; `str()` is one line."""

    bytes_must_move: int
    """Over all ranks: bytes of target rows that their own rank does not have."""
    bytes_to_receive: int
    """The same for this rank."""
    bytes_sent: int
    bytes_received: int
    bytes_local: int
    """Copied from this rank's source to its own target."""
    messages_sent: int
    messages_received: int
    seconds: float
    planned: bool
    """Whether a new plan was computed; a plan is kept as long as no rank's model changes shape."""

    @property
    def ratio(self) -> float:
        """Bytes received / bytes_to_receive: 1 is the minimum."""
        return self.bytes_received / self.bytes_to_receive if self.bytes_to_receive else 1.0

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"received {self.bytes_received / mib:.1f} MiB of {self.bytes_to_receive / mib:.1f} that had to come, "
            f"sent {self.bytes_sent / mib:.1f}, copied {self.bytes_local / mib:.1f} in place, "
            f"{self.messages_sent + self.messages_received} messages, {self.seconds * 1e3:.1f} ms"
        )


class ReshardSource:
    """The weights of a live model, sharded like the engine's or differently; one object for all updates.

    Every rank of `group` creates one, in the same order. On ranks with an engine: apply(engine, source). On ranks with
    a trainer's part only: source.send(), and source.verify() where the others call verify_update(engine, source).
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        group: Any = None,
        bucket_mib: float = 16.0,
        shards: GatheredParts | None = None,
    ) -> None:
        """model: this rank's part of the trainer's model (plain, wrapped or in chunks); None on ranks without one.

        group: all ranks of trainer and engine; None is the world. bucket_mib: size of a message; a rank holds two of
        them for each rank it exchanges with. shards: FSDP's of `model`; None: the weights are there.
        """
        if not torch.distributed.is_initialized():
            raise ConfigError("ReshardSource needs torch.distributed; within one process give the model itself")
        if not bucket_mib > 0:
            raise ConfigError(f"bucket_mib is {bucket_mib}, it must be above 0")
        self._model = model
        self._group = group
        self._shards = shards
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._plan: ReshardPlan | None = None
        self._plan_parts: list[ReshardPlan] = []
        """`_plan`, split by the part that has the source tensor of a transfer."""
        self._key = ""
        self._planned = False
        self._source: Inventory | None = None
        self._parts: list[set[int]] = []
        """Numbers of the source's tensors that are gathered together, by number of the part."""
        self._part_of: dict[int, dict[int, int]] = {}
        """The same of all ranks: rank -> number of a source tensor -> number of its part."""
        self.report: ReshardReport | None = None
        """Figures of the last update."""

    # ------------------------------------------------------------------ a WeightSource

    def check(self, target: UpdateTarget | None, *, strict: bool = True) -> None:
        """Compute or reuse the plan; every rank of the group calls it. Raises the same on all before anything moves."""
        self._planned = False
        problem, layouts = "", None
        try:
            if self._model is not None:
                unpack_weights(self._model)
            gathered = {} if self._shards is None else self._shards.gathered_tensors()
            self._source = None if self._model is None else Inventory.of(self._model, gathered=gathered)
            layouts = self._layouts(target)
            self._parts = self._own_parts()
        except Exception as error:  # raised on all ranks below: the others must not wait for this one
            problem = f"{type(error).__name__}: {error}"
        key = hashlib.blake2b(repr((layouts, strict)).encode(), digest_size=8).hexdigest()
        is_new = self._plan is None or key != self._key
        answers = self._gather([problem, is_new, {"bucket_mib": self._bucket_bytes / 2**20, "strict": strict}])
        self._raise_any(answers)
        self._require_equal([(rank, options) for rank, (_, _, options) in answers])
        if any(is_new for _, (_, is_new, _) in answers):
            all_layouts = [layouts for _, layouts in self._gather(layouts)]
            self._plan = None
            self._plan = reshard_plan(all_layouts, torch.distributed.get_rank(), strict=strict)
            parts = {at: number for number, part in enumerate(self._parts) for at in part}
            self._part_of = dict(self._gather(parts))
            self._plan_parts = self._plan.split(
                lambda one: self._number_of(one.source, one.source_index), self._num_parts
            )
            self._key, self._planned = key, True
        assert self._plan is not None
        if self._plan.any_dropped:
            self._raise_any(self._gather([self._lost_values()]))

    def write_into(self, update: RowSink) -> None:
        """Take part in the exchange and write this rank's target tensors."""
        locals_ = update.target.inventory.tensors
        tensors: dict[int, Tensor] = {}

        def live(index: int) -> Tensor:
            if index not in tensors:
                tensors[index] = update.writable(locals_[index])
            return tensors[index]

        self._run(live)
        assert self.report is not None
        update.count_received(self.report.bytes_received)

    def send(self, *, strict: bool = True) -> ReshardReport:
        """On a rank without an engine: its side of an apply()."""
        self.check(None, strict=strict)
        self._run(_no_target_tensor)
        assert self.report is not None
        return self.report

    def verify(self, target: UpdateTarget | None = None, *, strict: bool = True) -> str:
        """Compare digests of the engine's weights with the trainer's, rounded to the engine's dtypes -> checksum.

        Every rank of the group calls it. Raises WeightUpdateError, the same on all, naming every tensor that differs.
        """
        self.check(target, strict=strict)
        assert self._plan is not None
        rank, limits = torch.distributed.get_rank(), dict(self._plan.limits)
        layouts = self._layouts(target)
        wanted = [(layout.name, layout.dtype) for layout in layouts.target]
        true = [(layout.name, layout.true_size) for layout in (*layouts.source, *layouts.target) if layout.true_size]
        dtypes: dict[str, torch.dtype] = {}
        for _, (pairs, lengths) in self._gather((wanted, true)):
            dtypes |= dict(pairs)
            limits = dict(lengths) | limits
        sides: list[dict[str, int]] = []
        for inventory, what in ((self._source, "source"), (None if target is None else target.inventory, "target")):
            own = [] if inventory is None else digests_of(inventory, rank=rank, dtypes=dtypes, limits=limits)
            parts = [part for _, text in self._gather(encode_digests(own)) for part in decode_digests(text)]
            try:
                sides.append(combine_digests([part for part in parts if part.name in dtypes]))
            except WeightUpdateError as error:  # every rank raises the same
                raise WeightUpdateError(f"{what}: {error}", tensor=error.tensor, rank=error.rank) from None
        wrong = [name for name in sides[1] if sides[0].get(name) != sides[1][name]]
        if wrong:
            raise WeightUpdateError(f"not what the source has: {listed(wrong)}", tensor=wrong[0], rank=rank)
        return checksum_of(sides[1])

    # ------------------------------------------------------------------ inside

    def _layouts(self, target: UpdateTarget | None) -> RankLayouts:
        source = () if self._source is None else tuple(local.layout for local in self._source.tensors)
        wanted = () if target is None else tuple(local.layout for local in target.inventory.tensors)
        return RankLayouts(rank=torch.distributed.get_rank(), host=socket.gethostname(), source=source, target=wanted)

    def _gather(self, value: Any) -> list[tuple[int, Any]]:
        """Every rank's value, as (rank in the world, value)."""
        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, (torch.distributed.get_rank(), value), group=self._group)
        return found

    def _raise_any(self, answers: Iterable[tuple[int, Any]]) -> None:
        failed = [(rank, answer[0]) for rank, answer in answers if answer[0]]
        if failed:
            self._plan = None
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed)
            raise WeightUpdateError(reasons, rank=failed[0][0])

    def _require_equal(self, options: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Ranks with different options split their messages differently and would wait for each other."""
        first, known = options[0]
        for rank, own in options[1:]:
            for name, value in own.items():
                if value != known[name]:
                    self._plan = None
                    raise WeightUpdateError(
                        f"{name} is {known[name]} on rank {first} and {value} on rank {rank}; give every rank the same",
                        rank=rank,
                    )

    def _lost_values(self) -> str:
        """An error if rows of this rank that no target has are not zeros; else ""."""
        assert self._plan is not None
        lost = ""
        for number in range(self._num_parts):
            with self._part(number):
                for rows in self._plan.dropped:
                    assert self._source is not None
                    local = self._source.tensors[rows.index]
                    if number == self._number_of(torch.distributed.get_rank(), rows.index) and bool(
                        local.tensor.detach().narrow(rows.dim, rows.start, rows.size).any()
                    ):
                        lost = f"{local.layout.name} has kv groups that the target lacks, and they are not zeros"
        return lost

    # ------------------------------------------------------------------ a source that is gathered part by part

    def _own_parts(self) -> list[set[int]]:
        """[]: all tensors are there."""
        if self._shards is None or self._source is None:
            return []
        number_of = {id(local.tensor): at for at, local in enumerate(self._source.tensors)}
        return [{number_of[key] for key in map(id, part) if key in number_of} for part in self._shards.parts]

    @property
    def _num_parts(self) -> int:
        return 1 + max((number for parts in self._part_of.values() for number in parts.values()), default=0)

    def _number_of(self, rank: int, index: int) -> int:
        """Number of the part that has a rank's source tensor. The first has what is never gathered."""
        return self._part_of[rank].get(index, 0)

    def _part(self, number: int) -> AbstractContextManager[None]:
        """Part `number` of this rank's source is there."""
        return nullcontext() if number >= len(self._parts) or self._shards is None else self._shards.part(number)

    @torch.no_grad()
    def _run(self, live: Callable[[int], Tensor]) -> None:
        """Exchange messages. live: this rank's target tensor by its index."""
        plan, started = self._plan, time.perf_counter()
        assert plan is not None, "checked first"
        sources = [] if self._source is None else self._source.tensors

        def source_rows(transfer: RowTransfer) -> Tensor:
            tensor = sources[transfer.source_index].tensor.detach()
            return tensor.narrow(transfer.dim, transfer.source_start, transfer.size)

        def target_rows(transfer: RowTransfer) -> Tensor:
            return live(transfer.target_index).narrow(transfer.dim, transfer.target_start, transfer.size)

        def copy_local(part: ReshardPlan) -> None:
            for transfer in part.local:
                target_rows(transfer).copy_(source_rows(transfer))
            for padding in part.padding:
                live(padding.index).narrow(padding.dim, padding.start, padding.size).zero_()

        device = _device_of(self._group, sources, live, plan)
        exchange = _Exchange(self._group, device, source_rows=source_rows, target_rows=target_rows)
        for number, part in enumerate(self._plan_parts):
            with self._part(number):
                exchange.run(part, self._bucket_bytes, meanwhile=functools.partial(copy_local, part))
        self.report = ReshardReport(
            bytes_must_move=plan.bytes_must_move,
            bytes_to_receive=plan.bytes_to_receive,
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            bytes_local=sum(transfer.num_bytes for transfer in plan.local),
            messages_sent=exchange.messages_sent,
            messages_received=exchange.messages_received,
            seconds=time.perf_counter() - started,
            planned=self._planned,
        )


def _bytes_of(buffer: Tensor) -> Tensor:
    """The same memory as uint8, which every backend can send."""
    return buffer.view(torch.uint8)


def _no_target_tensor(index: int) -> Tensor:
    raise AssertionError(f"target tensor {index} on a rank without an engine")


def _device_of(
    group: Any, sources: Sequence[LocalTensor], live: Callable[[int], Tensor], plan: ReshardPlan
) -> torch.device:
    """Device of the message buffers: the host for gloo, the weights' device for nccl."""
    if sources:
        weights = sources[0].tensor.device
    else:
        received = next((transfers[0].target_index for transfers in plan.receives.values()), None)
        weights = torch.device("cpu") if received is None else live(received).device
    return torch.device("cpu") if backend_on(group, weights.type) == "gloo" else weights


@dataclass(slots=True)
class _Round:
    """Messages in flight."""

    works: list[Any]
    sent: list[Tensor]
    """Kept until they have arrived."""
    received: list[tuple[TransferMessage, Tensor]]
    """Buffers to unpack; other messages are received in the target tensor."""


class _Exchange:
    """Sends and receives one rank's messages of a plan, a round at a time."""

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        source_rows: Callable[[RowTransfer], Tensor],
        target_rows: Callable[[RowTransfer], Tensor],
    ) -> None:
        """source_rows, target_rows: the rows of a transfer in this rank's source or target tensor."""
        self._group, self._device = group, device
        self._source_rows, self._target_rows = source_rows, target_rows
        self.bytes_sent = self.bytes_received = self.messages_sent = self.messages_received = 0

    def run(self, plan: ReshardPlan, bucket_bytes: int, *, meanwhile: Callable[[], None]) -> None:
        """meanwhile: called while round 0 is in flight."""
        sends = {peer: messages_of(transfers, bucket_bytes) for peer, transfers in plan.sends.items()}
        receives = {peer: messages_of(transfers, bucket_bytes) for peer, transfers in plan.receives.items()}
        rounds = max((len(messages) for messages in (*sends.values(), *receives.values())), default=0)
        in_flight: _Round | None = None
        for number in range(rounds):
            begun = self._begin(
                {peer: messages[number] for peer, messages in sends.items() if number < len(messages)},
                {peer: messages[number] for peer, messages in receives.items() if number < len(messages)},
            )
            if in_flight is None:
                meanwhile()
            else:
                self._end(in_flight)
            in_flight = begun
        if in_flight is None:
            meanwhile()
        else:
            self._end(in_flight)

    def _begin(self, sends: dict[int, TransferMessage], receives: dict[int, TransferMessage]) -> _Round:
        operations, sent, received = [], [], []
        for peer in sorted({*sends, *receives}):
            if peer in receives:
                message = receives[peer]
                buffer = self._in_place(message, self._target_rows)
                if buffer is None:
                    buffer = torch.empty(message.numel, dtype=message.dtype, device=self._device)
                    received.append((message, buffer))
                operations.append(
                    torch.distributed.P2POp(torch.distributed.irecv, _bytes_of(buffer), peer, self._group)
                )
                self.bytes_received += buffer.nbytes
            if peer in sends:
                buffer = self._in_place(sends[peer], self._source_rows)
                buffer = self._packed(sends[peer]) if buffer is None else buffer
                sent.append(buffer)
                operations.append(
                    torch.distributed.P2POp(torch.distributed.isend, _bytes_of(buffer), peer, self._group)
                )
                self.bytes_sent += buffer.nbytes
        self.messages_sent += len(sends)
        self.messages_received += len(receives)
        return _Round(torch.distributed.batch_isend_irecv(operations), sent, received)

    def _in_place(self, message: TransferMessage, rows_of: Callable[[RowTransfer], Tensor]) -> Tensor | None:
        """The memory of a message's only transfer, if it can be sent or received there."""
        if len(message.transfers) > 1:
            return None
        rows = rows_of(message.transfers[0])
        fits = rows.is_contiguous() and rows.dtype == message.dtype and rows.device.type == self._device.type
        return rows.view(-1) if fits else None

    def _packed(self, message: TransferMessage) -> Tensor:
        buffer = torch.empty(message.numel, dtype=message.dtype, device=self._device)
        at = 0
        for transfer in message.transfers:
            rows = self._source_rows(transfer)
            buffer[at : at + rows.numel()].view(rows.shape).copy_(rows)
            at += rows.numel()
        return buffer

    def _end(self, in_flight: _Round) -> None:
        for work in in_flight.works:
            work.wait()
        for message, buffer in in_flight.received:
            at = 0
            for transfer in message.transfers:
                rows = self._target_rows(transfer)
                rows.copy_(buffer[at : at + rows.numel()].view(rows.shape))
                at += rows.numel()
