"""What LoRA adapters cost: tokens a second of 16 requests on SmolLM2 with none, one and eight adapters.

    taskset -c 0,1 python tools/bench/lora.py [--rank 16] [--rounds 5] [--dtype bfloat16]

Cases take turns within a round; the figure of a case is its median, and its ratio that to the engine without adapters.
Adapters are random PEFT directories of all seven projections, whose queries, keys and values have an A each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_infer import LLM, LoRAConfig, SamplingParams

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 128, 128


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


def load_beside(engine: Any, folders: list[Path]) -> None:
    """Print how long steps of 16 requests take while adapters are loaded beside them, and how long that takes."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 40000, (NUM_REQUESTS, 16), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    ids = [engine.add_request(prompt, params, stream="delta") for prompt in prompts]

    def step() -> float:
        began = time.perf_counter()
        engine.step()
        return time.perf_counter() - began

    def steps(count: int) -> list[float]:
        return [step() for _ in range(count)]

    steps(20)
    alone, beside, loads, installs = steps(60), [], [], []
    for number, folder in enumerate(folders):
        name = f"beside{number}"
        began = time.perf_counter()
        reading = engine.controls.adapters.read(name, folder)
        while not reading.future.done():
            beside.append(step())
        install = time.perf_counter()
        engine.load_adapter(name, reading)
        installs.append(time.perf_counter() - install)
        loads.append(time.perf_counter() - began)
        ids.append(engine.add_request([5], SamplingParams(temperature=0.0, max_tokens=2, adapter=name)))
        beside.append(step() + installs[-1])  # this step writes it into a slot
        alone += steps(10)
    for request_id in ids[:NUM_REQUESTS]:
        engine.abort(request_id)
    usual = statistics.median(alone)
    print(f"a step of {NUM_REQUESTS} requests: median {usual * 1e3:.1f} ms, longest {max(alone) * 1e3:.1f}")
    print(
        f"while {len(folders)} adapters are loaded: median {statistics.median(beside) * 1e3:.1f} ms, longest "
        f"{max(beside) * 1e3:.1f} ({max(beside) / usual:.2f} usual steps); on the engine's thread "
        f"{max(installs) * 1e3:.1f} ms at most; loaded after {statistics.median(loads) * 1e3:.0f} ms, at most "
        f"{max(loads) * 1e3:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    settings: dict[str, Any] = {"buffer_size_gb": 0.5, "max_requests": 16, "enable_prefix_caching": False}
    plain = LLM("smollm2", config=settings, dtype=args.dtype)
    adapted = LLM("smollm2", config=settings | {"lora": LoRAConfig(max_loras=8, max_rank=args.rank)}, dtype=args.dtype)
    seconds = []
    with tempfile.TemporaryDirectory() as root:
        folders = [write_adapter(Path(root) / f"{i}", adapted.engine.model, args.rank, i) for i in range(16)]
        for index in range(8):
            began = time.perf_counter()
            adapted.engine.load_adapter(f"a{index}", folders[index])
            seconds.append(time.perf_counter() - began)
        shown = statistics.median(seconds) * 1e3, seconds[0] * 1e3, max(seconds[1:]) * 1e3
        print("load_adapter, rank {}: {:.0f} ms; the first {:.0f}, others at most {:.0f}".format(args.rank, *shown))
        load_beside(adapted.engine, folders[8:])
    if not args.rounds:
        return
    cases: dict[str, tuple[LLM, list[str | None]]] = {
        "engine without adapters": (plain, [None]),
        "base requests, 8 adapters loaded": (adapted, [None]),
        "one adapter": (adapted, ["a0"]),
        "8 adapters": (adapted, [f"a{index}" for index in range(8)]),
    }
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 40000, (NUM_REQUESTS, NUM_PROMPT), generator=generator).tolist()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(args.rounds + 1):
        for name, (llm, names) in cases.items():
            params = [
                SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, adapter=names[i % len(names)])
                for i in range(NUM_REQUESTS)
            ]
            began = time.perf_counter()
            llm.generate(prompts, params)
            if round_number:  # the first one warms up
                found[name].append(NUM_REQUESTS * NUM_OUTPUT / (time.perf_counter() - began))
    base = statistics.median(found["engine without adapters"])
    for name, speeds in found.items():
        median = statistics.median(speeds)
        print(f"{name:34} {median:7.0f} tok/s  {median / base:.3f}  (rounds {min(speeds):.0f} to {max(speeds):.0f})")


if __name__ == "__main__":
    main()
