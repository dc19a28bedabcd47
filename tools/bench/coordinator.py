"""The coordinator with replicas that compute nothing: its cost per request, its growth, and what routing saves.

    python tools/bench/coordinator.py [--json FILE] [--quick]

Coordinator and replicas are processes; the load comes from this one. Replicas are `EchoEngine`s: they use the engine's
own prefix cache and sleep in place of computing. So prefill time is simulated; hits and saved tokens are real.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from typing import Any

import psutil
from serve_case import serve_echo

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.utils.child_process import end_with_parent

from echo import echo_tokens  # isort: skip  (serve_case puts its folder into the path)

BLOCK, KEY = 16, b"a key for a benchmark"


def serve_coordinator(policy: str, alpha: float, pipe: Any) -> None:
    end_with_parent()
    from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions

    options = CoordinatorOptions(policy=policy, alpha=alpha, max_queue=100_000, timeout_s=30.0, key=KEY)  # type: ignore[arg-type]
    with Coordinator("tcp://127.0.0.1:0", options) as coordinator:
        pipe.send(coordinator.address)
        coordinator.run()


class Cluster:
    """Processes of a coordinator and its replicas, and a client of theirs."""

    def __init__(
        self, num_replicas: int, *, policy: str = "load_balanced", alpha: float = 0.5, **settings: Any
    ) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        self._processes = [context.Process(target=serve_coordinator, args=(policy, alpha, theirs), daemon=True)]
        self._processes[0].start()
        address = ours.recv()
        for index in range(num_replicas):
            arguments = (address, f"r{index}", settings, KEY)
            self._processes.append(context.Process(target=serve_echo, args=arguments, daemon=True))
            self._processes[-1].start()
        self.client = InferenceClient(address, key=KEY)
        while len(self.client.stats()["replicas"]) < num_replicas:
            time.sleep(0.02)

    def cpu_s(self) -> float:
        """CPU seconds of the coordinator's process."""
        return sum(psutil.Process(self._processes[0].pid).cpu_times()[:2])

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        for process in self._processes:
            process.kill()
            process.join()


def closed_loop(client: InferenceClient, prompts: list[list[int]], params: SamplingParams, in_flight: int) -> float:
    """Run the prompts with so many at once -> seconds. The first answer is checked."""
    room, done = threading.Semaphore(in_flight), threading.Semaphore(0)

    def release(_: Any) -> None:
        room.release()
        done.release()

    futures = []
    began = time.perf_counter()
    for prompt in prompts:
        room.acquire()
        future = client.submit(prompt, params)
        future.add_done_callback(release)
        futures.append(future)
    for _ in futures:
        done.acquire()
    seconds = time.perf_counter() - began
    for prompt, future in zip(prompts[:20], futures, strict=False):
        assert future.result().outputs[0].token_ids == echo_tokens(prompt, params.max_tokens or 16)
    return seconds


def overhead(num_requests: int) -> dict[str, float]:
    """One request after the other through one replica that takes no time; then as many as go."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = list(range(64))
    with Cluster(1, max_requests=256) as one:
        one.client.generate([prompt] * 100, params)
        times = []
        for _ in range(300):
            began = time.perf_counter()
            one.client.generate(prompt, params)
            times.append(time.perf_counter() - began)
        before = one.cpu_s()
        seconds = closed_loop(one.client, [prompt] * num_requests, params, 512)
        cpu = one.cpu_s() - before
    return {
        "latency_p50_us": statistics.median(times) * 1e6,
        "latency_p90_us": sorted(times)[270] * 1e6,
        "requests_per_s": num_requests / seconds,
        "coordinator_cpu_us": cpu / num_requests * 1e6,
        "limit_per_core": num_requests / max(cpu, 1e-9),
    }


def growth(counts: list[int], per_replica: int) -> list[dict[str, float]]:
    """Replicas with a step of 20 ms and 16 rows, kept full: what 1 to 8 of them answer."""
    rows = []
    params = SamplingParams(max_tokens=8, temperature=0.0)
    for count in counts:
        prompts = [[number % 100, number // 100, *range(62)] for number in range(per_replica * count)]
        with Cluster(count, max_requests=16, step_s=0.02) as one:
            closed_loop(one.client, prompts[: 16 * count], params, 20 * count)
            before = one.cpu_s()
            seconds = closed_loop(one.client, prompts, params, 24 * count)
            cpu = one.cpu_s() - before
        rate = len(prompts) / seconds
        ideal = count * 16 / (8 * 0.02)
        rows.append(
            {
                "replicas": count,
                "requests_per_s": rate,
                "ideal_per_s": ideal,
                "share": rate / ideal,
                "busy": cpu / seconds,
            }
        )
    return rows


def routing(num_requests: int, *, prefill_us: float, replicas: int = 4, families: int = 24) -> list[dict[str, Any]]:
    """A few families of prompts that share 512 tokens, in random order, for caches that hold a third of them each."""
    rng = random.Random(0)
    prefixes = [[family, *range(511)] for family in range(families)]
    prompts = []
    for number in range(num_requests):
        tail = [rng.randrange(1000) for _ in range(31)]
        prompts.append([*prefixes[rng.randrange(families)], number, *tail])
    params = SamplingParams(max_tokens=16, temperature=0.0)
    settings = {
        "block_size": BLOCK,
        "num_blocks": families // 3 * 32 + 8 * 4,
        "max_requests": 8,
        "prefill_s_per_token": prefill_us * 1e-6,
        "step_s": 0.002,
    }
    rows = []
    for policy in ("round_robin", "load_balanced", "first_prefix_block", "longest_prefix"):
        with Cluster(replicas, policy=policy, **settings) as one:
            seconds = closed_loop(one.client, prompts, params, 8 * replicas)
            stats = one.client.stats()
        rows.append(
            {
                "policy": policy,
                "hit_rate": stats["cached_tokens"] / stats["prompt_tokens"],
                "saved_tokens": stats["cached_tokens"],
                "prompt_tokens": stats["prompt_tokens"],
                "requests_per_s": num_requests / seconds,
            }
        )
    for row in rows:
        row["speedup"] = row["requests_per_s"] / rows[0]["requests_per_s"]
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table whose columns are the keys."""
    print(f"\n{title}\n" + "".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        cells = (v if isinstance(v, str) else f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in row.values())
        print("".join(f"{cell:>20}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tenth of the load")
    args = parser.parse_args()
    scale = 10 if args.quick else 1
    print(f"client, coordinator and replicas on {os.cpu_count()} cores")
    report: dict[str, Any] = {"overhead": overhead(10_000 // scale)}
    show("a replica that takes no time: one request at a time, then many", [report["overhead"]])
    report["growth"] = growth([1, 2, 4, 8], 800 // scale)
    show("growth: steps of 20 ms, 16 rows, 8 tokens a request", report["growth"])
    report["routing"] = routing(800 // scale, prefill_us=100.0)
    title = (
        "routing: 4 replicas, 24 shared prefixes of 512 tokens, each cache holds 8; prefill simulated, 100 us a token"
    )
    show(title, report["routing"])
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
