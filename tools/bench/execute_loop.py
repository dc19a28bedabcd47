"""The `execute` loop of a pipeline beside `engine.generate`: tokens per second of each, in turns, and their ratio.

    python tools/bench/execute_loop.py [--model smollm2] [--requests 16] [--tokens 64] [--rounds 5] [--json out.json]

Both run on one engine with overlap. A round is one run of each; the ratio is the median of the rounds' ratios. The
`execute` loop takes every token of every step, as a server does; `generate` hands out finished requests only.
cpu_ratio is the same of the process's CPU seconds, which other processes disturb less: measure it with --threads 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.entrypoints.llm import LLM
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.text_generation import TextContext, TextGenerationInputs


def by_generate(engine: DynamicInferenceEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, params)]


def by_execute(
    pipeline: OverlapTextGenerationPipeline, prompts: list[list[int]], params: SamplingParams
) -> list[list[int]]:
    contexts = [
        TextContext(request_id=f"row {number}", tokens=list(ids), prompt_len=len(ids), params=params)
        for number, ids in enumerate(prompts)
    ]
    active = contexts
    while active:
        pipeline.execute(TextGenerationInputs.of(active))
        active = [context for context in active if not context.is_done]
    while pipeline.has_pending_outputs():
        pipeline.execute(TextGenerationInputs.empty())
    return [context.generated for context in contexts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(args.model, config={"overlap": True, "enable_prefix_caching": False}, threads=args.threads)
    pipeline = OverlapTextGenerationPipeline.of_engine(llm.engine)
    prompts = [[17 + number, *range(40, 72)] for number in range(args.requests)]
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    rates: dict[str, list[float]] = {"generate": [], "execute": []}
    cpu_s: dict[str, list[float]] = {"generate": [], "execute": []}
    for number in range(args.rounds + 1):
        tokens = {}
        for name in sorted(rates, reverse=bool(number % 2)):
            begun, cpu_begun = time.perf_counter(), time.process_time()
            if name == "generate":
                tokens[name] = by_generate(llm.engine, prompts, params)
            else:
                tokens[name] = by_execute(pipeline, prompts, params)
            rates[name].append(sum(map(len, tokens[name])) / (time.perf_counter() - begun))
            cpu_s[name].append(time.process_time() - cpu_begun)
        assert tokens["generate"] == tokens["execute"], "the two drew different tokens"
    generate, execute = rates["generate"][1:], rates["execute"][1:]  # the first round warms up
    ratios = [one / other for one, other in zip(execute, generate, strict=True)]
    cpu_ratios = [one / other for one, other in zip(cpu_s["generate"][1:], cpu_s["execute"][1:], strict=True)]
    found = {
        "requests": args.requests,
        "generate_tokens_per_s": round(statistics.median(generate), 1),
        "execute_tokens_per_s": round(statistics.median(execute), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(one, 4) for one in ratios],
        "cpu_ratio": round(statistics.median(cpu_ratios), 4),
    }
    print(json.dumps(found, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
