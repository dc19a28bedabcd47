"""Streams that N HTTP processes carry, in front of engines that compute nothing.

    python tools/bench/http_workers.py [--workers 1 2 3] [--streams 64 128 256 512] [--seconds 10] [--json FILE]

Two EchoEngines draw a token for each of their requests every --step-ms (20), so that S streams ask for S x 50 tokens/s.
Coordinator, engines, HTTP processes and clients (raw sockets that count bytes) share the machine's cores; what each of
them used is told beside, as is what a core of HTTP would carry: tokens / CPU seconds of the HTTP processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_infer.utils.child_process import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
os.environ["PYTHONPATH"] = str(ROOT)
MAX_TOKENS = 100


def engine(address: str, step_s: float, name: str) -> None:
    """A replica without a model, until it is killed."""
    end_with_parent()
    from megatron_infer.coordinator.replica import Replica
    from megatron_infer.testing.echo import EchoEngine

    with Replica(EchoEngine(num_blocks=1 << 16, max_requests=512, step_s=step_s), address, name=name) as one:
        one.run()


def clients(url: str, count: int, seconds: float, pipe: Any) -> None:
    """Streams one after the other on `count` connections -> tokens, events, seconds of each stream, gaps."""
    end_with_parent()
    pipe.send(asyncio.run(_clients(url, count, seconds)))


async def _clients(url: str, count: int, seconds: float) -> dict[str, Any]:
    end, found = time.perf_counter() + seconds, {"tokens": 0, "events": 0, "seconds": [], "gaps": []}

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        body = {"prompt": [number % 900, 1, 2], "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        while time.perf_counter() < end:
            began = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            last, tail = 0.0, b""
            while b"[DONE]" not in tail:
                piece = await reader.read(1 << 16)
                assert piece, "the connection was cut"
                now, events = time.perf_counter(), piece.count(b"data: {")
                found["events"] += events
                if last and events:
                    found["gaps"].append(now - last)
                last, tail = now, (tail + piece)[-64:]
            await reader.readuntil(b"0\r\n\r\n") if not tail.endswith(b"0\r\n\r\n") else None
            found["tokens"] += MAX_TOKENS
            found["seconds"].append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(one(number) for number in range(count)))
    return found


def cpu_seconds(pids: dict[str, list[int]]) -> dict[str, float]:
    import psutil

    return {name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in group) for name, group in pids.items()}


def measure(url: str, pids: dict[str, list[int]], streams: int, args: argparse.Namespace) -> dict[str, Any]:
    from serve_case import quantile

    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(args.client_processes):
        pipe, other = context.Pipe()
        share = streams // args.client_processes
        processes.append(context.Process(target=clients, args=(url, share, args.seconds, other), daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    before, began = cpu_seconds(pids), time.perf_counter()
    found = [pipe.recv() for pipe in pipes]
    seconds, after = time.perf_counter() - began, cpu_seconds(pids)
    for process in processes:
        process.join()
    tokens, gaps = sum(one["tokens"] for one in found), [gap for one in found for gap in one["gaps"]]
    cpu = {name: round((after[name] - before[name]) / seconds, 2) for name in after}
    return {
        "streams": streams,
        "tokens_per_s": round(streams * MAX_TOKENS / statistics.mean(s for one in found for s in one["seconds"])),
        "asked_per_s": round(streams * 1000 / args.step_ms),
        "tokens_per_event": round(tokens / sum(one["events"] for one in found), 2),
        "gap_ms": {f"p{share}": round(1e3 * quantile(gaps, share / 100), 1) for share in (50, 99)},
        "cores": cpu,
        "tokens_per_cpu_s_of_http": round(tokens / (after["http"] - before["http"])),
    }


def run(workers: int, args: argparse.Namespace, tokenizer: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    import psutil

    from megatron_infer.server.process_options import HttpOptions
    from megatron_infer.server.server_config import ServerConfig
    from megatron_infer.server.supervisor import Process, coordinator_process

    address = f"ipc://{folder}/coordinator{workers}"
    settings = ServerConfig(port=0, log_requests=False, max_queue=1 << 14, http_workers=workers)
    options = HttpOptions(settings=settings, coordinator=address, tokenizer=tokenizer, folder=folder, model="echo")
    context = multiprocessing.get_context("spawn")
    step_s = args.step_ms / 1e3
    engines = [context.Process(target=engine, args=(address, step_s, f"e{i}"), daemon=True) for i in range(2)]
    one = Process(coordinator_process({"bind": address, "max_queue": 1 << 14}))
    http = Process(options.process())
    try:
        one.start()
        one.wait_ready(60)
        for process in engines:
            process.start()
        http.start()
        url = http.wait_ready(60)["url"]
        assert http.pid is not None and one.pid is not None
        children = [child.pid for child in psutil.Process(http.pid).children()]
        pids = {"http": children or [http.pid], "coordinator": [one.pid], "engines": [p.pid for p in engines if p.pid]}
        found = []
        for streams in args.streams:
            found.append({"workers": workers, **measure(url, pids, streams, args)})
            print(json.dumps(found[-1]), flush=True)
        return found
    finally:
        http.signal(signal.SIGTERM)
        http.wait(10)
        for process in (*engines,):
            process.kill()
        one.signal(signal.SIGKILL)


def main() -> int:
    from megatron_infer.server.launch import save_tokenizer_in_subprocess

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        tokenizer = save_tokenizer_in_subprocess("smollm2", folder)
        found = [one for workers in args.workers for one in run(workers, args, tokenizer, folder)]
    finally:
        shutil.rmtree(folder)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
