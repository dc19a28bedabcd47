"""A server whose processes are killed again and again under load: no stream of a live HTTP process is lost or altered.

    python tools/bench/serve_soak.py [--model smollm2] [--clients 200] [--seconds 180] [--http-workers 1] [--json FILE]

CLIENTS streaming clients, each with one request after the other, beside 8 that leave in the middle, 4 that read 256
bytes a second, 4 that send what is refused and 40 silent connections. Every KILL_S (30) a process is killed (SIGKILL),
each kind in turn: an engine, the coordinator, and with --http-workers one of these. Every stream that ends must have
the text of offline generation; those on connections that a killed HTTP process had accepted are counted apart. Memory
(RSS) of every process is sampled from its start on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serve_case import Heard, Server, quantile, served, stream
from serve_load import Work, is_idle, make_prompts, offline

ROLES = ("engine", "coordinator", "http_worker")
BAD = (b"{", b'{"prompt": 1.5}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "n": 1000}', b"\xff" * 1000)


@dataclass
class Outcome:
    heard: list[Heard] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cut: int = 0
    """Streams whose HTTP process was killed."""
    wrong: list[str] = field(default_factory=list)
    left: int = 0
    refused: int = 0
    read_slowly: int = 0
    kills: list[tuple[float, str]] = field(default_factory=list)


class Soak:
    """The clients of one run."""

    def __init__(self, url: str, work: Work, seconds: float) -> None:
        self.url, self.work, self.outcome = url, work, Outcome()
        self.end = time.perf_counter() + seconds
        self._numbers = itertools.count()

    def _next(self) -> tuple[dict[str, Any], str]:
        body, right = self.work[next(self._numbers) % len(self.work)]
        return {**body, "stream_options": {"include_usage": True}}, right

    def _http_killed_within(self, began: float, ended: float) -> bool:
        return any(began <= at <= ended + 1.0 for at, role in self.outcome.kills if role == "http_worker")

    async def stay(self, number: int, clients: int) -> None:
        await asyncio.sleep(2.0 * number / clients)
        while time.perf_counter() < self.end:
            body, right = self._next()
            heard = await stream(self.url, body)
            if heard.error:
                was_cut = heard.error.startswith(("EOFError", "Connection", "ValueError: b''"))
                if was_cut and self._http_killed_within(heard.began, heard.ended):
                    self.outcome.cut += 1
                else:
                    self.outcome.lost.append(heard.error)
                    await asyncio.sleep(0.2)
                continue
            self.outcome.heard.append(heard)
            if heard.text != right:
                self.outcome.wrong.append(f"{body['prompt']!r}: {heard.text!r}, right is {right!r}")

    async def leave(self) -> None:
        while time.perf_counter() < self.end:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0.2, 8.0)):
                    await stream(self.url, self._next()[0])
            self.outcome.left += 1

    async def dawdle(self) -> None:
        """A reader of 256 bytes a second; its text must be right, too."""
        while time.perf_counter() < self.end:
            body, right = self._next()
            heard = await stream(self.url, body, pause_s=1.0, limit=512)
            self.outcome.read_slowly += 1
            if heard.text != right and not (heard.error and self._http_killed_within(heard.began, heard.ended)):
                self.outcome.wrong.append(f"slow reader: {heard.error or heard.text!r}")

    async def annoy(self) -> None:
        parts, bodies = urlsplit(self.url), itertools.cycle(BAD)
        while time.perf_counter() < self.end:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                data = next(bodies)
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
                status = await reader.readline()
                assert not status or status.split()[1][:1] == b"4", status
                self.outcome.refused += bool(status)
                writer.close()
            await asyncio.sleep(0.2)

    async def idle(self) -> None:
        parts = urlsplit(self.url)
        while time.perf_counter() < self.end:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.1, self.end - time.perf_counter())):
                        await reader.read()
                writer.close()

    async def kill(self, server: Server, every_s: float, roles: list[str]) -> None:
        for role in itertools.cycle(roles):
            if time.perf_counter() + every_s > self.end:
                return
            await asyncio.sleep(every_s)
            pid = random.choice([pid for pid, name in processes_of(server).items() if name.startswith(role)])
            self.outcome.kills.append((time.perf_counter(), role))
            os.kill(pid, signal.SIGKILL)

    async def run(self, server: Server, args: argparse.Namespace) -> None:
        roles = [role for role in ROLES if role != "http_worker" or args.http_workers > 1]
        await asyncio.gather(
            *(self.stay(number, args.clients) for number in range(args.clients)),
            *(self.leave() for _ in range(8)),
            *(self.dawdle() for _ in range(4)),
            *(self.annoy() for _ in range(4)),
            *(self.idle() for _ in range(40)),
            self.kill(server, args.kill_s, roles),
        )


def processes_of(server: Server) -> dict[int, str]:
    """Process id -> its role, and which of its kind it is."""
    import psutil

    names = {server.pid: "http"}
    for child in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = child.cmdline()
            if (role := next((role for role in ROLES if role in words), None)) is not None:
                names[child.pid] = role
    return names


class Memory(threading.Thread):
    """RSS of every process of a server, also of those that are started later, each second."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
        self.server, self.ending = server, threading.Event()

    def run(self) -> None:
        import psutil

        while not self.ending.wait(1.0):
            for pid, role in processes_of(self.server).items():
                with contextlib.suppress(psutil.Error):
                    rss = psutil.Process(pid).memory_info().rss / 2**20
                    self.samples.setdefault((role, pid), []).append((time.perf_counter(), rss))

    def report(self) -> list[dict[str, Any]]:
        """MiB of each process: medians of its second fifth and of its last one, and the most."""
        found = []
        for (role, _), given in self.samples.items():
            values = [rss for _, rss in given]
            fifth = max(1, len(values) // 5)
            early, late = statistics.median(values[fifth : 2 * fifth] or values), statistics.median(values[-fifth:])
            figures = {"early": early, "late": late, "peak": max(values)}
            found.append({"process": role, "seconds": len(values)} | {k: round(v, 1) for k, v in figures.items()})
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--kill-s", type=float, default=30.0)
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = {"max_requests": 64, "max_sequence_length": 512, "buffer_size_gb": 0.25}
    bodies = make_prompts(64)
    work = list(zip(bodies, offline(args.model, bodies, config), strict=True))
    typed = [word for name, value in config.items() for word in ("--" + name.replace("_", "-"), str(value))]
    typed += ["--http-workers", str(args.http_workers), "--dp", str(args.dp)]
    with served(args.model, *typed, "--dtype", "float32") as server:
        soak, memory = Soak(server.url, work, args.seconds), Memory(server)
        memory.start()
        began = time.perf_counter()
        asyncio.run(soak.run(server, args))
        seconds = time.perf_counter() - began
        deadline = time.monotonic() + 60
        while not is_idle(status := server.get("/v1/status")):
            assert time.monotonic() < deadline, status
            time.sleep(0.2)
        memory.ending.set()
        memory.join()
        state = [{key: one[key] for key in ("name", "restarts", "last_exit")} for one in status["workers"]]
    found, heard = soak.outcome, soak.outcome.heard
    gaps = [b - a for one in heard for a, b in itertools.pairwise(one.times)]
    times = {"first token": [one.ttft for one in heard if one.times], "between pieces": gaps}
    result = {
        "seconds": round(seconds, 1),
        "kills": [f"{at - began:.0f} s: {role}" for at, role in found.kills],
        "streams": len(heard),
        "tokens": sum(one.num_tokens for one in heard),
        "lost": len(found.lost),
        "altered": len(found.wrong),
        "cut with their HTTP process": found.cut,
        "left": found.left,
        "refused": found.refused,
        "read slowly": found.read_slowly,
        "ms": {
            name: {f"p{share}": round(1e3 * quantile(given, share / 100)) for share in (50, 90, 99)}
            for name, given in times.items()
        },
        "MiB": memory.report(),
        "workers": state,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
    print(json.dumps(result, indent=1))
    for text in (*found.lost[:5], *found.wrong[:5]):
        print(text)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if found.lost or found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
