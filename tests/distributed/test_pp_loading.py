"""A pipeline stage reads its own layers from files, and they are those of the whole model."""

from __future__ import annotations

import re
from pathlib import Path

import gloo_ranks as ranks
import pytest
import torch
from hf_models import random_model
from test_gguf import write_gguf

from megatron_infer.errors import ConfigError
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import num_parameters, shape_of
from megatron_infer.models.loading.gguf_source import GGUFWeights
from megatron_infer.models.loading.hf_weights import SafetensorsReader
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.stage_layers import stage_span

GPT = ["llama_tied", "llama_all_biases", "qwen2_window_from_layer", "smollm3", "gpt2"]
HYBRID = ["nemotron_h", "granite_factors_tied", "bamba_biases"]


def build_stages(rank: int, size: int, folder: Path) -> None:
    for name in [*GPT, *HYBRID, "file.gguf"]:
        source = open_source(folder / name)
        read = record_reads()
        model = build_model(source, pipeline_parallel=size)
        whole = torch.load(folder / f"{name}.pt")
        first = model.decoder.layers[0].layer_number - 1
        for key, parameter in model.named_parameters():
            if key.startswith("decoder.layers."):
                _, _, index, part = key.split(".", 3)
                key = f"decoder.layers.{int(index) + first}.{part}"
            elif key == "output_layer.weight" and key not in whole:
                key = "embedding.word_embeddings.weight"  # tied: the last stage's own copy
            assert torch.equal(parameter, whole.pop(key)), f"{name}: {key}"
        assert len(read) > 5 and not foreign(read, source.config(), rank, size), f"{name}: reads other stages' layers"
        check_shape(source.config(), model, rank, size)
        torch.save(list(whole), folder / f"{name}.left.{rank}")
    for first in (1, 2):
        model = build_model(open_source(folder / "llama_tied"), pipeline_parallel=2, **stages(first))
        assert len(model.decoder.layers) == (first, 3 - first)[rank], "megatron-core's options decide"
    with pytest.raises(ConfigError, match="pipeline_parallel=1, but megatron-core is set up for 2"):
        build_model(open_source(folder / "llama_tied"))


def stages(first: int) -> dict[str, int]:
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": 3 - first}


def record_reads() -> set[str]:
    """Names of tensors that are read from now on."""
    names: set[str] = set()
    for reader in (SafetensorsReader, GGUFWeights):
        original = getattr(reader, "original_read", reader.read)
        reader.original_read = original

        def read(self, name, *arguments, original=original, **options):
            names.add(name)
            return original(self, name, *arguments, **options)

        reader.read = read
    return names


def foreign(names: set[str], plan, rank: int, size: int) -> set[str]:
    """Which of these tensors belong to layers of other stages; a layer of two blocks may be shared by both."""
    begin, end = stage_span(plan.transformer["num_layers"], size, rank)
    blocks = 2 if plan.architecture in ("BambaForCausalLM", "GraniteMoeHybridForCausalLM") else 1
    mine = {index // blocks for index in range(begin, end)}
    numbered = {name: re.search(r"\.(?:layers|h)\.(\d+)\.", name) for name in names}
    return {name for name, found in numbered.items() if found and int(found[1]) not in mine}


def check_shape(plan, model, rank: int, size: int) -> None:
    """What is sized before anything is built is what is built."""
    live = adopt(model, vocab_size=plan.vocab_size).shape
    sized = shape_of(plan, dtype="float32", pipeline_parallel_size=size, stage=rank)
    for field in ("num_layers", "num_attention_layers", "num_kv_heads", "head_dim", "state", "is_stage"):
        assert getattr(live, field) == getattr(sized, field), f"{plan.architecture}: {field}"


@pytest.mark.timeout(240)
def test_stages_read_their_own_layers_and_together_are_the_model(tmp_path: Path):
    """Hugging Face directories of every naming, tied and not, uneven; GGUF."""
    for name in GPT:
        random_model(name).save_pretrained(tmp_path / name)
    for name in HYBRID:
        random_model(name).save_pretrained(tmp_path / name)
    write_gguf(tmp_path / "file.gguf", random_model("llama"), "llama")
    for name in [*GPT, *HYBRID, "file.gguf"]:
        source = open_source(tmp_path / name)
        model = build_model(source)
        torch.save(dict(model.named_parameters()), tmp_path / f"{name}.pt")
        stage_sizes = [num_parameters(source.config(), num_stages=2, stage=stage) for stage in range(2)]
        copies = source.config().vocab_size * model.config.hidden_size * source.config().tied_embeddings
        assert sum(stage_sizes) == num_parameters(source.config()) + copies
    ranks.run_on_ranks(build_stages, 2, tmp_path)
    for name in [*GPT, *HYBRID, "file.gguf"]:
        left = [set(torch.load(tmp_path / f"{name}.left.{rank}")) for rank in range(2)]
        assert not left[0] & left[1], f"{name}: on no stage: {left[0] & left[1]}"
