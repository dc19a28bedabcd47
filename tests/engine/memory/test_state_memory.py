"""Memory of recurrent states: what `plan` says, what an engine of the same options takes, what the system measures."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import RECURRENT, make_model

from megatron_infer.cli import generate
from megatron_infer.cli.loading import load_llm
from megatron_infer.cli.main import main
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.memory.regions.choose import resident_bytes
from megatron_infer.memory.store_layout import PAGE_BYTES
from megatron_infer.testing.inspect import inspect

GIB = 2**30


def state_region(engine: DynamicInferenceEngine) -> tuple[int, int]:
    """(address, bytes) of all state slots."""
    states = inspect(engine).store.states
    return states.conv_SLCW.data_ptr(), engine.sizes.state_bytes


def in_memory(engine: DynamicInferenceEngine) -> int:
    return resident_bytes(*state_region(engine))


@pytest.mark.parametrize("kind", RECURRENT)
def test_live_requests_take_a_slot_each_and_cached_states_theirs(kind):
    """Pages are taken when they are first written, so a slot costs its bytes and at most a page at each end."""
    model = make_model(kind, **({"linear_key_head_dim": 768} if kind == "delta" else {"mamba_state_dim": 128}))
    engine = DynamicInferenceEngine(
        model,
        InferenceConfig(
            buffer_size_gb=0.05,
            block_size_tokens=16,
            max_requests=24,
            max_sequence_length=128,
            enable_prefix_caching=True,
            prefix_caching_mamba_gb=0.01,
        ),
    )
    sizes, store = engine.sizes, inspect(engine).store
    slot = sizes.state_slot_bytes
    assert slot > 32 * PAGE_BYTES
    assert sizes.num_state_slots == 24 + 1 + int(0.01 * GIB) // slot
    assert sizes.state_bytes == sizes.num_state_slots * slot
    assert store.layout.num_bytes == -(-sizes.kv_bytes // PAGE_BYTES) * PAGE_BYTES + sizes.state_bytes
    at_rest = in_memory(engine)
    assert at_rest <= slot + 2 * PAGE_BYTES, "slots nobody uses are in memory"
    taken = at_rest
    for num_live in (1, 4, 9):
        while engine.stats().num_running < num_live:  # too short for a cached state
            engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
            engine.step()
        taken = in_memory(engine) - at_rest
        assert num_live * (slot - PAGE_BYTES) <= taken <= num_live * (slot + 2 * PAGE_BYTES)
    for start in (10, 50):
        prompt = list(range(start, start + 40))
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        engine.step()
    more = in_memory(engine) - at_rest - taken
    assert 4 * (slot - PAGE_BYTES) <= more <= 4 * (slot + 2 * PAGE_BYTES), "two rows and two cached states"
    engine.suspend("recompute")
    assert store.resident_bytes() == 0


def test_a_full_engine_takes_what_was_planned():
    """Every row and every cached state in use: the whole state pool, no byte more."""
    model = make_model("mamba", mamba_state_dim=128)
    settings = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"}
    engine = DynamicInferenceEngine(
        model,
        InferenceConfig(
            buffer_size_gb=0.01, block_size_tokens=16, max_sequence_length=96, prefix_caching_mamba_gb=0.005, **settings
        ),
    )
    sizes = engine.sizes
    prompts = [[i % 128, *range(40)] for i in range(2 * sizes.num_state_slots)]
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert inspect(engine).context.states.slots.num_cached == sizes.num_cached_states > 8
    unused = sizes.state_slot_bytes  # of the dummy
    used = in_memory(engine)
    assert sizes.state_bytes - unused - PAGE_BYTES <= used <= sizes.state_bytes + PAGE_BYTES
    assert used <= (0.01 + 0.005) * GIB


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    hf_models = pytest.importorskip("hf_models", exc_type=ImportError)
    path = tmp_path_factory.mktemp("nemotron")
    hf_models.random_model("nemotron_h").save_pretrained(path)
    return path


SPLITS: dict[str, list[str]] = {
    "a share of the buffer": ["--mamba-memory-ratio", "0.4", "--max-requests", "none"],
    "states of so many requests": ["--max-requests", "24"],
    "a state with each block": ["--max-requests", "none"],
}
MORE = ["--enable-prefix-caching", "--prefix-caching-mamba-gb", "0.001"]


@pytest.mark.few
@pytest.mark.parametrize("more", [["--no-enable-prefix-caching"], MORE], ids=["", "cached states"])
@pytest.mark.parametrize("split", SPLITS)
def test_plan_prints_the_sizes_that_an_engine_of_the_same_options_has(directory, split, more, capsys, monkeypatch):
    flags = ["--dtype", "float32", "--buffer-size-gb", "0.004", "--block-size-tokens", "16", *SPLITS[split], *more]
    assert main(["plan", str(directory), *flags, "--json"]) == 0
    planned = {name: row["value"] for name, row in json.loads(capsys.readouterr().out)["sizes"].items()}
    parser = argparse.ArgumentParser()
    generate.add_parser(parser.add_subparsers())
    frozen = gc.get_freeze_count()
    engine = load_llm(parser.parse_args(["generate", str(directory), "--threads", "1", *flags])).engine
    assert gc.get_freeze_count() <= frozen, "the memory of an LLM that a caller drops comes back"
    assert planned == {row.name: row.value for row in engine.sizes.table()}

    buffer, slot, block = int(0.004 * GIB), planned["state_slot_bytes"], planned["block_bytes"]
    blocks, slots, cached = planned["num_blocks"], planned["num_state_slots"], planned["num_cached_states"]
    assert cached == (int(0.001 * GIB) // slot if more is MORE else 0)
    by_hand = {
        "a share of the buffer": (0.6 * buffer // block, 0.4 * buffer // slot),
        "states of so many requests": ((buffer - 24 * slot) // block, 24),
        "a state with each block": (buffer // (block + slot), buffer // (block + slot)),
    }[split]
    assert blocks == by_hand[0]
    assert by_hand[1] - 4 < slots - cached - 1 <= by_hand[1], "requests are a multiple of 4"

    store, context = inspect(engine).store, inspect(engine).context
    assert store.kv_cache.shape[2] == blocks and store.kv_cache.numel() * 4 == blocks * block
    assert store.states.ssm_SLHPN.shape == (slots, 3, 8, 8, 16) and store.states.conv_SLCW.shape == (slots, 3, 128, 4)
    assert (context.num_rows, context.num_blocks) == (planned["max_requests"], blocks - 1)
    assert context.states.slots.count == cached

    monkeypatch.setenv("COLUMNS", "220")
    assert main(["plan", str(directory), *flags]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name, value in (("num_blocks", blocks), ("num_state_slots", slots), ("state_slot_bytes", slot)):
        assert f" {value:,} " in shown[name]


def test_narrower_states_take_half_and_the_engine_answers():
    """conv and SSM dtypes are options; requests double with the same buffer."""
    model = make_model("mamba", mamba_state_dim=128)
    sizes: dict[str, Any] = {"buffer_size_gb": 0.01, "block_size_tokens": 16, "max_sequence_length": 96}
    wide = DynamicInferenceEngine(model, InferenceConfig(**sizes))
    states = MambaInferenceStateConfig.from_model(model)
    states = dataclasses.replace(states, conv_states_dtype="bfloat16", ssm_states_dtype="bfloat16")
    narrow = DynamicInferenceEngine(model, InferenceConfig(**sizes, mamba_inference_state_config=states))
    assert 2 * narrow.sizes.state_slot_bytes == pytest.approx(wide.sizes.state_slot_bytes, rel=0.01)
    assert narrow.sizes.max_requests >= 2 * wide.sizes.max_requests
    assert inspect(narrow).store.states.layer(0).ssm_SHPN.dtype == torch.bfloat16
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    outputs = [engine.generate(list(range(9)), params)[0].outputs[0] for engine in (wide, narrow)]
    assert outputs[0].token_ids[0] == outputs[1].token_ids[0]
