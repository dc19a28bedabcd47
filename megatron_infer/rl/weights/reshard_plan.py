"""Which rows of which tensor go from which rank to which, so that one layout of a model becomes another.

    trainer TP2              engine TP1 on rank 0           moved
    rank 0  [ rows 0-3 ]  -> rank 0  [ rows 0-3             nothing, copied in place
    rank 1  [ rows 4-7 ]  ->           rows 4-7 ]           rows 4-7, rank 1 -> rank 0

Every rank says what it holds and what it wants; out of that all of them make the same plan. What a rank has itself is
never sent, what several have comes from the same host if it can, else from whoever has sent least so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_infer.errors import WeightUpdateError
from megatron_infer.rl.weights.inventory import KV_GROUPS, VOCABULARY, Layout, Span

Range = tuple[int, int]
_LARGE = 16
"""A slice of this part of a bucket is worth a message of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayouts:
    """What one rank has of the trainer's model and wants of the engine's."""

    rank: int
    """In the world."""
    host: str
    has: tuple[Layout, ...]
    wants: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """`size` rows of one tensor, counted along the dimension that it is split along."""

    name: str
    source: int
    """Rank that has them; its tensor is number `source_index` of what it has, they begin at `source_start` there."""
    source_index: int
    source_start: int
    target: int
    target_index: int
    target_start: int
    size: int
    dim: int
    row_numel: int
    dtype: torch.dtype
    """In which they travel: the narrower of both sides' types."""

    @property
    def num_bytes(self) -> int:
        return self.size * self.row_numel * int(self.dtype.itemsize)

    def cut(self, at: int, size: int) -> Slice:
        """`size` rows of it from its row `at` on."""
        return Slice(
            self.name, self.source, self.source_index, self.source_start + at, self.target, self.target_index,
            self.target_start + at, size, self.dim, self.row_numel, self.dtype,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PaddingRows:
    """Rows of a target tensor that are padding which the source does not have: they become zeros."""

    index: int
    dim: int
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """One rank's part of a plan, and the figures of the whole."""

    local: tuple[Slice, ...]
    """From this rank's source to its own target."""
    sends: dict[int, tuple[Slice, ...]]
    """By the rank they go to."""
    receives: dict[int, tuple[Slice, ...]]
    blanks: tuple[PaddingRows, ...]
    dropped: tuple[PaddingRows, ...]
    """Rows of this rank's source tensors that no target has room for: zero kv groups, or there is a mistake."""
    any_dropped: bool
    """On any rank."""
    limits: dict[str, int]
    """Tensors that are padded differently on both sides -> length without padding."""
    bytes_must_move: int
    """Of all ranks: what a target wants and its own rank does not have."""
    bytes_to_receive: int
    """Of this rank alone."""


def reshard_plan(holdings: Sequence[RankLayouts], rank: int, *, strict: bool = True) -> ReshardPlan:
    """`rank`'s part of the plan; every rank gives the same holdings.

    Raises WeightUpdateError, the same on every rank, naming tensors that nobody has, that nobody wants (if strict) or
    whose shapes do not belong to the same model.
    """
    holdings = sorted(holdings, key=lambda holding: holding.rank)
    has, wants = _by_name(holdings, "has"), _by_name(holdings, "wants")
    _check_names(has, wants, strict=strict)
    for name in wants:
        has[name], wants[name] = _align(has[name], wants[name]), _align(wants[name], has[name])
    limits = {name: limit for name in wants if (limit := _limit(name, has[name], wants[name])) is not None}
    hosts = {holding.rank: holding.host for holding in holdings}
    planner = _Planner(hosts)
    blanks: list[PaddingRows] = []
    for name, targets in sorted(wants.items()):
        limit = limits.get(name)
        for target in targets:
            planner.cover(name, has[name], target, limit)
            if target.rank == rank and limit is not None:
                blanks += _beyond(target, limit)
    dropped = [
        (place.rank, blank)
        for name, limit in limits.items()
        for place in has[name]
        if place.layout.padded == KV_GROUPS
        for blank in _beyond(place, limit)
    ]
    return ReshardPlan(
        local=tuple(s for s in planner.slices if s.source == s.target == rank),
        sends=_grouped((s for s in planner.slices if s.source == rank != s.target), "target"),
        receives=_grouped((s for s in planner.slices if s.target == rank != s.source), "source"),
        blanks=tuple(blanks),
        dropped=tuple(blank for owner, blank in dropped if owner == rank),
        any_dropped=bool(dropped),
        limits=limits,
        bytes_must_move=_must_move(has, wants, limits),
        bytes_to_receive=_must_move(
            has, {name: [place for place in places if place.rank == rank] for name, places in wants.items()}, limits
        ),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    index: int
    layout: Layout


def _by_name(holdings: Sequence[RankLayouts], side: str) -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = defaultdict(list)
    for holding in holdings:
        for index, layout in enumerate(getattr(holding, side)):
            found[layout.name].append(_Place(holding.rank, index, layout))
    return dict(found)


def _align(places: Sequence[_Place], others: Sequence[_Place]) -> list[_Place]:
    """Whole tensors counted along the dimension that the other side splits."""
    dims = {place.layout.dim for place in (*places, *others) if not place.layout.is_whole}
    if len(dims) != 1:
        return list(places)
    return [_Place(place.rank, place.index, place.layout.along(*dims)) for place in places]


def _check_names(has: Mapping[str, object], wants: Mapping[str, object], *, strict: bool) -> None:
    missing = sorted(set(wants) - set(has))
    if not has:
        raise WeightUpdateError("no rank of the group has a source model; give it to ReshardSource where it lives")
    if not wants:
        raise WeightUpdateError("no rank of the group has a target; call apply() where the engine lives")
    extra = sorted(set(has) - set(wants)) if strict else []
    problems = []
    if missing:
        problems.append(f"the source has no {', '.join(missing[:8])}" + " and more" * (len(missing) > 8))
    if extra:
        problems.append(f"the target has no {', '.join(extra[:8])}" + " and more" * (len(extra) > 8))
    if problems:
        raise WeightUpdateError("; ".join(problems), tensor=(missing + extra)[0])


def _limit(name: str, sources: Sequence[_Place], targets: Sequence[_Place]) -> int | None:
    """Rows that both sides have where they are padded differently; None where they are not."""
    for side in (sources, targets):
        shapes = {place.layout.shape for place in side}
        if len(shapes) > 1:
            ranks = ", ".join(f"rank {place.rank}: {list(place.layout.shape)}" for place in side)
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
    """Finds a source for every row, and keeps count of what each rank sends."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self.slices: list[Slice] = []
        self._hosts = hosts
        self._load: dict[int, int] = defaultdict(int)

    def cover(self, name: str, sources: Sequence[_Place], target: _Place, limit: int | None) -> None:
        """Slices for all that `target` holds below `limit`."""
        own = [place for place in sources if place.rank == target.rank]
        others = [place for place in sources if place.rank != target.rank]
        for span in target.layout.spans:
            end = span.whole + span.size if limit is None else min(span.whole + span.size, limit)
            at = span.whole
            while at < end:
                found = _reach(own, at, end)
                if found is None:
                    stop = _next_start(own, at, end)
                    found = self._best(others, target.rank, at, stop)
                if found is None:
                    raise WeightUpdateError(
                        f"{name}: no rank of the source has row {at} of {target.layout.shape[target.layout.dim]}",
                        tensor=name,
                    )
                place, held, stop = found
                self._take(name, place, held, target, span, at, stop)
                at = stop

    def _best(self, places: Sequence[_Place], rank: int, at: int, end: int) -> tuple[_Place, Span, int] | None:
        able = [found for place in places if (found := _reach([place], at, end)) is not None]
        if not able:
            return None
        near = [found for found in able if self._hosts[found[0].rank] == self._hosts[rank]] or able
        return min(near, key=lambda found: (self._load[found[0].rank], found[0].rank))

    def _take(self, name: str, place: _Place, held: Span, target: _Place, span: Span, at: int, stop: int) -> None:
        layout = target.layout
        dtype = min((place.layout.dtype, layout.dtype), key=lambda dtype: dtype.itemsize)
        found = Slice(
            name, place.rank, place.index, held.local + at - held.whole, target.rank, target.index,
            span.local + at - span.whole, stop - at, layout.dim, layout.row_numel, dtype,
        )  # fmt: skip
        self.slices.append(found)
        if place.rank != target.rank:
            self._load[place.rank] += found.num_bytes


def _reach(places: Iterable[_Place], at: int, end: int) -> tuple[_Place, Span, int] | None:
    """A place that has row `at`, and how far it reaches."""
    for place in places:
        for span in place.layout.spans:
            if span.whole <= at < span.whole + span.size:
                return place, span, min(end, span.whole + span.size)
    return None


def _next_start(places: Iterable[_Place], at: int, end: int) -> int:
    starts = [span.whole for place in places for span in place.layout.spans if at < span.whole < end]
    return min(starts, default=end)


def _beyond(place: _Place, limit: int) -> Iterator[PaddingRows]:
    for span in place.layout.spans:
        first = max(limit, span.whole)
        if first < span.whole + span.size:
            start = span.local + first - span.whole
            yield PaddingRows(place.index, place.layout.dim, start, span.whole + span.size - first)


def _must_move(
    has: Mapping[str, Sequence[_Place]], wants: Mapping[str, Sequence[_Place]], limits: Mapping[str, int]
) -> int:
    """Bytes that targets want and their own ranks do not have: no plan can move fewer."""
    total = 0
    for name, targets in wants.items():
        for target in targets:
            rows = _rows(target.layout, limits.get(name))
            here = set().union(*(_rows(place.layout, None) for place in has[name] if place.rank == target.rank))
            missing = _length(rows) - _overlap(rows, here)
            itemsize = min(target.layout.dtype.itemsize, has[name][0].layout.dtype.itemsize)
            total += missing * target.layout.row_numel * itemsize
    return total


def _rows(layout: Layout, limit: int | None) -> set[Range]:
    end = layout.shape[layout.dim] if limit is None else limit
    return {(s.whole, min(end, s.whole + s.size)) for s in layout.spans if s.whole < end}


def _length(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _overlap(rows: Iterable[Range], others: Iterable[Range]) -> int:
    """Rows of the first that are in the second, whose ranges may overlap each other."""
    merged: list[list[int]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return sum(max(0, min(end, b) - max(start, a)) for start, end in rows for a, b in merged)


def _grouped(slices: Iterable[Slice], key: str) -> dict[int, tuple[Slice, ...]]:
    found: dict[int, list[Slice]] = defaultdict(list)
    for piece in slices:
        found[getattr(piece, key)].append(piece)
    return {rank: tuple(pieces) for rank, pieces in sorted(found.items())}


@dataclass(frozen=True, slots=True)
class Message:
    """Slices of one dtype that travel together, in this order, one behind the other."""

    slices: tuple[Slice, ...]
    dtype: torch.dtype
    numel: int = field(default=0)

    @property
    def num_bytes(self) -> int:
        return self.numel * int(self.dtype.itemsize)


def messages_of(slices: Iterable[Slice], bucket_bytes: int) -> list[Message]:
    """The slices between two ranks in messages of at most `bucket_bytes` (or one row); both ends make the same.

    Large slices travel alone, so that they need not be copied into a bucket and out of it.
    """
    by_dtype: dict[torch.dtype, list[Slice]] = defaultdict(list)
    for piece in slices:
        by_dtype[piece.dtype].append(piece)
    messages: list[Message] = []
    for dtype in sorted(by_dtype, key=str):
        room = capacity = max(1, bucket_bytes // dtype.itemsize)
        bucket: list[Slice] = []
        for piece in by_dtype[dtype]:
            at = 0
            if piece.num_bytes >= bucket_bytes // _LARGE:
                rows = max(1, capacity // piece.row_numel)
                cuts = (piece.cut(at, min(rows, piece.size - at)) for at in range(0, piece.size, rows))
                messages += (_message([cut], dtype) for cut in cuts)
                continue
            while at < piece.size:
                rows = min(piece.size - at, room // piece.row_numel)
                if rows <= 0 and bucket:
                    messages.append(_message(bucket, dtype))
                    bucket, room = [], capacity
                    continue
                rows = max(1, rows)
                bucket.append(piece.cut(at, rows))
                at, room = at + rows, room - rows * piece.row_numel
        if bucket:
            messages.append(_message(bucket, dtype))
    return messages


def _message(slices: Sequence[Slice], dtype: torch.dtype) -> Message:
    return Message(tuple(slices), dtype, sum(piece.size * piece.row_numel for piece in slices))
