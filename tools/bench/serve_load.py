"""The server under load: right answers, flat memory, latency by percentile, killed clients, slow readers.

    python tools/bench/serve_load.py [--model smollm2] [--clients 200] [--seconds 180] [--storms 5] [--json FILE]

1. CLIENTS streaming clients for SECONDS, each with one request after the other from a pool of prompts: every reply must
   be complete and be what the engine gives for that prompt offline (float32, greedy).
2. Storms: processes full of streaming clients are killed (SIGKILL) again and again; afterwards no request runs and no
   block is held.
3. The latency of quick clients, without and with 20 that read 256 bytes a second, in turns.
Processes' memory (RSS) is sampled all along.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from serve_case import Heard, Server, quantile, served, stream

from megatron_infer.utils.child_process import end_with_parent

Work = list[tuple[dict[str, Any], str]]
"""Bodies of calls, and the text that each must be answered with."""


@dataclass
class Load:
    """What came of a load."""

    seconds: float = 0.0
    heard: list[Heard] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.heard)

    def table(self) -> dict[str, dict[str, float]]:
        """Milliseconds by percentile. ITL: between two pieces of text of a stream."""
        gaps = [b - a for one in self.heard for a, b in itertools.pairwise(one.times)]
        values = {"TTFT": [one.ttft for one in self.heard if one.times], "ITL": gaps}
        values["e2e"] = [one.e2e for one in self.heard]
        return {
            name: {f"p{share:g}": round(1e3 * quantile(given, share / 100), 1) for share in (50, 90, 99)}
            for name, given in values.items()
        }

    def check(self) -> None:
        assert self.heard and not self.errors, self.errors[:3]
        assert not self.wrong, f"{len(self.wrong)} of {len(self.heard)} replies are wrong: {self.wrong[:2]}"


async def load(url: str, work: Work, *, clients: int, seconds: float, spread_s: float = 2.0) -> Load:
    """Closed loop: each client sends its next request when the last one is answered, until `seconds` are over."""
    done, numbers, began = Load(), itertools.count(), time.perf_counter()

    async def client(number: int) -> None:
        await asyncio.sleep(spread_s * number / clients)
        while time.perf_counter() - began < seconds:
            body, right = work[next(numbers) % len(work)]
            heard = await stream(url, {**body, "stream_options": {"include_usage": True}})
            if heard.error:
                done.errors.append(heard.error)
                continue
            done.heard.append(heard)
            if heard.text != right:
                done.wrong.append(f"{body['prompt']!r}: {heard.text!r}, right is {right!r}")

    await asyncio.gather(*(client(number) for number in range(clients)))
    done.seconds = time.perf_counter() - began
    return done


async def dawdle(url: str, body: dict[str, Any], *, readers: int, during: Callable[[], Any]) -> Any:
    """`during()`, awaited, while so many readers take 256 bytes a second each."""
    slow = [asyncio.create_task(stream(url, body, pause_s=1.0, limit=512)) for _ in range(readers)]
    await asyncio.sleep(1.0)
    try:
        return await during()
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


def _crowd(url: str, body: dict[str, Any], clients: int) -> None:
    end_with_parent()

    async def every() -> None:
        await asyncio.gather(*(stream(url, body) for _ in range(clients)))

    asyncio.run(every())


def storm(url: str, body: dict[str, Any], look: Callable[[], dict[str, Any]], *, times: int, clients: int) -> None:
    """Kill a process full of clients in the middle of their streams, `times` times."""
    context = multiprocessing.get_context("spawn")
    for _ in range(times):
        process = context.Process(target=_crowd, args=(url, body, clients), daemon=True)
        process.start()
        deadline = time.monotonic() + 60.0
        while (status := look())["calls"] < clients or not sum(one["running"] for one in status["replicas"]):
            assert process.is_alive() and time.monotonic() < deadline, status
            time.sleep(0.05)
        assert process.pid is not None and process.is_alive(), "its streams had ended before it was killed"
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def is_idle(status: dict[str, Any]) -> bool:
    """No request anywhere and no block held."""
    busy = status["calls"] + status["waiting"] + sum(one["running"] + one["waiting"] for one in status["replicas"])
    held = sum(one["blocks"]["used"] + one["blocks"]["paused"] for one in status["replicas"])
    return bool(status["replicas"]) and not busy and not held


def wait_idle(look: Callable[[], dict[str, Any]], timeout_s: float = 30.0) -> float:
    """Seconds until nothing is held."""
    began = time.monotonic()
    while not is_idle(look()):
        assert time.monotonic() - began < timeout_s, look()
        time.sleep(0.1)
    return time.monotonic() - began


class Memory:
    """RSS of processes, sampled in a thread."""

    def __init__(self, pids: dict[int, str]) -> None:
        self.samples: dict[str, list[float]] = {name: [] for name in pids.values()}
        self._pids, self._ending = pids, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self._thread.join()

    def _sample(self) -> None:
        import psutil

        processes = {name: psutil.Process(pid) for pid, name in self._pids.items()}
        while not self._ending.wait(1.0):
            for name, process in processes.items():
                self.samples[name].append(process.memory_info().rss / 2**20)

    def report(self) -> dict[str, dict[str, float]]:
        """MiB of each process: medians of the second sixth and of the last one, what lies between, and the peak."""
        found = {}
        for name, given in self.samples.items():
            sixth = max(1, len(given) // 6)
            first, last = statistics.median(given[sixth : 2 * sixth]), statistics.median(given[-sixth:])
            figures = {"early": first, "late": last, "grown": last - first, "peak": max(given)}
            found[name] = {key: round(value, 1) for key, value in figures.items()}
        return found


# ---------------------------------------------------------------------- the long run


def make_prompts(number: int) -> list[dict[str, Any]]:
    things = "river garden engine letter winter market island teacher window ship forest song bridge clock".split()
    heads = "Once upon a time a; The best thing about a; How to paint a; A short poem about a; Facts about the".split(
        ";"
    )
    pairs = list(itertools.product(heads, things))
    assert number <= len(pairs)
    return [
        {"prompt": f"{head.strip()} {thing}", "max_tokens": 8 + 5 * i % 17, "temperature": 0, "ignore_eos": True}
        for i, (head, thing) in enumerate(pairs[:number])
    ]


def _offline(model: str, bodies: list[dict[str, Any]], config: dict[str, Any], pipe: Any) -> None:
    end_with_parent()
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.config.sampling_params import SamplingParams
    from megatron_infer.engine.llm import LLM

    llm = LLM(model, config=InferenceConfig.from_dict(config), dtype="float32")
    params = [SamplingParams(max_tokens=one["max_tokens"], temperature=0.0, ignore_eos=True) for one in bodies]
    pipe.send([one.outputs[0].text for one in llm.generate([one["prompt"] for one in bodies], params)])


def offline(model: str, bodies: list[dict[str, Any]], config: dict[str, Any]) -> list[str]:
    """Texts of the engine without a server, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_offline, args=(model, bodies, config, other))
    process.start()
    texts: list[str] = pipe.recv()
    process.join()
    return texts


def run(server: Server, work: Work, args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    look = partial(server.get, "/v1/status")
    asyncio.run(load(server.url, work, clients=8, seconds=5)).check()
    with Memory(server.processes()) as memory:
        main_load = asyncio.run(load(server.url, work, clients=args.clients, seconds=args.seconds))
    main_load.check()
    result["load"] = {
        "clients": args.clients,
        "seconds": round(main_load.seconds, 1),
        "replies": len(main_load.heard),
        "tokens": main_load.num_tokens,
        "tokens_per_s": round(main_load.num_tokens / main_load.seconds, 1),
        "ms": main_load.table(),
        "MiB": memory.report(),
        "idle_after_s": round(wait_idle(look), 2),
    }
    print(json.dumps(result["load"], indent=1))
    long = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    storm(server.url, long, look, times=args.storms, clients=50)
    idle_s = wait_idle(look)
    result["storms"] = {"killed": args.storms, "clients_each": 50, "idle_after_s": round(idle_s, 2)}
    print(json.dumps(result["storms"]))
    medians = slow_readers(server.url, work)
    wait_idle(look)
    result["slow_readers"] = {"without_ms": round(medians[0], 1), "with_ms": round(medians[1], 1)}
    print(json.dumps(result["slow_readers"]))
    return result


def slow_readers(url: str, work: Work, *, rounds: int = 3) -> list[float]:
    """Median milliseconds of 4 quick clients' replies, without and with 20 slow readers, in turns."""
    slow = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        quick = partial(load, url, work, clients=4, seconds=8.0)
        alone = asyncio.run(quick())
        beside = asyncio.run(dawdle(url, slow, readers=20, during=quick))
        for one, found in zip((alone, beside), times, strict=True):
            one.check()
            found += [heard.e2e * 1e3 for heard in one.heard]
    return [statistics.median(found) for found in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--storms", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = {"max_requests": 64, "max_sequence_length": 512, "buffer_size_gb": 0.5}
    bodies = make_prompts(64)
    work = list(zip(bodies, offline(args.model, bodies, config), strict=True))
    typed = [word for name, value in config.items() for word in ("--" + name.replace("_", "-"), str(value))]
    with served(args.model, *typed, "--dtype", "float32") as server:
        result = run(server, work, args)
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
