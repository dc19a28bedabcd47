"""What the tools that load a server share: servers in processes, their memory, and a client that costs little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_infer.utils.child_process import ChildProcess, end_with_parent
from megatron_infer.utils.host import resident_mib

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))  # for engines without a model
START_S = 240.0
ROLES = ("engine", "coordinator", "http_worker")
SPAWN = multiprocessing.get_context("spawn")
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "


# ---------------------------------------------------------------------- servers


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
        """Process id -> its role."""
        import psutil

        names = {self.pid: "http"}
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if (role := next((role for role in ROLES if role in words), None)) is not None:
                    names[child.pid] = role
        return names


@contextlib.contextmanager
def served(*arguments: str, command: str = "serve") -> Iterator[Server]:
    """A server of `arguments` at a free port; ended by SIGTERM. command: of megatron-infer."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "megatron_infer", command, *arguments, "--port", "0", "--no-log-requests"]
    process = ChildProcess(words, env=environment, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.findall(r"serving .* at (\S+)", "".join(lines))):
            assert process.poll() is None and time.monotonic() < deadline, "".join(lines)
            time.sleep(0.05)
        yield Server(found[0], process.pid, lines)
    finally:
        process.end(signal.SIGTERM, timeout_s=40)
        reader.join(5)


@contextlib.contextmanager
def vllm_served(python: str, directory: str, dtype: str, threads: int, *more: str, **environment: str) -> Iterator[str]:
    """-> the URL of vLLM's server of a directory. more, environment: arguments and variables of its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "2"}
    env.pop("PYTHONPATH", None)
    env |= environment
    options = ("--model", directory, "--port", str(port), "--dtype", dtype, "--max-model-len", "1024", *more)
    with tempfile.TemporaryFile("w+") as log:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *options]
        process = ChildProcess(command, env=env, stdout=log, stderr=log)
        try:
            url, ends = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                if process.poll() is not None or time.monotonic() > ends:
                    log.seek(0)
                    raise SystemExit("vLLM's server does not start:\n" + log.read()[-2000:])
                time.sleep(0.5)
            yield url
        finally:
            process.end()


def flags(config: dict[str, Any]) -> list[str]:
    return [word for name, value in config.items() for word in ("--" + name.replace("_", "-"), str(value))]


def serve_echo(address: str, name: str, settings: dict[str, Any], key: bytes | None = None) -> None:
    """A replica whose engine has no model, until its process is ended."""
    end_with_parent()
    from echo import EchoEngine

    from megatron_infer.coordinator.replica import Replica

    Replica(EchoEngine(**settings), address, name=name, key=key).run()


class Offline:
    """An engine without a server, in another process."""

    def __init__(self, model: str, config: dict[str, Any], **options: Any) -> None:
        self._pipe, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=self._run, args=(model, config, options, other), daemon=True)
        self.process.start()
        assert self._pipe.recv() == "ready"

    def generate(self, bodies: list[dict[str, Any]]) -> tuple[float, list[str]]:
        """(seconds, texts)."""
        self._pipe.send(bodies)
        answer: tuple[float, list[str]] = self._pipe.recv()
        return answer

    def close(self) -> None:
        self._pipe.send(None)
        self.process.join(10)

    @staticmethod
    def _run(model: str, config: dict[str, Any], options: dict[str, Any], pipe: Any) -> None:
        end_with_parent()
        from megatron_infer import LLM, SamplingParams

        llm = LLM(model, config=config, **options)
        pipe.send("ready")
        while (bodies := pipe.recv()) is not None:
            params = [SamplingParams(max_tokens=one["max_tokens"], temperature=0.0, ignore_eos=True) for one in bodies]
            began = time.perf_counter()
            outputs = llm.generate([one["prompt"] for one in bodies], params)
            pipe.send((time.perf_counter() - began, [one.outputs[0].text for one in outputs]))


class Memory(threading.Thread):
    """RSS of every process of a server, also of those that are started later, each second."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._samples: dict[tuple[str, int], list[float]] = {}
        self._server, self._ending = server, threading.Event()

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self.join()

    def run(self) -> None:
        while not self._ending.wait(1.0):
            for pid, role in self._server.processes().items():
                self._samples.setdefault((role, pid), []).append(resident_mib(pid))

    def report(self) -> list[dict[str, Any]]:
        """MiB of each process: medians of the second fifth of its time and of the last one, and the most."""
        found = []
        for (role, _), values in self._samples.items():
            fifth = max(1, len(values) // 5)
            early, late = statistics.median(values[fifth : 2 * fifth] or values), statistics.median(values[-fifth:])
            figures = {"early": early, "late": late, "grown": late - early, "peak": max(values)}
            found.append({"process": role, "seconds": len(values)} | {k: round(v, 1) for k, v in figures.items()})
        return found


def cpu_seconds(pids: dict[int, str]) -> Counter[str]:
    """By what the processes are."""
    import psutil

    found: Counter[str] = Counter()
    for pid, name in pids.items():
        found[name] += sum(psutil.Process(pid).cpu_times()[:2])
    return found


# ---------------------------------------------------------------------- clients


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
    prompt: Any = None
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
    """A streamed completion on a new connection.

    pause_s: rest of the reader after each 256 bytes. source: the address that the call comes from.
    """
    heard = Heard(began=time.perf_counter(), prompt=body["prompt"])
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


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server. options: of `asyncio.open_connection`."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()


async def events(
    url: str, body: dict[str, Any], pause_s: float, limit: int, source: str | None = None
) -> AsyncIterator[dict[str, Any]]:
    local = None if source is None else (source, 0)
    data = json.dumps(body).encode()
    async with connected(url, limit=limit, local_addr=local) as (reader, writer):
        writer.write(f"{HEAD}{len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status!r}: {(await reader.read(4096))[-400:]!r}")
        rest = b""
        while data := await reader.read(256 if pause_s else 1 << 16):
            # lines of chunk sizes lie between; no event is cut by them, as each is a chunk
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            if pause_s:
                await asyncio.sleep(pause_s)
        raise EOFError("the connection was cut before [DONE]")


def quantile(values: list[float], q: float) -> float:
    """The value that a share q of `values` does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")
