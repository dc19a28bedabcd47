"""Attacks on a server by one stranger, and what they cost all others: a table in Markdown.

    python tools/bench/serve_attacks.py [--model smollm2]

During each attack two others ask for /health and for one token again and again. The last two rows: 400 connections that
send nothing at a server that was started with 256 descriptors, and three streams while the HTTP process stands still.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from serve_case import Server, served, stream

JSON = {"Content-Type": "application/json"}


def call(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[str, float]:
    """One call on a connection of its own -> (status or error, seconds)."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    began = time.perf_counter()
    try:
        connection.request(method, path, body, JSON)
        reply = connection.getresponse()
        reply.read()
        return str(reply.status), time.perf_counter() - began
    except OSError as error:
        return type(error).__name__, time.perf_counter() - began
    finally:
        connection.close()


@contextlib.contextmanager
def asking(server: Server, method: str, path: str, body: bytes | None = None) -> Iterator[list[float]]:
    """Seconds of each call of another, until the block ends."""
    seconds: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.05):
            seconds.append(call(server, method, path, body)[1])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        done.set()
        thread.join()


def rss_mib(server: Server) -> int:
    with open(f"/proc/{server.pid}/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) // 1024


def attacked(server: Server, name: str, attack: Callable[[], str]) -> None:
    """Print a row of the table."""
    before = rss_mib(server)
    token = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}).encode()
    with asking(server, "GET", "/health") as health, asking(server, "POST", "/v1/completions", token) as tokens:
        time.sleep(1.0)
        outcome = attack()
        time.sleep(0.5)
    time.sleep(5.0)
    shown = f"{1e3 * max(health):,.0f} | {1e3 * max(tokens):,.0f} | {before} -> {rss_mib(server)}"
    print(f"| {name} | {outcome} | {shown} |", flush=True)


def posting(server: Server, path: str, body: Any, *, times: int = 1) -> Callable[[], str]:
    data = json.dumps(body, separators=(",", ":")).encode()

    def attack() -> str:
        results: list[tuple[str, float]] = []
        threads = [
            threading.Thread(target=lambda: results.append(call(server, "POST", path, data))) for _ in range(times)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ", ".join(f"{status} after {seconds:.2f} s" for status, seconds in results)

    return attack


def nothing() -> str:
    time.sleep(3.0)
    return ""


def endless_header(server: Server) -> str:
    parts, sent = urlsplit(server.url), 0
    began = time.perf_counter()
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), timeout=30) as one:
        one.sendall(b"GET /version HTTP/1.1\r\nX: ")
        while time.perf_counter() - began < 6:
            one.sendall(b"a" * (1 << 20))
            sent += 1
    return f"{sent} MiB taken in {time.perf_counter() - began:.1f} s"


def idle_connections(server: Server) -> str:
    """The outcome of 20 calls beside 400 connections that send nothing."""
    parts = urlsplit(server.url)
    idle = [socket.create_connection((parts.hostname, parts.port)) for _ in range(400)]
    time.sleep(0.5)
    outcomes = Counter(call(server, "GET", "/version")[0] for _ in range(20))
    for one in idle:
        one.close()
    return ", ".join(f"{count} x {outcome}" for outcome, count in outcomes.items())


async def stopped(server: Server, seconds: float) -> str:
    """How three streams end whose HTTP process stands still for so long."""
    body = {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    streams = [asyncio.create_task(stream(server.url, {**body, "prompt": f"Story {i}:"})) for i in range(3)]
    await asyncio.sleep(2.0)
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    os.kill(server.pid, signal.SIGCONT)
    return ", ".join(one.error[:60] or f"{one.num_tokens} tokens" for one in await asyncio.gather(*streams))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    model = parser.parse_args().model
    print("| attack | its outcome | others: /health, ms at most | one token, ms at most | HTTP process, MiB |")
    print("|---|---|---|---|---|")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # the server inherits it
    with served(model) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        texts = "a " * (4 << 20)
        for name, attack in (
            ("nothing", nothing),
            ("two prompts of 8 MB", posting(server, "/v1/completions", {"prompt": texts[:-99]}, times=2)),
            ("8 MB of token ids", posting(server, "/v1/completions", {"prompt": [1] * 4_000_000})),
            ("/tokenize, 4 MB", posting(server, "/tokenize", {"prompt": texts[: 4 << 20]})),
            (
                "200,000 messages",
                posting(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 200_000}),
            ),
            (
                "500,000 entries in logit_bias",
                posting(server, "/v1/completions", {"prompt": [1], "logit_bias": dict.fromkeys(range(500_000), 1)}),
            ),
            ("a header without end", lambda: endless_header(server)),
            ("400 silent connections", lambda: idle_connections(server)),
            ("SIGSTOP for 7 s", lambda: asyncio.run(stopped(server, 7.0))),
        ):
            attacked(server, name, attack)


if __name__ == "__main__":
    main()
