"""What a long prompt costs those who stream, and what it waits for: each batching policy in turns, on one model.

    python tools/bench/batching_policies.py [--model smollm2] [--streams 16] [--prompt 4096] [--rounds 3] [--json FILE]

So many requests stream when the long prompt arrives. Told are its time to the first token, and the times between the
tokens of the streams from its arrival until its first token, in the round of a policy that other programs disturbed
least. Every policy gives the same tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from megatron_infer.cli.bench_workload import percentile
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.entrypoints.llm import LLM
from megatron_infer.utils.host import CpuClock

CASES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "mixed, max_tokens=128": {"max_tokens": 128},
    "prefill_first": {"batching": "prefill_first"},
    "phased": {"batching": "phased"},
}


def play(engine: DynamicInferenceEngine, streams: list[list[int]], prompt: list[int], tokens: int) -> dict[str, Any]:
    """Stream, let the prompt arrive in the middle, and go on to the end."""
    clock = CpuClock.now()
    ids = [engine.add_request(one, _params(tokens)) for one in streams]
    drawn: dict[str, list[int]] = {}
    times: dict[str, list[float]] = {}
    arrived, late = 0.0, ""
    while engine.has_unfinished():
        if not late and len(times) == len(ids) and min(map(len, times.values())) >= tokens // 4:
            arrived, late = time.perf_counter(), engine.add_request(prompt, _params(8))
        for output in engine.step():
            fresh = output.outputs[0].token_ids
            moments = times.setdefault(output.request_id, [])
            moments += [time.perf_counter()] * (len(fresh) - len(moments))
            drawn[output.request_id] = fresh
    first = times[late][0]
    gaps = [b - a for one in ids for a, b in zip(times[one], times[one][1:], strict=False) if b > arrived and a < first]
    end = CpuClock.now()
    return {
        "first_token_s": first - arrived,
        "gap_p50_ms": percentile(gaps, 50) * 1e3,
        "gap_p99_ms": percentile(gaps, 99) * 1e3,
        "longest_gap_ms": max(gaps) * 1e3,
        "all_s": end.wall - clock.wall,
        "other_load": end.other_load(clock),
        "tokens": [drawn[one] for one in (*ids, late)],
    }


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base = {
        "enable_prefix_caching": False,
        "max_requests": args.streams + 1,
        "max_tokens": 512,
        "max_sequence_length": args.prompt + 256,
    }
    llm = LLM(args.model, config=base, dtype=args.dtype, threads=args.threads)
    streams = [[17 + number, *range(40, 72)] for number in range(args.streams)]
    prompt = [1000 + (7 * place) % 40000 for place in range(args.prompt)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    expected = None
    for number in range(args.rounds + 1):  # the first one warms up
        for name, case in CASES.items():
            config = machine_config({**base, **case}, is_cuda=False, available_bytes=8 << 30)
            engine = DynamicInferenceEngine(llm.engine.model, config)
            one = play(engine, streams, prompt, args.tokens)
            tokens = one.pop("tokens")
            expected = expected or tokens
            one["same_tokens"] = tokens == expected
            if number:
                found[name].append(one)
            print(name, {key: round(value, 2) for key, value in one.items()}, flush=True)
    print(
        "\n| batching | first token of the prompt, s | between tokens of the streams, ms: p50, p99, longest | all, s |"
    )
    print("|---|---|---|---|")
    for name, ones in found.items():
        one = min(ones, key=lambda one: one["other_load"] or 0.0)
        print(
            f"| {name} | {one['first_token_s']:.2f} | {one['gap_p50_ms']:.0f}, {one['gap_p99_ms']:.0f}, "
            f"{one['longest_gap_ms']:.0f} | {one['all_s']:.2f} |"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
