"""Requests saved with their keys and values by two ranks: each writes its part, all or none, and takes it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks, stage_ends

from megatron_infer.engine.durable import rank_files as saved_parts
from megatron_infer.engine.durable.parcel import Parcel
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InferenceError, RequestError, SnapshotError, TransitionFailed
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
SETTINGS = {"enable_chunked_prefill": True, "max_tokens": 48, "enable_prefix_caching": True}
HOW = {"position_embedding_type": "rope", "init_method_std": 0.2, "max_sequence_length": 512}


def staged(make: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    return lambda rank: make(**stage_ends(rank, 2), **{PP: 2})


CASES: dict[str, tuple[dict[str, int], Callable[[int], torch.nn.Module]]] = {
    "tp": ({TP: 2}, lambda rank: tiny_gpt(**HOW, **{TP: 2})),
    "ep": ({EP: 2}, lambda rank: tiny_gpt(**HOW, **EXPERTS, **{EP: 2})),
    "pp": ({PP: 2}, staged(lambda **how: tiny_gpt(**HOW, **how))),
    "no attention on the first stage": ({PP: 2}, staged(lambda **how: tiny_hybrid("M-M**-", **HOW, **how))),
    "no Mamba on the last stage": ({PP: 2}, staged(lambda **how: tiny_hybrid("M*-*", **HOW, **how))),
    "nothing kept on the last stage": ({PP: 2}, staged(lambda **how: tiny_hybrid("M*--", **HOW, **how))),
    "no attention at all": ({PP: 2}, staged(lambda **how: tiny_hybrid("MM", **HOW, **how))),
}


def begun(model: torch.nn.Module, rank: int, **settings: Any) -> DynamicInferenceEngine:
    """An engine in the midst of its requests: some decode, one is in its prompt, some wait."""
    engine = ranks.make_engine(model, **SETTINGS | settings)
    for index, (prompt, params) in enumerate(ranks.workload(7) if rank == 0 else ()):
        engine.add_request(prompt, params, request_id=str(index), stream="final")
    for _ in range(5):
        assert not engine.step()
    return engine


def finish(engine: DynamicInferenceEngine) -> dict[str, Any]:
    done = []
    while engine.has_unfinished():
        done += [output for output in engine.step() if output.finished]
    ranks.assert_no_block_leaked(engine)
    engine.rank_group.lockstep.close()
    return ranks.account(done)


def listed(path: Path) -> list[str]:
    torch.distributed.barrier()
    names = sorted(one.name for one in path.parent.glob(f"{path.name}*"))
    torch.distributed.barrier()
    return names


def check_return(model: torch.nn.Module, rank: int, path: Path) -> dict[str, Any]:
    """They go on where they were, in blocks of another size, and no token is computed twice -> what comes of them."""
    want: dict[str, Any] = {}
    for block_size, caching in ((16, False), (8, True)):
        source = begun(model, rank, enable_prefix_caching=caching)
        source.save_requests(path, kv=True)
        first = listed(path)
        source.save_requests(path, kv=True)
        names = listed(path)
        assert len(names) == 2 and names[0] == path.name and names != first, "one save, nothing of the one before"
        before = source.stats().counters["prefill_tokens"]
        want = finish(source)
        engine = ranks.make_engine(model, **SETTINGS | {"block_size_tokens": block_size})
        report = engine.load_requests(path)
        assert len(report.with_kv) > 2 and not report.recomputed, report
        assert len(report.loaded) == 7
        ranks.assert_same_account(finish(engine), want)
        if not caching:
            rest = source.stats().counters["prefill_tokens"] - before
            assert engine.stats().counters["prefill_tokens"] <= rest, "something was computed twice"
    return want


def check_move(model: torch.nn.Module, rank: int, want: dict[str, Any]) -> None:
    """Requests move between two engines of these ranks: each rank hands out its part and takes it in."""
    source, other = begun(model, rank), ranks.make_engine(model, **SETTINGS)
    reports = [other.take_in(source.hand_out(str(index)).to_bytes()) for index in range(0, 7, 2)]
    assert not any(report.recomputed for report in reports) and any(report.with_kv for report in reports)
    ranks.assert_same_account(finish(source) | finish(other), want)


def check_whole_move(model: torch.nn.Module, rank: int, want: dict[str, Any]) -> None:
    """The leader has the parts of all ranks as one parcel, also without blocks that are there."""
    source, other = begun(model, rank), ranks.make_engine(model, **SETTINGS)
    for index in (0, 2, 4, 6, 5):
        parcel = source.hand_out(str(index), whole=True)
        prompt = ranks.workload(7)[index][0]
        content = parcel.without(other.num_published(prompt)).to_bytes() if rank == 0 else None
        report = other.take_in(content, whole=True)
        assert not report.recomputed and report.loaded == [str(index)], report
    ranks.assert_same_account(finish(source) | finish(other), want)


def check_damaged(model: torch.nn.Module, rank: int) -> None:
    """A whole parcel that is cut, changed or missing is refused on all ranks, which go on."""
    source, other = begun(model, rank), ranks.make_engine(model, **SETTINGS)
    parcel = source.hand_out("0", whole=True)
    changed = (Parcel(manifest={**parcel.manifest, "parts": parts}, tensors=parcel.tensors) for parts in (5, [7]))
    for damaged, why in zip((parcel.to_bytes()[:-9], *changed), ("truncated", "no list", "understood"), strict=True):
        with pytest.raises((TransitionFailed, SnapshotError), match=why):
            other.take_in(None if rank else damaged, whole=True)
    for given, whole in ((None, True), ("text", True), (parcel, False)):
        with pytest.raises((TransitionFailed, RequestError), match="no parcel"):
            other.take_in(None if rank else given, whole=whole)
    assert other.take_in(None if rank else parcel, whole=True).with_kv == ["0"]
    finish(source)
    finish(other)


def check_other_layouts(model: torch.nn.Module, rank: int) -> None:
    """From two ranks to one and back by the tokens alone, on all ranks."""
    source, other = begun(model, rank), ranks.make_engine(model, **SETTINGS)
    parcel = source.hand_out("0", whole=True).to_bytes()
    finish(source)
    new_groups(**{TP: 1})
    alone = ranks.make_engine(tiny_gpt(**HOW), **SETTINGS)
    content = None
    if rank == 0:
        report = alone.take_in(parcel, whole=True)
        assert report.recomputed == {"0": "saved by 2 ranks (tp=2), this engine has 1 rank"}, report
        for _ in range(3):
            alone.step()
        content = alone.hand_out("0", whole=True).to_bytes()
    report = other.take_in(content, whole=True)
    assert report.recomputed == {"0": "saved by 1 rank, this engine has 2 ranks (tp=2)"}, report
    ((_, reason, _),) = finish(other).values()
    assert reason.endswith("length")


def check_all_or_nothing(model: torch.nn.Module, rank: int, path: Path, want: dict[str, Any]) -> None:
    """A rank that cannot write leaves the save before as it was; a damaged part is refused, a lost one done without."""
    engine = begun(model, rank)
    engine.save_requests(path, kv=True)
    names = listed(path)
    write, stage = saved_parts.file_format.write, saved_parts.file_format.stage

    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    for victim, name in ((0, "put_in_place"), (1, "write")):
        original = getattr(saved_parts.file_format, name)
        if rank == victim:
            setattr(saved_parts.file_format, name, full)
        with pytest.raises(OSError if rank == victim else TransitionFailed, match="no space"):
            engine.save_requests(path, kv=True)
        setattr(saved_parts.file_format, name, original)
        assert listed(path) == names
    assert (write, stage) == (saved_parts.file_format.write, saved_parts.file_format.stage)
    finish(engine)

    part = path.with_name(names[1])
    content = part.read_bytes()
    engine = ranks.make_engine(model, **SETTINGS)
    torch.distributed.barrier()
    if rank == 1:
        part.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(SnapshotError if rank else TransitionFailed, match="checksum"):
        engine.load_requests(path)
    assert not engine.has_unfinished()
    if rank == 1:
        part.unlink()
    report = engine.load_requests(path)
    assert not report.with_kv and report.recomputed
    assert all("rank 1: the part of rank 1 is missing" in why for why in report.recomputed.values()), report
    ranks.assert_same_account(finish(engine), want)


def check_following(model: torch.nn.Module, rank: int, path: Path) -> None:
    engine = begun(model, rank)
    if rank == 0:
        engine.save_requests(path, kv=True)
        with pytest.raises(TransitionFailed, match=r"rank 1: .*given NoneType, which is no parcel"):
            engine.take_in(engine.hand_out("6"))  # the part of this rank alone
        engine.dismiss()
    else:
        with pytest.raises(InferenceError, match="rank 0"):
            engine.save_requests(path)
        engine.follow()
    assert len(listed(path)) == 2
    finish(engine)
    if rank == 0:  # without keys and values the leader writes alone, and what it had of the others goes
        engine.save_requests(path)
    assert listed(path) == [path.name]


def on_rank(rank: int, size: int, folder: Path) -> None:
    for case, (sizes, make) in CASES.items():
        new_groups(**sizes)
        model = make(rank)
        path = folder / case
        want = check_return(model, rank, path)
        check_whole_move(model, rank, want)
        if case == "tp":
            check_move(model, rank, want)
            check_damaged(model, rank)
            check_all_or_nothing(model, rank, folder / "other", want)
            check_following(model, rank, folder / "followed")
            check_other_layouts(model, rank)
        if case == "pp":
            engine = ranks.make_engine(model, **SETTINGS)
            report = engine.load_requests(folder / "tp")
            reason = "saved by 2 ranks (tp=2), this engine has 2 ranks (pp=2)"
            assert set(report.recomputed.values()) == {reason}, report
            assert len(finish(engine)) == 7


@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_ranks_save_and_take_back_what_they_computed(tmp_path: Path) -> None:
    """In every layout, stages that keep no keys and values, or no states, among them."""
    run_on_ranks(on_rank, 2, tmp_path)
