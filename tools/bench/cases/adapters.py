"""What LoRA adapters cost, on SmolLM2."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cases.case import Case, Clock, Done, Measure, Variant
from megatron_infer import LLM, LoRAConfig, SamplingParams

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 128, 128
NUM_ADAPTERS = 8


def state_dict(model: Any, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """A random adapter of a Llama under PEFT's names."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    width, inner = config.hidden_size, config.ffn_hidden_size
    keys = config.kv_channels * config.num_query_groups
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {}
    for layer in range(config.num_layers):
        for name, (rows, columns) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / columns**0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.005
    return tensors


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> Path:
    """A PEFT directory."""
    folder.mkdir()
    save_file(state_dict(model, rank, seed), folder / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def generate(clock: Clock, llm: LLM, adapters: list[str | None]) -> Done:
    """NUM_REQUESTS requests; request i asks for adapters[i % len(adapters)]."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 2000, (NUM_REQUESTS, NUM_PROMPT), generator=generator).tolist()
    params = [
        SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, adapter=adapters[i % len(adapters)])
        for i in range(NUM_REQUESTS)
    ]
    with clock:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return Done(NUM_REQUESTS * NUM_OUTPUT)


@contextlib.contextmanager
def lora(args: argparse.Namespace) -> Iterator[list[Measure]]:
    settings: dict[str, Any] = {"buffer_size_gb": 0.5, "max_requests": NUM_REQUESTS, "enable_prefix_caching": False}
    adapters = LoRAConfig(max_loras=NUM_ADAPTERS, max_rank=args.rank)
    plain = LLM("smollm2", config=settings, dtype=args.dtype)
    adapted = LLM("smollm2", config=settings | {"lora": adapters}, dtype=args.dtype)
    seconds = []
    with tempfile.TemporaryDirectory() as root:
        model = adapted.engine.model
        folders = [write_adapter(Path(root) / f"{i}", model, args.rank, i) for i in range(NUM_ADAPTERS)]
        for index in range(NUM_ADAPTERS):
            began = time.perf_counter()
            adapted.engine.load_adapter(f"a{index}", folders[index])
            seconds.append(time.perf_counter() - began)
        shown = statistics.median(seconds) * 1e3, seconds[0] * 1e3, max(seconds[1:]) * 1e3
        print("load_adapter, rank {}: {:.0f} ms; the first {:.0f}, others at most {:.0f}".format(args.rank, *shown))
    names = [f"a{index}" for index in range(NUM_ADAPTERS)]
    variants: dict[str, Variant] = {
        "an engine without adapters": partial(generate, llm=plain, adapters=[None]),
        "base requests, 8 adapters loaded": partial(generate, llm=adapted, adapters=[None]),
        "one adapter": partial(generate, llm=adapted, adapters=names[:1]),
        "8 adapters": partial(generate, llm=adapted, adapters=names),
    }
    yield [Measure(f"{NUM_REQUESTS} requests", "token", variants)]


CASES = {
    "lora": Case(
        about="LoRA adapters: 16 requests with none, one and eight.\n\n"
        "Adapters are random PEFT directories of all seven projections; queries, keys and values have an A each.\n"
        "First the seconds of a load.",
        prepare=lora,
        rounds=5,
        options={"rank": 16, "dtype": "bfloat16"},
    ),
}
