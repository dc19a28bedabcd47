"""Any layout of a tensor becomes any other: every missing row is sent once, and no row that the rank has already."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_infer.errors import WeightUpdateError
from megatron_infer.rl.updates.digest import combine_digests, part_digest
from megatron_infer.rl.updates.inventory import KV_GROUPS, VOCABULARY, Layout, _spans
from megatron_infer.rl.updates.reshard_plan import RankLayouts, ReshardPlan, messages_of, reshard_plan

TENSORS = {
    "column": ((24, 5), 0, (24,)),
    "row": ((5, 24), 1, (24,)),
    "gate and up": ((48, 3), 0, (24, 24)),
    "in_proj": ((120, 2), 0, (48, 24, 12, 12, 24)),
    "conv": ((48, 1, 4), 0, (24, 12, 12)),
    "bias": ((24,), 0, (24,)),
    "norm": ((7,), 0, None),
}
SIZES = (1, 2, 3, 4, 6)


def layouts(size: int, rank: int, dtype: torch.dtype) -> list[Layout]:
    """One rank's layouts of all tensors, split over `size` ranks."""
    found = []
    for name, (shape, dim, parts) in TENSORS.items():
        actual = (shape[dim],) if parts is None else tuple(part // size for part in parts)
        spans = _spans(actual, *((0, 1) if parts is None else (rank, size)))
        found.append(Layout(name=name, shape=shape, dim=dim, spans=spans, dtype=dtype))
    return found


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _, _) in TENSORS.items()}


def carry_out(plans: dict[int, ReshardPlan], has: dict[int, list], wants: dict[int, list], bucket: int) -> int:
    """Run all ranks' plans in one process -> bytes moved. Both ends compute their messages, as ranks do."""
    moved = 0
    for rank, plan in plans.items():
        for transfer in plan.local:
            put(wants, transfer, rows(has, transfer))
        for padding in plan.padding:
            wants[rank][padding.index].narrow(padding.dim, padding.start, padding.size).zero_()
        for peer, transfers in plan.sends.items():
            sent, expected = messages_of(transfers, bucket), messages_of(plans[peer].receives[rank], bucket)
            assert sent == expected
            for message in sent:
                assert message.num_bytes <= max(bucket, message.transfers[0].row_numel * message.dtype.itemsize)
                moved += message.num_bytes
                for transfer in message.transfers:
                    put(wants, transfer, rows(has, transfer).to(transfer.dtype))
    return moved


def rows(has: dict[int, list], transfer: Any) -> torch.Tensor:
    return has[transfer.source][transfer.source_index].narrow(transfer.dim, transfer.source_start, transfer.size)


def put(wants: dict[int, list], transfer: Any, value: torch.Tensor) -> None:
    wants[transfer.target][transfer.target_index].narrow(transfer.dim, transfer.target_start, transfer.size).copy_(
        value
    )


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.long) for n in range(12, 30))])
def test_every_layout_becomes_every_other_with_the_fewest_possible_bytes(seed: int):
    draw = random.Random(seed)
    ranks, before, after = range(draw.randint(1, 8)), draw.choice(SIZES), draw.choice(SIZES)
    ranks = range(max(len(ranks), before, after))
    shift = draw.randrange(len(ranks))
    trainers = {rank: rank % before for rank in ranks if rank < len(ranks) // before * before}
    engines = {(rank + shift) % len(ranks): rank % after for rank in range(len(ranks) // after * after)}
    source_type, target_type = (
        draw.choice([torch.float32, torch.bfloat16]),
        draw.choice([torch.float32, torch.bfloat16]),
    )
    layouts_of_ranks = [
        RankLayouts(
            rank=rank,
            host=f"host{rank // 3}",
            source=tuple(layouts(before, trainers[rank], source_type)) if rank in trainers else (),
            target=tuple(layouts(after, engines[rank], target_type)) if rank in engines else (),
        )
        for rank in ranks
    ]
    whole = whole_tensors()
    has = {h.rank: [la.part_of(whole[la.name].to(source_type)) for la in h.source] for h in layouts_of_ranks}
    wants = {
        h.rank: [torch.full_like(la.part_of(whole[la.name]), float("nan"), dtype=target_type) for la in h.target]
        for h in layouts_of_ranks
    }
    plans = {rank: reshard_plan(layouts_of_ranks, rank) for rank in ranks}
    moved = carry_out(plans, has, wants, bucket=draw.choice([16, 200, 10**6]))
    assert {plan.bytes_must_move for plan in plans.values()} == {moved}
    assert sum(plan.bytes_to_receive for plan in plans.values()) == moved
    for one in layouts_of_ranks:
        for layout, got in zip(one.target, wants[one.rank], strict=True):
            expected = layout.part_of(whole[layout.name].to(source_type)).to(target_type)
            assert torch.equal(got, expected), f"{layout.name} on rank {one.rank}"
    check_digests(layouts_of_ranks, wants, has, target_type)


def check_digests(layouts_of_ranks: list[RankLayouts], wants: dict, has: dict, dtype: torch.dtype) -> None:
    """Both sides have the same digests; changing any one bit changes them."""

    def side(which: str, held: dict) -> dict[str, int]:
        return combine_digests(
            [
                part_digest(layout, tensor, dtype=dtype, rank=one.rank)
                for one in layouts_of_ranks
                for layout, tensor in zip(getattr(one, which), held[one.rank], strict=True)
            ]
        )

    assert side("target", wants) == side("source", has)
    rank = next(rank for rank, tensors in wants.items() if tensors)
    for index, tensor in enumerate(wants[rank]):
        flat = tensor.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(-1)
        flat[-1] ^= 1
        try:
            changed = side("target", wants) != side("source", has)
        except WeightUpdateError as error:
            changed = layouts_of_ranks[rank].target[index].name == error.tensor
        assert changed, index
        flat[-1] ^= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32, torch.bfloat16])
def test_digests_read_every_bit_and_write_none(dtype):
    layout = Layout(name="t", shape=(6, 4), dim=0, spans=_spans((6,), 0, 1), dtype=dtype)
    tensor = torch.arange(24).view(6, 4).to(dtype)
    kept, digest = tensor.clone(), part_digest(layout, tensor)
    assert torch.equal(tensor, kept)
    bits = tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])
    for bit in range(8 * tensor.element_size()):
        bits[2, 3] ^= 1 << bit if bit < 8 * tensor.element_size() - 1 else -1 << bit
        assert part_digest(layout, tensor).value != digest.value, bit
        bits[2, 3] = kept.view(bits.dtype)[2, 3]


def test_digests_depend_on_order_position_and_zeros():
    layout = Layout(name="t", shape=(6, 4), dim=0, spans=_spans((6,), 0, 1), dtype=torch.float32)
    tensor = torch.arange(24.0).view(6, 4)
    swapped = tensor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    seen = [
        tensor,
        swapped,
        tensor.flip(1),
        tensor.roll(1, 0),
        tensor.t().reshape(6, 4),
        torch.zeros(6, 4),
        -torch.zeros(6, 4),
    ]
    assert len({part_digest(layout, one).value for one in seen}) == len(seen)


def padded(shape: tuple[int, int], size: int, rank: int, **how: Any) -> Layout:
    return Layout(
        name="t", shape=shape, dim=0, spans=_spans((shape[0] // size,), rank, size), dtype=torch.float32, **how
    )


def exchange(has: list[Layout], wants: list[Layout], whole: torch.Tensor) -> list[torch.Tensor]:
    size = max(len(has), len(wants))
    layouts_of_ranks = [
        RankLayouts(rank=rank, host="", source=tuple(has[rank : rank + 1]), target=tuple(wants[rank : rank + 1]))
        for rank in range(size)
    ]
    held = {h.rank: [layout.part_of(whole) for layout in h.source] for h in layouts_of_ranks}
    got = {h.rank: [torch.full_like(la.part_of(whole), float("nan")) for la in h.target] for h in layouts_of_ranks}
    plans = {rank: reshard_plan(layouts_of_ranks, rank) for rank in range(size)}
    parts = {rank: plan.split(lambda transfer: transfer.source, size) for rank, plan in plans.items()}
    for rank, plan in plans.items():
        assert [rows for part in parts[rank] for rows in part.padding] == list(plan.padding), "each row is filled once"
    for number in range(size):
        carry_out({rank: of_rank[number] for rank, of_rank in parts.items()}, held, got, 64)
    return [got[rank][0] for rank in range(len(wants))]


def test_differently_padded_vocabularies_and_kv_groups_are_filled_with_zeros():
    whole = torch.randn(10, 3)
    vocabulary = {"padded": VOCABULARY, "true_size": 10}
    got = exchange(
        [padded((10, 3), 1, 0, padded=VOCABULARY)], [padded((12, 3), 2, r, **vocabulary) for r in (0, 1)], whole
    )
    assert torch.equal(torch.cat(got), torch.cat([whole, torch.zeros(2, 3)]))
    back = exchange([padded((12, 3), 2, r, **vocabulary) for r in (0, 1)], [padded((10, 3), 1, 0, **vocabulary)], whole)
    assert torch.equal(back[0], whole)
    groups = {"padded": KV_GROUPS, "unit": 3}
    got = exchange([padded((9, 3), 1, 0, **groups)], [padded((12, 3), 2, r, **groups) for r in (0, 1)], whole[:9])
    assert torch.equal(torch.cat(got), torch.cat([whole[:9], torch.zeros(3, 3)]))


def test_tensors_of_different_models_are_refused_by_name():
    column = padded((12, 3), 1, 0)

    def plan(has: list[Layout], wants: list[Layout], **how: Any) -> None:
        reshard_plan([RankLayouts(rank=0, host="", source=tuple(has), target=tuple(wants))], 0, **how)

    for other in (
        padded((10, 3), 1, 0),
        padded((12, 4), 1, 0),
        padded((10, 3), 1, 0, padded=VOCABULARY),
        replace(column, shape=(12,), spans=_spans((12,), 0, 1)),
    ):
        with pytest.raises(WeightUpdateError, match=r"t has shape \[12, 3\] in the source, \[") as error:
            plan([column], [other])
        assert error.value.tensor == "t"
    with pytest.raises(WeightUpdateError, match="the source has no t"):
        plan([replace(column, name="u")], [column])
    with pytest.raises(WeightUpdateError, match="the target has no u"):
        plan([column, replace(column, name="u")], [column])
    plan([column, replace(column, name="u")], [column], strict=False)
    with pytest.raises(WeightUpdateError, match="t: no rank of the source has row 6 of 12"):
        plan([padded((12, 3), 2, 0)], [column])
