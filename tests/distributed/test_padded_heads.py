"""kv groups that do not divide over ranks are padded with zeros; checkpoints with and without them are one model."""

from __future__ import annotations

import json
from pathlib import Path

import gloo_ranks as ranks
import pytest
import stage_case
import torch
from hf_models import random_model

from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.sources import open_source

SHAPE = ("num_query_heads", "num_kv_heads", "head_dim", "num_attention_layers", "padded_vocab_size")


def on_rank(rank: int, size: int, folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    ranks.new_groups(tensor_model_parallel_size=size)
    for name in ("hf", "whole", "padded", "padded by itself"):
        source = open_source(folder / name)
        model = build_model(source, tensor_parallel=size)
        live, sized = adopt(model).shape, shape_of(source.config(), dtype="float32", tensor_parallel_size=size)
        assert live.num_kv_heads == 2, "three groups over two ranks"
        assert [getattr(live, field) for field in SHAPE] == [getattr(sized, field) for field in SHAPE]
        stage_case.assert_same(stage_case.generate(stage_case.make_engine(model)), expected, name)
        if name == "hf":
            save_checkpoint(model, folder / "padded", description=source.config())
            save_checkpoint(model, folder / "padded by itself")
            torch.distributed.barrier()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_padded_model_is_saved_so_that_any_number_of_ranks_reads_it(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}
    random_model("llama_all_biases", **heads).save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    whole = build_model(source)
    save_checkpoint(whole, tmp_path / "whole", description=source.config())
    stage_case.write_json(tmp_path / "expected.json", stage_case.generate(stage_case.make_engine(whole)))
    ranks.run_on_ranks(on_rank, 2, tmp_path)
    for name in ("padded", "padded by itself"):
        back = build_model(open_source(tmp_path / name))
        assert back.config.num_query_groups == 3 and back.config.num_attention_heads == 6
        for (key, got), (_, want) in zip(back.named_parameters(), whole.named_parameters(), strict=True):
            assert torch.equal(got, want), f"{name}: {key}"
