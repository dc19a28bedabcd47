"""A trainer's weights reach an engine of another layout: no more bytes than must, and its very logprobs."""

from __future__ import annotations

import json
from pathlib import Path

import gloo_ranks as ranks
import pytest
import reshard_case as case
import torch
from safetensors.torch import load_file

from megatron_infer.errors import WeightUpdateError, WrongState
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl.updates import ReshardSource, apply, verify_update
from megatron_infer.rl.updates.inventory import Inventory

MOVES = [
    ("gpt", {"tp": 2}, {}),
    ("gpt", {}, {"tp": 2}),
    ("tied", {"pp": 2}, {"tp": 2}),
    ("tied", {"tp": 2}, {"pp": 2}),
    ("experts", {"ep": 2}, {}),
    ("delta", {"tp": 2}, {}),
    ("delta", {"pp": 2}, {"tp": 2}),
    ("hybrid", {"tp": 2}, {}),
    ("hybrid", {"pp": 2}, {"tp": 2}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    case.save_models(folder)
    expected = {name: case.logprobs(case.make_engine(case.whole_model(name))) for name in case.WHOLE}
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


def addresses(engine) -> list[int]:
    return [tensor.data_ptr() for tensor in engine.model.state_dict().values() if tensor is not None]


def run_moves(rank: int, size: int, folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    for name, before, after in MOVES:
        where = f"{name} {before} -> {after}"
        trainer = case.load(folder, name, **before)
        own = case.logprobs(case.make_engine(trainer))
        engine = case.make_engine(case.scrambled(case.load(folder, name, **after)))
        places, source = addresses(engine), ReshardSource(trainer, bucket_mib=0.05)
        done = apply(engine, source, checksum=True)
        case.assert_equal(case.logprobs(engine), own, where)
        case.assert_equal(case.logprobs(engine), expected[name], where)
        assert addresses(engine) == places
        must = case.must_move(Inventory.of(trainer), Inventory.of(engine.model))
        report = source.report
        assert report.bytes_must_move == must == case.summed(report.bytes_received) == case.summed(report.bytes_sent)
        assert done.bytes_received == report.bytes_received and report.ratio == 1.0 and report.planned
        found = verify_update(engine, source)
        assert found.checksum == done.checksum and found.num_compared == found.num_tensors == done.num_tensors
        assert len(set(case.everyone(found.checksum))) == 1
        check_sabotage(engine, source, where)
        check_next_update(trainer, engine, source, where)
    check_misfits(folder, rank)


def check_sabotage(engine, source, where: str) -> None:
    """What is wrong with one tensor on one rank is found on all of them, and named."""
    for name, spoil in (
        ("decoder.final", lambda live: live.uniform_(3, 4)),  # skipped: it still has another value
        ("linear_proj.weight", lambda live: live.copy_(live.flip(0))),  # rows in another order
        ("word_embeddings.weight", lambda live: live.view(torch.int32)[5:6, 7:8].bitwise_xor_(1)),  # the last bit
    ):
        held = [local for local in engine.model.named_parameters() if name in local[0]]
        last = max(rank for rank, has in enumerate(case.everyone(bool(held))) if has)
        mine = held[:1] if torch.distributed.get_rank() == last else []
        kept = [(live, live.detach().clone()) for _, live in mine]
        with torch.no_grad():
            for live, _ in kept:
                spoil(live)
        with pytest.raises(WeightUpdateError, match=name.replace(".", r"\.")):
            verify_update(engine, source)
        with torch.no_grad():
            for live, before in kept:
                live.copy_(before)
    assert verify_update(engine, source).num_compared, where


def check_next_update(trainer, engine, source, where: str) -> None:
    """A training step later the plan is the same, and so is the answer."""
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.25)
    version = engine.weight_version
    done = apply(engine, source)
    assert not source.report.planned and done.version == version + 1 == engine.weight_version
    verify_update(engine, source)
    case.assert_equal(case.logprobs(engine), case.logprobs(case.make_engine(trainer)), where, tolerance=2e-6)


def check_misfits(folder: Path, rank: int) -> None:
    """Models that do not belong together, and a rank that fails alone: all raise, nothing moves, the engine goes on."""
    trainer = case.load(folder, "tied", tp=2)
    engine = case.make_engine(case.load(folder, "gpt"))
    before = case.logprobs(engine)
    with pytest.raises(WeightUpdateError, match=r"the source has no .*k_layernorm\.weight.*nothing was written"):
        apply(engine, ReshardSource(trainer))
    wrong = torch.nn.Linear(2, 2) if rank == 1 else trainer
    with pytest.raises(WeightUpdateError, match="rank 1: ModelError: Linear is not a megatron-core language model"):
        apply(engine, ReshardSource(wrong))
    with pytest.raises(WeightUpdateError, match="no rank of the group has a source model"):
        apply(engine, ReshardSource(None))
    with pytest.raises(WeightUpdateError, match=r"bucket_mib is 1\.0 on rank 0 and 2\.0 on rank 1; give every rank"):
        apply(engine, ReshardSource(trainer, bucket_mib=1.0 + rank))
    with pytest.raises(WeightUpdateError, match="strict is True on rank 0 and False on rank 1"):
        apply(engine, ReshardSource(trainer), strict=rank == 0)
    assert case.logprobs(engine) == before and engine.weight_version == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trainer_of_another_layout_gives_an_engine_its_logprobs_and_moves_what_it_must(saved: Path):
    ranks.run_on_ranks(run_moves, 2, saved)


def run_apart(rank: int, size: int, folder: Path) -> None:
    """Of four ranks: a trainer on 0 and 1, an engine on 1 and 3; then a trainer on all, an engine on 2 and 3."""
    expected = json.loads((folder / "expected.json").read_text())
    trainer = case.load(folder, "tied", tp=2)
    model = case.scrambled(case.load(folder, "tied", pp=2))
    source = ReshardSource(trainer if rank in (0, 1) else None, bucket_mib=0.02)
    target = give(model, rank in (1, 3), source, expected["tied"])
    must = case.must_move(Inventory.of(trainer) if rank < 2 else None, target)
    assert case.everyone(source.report.bytes_sent)[2:] == [0, 0]
    assert source.report.bytes_must_move == must == case.summed(source.report.bytes_received)

    trainer = case.load(folder, "hybrid", pp=2)
    model = case.scrambled(case.load(folder, "hybrid", tp=2))
    source = ReshardSource(trainer, bucket_mib=0.02)
    target = give(model, rank in (2, 3), source, expected["hybrid"])
    must = case.must_move(Inventory.of(trainer), target)
    sent = case.everyone(source.report.bytes_sent)
    assert source.report.bytes_must_move == must == sum(sent)
    assert sent[2:] == [0, 0] and max(sent[:2]) - min(sent[:2]) < 0.2 * max(sent), "replicas do not share the work"


def give(model, has_engine: bool, source: ReshardSource, expected) -> Inventory | None:
    if not has_engine:
        source.send()
        source.verify()
        return None
    engine = case.make_engine(model)
    apply(engine, source)
    verify_update(engine, source)
    case.assert_equal(case.logprobs(engine), expected, "apart")
    return Inventory.of(model)


@pytest.mark.timeout(300)
def test_trainer_and_engine_may_be_on_different_ranks_and_replicas_share_the_work(saved: Path):
    ranks.run_on_ranks(run_apart, 4, saved)


LAYOUTS = [("gpt", {"tp": 2}), ("tied", {"pp": 2}), ("experts", {"ep": 2}), ("hybrid", {"pp": 2})]


def run_sources(rank: int, size: int, folder: Path) -> None:
    """Whole and local state dicts, streams and checkpoints into engines of two ranks; one rank that fails alone."""
    expected = json.loads((folder / "expected.json").read_text())
    for name, layout in LAYOUTS:
        where = f"{name} {layout}"
        whole = {k: v for k, v in torch.load(folder / f"{name}.pt").items() if isinstance(v, torch.Tensor)}
        right = case.load(folder, name, **layout)
        engine = case.make_engine(case.load(folder, name, **layout))
        checksums = set()
        for source in (whole, right, right.state_dict(), folder / name, iter(reversed(whole.items()))):
            case.scrambled(engine.model)
            checksums.add(apply(engine, source, checksum=True).checksum)
            case.assert_equal(case.logprobs(engine), expected[name], where)
        assert len({*checksums, *case.everyone(checksums.copy().pop())}) == 1, where
        assert verify_update(engine, whole).checksum in checksums
        check_one_rank_failing(engine, whole, rank, expected[name])
    check_hugging_face(folder / "llama")


def check_hugging_face(folder: Path) -> None:
    """Three kv heads over two ranks: a group of zeros is added, in a reshard as when the model is built."""
    ranks.new_groups(tensor_model_parallel_size=2)
    model = build_model(open_source(folder), tensor_parallel=2)
    engine = case.make_engine(model)
    expected = case.logprobs(engine)
    ranks.new_groups()
    trainer = build_model(open_source(folder))
    stream = load_file(folder / "model.safetensors")
    plan = open_source(folder).config()
    for source, how in ((folder, None), (iter(reversed(stream.items())), plan), (ReshardSource(trainer), None)):
        case.scrambled(model)
        apply(engine, source, plan=how)
        case.assert_equal(case.logprobs(engine), expected, str(source))
    assert verify_update(engine, folder).num_compared == len(list(model.parameters()))


def check_one_rank_failing(engine, whole, rank: int, expected) -> None:
    name = "decoder.layers.3.mlp.router.weight" if "decoder.layers.3.mlp.router.weight" in whole else None
    name = name or next(reversed([key for key in whole if key.startswith("decoder.layers.3.")]))
    bad = dict(whole) | ({name: whole[name][:-1]} if rank == 1 else {})
    message = rf"rank 1: {name} has shape".replace(".", r"\.")
    with pytest.raises(WeightUpdateError, match=f"{message}.*nothing was written") as told:
        apply(engine, bad)
    assert (told.value.rank, told.value.tensor) == (1, name)
    with pytest.raises(WeightUpdateError, match=f"{message}.*was put back"):
        apply(engine, iter(bad.items()), undo=True)
    case.assert_equal(case.logprobs(engine), expected, "put back")
    with pytest.raises(WeightUpdateError, match=f"{message}.*half old, half new"):
        apply(engine, iter(bad.items()))
    with pytest.raises(WrongState, match=message):
        engine.generate([[1, 2, 3]])
    with pytest.raises(WrongState, match=message):
        engine.step()
    apply(engine, whole)
    case.assert_equal(case.logprobs(engine), expected, "whole again")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_state_dicts_streams_and_checkpoints_reach_engines_of_two_ranks_or_fail_on_both(saved: Path):
    case.save_llama(saved)
    ranks.run_on_ranks(run_sources, 2, saved)
