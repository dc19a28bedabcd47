"""vLLM's server beside ours: first token and time between tokens at 1, 16 and 32 at once, in turns on the same machine.

    python tools/bench/serve_beside.py DIRECTORY --vllm-python VENV/bin/python [--concurrency 1,16,32] [--rounds 3]

Both serve the Hugging Face directory in the same dtype with the same number of threads and stream answers of the same
lengths to the same prompts; `megatron-infer bench-serve` asks. While one is asked the other one waits.
`megatron-infer convert smollm2 DIRECTORY --dtype bfloat16` makes a directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_case import ROOT, START_S, served

from megatron_infer.utils.child_process import ChildProcess, run

FIGURES = {"first token": "ttft_ms", "between tokens": "itl_ms"}


@contextlib.contextmanager
def vllm_served(python: str, directory: str, dtype: str, threads: int, log: Path) -> Iterator[str]:
    """-> the URL of vLLM's server of a directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "2"}
    env.pop("PYTHONPATH", None)
    options = ("--model", directory, "--port", str(port), "--dtype", dtype, "--max-model-len", "1024")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *options]
    with log.open("wb") as lines:
        process = ChildProcess(command, env=env, stdout=lines, stderr=lines)
    try:
        url, ends = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit("vLLM's server does not start:\n" + log.read_text()[-2000:])
            time.sleep(0.5)
        yield url
    finally:
        process.end()


def ask(url: str, concurrency: int, requests: int, seed: int, report: Path) -> dict[str, Any]:
    """One run of bench-serve -> its report."""
    options = {"--concurrency": concurrency, "--num-requests": requests, "--workload-seed": seed, "--json": report}
    typed = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "megatron_infer", "bench-serve", url, *typed]
    done = run(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise SystemExit(f"bench-serve {url} failed:\n{done.stdout}{done.stderr}")
    return dict(json.loads(report.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--vllm-python", required=True, metavar="PYTHON", help="of the environment that has vLLM")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", default="1,16,32")
    parser.add_argument("--requests", type=int, default=32, help="of a run; at 1 at once an eighth of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[int, list[dict[str, Any]]]] = {"megatron_infer": {}, "vLLM": {}}
    ours = ("--dtype", args.dtype, "--threads", str(args.threads), "--max-sequence-length", "1024")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        report, log = Path(folder) / "report.json", Path(folder) / "log"
        theirs = vllm_served(args.vllm_python, args.directory, args.dtype, args.threads, log)
        urls = {"vLLM": stack.enter_context(theirs)}
        urls["megatron_infer"] = stack.enter_context(served(args.directory, *ours)).url
        for url in urls.values():
            ask(url, 16, 16, 99, report)  # warms up
        for at_once in map(int, args.concurrency.split(",")):
            for number in range(args.rounds):
                for name in sorted(urls, reverse=bool(number % 2)):
                    requests = max(args.requests // 8, 2) if at_once == 1 else max(args.requests, at_once)
                    # prompts that no run has had: none is in a prefix cache
                    one = ask(urls[name], at_once, requests, 1000 * at_once + number, report)
                    found[name].setdefault(at_once, []).append(one)
                    times = "; ".join(
                        f"{title} p50 {one['latency'][key]['p50']:.1f}, p99 {one['latency'][key]['p99']:.1f} ms"
                        for title, key in FIGURES.items()
                    )
                    rate = f"{one['output_tokens_per_s']:.0f} tokens/s"
                    print(f"{at_once} at once, round {number + 1}: {name} {rate}; {times}", flush=True)
    print("\n| at once | server | tokens/s | first token, ms: p50, p99 | between tokens, ms: p50, p99 |")
    print("|---|---|---|---|---|")
    for at_once in map(int, args.concurrency.split(",")):
        for name, runs in found.items():
            middle = {
                (key, p): statistics.median(one["latency"][key][p] for one in runs[at_once])
                for key in FIGURES.values()
                for p in ("p50", "p99")
            }
            rate = statistics.median(one["output_tokens_per_s"] for one in runs[at_once])
            cells = " | ".join(f"{middle[key, 'p50']:.1f}, {middle[key, 'p99']:.1f}" for key in FIGURES.values())
            print(f"| {at_once} | {name} | {rate:.0f} | {cells} |")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
