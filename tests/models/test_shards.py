"""Which files of a directory a model's tensors come from: those that transformers loads, and the index decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import logits_of, random_model
from plain_forward import full_logits
from safetensors.torch import load_file, save_file

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.hf_weights import SafetensorsReader
from megatron_infer.models.loading.sources import open_source
from megatron_infer.pipelines.foreign_runner import read_weights

IDS = list(range(1, 30))
NAME = "model.layers.0.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original() -> Any:
    return random_model("llama")


def in_shards(model: Any, folder: Path) -> list[Path]:
    model.save_pretrained(folder, max_shard_size="20KB")
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) > 2
    return found


def add(path: Path, **tensors: torch.Tensor) -> None:
    save_file({**load_file(path), **{name.replace("__", "."): one for name, one in tensors.items()}}, path)


def stale_in(folder: Path, place: int) -> None:
    """Put another value of a tensor into the first or last shard, where the index does not look for it."""
    shards = sorted(folder.glob("model-*.safetensors"))
    home = json.loads((folder / INDEX).read_text())["weight_map"][NAME]
    assert shards[place].name != home
    save_file({**load_file(shards[place]), NAME: torch.ones(80, 48)}, shards[place])


def stale_before(model: Any, folder: Path) -> None:
    in_shards(model, folder)
    stale_in(folder, 0)


def stale_after(model: Any, folder: Path) -> None:
    in_shards(model, folder)
    stale_in(folder, -1)


def unnamed(model: Any, folder: Path) -> None:
    add(in_shards(model, folder)[1], extra__weight=torch.ones(3))


def beside_shards(model: Any, folder: Path) -> None:
    in_shards(model, folder)
    save_file({"layers.0.wq.weight": torch.ones(3)}, folder / "consolidated.safetensors")


def beside_one(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    save_file({"layers.0.wq.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    save_file({"state.0.exp_avg": torch.ones(3), NAME: torch.ones(80, 48)}, folder / "optimizer.safetensors")


def pickled(model: Any, folder: Path) -> None:
    """Shards of torch.save, with a stale tensor in the last one and an optimizer beside them."""
    shards = in_shards(model, folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for path in shards:
        state = load_file(path)
        if path == shards[0]:
            state[NAME] = torch.ones(80, 48)
        torch.save(state, folder / f"pytorch_{path.stem}.bin")
        path.unlink()
    (folder / INDEX).unlink()
    names = {name: f"pytorch_{Path(file).stem}.bin" for name, file in weight_map.items()}
    index = {"metadata": {}, "weight_map": names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def beside_pickled(model: Any, folder: Path) -> None:
    pickled(model, folder)
    save_file({"state.0.exp_avg": torch.ones(3)}, folder / "optimizer.safetensors")
    save_file({"base_model.lora_A.weight": torch.ones(3)}, folder / "adapter_model.safetensors")


DIRECTORIES = (stale_before, stale_after, unnamed, beside_shards, beside_one, pickled, beside_pickled)


@pytest.mark.parametrize("arrange", DIRECTORIES, ids=lambda one: one.__name__)
def test_a_directory_is_the_model_that_its_index_or_whole_file_says(
    arrange: Callable[[Any, Path], None], original: Any, tmp_path: Path
) -> None:
    arrange(original, tmp_path)
    expected = logits_of(original, IDS)
    if arrange is not stale_after:  # transformers takes the tensor of the last shard, whatever the index says
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert (logits_of(loaded, IDS) - expected).abs().max() < 1e-4
    got = full_logits(build_model(open_source(tmp_path)), IDS)
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    if arrange is not pickled:
        assert torch.equal(read_weights(tmp_path)[NAME], original.state_dict()[NAME])


def test_a_whole_file_beside_an_index_is_what_is_read_with_a_warning(original: Any, tmp_path: Path) -> None:
    in_shards(original, tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"model\.safetensors is read, as transformers does.*remove the one"):
        assert set(SafetensorsReader(tmp_path).shapes()) == {"a"}


def test_a_tensor_that_is_not_where_the_index_says_is_missing(original: Any, tmp_path: Path) -> None:
    shards = in_shards(original, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    home = index["weight_map"][NAME]
    index["weight_map"][NAME] = next(path.name for path in shards if path.name != home)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"missing \(1\): {NAME}"):
        build_model(open_source(tmp_path))
