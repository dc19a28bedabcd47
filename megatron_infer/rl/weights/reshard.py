"""A live trainer of another layout as a source of weights: its shards go rank to rank, in buckets, by send and receive.

    every rank     what it holds and wants -> plan (once; later updates only compare a fingerprint)
    round k        the k-th bucket of every pair of ranks: packed, sent and received at once, unpacked into live
                   tensors while the next round is under way

No tensor is ever whole on a rank that does not hold it whole. Trainer and engine may be the same processes or others of
one world; backends are gloo and nccl.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_infer.comm.backends import backend_on
from megatron_infer.errors import ConfigError, WeightUpdateError
from megatron_infer.rl.weights.digest import (
    checksum_of,
    combined,
    decode,
    digests_of,
    encode,
)
from megatron_infer.rl.weights.inventory import Inventory, LocalTensor
from megatron_infer.rl.weights.names import listed
from megatron_infer.rl.weights.reshard_plan import Message, RankLayouts, ReshardPlan, Slice, messages_of, reshard_plan
from megatron_infer.rl.weights.sources import WeightSink
from megatron_infer.rl.weights.target import UpdateTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What one update moved, as this rank saw it; `str()` is a line."""

    bytes_must_move: int
    """Of all ranks: what targets want and their own ranks do not have."""
    bytes_to_receive: int
    """Of these, what this rank wants."""
    bytes_sent: int
    bytes_received: int
    bytes_local: int
    """Copied from this rank's source to its own target."""
    messages_sent: int
    messages_received: int
    seconds: float
    planned: bool
    """Whether the plan was made anew; it is kept as long as no rank's model changes shape."""

    @property
    def ratio(self) -> float:
        """Bytes received over bytes that had to come: 1 is as few as there can be."""
        return self.bytes_received / self.bytes_to_receive if self.bytes_to_receive else 1.0

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"received {self.bytes_received / mib:.1f} MiB of {self.bytes_to_receive / mib:.1f} that had to come, "
            f"sent {self.bytes_sent / mib:.1f}, copied {self.bytes_local / mib:.1f} in place, "
            f"{self.messages_sent + self.messages_received} messages, {self.seconds * 1e3:.1f} ms"
        )


class ReshardSource:
    """The weights of a live model that may be sharded otherwise than the engine's; one object for the loop.

    Every rank of `group` makes one, in the same order. On ranks with an engine: apply(engine, source). On ranks with a
    trainer's part only: source.send(), and source.verify() where the others call verify_update(engine, source).
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        group: Any = None,
        bucket_mib: float = 16.0,
    ) -> None:
        """model: this rank's part of the trainer's (plain, wrapped or in chunks); None where it has none.

        group: all ranks of trainer and engine; None is the world. bucket_mib: size of a message; a rank holds two of
        them for each rank it exchanges with.
        """
        if not torch.distributed.is_initialized():
            raise ConfigError("ReshardSource needs torch.distributed; within one process give the model itself")
        if not bucket_mib > 0:
            raise ConfigError(f"bucket_mib is {bucket_mib}, it must be above 0")
        self._model, self._group = model, group
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._plan: ReshardPlan | None = None
        self._key = ""
        self._planned = False
        self._source: Inventory | None = None
        self.report: ReshardReport | None = None
        """Of the last update."""

    # ------------------------------------------------------------------ a WeightSource

    def check(self, target: UpdateTarget | None, *, strict: bool = True) -> None:
        """Make or find the plan; every rank of the group calls it. Raises the same on all, before anything moves."""
        self._planned = False
        problem, holding = "", None
        try:
            self._source = None if self._model is None else Inventory.of(self._model)
            holding = self._holding(target)
        except Exception as error:  # told to all ranks: alone, this one would leave them waiting
            problem = f"{type(error).__name__}: {error}"
        key = hashlib.blake2b(repr((holding, strict)).encode(), digest_size=8).hexdigest()
        fresh = self._plan is None or key != self._key
        answers = self._gather([problem, fresh, {"bucket_mib": self._bucket_bytes / 2**20, "strict": strict}])
        self._raise_any(answers)
        self._raise_unlike([(rank, how) for rank, (_, _, how) in answers])
        if any(fresh for _, (_, fresh, _) in answers):
            holdings = [holding for _, holding in self._gather(holding)]
            self._plan = None
            self._plan = reshard_plan(holdings, torch.distributed.get_rank(), strict=strict)
            self._key, self._planned = key, True
        assert self._plan is not None
        if self._plan.any_dropped:
            self._raise_any(self._gather([self._lost()]))

    def write_into(self, update: WeightSink) -> None:
        """Take part in the exchange and write what this rank wants."""
        locals_ = update.target.inventory.tensors
        opened: dict[int, Tensor] = {}

        def live(index: int) -> Tensor:
            if index not in opened:
                opened[index] = update.opened(locals_[index])
            return opened[index]

        self._exchange(live)
        assert self.report is not None
        update.received(self.report.bytes_received)

    def send(self, *, strict: bool = True) -> ReshardReport:
        """On a rank without an engine: its side of an apply()."""
        self.check(None, strict=strict)
        self._exchange(_no_target)
        assert self.report is not None
        return self.report

    def verify(self, target: UpdateTarget | None = None, *, strict: bool = True) -> str:
        """Compare digests of the engine's weights with the trainer's, rounded to the engine's dtypes -> checksum.

        Every rank of the group calls it. Raises WeightUpdateError, the same on all, naming every tensor that differs.
        """
        self.check(target, strict=strict)
        assert self._plan is not None
        rank, limits = torch.distributed.get_rank(), dict(self._plan.limits)
        holding = self._holding(target)
        wanted = [(layout.name, layout.dtype) for layout in holding.wants]
        true = [(layout.name, layout.true_size) for layout in (*holding.has, *holding.wants) if layout.true_size]
        dtypes: dict[str, torch.dtype] = {}
        for _, (pairs, lengths) in self._gather((wanted, true)):
            dtypes |= dict(pairs)
            limits = dict(lengths) | limits
        sides: list[dict[str, int]] = []
        for inventory, what in ((self._source, "source"), (None if target is None else target.inventory, "target")):
            own = [] if inventory is None else digests_of(inventory, rank=rank, dtypes=dtypes, limits=limits)
            parts = [part for _, text in self._gather(encode(own)) for part in decode(text)]
            try:
                sides.append(combined([part for part in parts if part.name in dtypes]))
            except WeightUpdateError as error:  # raised alike on every rank
                raise WeightUpdateError(f"{what}: {error}", tensor=error.tensor, rank=error.rank) from None
        wrong = [name for name in sides[1] if sides[0].get(name) != sides[1][name]]
        if wrong:
            raise WeightUpdateError(f"not what the source has: {listed(wrong)}", tensor=wrong[0], rank=rank)
        return checksum_of(sides[1])

    # ------------------------------------------------------------------ inside

    def _holding(self, target: UpdateTarget | None) -> RankLayouts:
        has = () if self._source is None else tuple(local.layout for local in self._source.tensors)
        wants = () if target is None else tuple(local.layout for local in target.inventory.tensors)
        return RankLayouts(rank=torch.distributed.get_rank(), host=socket.gethostname(), has=has, wants=wants)

    def _gather(self, value: Any) -> list[tuple[int, Any]]:
        """Everyone's value with its rank in the world."""
        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, (torch.distributed.get_rank(), value), group=self._group)
        return found

    def _raise_any(self, answers: Iterable[tuple[int, Any]]) -> None:
        failed = [(rank, answer[0]) for rank, answer in answers if answer[0]]
        if failed:
            self._plan = None
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed)
            raise WeightUpdateError(reasons, rank=failed[0][0])

    def _raise_unlike(self, told: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Ranks that cut their messages otherwise would wait for each other."""
        first, known = told[0]
        for rank, how in told[1:]:
            for name, value in how.items():
                if value != known[name]:
                    self._plan = None
                    raise WeightUpdateError(
                        f"{name} is {known[name]} on rank {first} and {value} on rank {rank}; give every rank the same",
                        rank=rank,
                    )

    def _lost(self) -> str:
        """Which of this rank's tensors have values where the target has no room; zeros may go."""
        assert self._plan is not None
        for blank in self._plan.dropped:
            assert self._source is not None
            local = self._source.tensors[blank.index]
            if bool(local.tensor.detach().narrow(blank.dim, blank.start, blank.size).any()):
                return f"{local.layout.name} has kv groups that the target lacks, and they are not zeros"
        return ""

    @torch.no_grad()
    def _exchange(self, live: Callable[[int], Tensor]) -> None:
        plan, started = self._plan, time.perf_counter()
        assert plan is not None, "checked first"
        sources = [] if self._source is None else self._source.tensors

        def meanwhile() -> None:
            for piece in plan.local:
                _rows(live(piece.target_index), piece, piece.target_start).copy_(_own(sources, piece))
            for blank in plan.blanks:
                live(blank.index).narrow(blank.dim, blank.start, blank.size).zero_()

        carrier = _Carrier(self._group, self._bucket_bytes, _device_of(self._group, sources, live, plan))
        carrier.run(plan, lambda piece: _own(sources, piece), live, meanwhile)
        self.report = ReshardReport(
            bytes_must_move=plan.bytes_must_move,
            bytes_to_receive=plan.bytes_to_receive,
            bytes_sent=carrier.bytes_sent,
            bytes_received=carrier.bytes_received,
            bytes_local=sum(piece.num_bytes for piece in plan.local),
            messages_sent=carrier.messages_sent,
            messages_received=carrier.messages_received,
            seconds=time.perf_counter() - started,
            planned=self._planned,
        )


def _raw(buffer: Tensor) -> Tensor:
    """As bytes, which every backend can send."""
    return buffer.view(torch.uint8)


def _no_target(index: int) -> Tensor:
    raise AssertionError(f"tensor {index} of a rank that wants none")


def _rows(tensor: Tensor, piece: Slice, start: int) -> Tensor:
    return tensor.narrow(piece.dim, start, piece.size)


def _own(sources: Sequence[LocalTensor], piece: Slice) -> Tensor:
    return _rows(sources[piece.source_index].tensor.detach(), piece, piece.source_start)


def _device_of(
    group: Any, sources: Sequence[LocalTensor], live: Callable[[int], Tensor], plan: ReshardPlan
) -> torch.device:
    """Where messages lie: gloo sends from the host, nccl from the device that the weights are on."""
    if sources:
        weights = sources[0].tensor.device
    else:
        wanted = next((pieces[0].target_index for pieces in plan.receives.values()), None)
        weights = torch.device("cpu") if wanted is None else live(wanted).device
    return torch.device("cpu") if backend_on(group, weights.type) == "gloo" else weights


@dataclass(slots=True)
class _Round:
    """Messages under way."""

    works: list[Any]
    sent: list[Tensor]
    """Kept until they have arrived."""
    received: list[tuple[Message, Tensor]]
    """Those to be unpacked; the others arrive where they belong."""


class _Carrier:
    """Carries one rank's messages of a plan."""

    def __init__(self, group: Any, bucket_bytes: int, device: torch.device) -> None:
        self._group, self._bucket_bytes, self._device = group, bucket_bytes, device
        self.bytes_sent = self.bytes_received = self.messages_sent = self.messages_received = 0

    def run(
        self,
        plan: ReshardPlan,
        own: Callable[[Slice], Tensor],
        live: Callable[[int], Tensor],
        meanwhile: Callable[[], None],
    ) -> None:
        """own: rows of this rank's source; live: a target tensor by its number; meanwhile: done during round 0."""
        sends = {peer: messages_of(pieces, self._bucket_bytes) for peer, pieces in plan.sends.items()}
        receives = {peer: messages_of(pieces, self._bucket_bytes) for peer, pieces in plan.receives.items()}
        rounds = max((len(messages) for messages in (*sends.values(), *receives.values())), default=0)
        under_way: _Round | None = None
        for number in range(rounds):
            begun = self._begin(
                {peer: messages[number] for peer, messages in sends.items() if number < len(messages)},
                {peer: messages[number] for peer, messages in receives.items() if number < len(messages)},
                own,
                live,
            )
            if under_way is None:
                meanwhile()
            else:
                self._end(under_way, live)
            under_way = begun
        if not rounds:
            meanwhile()
        if under_way is not None:
            self._end(under_way, live)

    def _begin(
        self,
        sends: dict[int, Message],
        receives: dict[int, Message],
        own: Callable[[Slice], Tensor],
        live: Callable[[int], Tensor],
    ) -> _Round:
        operations, sent, received = [], [], []
        for peer in sorted({*sends, *receives}):
            if peer in receives:
                message = receives[peer]
                buffer = self._direct(message, lambda piece: _rows(live(piece.target_index), piece, piece.target_start))
                if buffer is None:
                    buffer = torch.empty(message.numel, dtype=message.dtype, device=self._device)
                    received.append((message, buffer))
                operations.append(torch.distributed.P2POp(torch.distributed.irecv, _raw(buffer), peer, self._group))
                self.bytes_received += buffer.nbytes
            if peer in sends:
                buffer = self._direct(sends[peer], own)
                buffer = self._packed(sends[peer], own) if buffer is None else buffer
                sent.append(buffer)
                operations.append(torch.distributed.P2POp(torch.distributed.isend, _raw(buffer), peer, self._group))
                self.bytes_sent += buffer.nbytes
        self.messages_sent += len(sends)
        self.messages_received += len(receives)
        return _Round(torch.distributed.batch_isend_irecv(operations), sent, received)

    def _direct(self, message: Message, rows_of: Callable[[Slice], Tensor]) -> Tensor | None:
        """The memory of a message's only slice, where it lies as it travels."""
        if len(message.slices) > 1:
            return None
        rows = rows_of(message.slices[0])
        fits = rows.is_contiguous() and rows.dtype == message.dtype and rows.device.type == self._device.type
        return rows.view(-1) if fits else None

    def _packed(self, message: Message, own: Callable[[Slice], Tensor]) -> Tensor:
        buffer = torch.empty(message.numel, dtype=message.dtype, device=self._device)
        at = 0
        for piece in message.slices:
            rows = own(piece)
            buffer[at : at + rows.numel()].view(rows.shape).copy_(rows)
            at += rows.numel()
        return buffer

    def _end(self, under_way: _Round, live: Callable[[int], Tensor]) -> None:
        for work in under_way.works:
            work.wait()
        for message, buffer in under_way.received:
            at = 0
            for piece in message.slices:
                rows = _rows(live(piece.target_index), piece, piece.target_start)
                rows.copy_(buffer[at : at + rows.numel()].view(rows.shape))
                at += rows.numel()
