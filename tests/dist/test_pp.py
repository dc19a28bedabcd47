"""Pipeline stages on two gloo processes give the tokens and logprobs of one, whatever their layers are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stage_case
import torch

from megatron_infer.models.adopt import adopt


def run_stage(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    folder, expected = Path(folder), json.loads(Path(folder, "expected.json").read_text())
    for name in stage_case.MODELS:
        model = stage_case.load_model(folder, name, pipeline_parallel=size)
        adopted = adopt(model)
        assert (adopted.is_first_stage, adopted.is_last_stage) == (rank == 0, rank == size - 1)
        assert [adopted.shape.num_attention_layers, len(adopted.ssm_specs)] == stage_layers(name)[rank], name
        for features in stage_case.FEATURES:
            engine = stage_case.make_engine(model, features)
            assert engine.parts.scheduler.num_groups == size + engine.config.overlap
            stage_case.assert_same(stage_case.generate(engine), expected[name], f"{name}, {features}")
            stage_case.assert_same(
                stage_case.generate_over_suspends(engine), expected[name], f"{name}, {features}, suspended"
            )
            engine.parts.context.check()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def stage_layers(name: str) -> list[list[int]]:
    """(attention layers, Mamba layers) of each stage."""
    return {
        "tied": [[2, 0], [2, 0]],
        "untied, uneven": [[3, 0], [2, 0]],
        "learned positions": [[1, 0], [1, 0]],
        "first stage without attention": [[0, 3], [2, 1]],
        "last stage without Mamba": [[1, 2], [1, 0]],
        "last stage without either": [[1, 1], [0, 0]],
        "Mamba alone": [[0, 2], [0, 1]],
    }[name]


@pytest.mark.timeout(300)
def test_two_stages_give_the_tokens_and_logprobs_of_one_process(tmp_path: Path):
    """Checkpoints saved by one process, loaded by two; micro-batches in flight, groups, suspends in every mode."""
    stage_case.save_models(tmp_path)
    expected = {}
    for name in stage_case.MODELS:
        expected[name] = stage_case.generate(stage_case.make_engine(stage_case.load_model(tmp_path, name)))
        assert len({tuple(sample[0]) for answer in expected[name] for sample in answer[2:]}) > 5, "too alike to compare"
    stage_case.write_json(tmp_path / "expected.json", expected)
    torch.multiprocessing.spawn(run_stage, args=(2, str(tmp_path)), nprocs=2)
