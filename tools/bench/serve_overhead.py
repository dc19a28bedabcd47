"""What HTTP costs: tokens/s through the server at a fixed concurrency beside offline LLM.generate, same work, same run.

    python tools/bench/serve_overhead.py [--model smollm2] [--concurrency 32] [--requests 64] [--rounds 3] [--json FILE]

Both engines have the same options and threads; the sides take turns in going first, as the machine is not equally fast
all the time. CPU seconds of every process are told beside, which other work on the machine changes least.
The clients stream, with usage, and share the machine's cores with the server and the engine. While one side works, the
other one's engine waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from serve_case import served, stream

from megatron_infer.utils.child_process import end_with_parent

WORDS = "the of and to in is that it was for on are as with his they at be this have from or one had by word".split()


def make_work(number: int, seed: int, lengths: tuple[int, int], outputs: tuple[int, int]) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    work = []
    for index in range(number):
        words = [str(index), *(rng.choice(WORDS) for _ in range(rng.randint(*lengths)))]
        work.append({"prompt": " ".join(words), "max_tokens": rng.randint(*outputs)})
    return work


def offline(model: str, config: dict[str, Any], dtype: str, threads: int, concurrency: int, pipe: Any) -> None:
    """A process of its own, as the server's engine is one: does the work it is told and says how long it took."""
    end_with_parent()
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.config.sampling_params import SamplingParams
    from megatron_infer.engine.llm import LLM

    llm = LLM(model, config=InferenceConfig.from_dict(config), dtype=dtype, threads=threads)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        params = [SamplingParams(max_tokens=one["max_tokens"], temperature=0.0, ignore_eos=True) for one in work]
        began = time.perf_counter()
        outputs = llm.generate([one["prompt"] for one in work], params)
        seconds = time.perf_counter() - began
        pipe.send((seconds, [one.outputs[0].text for one in outputs]))


async def online(url: str, work: list[dict[str, Any]], concurrency: int) -> tuple[float, list[str], int]:
    queue = list(enumerate(work))[::-1]
    texts, counted = [""] * len(work), 0

    async def client() -> None:
        nonlocal counted
        while queue:
            index, one = queue.pop()
            body = {**one, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
            heard = await stream(url, body)
            assert not heard.error, heard.error
            texts[index] = heard.text
            counted += heard.num_tokens

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return time.perf_counter() - began, texts, counted


def cpu_seconds(pids: dict[int, str]) -> dict[str, float]:
    import psutil

    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for pid, name in pids.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--input-words", type=int, nargs=2, default=(20, 60))
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(48, 80))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = {"max_requests": args.concurrency, "max_sequence_length": 512, "buffer_size_gb": 0.5}
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    options = (args.model, config, args.dtype, args.threads, args.concurrency, other)
    process = context.Process(target=offline, args=options, daemon=True)
    process.start()
    assert pipe.recv() == "ready"
    typed = [word for name, value in config.items() for word in ("--" + name.replace("_", "-"), str(value))]
    rounds = []
    with served(args.model, *typed, "--dtype", args.dtype, "--threads", str(args.threads)) as server:
        for number in range(args.rounds + 1):  # the first one warms up
            work = make_work(
                args.requests if number else args.concurrency, number, args.input_words, args.output_tokens
            )
            total = sum(one["max_tokens"] for one in work)
            pids = server.processes() | {process.pid: "offline", os.getpid(): "clients"}
            before = cpu_seconds(pids)
            sides: dict[str, Any] = {}
            for side in ("offline", "server") if number % 2 else ("server", "offline"):
                if side == "offline":
                    pipe.send(work)
                    sides[side] = pipe.recv()
                else:
                    sides[side] = asyncio.run(online(server.url, work, args.concurrency))
            (alone, texts), (through, served_texts, counted) = sides["offline"], sides["server"]
            after = cpu_seconds(pids)
            assert counted == total, f"{counted} tokens came, {total} were asked for"
            cpu = {name: round(after[name] - before[name], 2) for name in after}
            different = sum(a != b for a, b in zip(texts, served_texts, strict=True))
            one = {"offline": total / alone, "server": total / through, "different": different, "cpu_s": cpu}
            if number:
                rounds.append(one)
            share = one["server"] / one["offline"]
            name = f"round {number}" if number else "warm-up"
            print(f"{name}: offline {one['offline']:.1f} tok/s in {alone:.2f} s, server {one['server']:.1f} in "
                  f"{through:.2f} s: {share:.1%}; {different} of {len(work)} texts differ; CPU s {cpu}")  # fmt: skip
    pipe.send(None)
    process.join(10)
    shares = [one["server"] / one["offline"] for one in rounds]
    spent = {name: sum(one["cpu_s"][name] for one in rounds) for name in rounds[0]["cpu_s"]}
    all_s = sum(seconds for name, seconds in spent.items() if name != "offline")
    print(f"CPU: offline {spent['offline']:.1f} s; server {all_s:.1f} s, of these the engine {spent['engine']:.1f}: "
          f"{spent['offline'] / all_s:.1%} of offline by CPU time alone")  # fmt: skip
    print(f"median {statistics.median(shares):.1%} of offline (target 97 %), {min(shares):.1%} to {max(shares):.1%}; "
          f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {args.threads} threads")  # fmt: skip
    if args.json is not None:
        args.json.write_text(json.dumps({"rounds": rounds, "median_share": statistics.median(shares)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
