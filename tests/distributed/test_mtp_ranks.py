"""An MTP layer divided over two tensor-parallel ranks, or on the last of two stages, drafts as in one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import gloo_ranks as ranks
import pytest
import torch
from drafters import MTP, guessing, knowing
from engines import make_engine
from test_same_answer import FEATURES, run

from megatron_infer.errors import ConfigError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import CheckpointSource, save_checkpoint
from megatron_infer.utils.json_file import read_json

SETTINGS = {"plain": {}, "chunked, prefix, overlap": {"prefix": "lru", "overlap": True, **FEATURES["chunked"]}}

QUICK = "quick"

drafting = partial(make_engine, draft="mtp")


def on_rank(rank: int, size: int, folder: Path, first: str) -> None:
    """first: the settings of the first of four cases; the next case has the other settings, and so on, over the kinds
    of ranks and models so that each kind has both. QUICK: each kind of ranks, of models and of settings once."""
    want = read_json(folder / "want.json")
    for row, how in enumerate(("pipeline", "tensor")):
        ranks.new_groups(**{f"{how}_model_parallel_size": size})
        for column, name in enumerate(("knows", "guesses")):
            if first == QUICK and row != column:
                continue
            part = build_model(CheckpointSource(folder / name), **{f"{how}_parallel": size})
            place = row if first == QUICK else [*SETTINGS].index(first) + row + column
            settings = SETTINGS[[*SETTINGS][place % 2]]
            engine = drafting(part, **settings, collective_timeout_s=60)
            assert run(engine, "sampled") == want[name], (how, name)
            found = engine.spec_decode_metrics()
            assert found.num_drafted > 50 and (found.acceptance_rate == 1) == (name == "knows"), found
            assert (engine.sizes.draft_block_bytes > 0) == (how == "tensor" or rank == size - 1)
            engine.rank_group.lockstep.close()
            save_checkpoint(part, folder / f"{name}, {how}")
    ranks.new_groups(pipeline_model_parallel_size=size)
    with pytest.raises(ConfigError, match="needs an output layer of its own"):
        build_model(CheckpointSource(folder / "tied"), pipeline_parallel=size)
    ranks.new_groups(tensor_model_parallel_size=size)
    with pytest.raises(ConfigError, match="'residual' needs whole distributions on each rank"):
        drafting(part, speculative=MTP | {"verification": "residual"}, collective_timeout_s=60)


@pytest.mark.long
@pytest.mark.parametrize("first", [QUICK, *SETTINGS])
def test_two_ranks_draft_what_one_process_does(tmp_path, first):
    """And save what they loaded."""
    want = {}
    for name, model in (("knows", knowing(num_layers=2)), ("guesses", guessing())):
        save_checkpoint(model, tmp_path / name)
        want[name] = run(drafting(build_model(CheckpointSource(tmp_path / name)), speculative=None), "sampled")
    save_checkpoint(guessing(share_embeddings_and_output_weights=True), tmp_path / "tied")
    (tmp_path / "want.json").write_text(json.dumps(want))
    ranks.run_on_ranks(on_rank, 2, tmp_path, first)
    is_quick = first == QUICK
    for name in want:
        first = build_model(CheckpointSource(tmp_path / name)).state_dict()
        for how in {"knows": ["pipeline"], "guesses": ["tensor"]}[name] if is_quick else ("pipeline", "tensor"):
            saved = build_model(CheckpointSource(tmp_path / f"{name}, {how}")).state_dict()
            assert all(torch.equal(saved[key], one) for key, one in first.items() if isinstance(one, torch.Tensor))
