"""An MTP layer that is divided over two tensor-parallel ranks drafts what it drafts in one process."""

from __future__ import annotations

import json
from pathlib import Path

import gloo_ranks as ranks
import pytest
from test_mtp import MTP, OTHERS, drafting, guessing, knowing
from test_same_answer import run

from megatron_infer.errors import ConfigError
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.checkpoint import CheckpointSource, save_checkpoint
from megatron_infer.utils.json_file import read_json

SETTINGS = {"plain": {}, "chunked, prefix, overlap": {"prefix": "lru", "overlap": True, **OTHERS["chunked"]}}


def on_rank(rank: int, size: int, folder: Path) -> None:
    want = read_json(folder / "want.json")
    ranks.new_groups(tensor_model_parallel_size=size)
    for name in ("knows", "guesses"):
        part = build_model(CheckpointSource(folder / name), tensor_parallel=size)
        for settings in SETTINGS.values():
            engine = drafting(part, **settings, collective_timeout_s=60)
            assert run(engine, "sampled") == want[name]
            found = engine.spec_decode_metrics()
            assert found.num_drafted > 50 and (found.acceptance_rate == 1) == (name == "knows"), found
            engine.rank_group.lockstep.close()
        if name == "knows":
            with pytest.raises(ConfigError, match="'residual' needs whole distributions on each rank"):
                drafting(part, speculative=MTP | {"verification": "residual"}, collective_timeout_s=60)
    ranks.new_groups(pipeline_model_parallel_size=size)
    with pytest.raises(ConfigError, match="pipeline_parallel=2 for a model with mtp_num_layers=1"):
        build_model(CheckpointSource(folder / "guesses"), pipeline_parallel=size)


def test_two_ranks_draft_what_one_process_does(tmp_path):
    want = {}
    for name, model in (("knows", knowing()), ("guesses", guessing())):
        save_checkpoint(model, tmp_path / name)
        want[name] = run(drafting(build_model(CheckpointSource(tmp_path / name)), speculative=None), "sampled")
    (tmp_path / "want.json").write_text(json.dumps(want))
    ranks.run_on_ranks(on_rank, 2, tmp_path)
