"""How near the engine comes to what the device can do at most, both measured in one run.

    python tools/bench/speed_of_light.py [--shape llama-8b --shape hybrid-8b] [--peer] [--json out.json]
    python tools/bench/speed_of_light.py --shape tiny                 a CPU: every line of it, at small sizes

Decode is held against the bytes that a copy moves a second: a step reads weights, keys, values and states. Prefill is
held against a bf16 matrix product; bytes and FLOPs are those of `megatron-infer plan --roofline`. Offload is held
against a copy to pinned host memory. Weights are random and made on the device. A step's time includes the host's work.
--peer also measures transformers on the same shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tools" / "bench"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from light import measures, peer
from light.engine import make_bench
from light.machine import Ceilings, measure
from light.scan import prompt_scan
from light.shapes import PLANS, random_model

from megatron_infer.config.model_shape import kv_token_bytes, state_bytes
from megatron_infer.models.loading.description_shape import step_counter

TINY = ("tiny-llama", "tiny-hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of each is measured."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 512
    steps: int = 32
    prompts: tuple[int, ...] = (4096, 16384)
    shares: tuple[float, ...] = (0.1, 0.5, 0.9)


SMALL = Sizes(batches=(1, 4), context=24, steps=3, prompts=(48, 96), shares=(0.5,))


def fitting(sizes: Sizes, per_request: int, free_bytes: int) -> tuple[int, ...]:
    """The batches whose cache fits into the free memory, of which an engine takes no more than 80 %."""
    room = 0.7 * free_bytes
    return tuple(batch for batch in sizes.batches if batch * per_request <= room)


def measure_shape(name: str, device: torch.device, ceilings: Ceilings, sizes: Sizes) -> list[Any]:
    """All rows of one shape."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plan = PLANS[name]
    counter = step_counter(plan, dtype=str(dtype).removeprefix("torch."))
    model = random_model(plan, dtype, device)
    longest = sizes.context + sizes.steps + 128
    request = longest * kv_token_bytes(counter.shape) + state_bytes(counter.shape)
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 2**34
    batches = fitting(sizes, request, free)
    if not batches:
        raise MemoryError(f"{name}: not even one request fits into {free / 2**30:.1f} GiB")
    most = max(batches)
    max_length = max(*sizes.prompts, longest) + 64
    # The pool holds the largest batch at the context's length; a long prompt has it to itself.
    room = max(most, -(-max_length // longest) + 1)
    bench = make_bench(model, counter, device, max_requests=room, max_length=longest, max_sequence_length=max_length)
    rows: list[Any] = [*measures.decode(bench, ceilings, batches=batches, context=sizes.context, steps=sizes.steps)]
    rows.append(
        measures.idle(bench, batch=batches[len(batches) // 2], context=sizes.context, steps=sizes.steps // 2 + 1)
    )
    rows += measures.prefill(bench, ceilings, lengths=sizes.prompts)
    rows += prompt_scan(bench, ceilings, length=max(sizes.prompts), dtype=dtype)
    half = batches[-1] if len(batches) < 3 else batches[2]
    rows.append(
        measures.mixed(
            bench, ceilings, batch=max(1, min(half, room - 8)), context=sizes.context, prompt=sizes.context, prompts=4
        )
    )
    rows += [row for row in (measures.graphs(bench),) if row]
    rows += measures.suspend(bench, ceilings, modes=("persist", "offload", "recompute"), shares=sizes.shares)
    for row in rows:
        row["shape"] = name
    return rows


def give_back() -> None:
    """Release unused memory of the device before the next model is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_peer(name: str, device: torch.device, sizes: Sizes, ours: dict[int, float]) -> list[Any]:
    """transformers on the same shape: a decode step's time, and ours over it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, rows = peer.llama(PLANS[name], dtype, device), []
    for batch in (batch for batch in ours if batch <= 64):
        taken = peer.decode_seconds(model, device, batch=batch, context=sizes.context, steps=sizes.steps)
        row = {"what": f"transformers generate batch {batch}", "ms": taken * 1e3, "tokens_s": batch / taken}
        rows.append(row | {"shape": name, "peer": True, "faster": taken * 1e3 / ours[batch]})
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", action="append", choices=[*PLANS, "tiny"], help="default: both of 8B")
    parser.add_argument("--peer", action="store_true", help="measure transformers' generate, too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    names = [
        name for given in options.shape or ["llama-8b", "hybrid-8b"] for name in (TINY if given == "tiny" else [given])
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and any(name not in TINY for name in names):
        print("speed_of_light: shapes of 8B need a GPU; --shape tiny runs on a CPU")
        return 2
    ceilings = measure(device)
    print(f"{device}: {ceilings}")
    rows: list[Any] = []
    for name in names:
        sizes = SMALL if name in TINY else Sizes()
        made = measure_shape(name, device, ceilings, sizes)
        if options.peer and PLANS[name].architecture == "LlamaForCausalLM":
            give_back()
            ours = {row["batch"]: row["ms"] for row in made if "batch" in row}
            made += measure_peer(name, device, sizes, ours)
        give_back()
        print(f"\n{name}")
        print("\n".join(measures.lines(made)), flush=True)
        rows += made
    if options.json:
        options.json.write_text(json.dumps({"ceilings": ceilings.to_dict(), "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
