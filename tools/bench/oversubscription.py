"""What a pool that is too small costs: 1, 2, 4 and 8 times its blocks asked for, for each way of preemption.

    python tools/bench/oversubscription.py [--model tiny|smollm2] [--pool 64] [--demand 1,2,4,8] [--threads N]

All requests arrive at once, with prompts and lengths drawn from a fixed seed; demand is the blocks all of them hold at
their end, in multiples of the pool. `equal` compares their tokens with those of a pool that holds everybody.
Completion is seconds from the start to a request's last token. Prices are those the engine measures on the way.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import InferenceConfig, PreemptionMode
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine

BLOCK = 16
VOCAB = 128
"""Of the tiny model; prompts stay below it with every model."""

MakeEngine = Callable[[InferenceConfig], DynamicInferenceEngine]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt and how many tokens it draws."""

    prompt: list[int]
    params: SamplingParams

    @property
    def num_blocks(self) -> int:
        """Held at its end; the last token drawn is never stored."""
        assert self.params.max_tokens is not None
        return -(-(len(self.prompt) + self.params.max_tokens - 1) // BLOCK)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a set of jobs on one engine."""

    tokens: list[list[int]]
    completion_s: list[float]
    seconds: float
    counters: dict[str, int]


def make_jobs(num_blocks: int, *, max_prompt: int, max_new: int) -> list[Job]:
    """Jobs that hold at least `num_blocks` blocks together at their end."""
    rng = random.Random(11)
    jobs: list[Job] = []
    asked = 0
    while asked < num_blocks:
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randint(max_prompt // 8, max_prompt))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(max_new // 4, max_new), ignore_eos=True)
        jobs.append(Job(prompt, params))
        asked += jobs[-1].num_blocks
    return jobs


def tiny_engines() -> MakeEngine:
    from megatron_infer.testing.tiny import tiny_gpt

    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=VOCAB, max_sequence_length=512, init_method_std=0.2)
    return lambda config: DynamicInferenceEngine(model, config)


def alias_engines(name: str, device: str) -> MakeEngine:
    """Float32, so that a token computed anew equals the one decoded before."""
    from megatron_infer.model_loader.build import build_model
    from megatron_infer.model_loader.sources import open_source

    model = build_model(open_source(name), dtype=torch.float32, device=device)
    return lambda config: DynamicInferenceEngine(model, config, model_name=name)


def run(engine: DynamicInferenceEngine, jobs: list[Job]) -> Outcome:
    completion: list[float] = []
    started = time.perf_counter()
    outputs = engine.generate(
        [job.prompt for job in jobs],
        [job.params for job in jobs],
        on_output=lambda output: completion.append(time.perf_counter() - started),
    )
    return Outcome(
        [output.outputs[0].token_ids for output in outputs],
        completion,
        time.perf_counter() - started,
        engine.stats().counters,
    )


def row(demand: str, mode: str, jobs: list[Job], outcome: Outcome, expected: list[list[int]]) -> str:
    finished = sum(len(tokens) == job.params.max_tokens for tokens, job in zip(outcome.tokens, jobs, strict=True))
    equal = sum(mine == theirs for mine, theirs in zip(outcome.tokens, expected, strict=False))
    verdict = "yes" if equal == len(jobs) else f"{equal}/{len(jobs)}"
    cuts = statistics.quantiles(outcome.completion_s, n=10)
    c = outcome.counters
    return (
        f"{demand:>7}{mode:>11}{f'{finished}/{len(jobs)}':>10}{verdict:>7}{c['paused']:>8}{c['evicted']:>9}"
        f"{c['swapped_out']:>6}{c['swapped_in']:>6}{c['recomputed_tokens']:>12}"
        f"{sum(map(len, outcome.tokens)) / outcome.seconds:>9.0f}"
        f"{cuts[0]:>8.2f}{cuts[4]:>8.2f}{cuts[8]:>8.2f}{max(outcome.completion_s):>8.2f}"
    )


HEADER = (
    f"{'demand':>7}{'preemption':>11}{'finished':>10}{'equal':>7}{'pauses':>8}{'evicted':>9}{'out':>6}{'in':>6}"
    f"{'recomputed':>12}{'tok/s':>9}{'p10 s':>8}{'p50 s':>8}{'p90 s':>8}{'max s':>8}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, or an alias such as smollm2 (default tiny)")
    parser.add_argument("--pool", type=int, default=64, help="blocks of 16 tokens (default 64)")
    parser.add_argument("--paused", type=int, default=0, help="blocks the paused may keep (default 0)")
    parser.add_argument("--host", type=int, default=None, help="host slots (default: twice the pool)")
    parser.add_argument("--demand", default="1,2,4,8", help="multiples of the pool (default 1,2,4,8)")
    parser.add_argument("--rows", type=int, default=64, help="rows of requests (default 64)")
    parser.add_argument("--max-prompt", type=int, default=96)
    parser.add_argument("--max-new", type=int, default=96)
    parser.add_argument("--overlap", action="store_true", help="launch a step before the last is committed")
    parser.add_argument("--device", default="cpu", help="where an alias is loaded (default cpu)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    make = tiny_engines() if args.model == "tiny" else alias_engines(args.model, args.device)
    base: dict[str, Any] = {
        "block_size_tokens": BLOCK,
        "max_sequence_length": args.max_prompt + args.max_new,
        "max_requests": args.rows,
        "max_tokens": 512,
        "enable_chunked_prefill": True,
        "overlap": args.overlap,
    }
    gib = make(InferenceConfig(buffer_size_gb=0.1, **base)).sizes.block_bytes / GIB
    demands = [float(text) for text in args.demand.split(",")]
    everything = make_jobs(int(max(demands) * args.pool), max_prompt=args.max_prompt, max_new=args.max_new)
    total = sum(job.num_blocks for job in everything)
    large = make(InferenceConfig(buffer_size_gb=(total + 1) * gib + 1e-9, **base))
    print(
        f"{args.model}, {torch.get_num_threads()} threads of {platform.processor() or platform.machine()}, pool of "
        f"{args.pool} blocks of {BLOCK}, {args.rows} rows, overlap {'on' if args.overlap else 'off'}"
    )
    expected = run(large, everything)
    assert not expected.counters["evicted"] and not expected.counters["paused"], "the large pool was too small"
    host = 2 * args.pool if args.host is None else args.host
    print(HEADER)
    print(row("large", "-", everything, expected, expected.tokens))
    for demand in demands:
        jobs = make_jobs(int(demand * args.pool), max_prompt=args.max_prompt, max_new=args.max_new)
        for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP, PreemptionMode.AUTO):
            config = InferenceConfig(
                buffer_size_gb=(args.pool + 1) * gib + 1e-9,
                paused_buffer_size_gb=args.paused * gib + 1e-9 if args.paused else 0,
                preemption_mode=mode,
                swap_buffer_size_gb=0 if mode is PreemptionMode.RECOMPUTE else host * gib + 1e-9,
                **base,
            )
            print(row(f"{demand:g}x", mode.value, jobs, run(make(config), jobs), expected.tokens), flush=True)


if __name__ == "__main__":
    main()
