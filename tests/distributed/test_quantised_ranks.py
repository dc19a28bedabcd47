"""Weights in 8 and 4 bits on two ranks: stages give what one process gives, tensor parallelism rounds equal blocks."""

from __future__ import annotations

import json
from pathlib import Path

import gloo_ranks as ranks
import pytest
from stage_case import FEATURES, SETTINGS, assert_same, generate, load_model, make_engine, write_json

from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.weight_dtypes import WEIGHT_DTYPE_BYTES
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.testing.tiny import tiny_gpt

LAYOUTS = {
    "stages": ({"pipeline_model_parallel_size": 2}, {"pipeline_parallel": 2}, 1e-5),
    # the sums of two ranks are rounded in another order, and the last digit of an input decides about one of eight bits
    "tensor parallel": ({"tensor_model_parallel_size": 2}, {"tensor_parallel": 2}, 0.02),
}


def on_rank(rank: int, size: int, folder: Path, first: int) -> None:
    """first: the features of the first weights; the next weights, and layouts, have the other ones."""
    wants = json.loads((folder / "want.json").read_text())
    for place, (name, (groups, parallel, tolerance)) in enumerate(LAYOUTS.items()):
        ranks.new_groups(**groups)
        for number, (weight_dtype, want) in enumerate(wants.items(), first + place):
            features = [*FEATURES][number % 2]
            settings = {"weight_dtype": weight_dtype, "collective_timeout_s": 60}
            engine = make_engine(load_model(folder, "model", **parallel), features, **settings)
            got = generate(engine)
            if rank == 0:
                assert_same(got, want, f"{weight_dtype}, {name}, {features}", tolerance=tolerance)
            engine.rank_group.lockstep.close()


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_give_what_one_process_gives(tmp_path, first):
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))
    model = tiny_gpt(num_layers=2, ffn_hidden_size=128, **SETTINGS)  # each of two ranks has whole blocks of 32 inputs
    save_checkpoint(model, tmp_path / "model")
    wants = {}
    for name in WEIGHT_DTYPE_BYTES:
        want = wants[name] = generate(make_engine(load_model(tmp_path, "model"), weight_dtype=name))
        with pytest.raises(AssertionError):  # the rounding shows
            assert_same(generate(make_engine(load_model(tmp_path, "model"))), want, tolerance=1e-3)
    write_json(tmp_path / "want.json", wants)
    ranks.run_on_ranks(on_rank, 2, tmp_path, first)
