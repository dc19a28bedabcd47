"""A trainer's weights reach an engine of another layout: no more bytes than must, and its very logprobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reshard_case as case

from megatron_infer.rl.weights import ReshardSource, apply, verify_update
from megatron_infer.rl.weights.inventory import Inventory

MOVES = [
    ("gpt", {"tp": 2}, {}),
    ("gpt", {}, {"tp": 2}),
    ("tied", {"pp": 2}, {"tp": 2}),
    ("tied", {"tp": 2}, {"pp": 2}),
    ("experts", {"ep": 2}, {}),
    ("experts", {}, {"ep": 2}),
    ("hybrid", {"tp": 2}, {}),
    ("hybrid", {"pp": 2}, {"tp": 2}),
    ("hybrid", {"ep": 2}, {"tp": 2}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    case.save_models(folder)
    expected = {name: case.logprobs(case.make_engine(case.whole_model(name))) for name in case.WHOLE}
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


def run_moves(rank: int, size: int, folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    for name, before, after in MOVES:
        where = f"{name} {before} -> {after}"
        trainer = case.load(folder, name, **before)
        own = case.logprobs(case.make_engine(trainer))
        engine = case.make_engine(case.scrambled(case.load(folder, name, **after)))
        addresses = [tensor.data_ptr() for tensor in engine.parts.model.state_dict().values() if tensor is not None]
        source = ReshardSource(trainer, bucket_mib=0.05)
        done = apply(engine, source, checksum=True)
        worst = case.assert_equal(case.logprobs(engine), own, where)
        case.assert_equal(case.logprobs(engine), expected[name], where)
        assert addresses == [
            tensor.data_ptr() for tensor in engine.parts.model.state_dict().values() if tensor is not None
        ]
        must = case.must_move(Inventory.of(trainer), Inventory.of(engine.parts.model))
        report = source.report
        assert report.bytes_must_move == must == case.summed(report.bytes_received) == case.summed(report.bytes_sent)
        assert done.bytes_received == report.bytes_received and report.ratio == 1.0 and report.planned
        found = verify_update(engine, source)
        assert found.checksum == done.checksum and found.num_compared == found.num_tensors == done.num_tensors
        if rank == 0:
            print(f"{where}: {must:,} bytes must move, {worst:.1e}")
