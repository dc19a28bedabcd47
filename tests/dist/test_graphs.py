"""Padded and captured steps of an engine over two ranks: stages capture their part, tensor-parallel ranks pad alike."""

from __future__ import annotations

import os
from pathlib import Path

import gloo_ranks as ranks
import pytest
import stage_case

from megatron_infer.config import ConfigWarning

GRAPHS = {"num_cuda_graphs": -1, "cuda_graph_max_tokens": 32, "enable_chunked_prefill": True}
NAMES = ("tied", "last stage without Mamba")


def take_static_kernels(graphs: str) -> None:
    os.environ |= {"MEGATRON_INFER_BACKEND": "static", "MEGATRON_INFER_GRAPHS": graphs}


def check_used(engine) -> None:
    counts = engine.parts.runner.graphs.pool.counts
    assert counts.replays > 10 and counts.uncaptured == 0 and not engine.parts.runner.graphs.pool.refused, counts


def run_stages(rank: int, size: int, folder: Path) -> None:
    take_static_kernels("replay")
    expected = stage_case.json.loads((folder / "expected.json").read_text())
    for name in NAMES:
        model = stage_case.load_model(folder, name, pipeline_parallel=size)
        engine = stage_case.make_engine(model, overlap=True, **GRAPHS)
        engine.parts.runner.warm_up(64)
        stage_case.assert_same(stage_case.generate(engine), expected[name], name, tolerance=1e-4)
        check_used(engine)
        stage_case.assert_same(stage_case.generate_over_suspends(engine), expected[name], name, tolerance=1e-4)

    ranks.new_groups(tensor_model_parallel_size=size)
    take_static_kernels("eager")
    model = stage_case.load_model(folder, "tied", tensor_parallel=size)
    engine = stage_case.make_engine(model, **GRAPHS)
    engine.parts.runner.warm_up(64)  # all of them together, as when an engine on GPUs is built
    stage_case.assert_same(stage_case.generate(engine), expected["tied"], "two tensor-parallel ranks", tolerance=1e-4)
    check_used(engine)
    take_static_kernels("replay")
    with pytest.warns(ConfigWarning, match="holds no collectives of gloo; every step runs eagerly"):
        engine = stage_case.make_engine(model, **GRAPHS)
    assert engine.parts.runner.graphs is None


@pytest.mark.timeout(200)
def test_two_ranks_pad_and_capture_alike_and_answer_as_one_process(tmp_path):
    expected = {}
    with pytest.MonkeyPatch.context() as patch:  # not while ranks are started: others' would have it, too
        patch.setenv("MEGATRON_INFER_BACKEND", "static")
        for name in NAMES:
            model = stage_case.MODELS[name]()
            stage_case.save_checkpoint(model, tmp_path / name)
            expected[name] = stage_case.generate(stage_case.make_engine(model))
    stage_case.write_json(tmp_path / "expected.json", expected)
    ranks.run_on_ranks(run_stages, 2, tmp_path)
