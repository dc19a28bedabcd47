"""The plan of a reshard: which rows of which tensor are sent from which rank to which.

    trainer TP2              engine TP1 on rank 0           moved
    rank 0  [ rows 0-3 ]  -> rank 0  [ rows 0-3             nothing, copied in place
    rank 1  [ rows 4-7 ]  ->           rows 4-7 ]           rows 4-7, rank 1 -> rank 0

Every rank reports its source and target layouts, and from all reports every rank computes the same plan. Rows that a
rank has itself are never sent; rows that several ranks have come from the same host if possible, else from the rank
that has sent least so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_infer.errors import WeightUpdateError
from megatron_infer.rl.updates.inventory import KV_GROUPS, VOCABULARY, Layout, Span, listed

Range = tuple[int, int]
_LARGE = 16
"""A transfer of at least 1/_LARGE of a bucket is a message of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayouts:
    """Layouts of the trainer's (source) and the engine's (target) tensors on one rank."""

    rank: int
    """In the world."""
    host: str
    source: tuple[Layout, ...]
    target: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class RowTransfer:
    """`size` rows of one tensor, counted along the dimension that it is split along, from one rank to another."""

    name: str
    source: int
    """Rank that has them, from row `source_start` on in number `source_index` of its source tensors."""
    source_index: int
    source_start: int
    target: int
    target_index: int
    target_start: int
    size: int
    dim: int
    row_numel: int
    dtype: torch.dtype
    """The dtype they are sent in: the narrower of both sides'."""

    @property
    def num_bytes(self) -> int:
        return self.size * self.row_numel * int(self.dtype.itemsize)

    def cut(self, at: int, size: int) -> RowTransfer:
        """`size` of its rows, from its row `at` on."""
        return RowTransfer(
            self.name, self.source, self.source_index, self.source_start + at, self.target, self.target_index,
            self.target_start + at, size, self.dim, self.row_numel, self.dtype,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PaddingRows:
    """Padding rows of a target tensor that the source does not have; they become zeros."""

    index: int
    dim: int
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """One rank's part of a plan, and figures of the whole plan."""

    local: tuple[RowTransfer, ...]
    """From this rank's source to its own target."""
    sends: dict[int, tuple[RowTransfer, ...]]
    """By the rank that they are sent to."""
    receives: dict[int, tuple[RowTransfer, ...]]
    padding: tuple[PaddingRows, ...]
    dropped: tuple[PaddingRows, ...]
    """Rows of this rank's source tensors that no target has: kv groups of zeros, otherwise a mistake."""
    any_dropped: bool
    """Whether any rank has dropped rows."""
    limits: dict[str, int]
    """Tensors that are padded differently on both sides -> length without padding."""
    bytes_must_move: int
    """Over all ranks: bytes of target rows that their own rank does not have."""
    bytes_to_receive: int
    """The same for this rank."""

    def split(self, number_of: Callable[[RowTransfer], int], num_parts: int) -> list[ReshardPlan]:
        """The plan in parts, by the number of each transfer's part. The first part has the padding.

        The parts of all ranks fit together where the numbers are the same on all ranks.
        """

        def divided(transfers: Iterable[RowTransfer]) -> list[tuple[RowTransfer, ...]]:
            found: list[list[RowTransfer]] = [[] for _ in range(num_parts)]
            for transfer in transfers:
                found[number_of(transfer)].append(transfer)
            return list(map(tuple, found))

        local = divided(self.local)
        sends = {rank: divided(transfers) for rank, transfers in self.sends.items()}
        receives = {rank: divided(transfers) for rank, transfers in self.receives.items()}
        return [
            replace(
                self,
                local=local[number],
                sends={rank: parts[number] for rank, parts in sends.items()},
                receives={rank: parts[number] for rank, parts in receives.items()},
                padding=() if number else self.padding,
            )
            for number in range(num_parts)
        ]


def reshard_plan(ranks: Sequence[RankLayouts], rank: int, *, strict: bool = True) -> ReshardPlan:
    """`rank`'s part of the plan; every rank passes the same layouts.

    Raises WeightUpdateError, the same on every rank, naming tensors that no source has, that no target has (if strict)
    or whose shapes do not belong to the same model.
    """
    ranks = sorted(ranks, key=lambda one: one.rank)
    sources = _shards_by_name((one.rank, one.source) for one in ranks)
    targets = _shards_by_name((one.rank, one.target) for one in ranks)
    _check_names(sources, targets, strict=strict)
    for name in targets:
        sources[name], targets[name] = _align(sources[name], targets[name]), _align(targets[name], sources[name])
    limits = {name: limit for name in targets if (limit := _limit(name, sources[name], targets[name])) is not None}
    hosts = {one.rank: one.host for one in ranks}
    planner = _Planner(hosts)
    padding: list[PaddingRows] = []
    for name, own_targets in sorted(targets.items()):
        limit = limits.get(name)
        for target in own_targets:
            planner.cover(name, sources[name], target, limit)
            if target.rank == rank and limit is not None:
                padding += _padding_after(target, limit)
    dropped = [
        (shard.rank, rows)
        for name, limit in limits.items()
        for shard in sources[name]
        if shard.layout.padded == KV_GROUPS
        for rows in _padding_after(shard, limit)
    ]
    return ReshardPlan(
        local=tuple(s for s in planner.transfers if s.source == s.target == rank),
        sends=_grouped((s for s in planner.transfers if s.source == rank != s.target), "target"),
        receives=_grouped((s for s in planner.transfers if s.target == rank != s.source), "source"),
        padding=tuple(padding),
        dropped=tuple(rows for owner, rows in dropped if owner == rank),
        any_dropped=bool(dropped),
        limits=limits,
        bytes_must_move=_bytes_to_move(sources, targets, limits),
        bytes_to_receive=_bytes_to_move(
            sources, {name: [one for one in shards if one.rank == rank] for name, shards in targets.items()}, limits
        ),
    )


@dataclass(frozen=True, slots=True)
class _RankShard:
    rank: int
    index: int
    layout: Layout


def _shards_by_name(layouts: Iterable[tuple[int, tuple[Layout, ...]]]) -> dict[str, list[_RankShard]]:
    found: dict[str, list[_RankShard]] = defaultdict(list)
    for rank, own in layouts:
        for index, layout in enumerate(own):
            found[layout.name].append(_RankShard(rank, index, layout))
    return dict(found)


def _align(shards: Sequence[_RankShard], others: Sequence[_RankShard]) -> list[_RankShard]:
    """Shards that are whole, counted along the dimension that the other side splits."""
    dims = {shard.layout.dim for shard in (*shards, *others) if not shard.layout.is_whole}
    if len(dims) != 1:
        return list(shards)
    return [_RankShard(shard.rank, shard.index, shard.layout.along(*dims)) for shard in shards]


def _check_names(sources: Mapping[str, object], targets: Mapping[str, object], *, strict: bool) -> None:
    missing = sorted(set(targets) - set(sources))
    if not sources:
        raise WeightUpdateError("no rank of the group has a source model; give it to ReshardSource where it lives")
    if not targets:
        raise WeightUpdateError("no rank of the group has a target; call apply() where the engine lives")
    extra = sorted(set(sources) - set(targets)) if strict else []
    problems = []
    if missing:
        problems.append(f"the source has no {listed(missing)}")
    if extra:
        problems.append(f"the target has no {listed(extra)}")
    if problems:
        raise WeightUpdateError("; ".join(problems), tensor=(missing + extra)[0])


def _limit(name: str, sources: Sequence[_RankShard], targets: Sequence[_RankShard]) -> int | None:
    """Length without padding of a tensor that both sides pad differently; None if their shapes are equal."""
    for side in (sources, targets):
        shapes = {shard.layout.shape for shard in side}
        if len(shapes) > 1:
            ranks = ", ".join(f"rank {shard.rank}: {list(shard.layout.shape)}" for shard in side)
            raise WeightUpdateError(f"{name} has different shapes on different ranks: {ranks}", tensor=name)
    one, other = sources[0].layout, targets[0].layout
    if one.shape == other.shape:
        return None
    mistake = WeightUpdateError(
        f"{name} has shape {list(one.shape)} in the source, {list(other.shape)} in the target", tensor=name
    )
    rest = [a == b for at, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if at != one.dim]
    if len(one.shape) != len(other.shape) or not all(rest) or one.padded != other.padded or one.dim != other.dim:
        raise mistake
    lengths = one.shape[one.dim], other.shape[other.dim]
    if one.padded == KV_GROUPS and one.unit == other.unit:
        return min(lengths)
    true_sizes = {layout.true_size for layout in (one, other)} - {None}
    if one.padded == VOCABULARY and len(true_sizes) == 1:
        true = true_sizes.pop()
        assert true is not None
        if true <= min(lengths):
            return true
    if one.padded == VOCABULARY:
        mistake.add_note("set model.true_vocab_size on either model if they differ by padding only")
    raise mistake


class _Planner:
    """Finds a source for every row, and counts the bytes that each rank sends."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.transfers: list[RowTransfer] = []
        self._hosts = hosts
        self._load: dict[int, int] = defaultdict(int)

    def cover(self, name: str, sources: Sequence[_RankShard], target: _RankShard, limit: int | None) -> None:
        """Add transfers for all rows of `target` below `limit`."""
        own = [shard for shard in sources if shard.rank == target.rank]
        others = [shard for shard in sources if shard.rank != target.rank]
        for span in target.layout.spans:
            end = span.whole + span.size if limit is None else min(span.whole + span.size, limit)
            at = span.whole
            while at < end:
                found = _holder_of(own, at, end)
                if found is None:
                    stop = _next_start(own, at, end)
                    found = self._least_loaded(others, target.rank, at, stop)
                if found is None:
                    raise WeightUpdateError(
                        f"{name}: no rank of the source has row {at} of {target.layout.shape[target.layout.dim]}",
                        tensor=name,
                    )
                shard, held, stop = found
                self._add(name, shard, held, target, span, at, stop)
                at = stop

    def _least_loaded(
        self, shards: Sequence[_RankShard], rank: int, at: int, end: int
    ) -> tuple[_RankShard, Span, int] | None:
        able = [found for shard in shards if (found := _holder_of([shard], at, end)) is not None]
        if not able:
            return None
        near = [found for found in able if self._hosts[found[0].rank] == self._hosts[rank]] or able
        return min(near, key=lambda found: (self._load[found[0].rank], found[0].rank))

    def _add(
        self, name: str, shard: _RankShard, held: Span, target: _RankShard, span: Span, at: int, stop: int
    ) -> None:
        layout = target.layout
        dtype = min((shard.layout.dtype, layout.dtype), key=lambda dtype: dtype.itemsize)
        found = RowTransfer(
            name, shard.rank, shard.index, held.local + at - held.whole, target.rank, target.index,
            span.local + at - span.whole, stop - at, layout.dim, layout.row_numel, dtype,
        )  # fmt: skip
        self.transfers.append(found)
        if shard.rank != target.rank:
            self._load[shard.rank] += found.num_bytes


def _holder_of(shards: Iterable[_RankShard], at: int, end: int) -> tuple[_RankShard, Span, int] | None:
    """(shard that has row `at`, its span, end of the rows it has up to `end`)."""
    for shard in shards:
        for span in shard.layout.spans:
            if span.whole <= at < span.whole + span.size:
                return shard, span, min(end, span.whole + span.size)
    return None


def _next_start(shards: Iterable[_RankShard], at: int, end: int) -> int:
    starts = [span.whole for shard in shards for span in shard.layout.spans if at < span.whole < end]
    return min(starts, default=end)


def _padding_after(shard: _RankShard, limit: int) -> Iterator[PaddingRows]:
    for span in shard.layout.spans:
        first = max(limit, span.whole)
        if first < span.whole + span.size:
            start = span.local + first - span.whole
            yield PaddingRows(shard.index, shard.layout.dim, start, span.whole + span.size - first)


def _bytes_to_move(
    sources: Mapping[str, Sequence[_RankShard]], targets: Mapping[str, Sequence[_RankShard]], limits: Mapping[str, int]
) -> int:
    """Bytes of target rows that their own ranks do not have: no plan can move fewer."""
    total = 0
    for name, own_targets in targets.items():
        for target in own_targets:
            rows = _ranges(target.layout, limits.get(name))
            here = set().union(*(_ranges(shard.layout, None) for shard in sources[name] if shard.rank == target.rank))
            missing = _length(rows) - _overlap(rows, here)
            itemsize = min(target.layout.dtype.itemsize, sources[name][0].layout.dtype.itemsize)
            total += missing * target.layout.row_numel * itemsize
    return total


def _ranges(layout: Layout, limit: int | None) -> set[Range]:
    end = layout.shape[layout.dim] if limit is None else limit
    return {(s.whole, min(end, s.whole + s.size)) for s in layout.spans if s.whole < end}


def _length(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _overlap(rows: Iterable[Range], others: Iterable[Range]) -> int:
    """Number of `rows` that are in `others`, whose ranges may overlap each other."""
    merged: list[list[int]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return sum(max(0, min(end, b) - max(start, a)) for start, end in rows for a, b in merged)


def _grouped(transfers: Iterable[RowTransfer], key: str) -> dict[int, tuple[RowTransfer, ...]]:
    found: dict[int, list[RowTransfer]] = defaultdict(list)
    for transfer in transfers:
        found[getattr(transfer, key)].append(transfer)
    return {rank: tuple(transfers) for rank, transfers in sorted(found.items())}


@dataclass(frozen=True, slots=True)
class TransferMessage:
    """Transfers of one dtype that are sent together, concatenated in this order."""

    transfers: tuple[RowTransfer, ...]
    dtype: torch.dtype
    numel: int

    @property
    def num_bytes(self) -> int:
        return self.numel * int(self.dtype.itemsize)


def messages_of(transfers: Iterable[RowTransfer], bucket_bytes: int) -> list[TransferMessage]:
    """The transfers between two ranks in messages of at most `bucket_bytes` (or one row); both ends compute the same.

    Large transfers are messages of their own, so that they need not be copied into a bucket and out of it.
    """
    by_dtype: dict[torch.dtype, list[RowTransfer]] = defaultdict(list)
    for transfer in transfers:
        by_dtype[transfer.dtype].append(transfer)
    messages: list[TransferMessage] = []
    for dtype in sorted(by_dtype, key=str):
        room = capacity = max(1, bucket_bytes // dtype.itemsize)
        bucket: list[RowTransfer] = []
        for transfer in by_dtype[dtype]:
            at = 0
            if transfer.num_bytes >= bucket_bytes // _LARGE:
                rows = max(1, capacity // transfer.row_numel)
                cuts = (transfer.cut(at, min(rows, transfer.size - at)) for at in range(0, transfer.size, rows))
                messages += (_message([cut], dtype) for cut in cuts)
                continue
            while at < transfer.size:
                rows = min(transfer.size - at, room // transfer.row_numel)
                if rows <= 0 and bucket:
                    messages.append(_message(bucket, dtype))
                    bucket, room = [], capacity
                    continue
                rows = max(1, rows)
                bucket.append(transfer.cut(at, rows))
                at, room = at + rows, room - rows * transfer.row_numel
        if bucket:
            messages.append(_message(bucket, dtype))
    return messages


def _message(transfers: Sequence[RowTransfer], dtype: torch.dtype) -> TransferMessage:
    return TransferMessage(tuple(transfers), dtype, sum(transfer.size * transfer.row_numel for transfer in transfers))
