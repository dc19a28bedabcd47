"""Compiled layers over two ranks: sums between their pieces, and stages that begin with a residual."""

from __future__ import annotations

from pathlib import Path

import gloo_ranks as ranks
import pytest
import stage_case

from megatron_infer.testing.inspect import inspect

STAGES, TENSOR = "last stage without Mamba", "tied"


def take_graphs_as_they_are() -> None:
    """torch.compile without its compiler."""
    import torch._inductor.compile_fx as inductor

    inductor.compile_fx = lambda graph, inputs: graph


def check(model, expected, what: str) -> None:
    engine = stage_case.make_engine(model, compile_layers=True)
    compiler = inspect(engine).adopted.compiler
    assert compiler is not None and compiler.num_functions
    at_start = compiler.num_compiles
    stage_case.assert_same(stage_case.generate(engine), expected, what, tolerance=1e-4)
    assert compiler.num_compiles == at_start


def run_compiled(rank: int, size: int, folder: Path, name: str) -> None:
    take_graphs_as_they_are()
    expected = stage_case.json.loads((folder / "expected.json").read_text())
    if name == STAGES:
        check(stage_case.load_model(folder, STAGES, pipeline_parallel=size), expected[STAGES], "two stages")
        return
    ranks.new_groups(tensor_model_parallel_size=size)
    check(stage_case.load_model(folder, TENSOR, tensor_parallel=size), expected[TENSOR], "two tensor-parallel ranks")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [STAGES, pytest.param(TENSOR, marks=pytest.mark.long)])
def test_two_ranks_with_compiled_layers_answer_as_one_process_without(tmp_path, name):
    model = stage_case.MODELS[name]()
    stage_case.save_checkpoint(model, tmp_path / name)
    expected = {name: stage_case.generate(stage_case.make_engine(model))}
    stage_case.write_json(tmp_path / "expected.json", expected)
    ranks.run_on_ranks(run_compiled, 2, tmp_path, name)
