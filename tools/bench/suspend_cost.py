"""What a suspend costs: against the live share of the pool, against the pool's size, and over many cycles.

    python tools/bench/suspend_cost.py [--model smollm2] [--pool-mib 512] [--rounds 5] [--cycles 200]

Live requests are real ones with random prompts. "first step" is the first step after the resume, which draws a token
for every request. Resident set sizes are the process's own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.entrypoints.llm import LLM
from megatron_infer.testing.inspect import inspect

MIB = 2**20
BLOCK = 64


def engine_with(llm: LLM, pool_mib: float, mode: str) -> DynamicInferenceEngine:
    """Another engine on the same weights with its own pool."""
    config = InferenceConfig(
        buffer_size_gb=pool_mib / 1024,
        block_size_tokens=BLOCK,
        max_requests=256,
        max_tokens=1024,
        enable_chunked_prefill=True,
        kv_cache_management_mode=mode,
    )
    return DynamicInferenceEngine(llm.engine.model, config, eos_ids=())


def fill(engine: DynamicInferenceEngine, live_bytes: float) -> int:
    """Bring requests into decode until they hold about `live_bytes` -> bytes they hold."""
    sizes, rng = engine.sizes, random.Random(0)
    blocks = max(1, int(live_bytes // sizes.block_bytes))
    vocabulary = engine.shape.vocab_size
    per_request = min(8, blocks)
    for first in range(0, blocks, per_request):
        tokens = min(per_request, blocks - first) * BLOCK - BLOCK // 2
        prompt = [rng.randrange(vocabulary) for _ in range(tokens)]
        engine.add_request(
            prompt, SamplingParams(max_tokens=BLOCK // 2, temperature=0.0, ignore_eos=True), stream="final"
        )
    while engine.stats().num_waiting or inspect(engine).scheduler.running_set.prefilling:
        engine.step()
    return len(inspect(engine).context.held_blocks()) * sizes.block_bytes


def cycle(engine: DynamicInferenceEngine) -> tuple[Any, Any, float]:
    """(suspend report, resume report, seconds of the first step after it)."""
    suspended, resumed = engine.suspend(tags={"kv_cache"}), engine.resume()
    started = time.perf_counter()
    engine.step()
    return suspended, resumed, time.perf_counter() - started


def measure(engine: DynamicInferenceEngine, rounds: int) -> str:
    engine.step()
    started = time.perf_counter()
    engine.step()
    plain = time.perf_counter() - started
    cycles = [cycle(engine) for _ in range(rounds)]
    suspend, resume, first = ([get(c) * 1e3 for c in cycles] for get in (_suspend_s, _resume_s, _first_s))
    report = cycles[0][0].tags["kv_cache"]
    return (
        f"{report.bytes_copied / MIB:9.1f} {report.bytes_freed / MIB:9.1f} {_spread(suspend)} {_spread(resume)} "
        f"{_spread(first)} {plain * 1e3:8.1f}"
    )


def _suspend_s(one: tuple[Any, Any, float]) -> float:
    return one[0].seconds


def _resume_s(one: tuple[Any, Any, float]) -> float:
    return one[1].seconds


def _first_s(one: tuple[Any, Any, float]) -> float:
    return one[2]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.1f} ({min(values):.1f}..{max(values):.1f})".ljust(24)


HEADER = (
    f"{'copied':>9} {'freed':>9} {'suspend ms':>10}{'':14} {'resume ms':>10}{'':14} {'first step ms':>13}{'':11} "
    f"{'a step':>8}   (MiB; median, min..max)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pool-mib", type=float, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=200)
    args = parser.parse_args()
    llm = LLM(args.model)
    print(f"offload, pool of {args.pool_mib:.0f} MiB, by live share\nlive share  {HEADER}")
    for share in (0.05, 0.25, 1.0):
        engine = engine_with(llm, args.pool_mib, "offload")
        held = fill(engine, share * 0.98 * args.pool_mib * MIB)
        print(f"{held / args.pool_mib / MIB:9.0%}   {measure(engine, args.rounds)}", flush=True)
        engine.suspend("recompute", tags={"kv_cache"})
    print(f"\noffload, 24 MiB live, by size of the pool\n{'pool MiB':>10}  {HEADER}")
    for pool in (128, 512, 2048, 4096):
        engine = engine_with(llm, pool, "offload")
        fill(engine, 24 * MIB)
        inspect(engine).store.kv_cache.view(-1)[::1024].zero_()  # every page of the pool is in memory once
        print(f"{pool:10}  {measure(engine, args.rounds)}", flush=True)
        engine.suspend("recompute", tags={"kv_cache"})
    print(f"\nresident set in MiB over {args.cycles} cycles of suspend, resume and a step")
    for mode in ("persist", "offload", "recompute"):
        engine = engine_with(llm, 128, mode)
        marks, rss = sorted({1, *range(args.cycles // 4, args.cycles + 1, max(1, args.cycles // 4))}), {}
        for number in range(1, args.cycles + 1):
            if not engine.has_unfinished():
                fill(engine, 24 * MIB)
            cycle(engine)
            if number in marks:
                rss[number] = engine.suspend().process_bytes_after / MIB
                engine.resume()
        print(f"  {mode:<10} " + "  ".join(f"{number}: {value:.1f}" for number, value in rss.items()), flush=True)
        engine.suspend("recompute", tags={"kv_cache"})


if __name__ == "__main__":
    main()
