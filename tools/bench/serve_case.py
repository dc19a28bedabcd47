"""What the server's benchmarks share: a server in processes of its own, and a client that costs next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_infer.utils.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0


@dataclass
class Server:
    """A `megatron-infer serve` that is up."""

    url: str
    pid: int
    """Of the HTTP process; coordinator and engines are its children."""
    lines: list[str]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def processes(self) -> dict[int, str]:
        """Process id -> what it is."""
        import psutil

        one = psutil.Process(self.pid)
        names = {self.pid: "http"}
        for child in one.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = " ".join(child.cmdline())
                names[child.pid] = next((role for role in ("coordinator", "engine") if role in words), "other")
        return names


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Server]:
    """A server of `arguments` at a port of its own; ended by SIGTERM."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron_infer", "serve", *arguments, "--port", "0", "--no-log-requests"]
    process = ChildProcess(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    told = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)  # type: ignore
    told.start()
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.findall(r"serving .* at (\S+)", "".join(lines))):
            assert process.poll() is None and time.monotonic() < deadline, "".join(lines)
            time.sleep(0.05)
        yield Server(found[0], process.pid, lines)
    finally:
        process.end(signal.SIGTERM, timeout_s=40)
        told.join(5)


def ask(url: str, body: dict[str, Any], *, timeout_s: float = 300.0) -> dict[str, Any]:
    """One call of /v1/completions, whole."""
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return json.load(reply)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Heard:
    """One streamed reply."""

    began: float
    text: str = ""
    times: list[float] = field(default_factory=list)
    """When each event with text came."""
    num_tokens: int = 0
    ended: float = 0.0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.began

    @property
    def e2e(self) -> float:
        return self.ended - self.began


async def stream(
    url: str, body: dict[str, Any], *, pause_s: float = 0.0, limit: int = 1 << 16, source: str | None = None
) -> Heard:
    """A streamed completion; a connection of its own. pause_s: a reader that rests so long after each 256 bytes.
    source: the address that it comes from."""
    heard = Heard(began=time.perf_counter())
    try:
        async for event in events(url, {**body, "stream": True}, pause_s, limit, source):
            if "error" in event:
                heard.error = event["error"]["message"]
                break
            if event.get("usage"):
                heard.num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if choice["text"]:
                    heard.times.append(time.perf_counter())
                    heard.text += choice["text"]
    except (OSError, EOFError, ValueError) as error:
        heard.error = f"{type(error).__name__}: {error}"
    heard.ended = time.perf_counter()
    return heard


async def events(
    url: str, body: dict[str, Any], pause_s: float, limit: int, source: str | None = None
) -> AsyncIterator[dict[str, Any]]:
    parts = urlsplit(url)
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=limit, local_addr=local)
    try:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status!r}: {(await reader.read(4096))[-400:]!r}")
        rest, num_read = b"", 0
        while data := await reader.read(256 if pause_s else 1 << 16):
            # lines of chunk sizes lie between; no event is cut by them, as each is a chunk
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            num_read += len(data)
            if pause_s:
                await asyncio.sleep(pause_s)
        raise EOFError("the connection was cut before [DONE]")
    finally:
        writer.close()


def quantile(values: list[float], q: float) -> float:
    """The value that a share q of `values` does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")
