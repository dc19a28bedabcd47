"""Servers under load: right answers, flat memory, latency by percentile, what HTTP costs.

    python tools/bench/serve_load.py [--part load] [--clients 200] [--seconds 180] [--storms 5] [--json FILE]
    python tools/bench/serve_load.py --part kills [--clients 200] [--seconds 180] [--kill-s 30] [--http-workers 3]
    python tools/bench/serve_load.py --part overhead [--clients 32] [--requests 64] [--rounds 3] [--threads 1]
    python tools/bench/serve_load.py --part vllm --model DIRECTORY --vllm-python VENV/bin/python [--clients 1 16 32]
    python tools/bench/serve_load.py --part workers [--http-workers 1 2 3] [--clients 64 128 256 512] [--seconds 10]
    python tools/bench/serve_load.py --part roles [--clients 8] [--every-s 4] [--seconds 40] [--rounds 3] [--threads 1]

load: streaming clients, each with one request after the other. Every reply must be complete and have the text of
offline generation (float32, greedy). Then processes full of clients are killed (SIGKILL), after which no request runs
and no block is held. Then quick clients, without and with 20 that read 256 bytes a second, in turns.

kills: the same clients next to 8 that leave in the middle, 4 that read 256 bytes a second, 4 that send what is refused
and 40 silent connections. Every KILL_S a process of the server is killed, each kind in turn. Streams on connections
that a killed HTTP process had accepted are counted apart; no other stream may be lost or altered.

overhead: tokens a second through the server and by offline LLM.generate, in turns, on the same work.

vllm: this server and vLLM's, asked in turns. `megatron-infer convert smollm2 DIRECTORY --dtype bfloat16` makes a
directory.

workers: streams that several HTTP processes carry, in front of engines that compute nothing.

roles: clients with short prompts stream while a prompt of 2,048 tokens comes every EVERY_S seconds; two engines, one
for prompts and one for answers, or both for both, in turns.

Clients, servers and engines share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from serve_case import (
    HEAD,
    ROLES,
    ROOT,
    SPAWN,
    Heard,
    Memory,
    Offline,
    Server,
    connected,
    cpu_seconds,
    flags,
    quantile,
    serve_echo,
    served,
    stream,
    vllm_served,
)

from megatron_infer.utils.child_process import end_with_parent

Work = list[tuple[dict[str, Any], str | None]]
"""Bodies of calls, and the text that each must be answered with; None: any."""


# ---------------------------------------------------------------------- closed loop


@dataclass
class Load:
    """What came of a load."""

    seconds: float = 0.0
    heard: list[Heard] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_cut: int = 0
    """Streams whose HTTP process was killed."""

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.heard)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces of text of a stream."""
        return [b - a for one in self.heard for a, b in itertools.pairwise(one.times)]

    def table(self) -> dict[str, dict[str, float]]:
        """Milliseconds by percentile. ITL: between two pieces of text of a stream."""
        values = {"TTFT": [one.ttft for one in self.heard if one.times], "ITL": self.gaps}
        values["e2e"] = [one.e2e for one in self.heard]
        return {
            name: {f"p{share}": round(1e3 * quantile(given, share / 100), 1) for share in (50, 90, 99)}
            for name, given in values.items()
        }

    def check(self) -> None:
        assert self.heard and not self.errors, self.errors[:3]
        assert not self.wrong, f"{len(self.wrong)} of {len(self.heard)} replies are wrong: {self.wrong[:2]}"


async def load(
    url: str,
    work: Work,
    *,
    clients: int,
    seconds: float | None = None,
    spread_s: float = 2.0,
    was_cut: Callable[[Heard], bool] = lambda heard: False,
) -> Load:
    """Closed loop: each client sends its next request when its last one is answered.

    seconds: until then, over and over; None: until the work has been done once. spread_s: in which the clients begin.
    """
    done, began = Load(), time.perf_counter()
    calls = iter(work) if seconds is None else itertools.cycle(work)
    until = math.inf if seconds is None else began + seconds

    async def client(number: int) -> None:
        await asyncio.sleep(spread_s * number / clients)
        while time.perf_counter() < until and (call := next(calls, None)) is not None:
            body, right = call
            heard = await stream(url, {**body, "stream_options": {"include_usage": True}})
            if not heard.error:
                done.heard.append(heard)
                if right is not None and heard.text != right:
                    done.wrong.append(f"{body['prompt']!r}: {heard.text!r}, right is {right!r}")
            elif was_cut(heard):
                done.num_cut += 1
            else:
                done.errors.append(heard.error)
                await asyncio.sleep(0.2)

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
    for _ in range(times):
        process = SPAWN.Process(target=_crowd, args=(url, body, clients), daemon=True)
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


def wait_idle(look: Callable[[], dict[str, Any]], timeout_s: float = 60.0) -> float:
    """Seconds until nothing is held."""
    began = time.monotonic()
    while not is_idle(look()):
        assert time.monotonic() - began < timeout_s, look()
        time.sleep(0.1)
    return time.monotonic() - began


# ---------------------------------------------------------------------- load, kills

LONG = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
CONFIG = {"max_requests": 64, "max_sequence_length": 512, "buffer_size_gb": 0.5}


def known_work(model: str) -> Work:
    """64 prompts with the texts of offline generation."""
    things = "river garden engine letter winter market island teacher window ship forest song bridge clock".split()
    heads = ("Once upon a time a", "The best thing about a", "How to paint a", "A short poem of a", "Facts about the")
    prompts = [f"{head} {thing}" for head, thing in itertools.product(heads, things)][:64]
    bodies = [
        {"prompt": prompt, "max_tokens": 8 + 5 * i % 17, "temperature": 0, "ignore_eos": True}
        for i, prompt in enumerate(prompts)
    ]
    offline = Offline(model, CONFIG, dtype="float32")
    _, texts = offline.generate(bodies)
    offline.close()
    return list(zip(bodies, texts, strict=True))


def figures(done: Load, memory: Memory) -> dict[str, Any]:
    return {
        "seconds": round(done.seconds, 1),
        "replies": len(done.heard),
        "tokens": done.num_tokens,
        "tokens_per_s": round(done.tokens_per_s, 1),
        "ms": done.table(),
        "MiB": memory.report(),
    }


def run_load(args: argparse.Namespace) -> dict[str, Any]:
    work = known_work(args.model)
    with served(args.model, *flags(CONFIG), "--dtype", "float32") as server:
        look = partial(server.get, "/v1/status")
        asyncio.run(load(server.url, work, clients=8, seconds=min(5.0, args.seconds))).check()
        with Memory(server) as memory:
            done = asyncio.run(load(server.url, work, clients=args.clients[0], seconds=args.seconds))
        done.check()
        found: dict[str, Any] = {"load": figures(done, memory) | {"idle_after_s": round(wait_idle(look), 2)}}
        storm(server.url, LONG | {"max_tokens": 400}, look, times=args.storms, clients=50)
        found["storms"] = {"killed": args.storms, "clients_each": 50, "idle_after_s": round(wait_idle(look), 2)}
        without, with_slow = slow_readers(server.url, work, seconds=min(8.0, args.seconds), rounds=args.rounds)
        wait_idle(look)
    found["slow_readers"] = {"without_ms": round(without, 1), "with_ms": round(with_slow, 1)}
    return found


def slow_readers(url: str, work: Work, *, seconds: float, rounds: int) -> list[float]:
    """Median milliseconds of 4 quick clients' replies, without and with 20 slow readers, in turns."""
    slow = LONG | {"max_tokens": 48, "logprobs": 20}
    quick = partial(load, url, work, clients=4, seconds=seconds)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for found, make in zip(times, (quick, partial(dawdle, url, slow, readers=20, during=quick)), strict=True):
            done = asyncio.run(make())
            done.check()
            found += [heard.e2e * 1e3 for heard in done.heard]
    return [statistics.median(found) for found in times]


BAD = (b"{", b'{"prompt": 1.5}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "n": 1000}', b"\xff" * 1000)


class Kills:
    """Processes that are killed, and clients that leave, read slowly, send what is refused, or send nothing."""

    def __init__(self, server: Server, work: Work, args: argparse.Namespace) -> None:
        self.server, self.args = server, args
        self.until = time.perf_counter() + args.seconds
        self.kills: list[tuple[float, str]] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._work, self._bad = itertools.cycle(work), itertools.cycle(BAD)

    def was_cut(self, heard: Heard) -> bool:
        """Whether the HTTP process of a stream was killed meanwhile."""
        if not heard.error.startswith(("EOFError", "Connection", "ValueError: b''")):
            return False
        return any(heard.began <= at <= heard.ended + 1.0 for at, role in self.kills if role == "http_worker")

    async def again(self, one: Callable[[], Awaitable[None]], what: str) -> None:
        while time.perf_counter() < self.until:
            with contextlib.suppress(OSError, TimeoutError):
                await one()
                self.counts[what] += 1

    async def leave(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0.2, 8.0)):
                await stream(self.server.url, next(self._work)[0])

    async def read_slowly(self) -> None:
        body, right = next(self._work)
        heard = await stream(self.server.url, body, pause_s=1.0, limit=512)
        if heard.text != right and not self.was_cut(heard):
            self.wrong.append(f"slow reader: {heard.error or heard.text!r}")

    async def annoy(self) -> None:
        data = next(self._bad)
        async with connected(self.server.url) as (reader, writer):
            writer.write(f"{HEAD}{len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
            status = await reader.readline()
        await asyncio.sleep(0.2)
        if not status:
            raise ConnectionError("cut")
        assert status.split()[1][:1] == b"4", status

    async def idle(self) -> None:
        async with (
            connected(self.server.url) as (reader, _),
            asyncio.timeout(max(0.1, self.until - time.perf_counter())),
        ):
            await reader.read()

    async def kill(self) -> None:
        roles = [role for role in ROLES if role != "http_worker" or self.args.http_workers[0] > 1]
        for role in itertools.cycle(roles):
            if time.perf_counter() + self.args.kill_s > self.until:
                return
            await asyncio.sleep(self.args.kill_s)
            pid = random.choice([pid for pid, name in self.server.processes().items() if name == role])
            self.kills.append((time.perf_counter(), role))
            os.kill(pid, signal.SIGKILL)

    async def run(self, work: Work) -> Load:
        others = [
            *(self.again(self.leave, "left") for _ in range(8)),
            *(self.again(self.read_slowly, "read slowly") for _ in range(4)),
            *(self.again(self.annoy, "refused") for _ in range(4)),
            *(self.again(self.idle, "silent") for _ in range(40)),
        ]
        clients = load(
            self.server.url, work, clients=self.args.clients[0], seconds=self.args.seconds, was_cut=self.was_cut
        )
        done, *_ = await asyncio.gather(clients, self.kill(), *others)
        return done


def run_kills(args: argparse.Namespace) -> dict[str, Any]:
    work, began = known_work(args.model), time.perf_counter()
    typed = [*flags(CONFIG), "--http-workers", str(args.http_workers[0]), "--dp", str(args.dp), "--dtype", "float32"]
    with served(args.model, *typed) as server, Memory(server) as memory:
        kills = Kills(server, work, args)
        began = time.perf_counter()
        done = asyncio.run(kills.run(work))
        wait_idle(partial(server.get, "/v1/status"))
        workers = server.get("/v1/status")["workers"]
    bad = [*done.errors, *done.wrong, *kills.wrong]
    for text in bad[:10]:
        print(text)
    return figures(done, memory) | {
        "kills": [f"{at - began:.0f} s: {role}" for at, role in kills.kills],
        "lost": len(done.errors),
        "altered": len(done.wrong) + len(kills.wrong),
        "cut with their HTTP process": done.num_cut,
        **kills.counts,
        "workers": [{key: one[key] for key in ("name", "restarts", "last_exit")} for one in workers],
        "failed": bool(bad),
    }


# ---------------------------------------------------------------------- overhead

WORDS = "the of and to in is that it was for on are as with his they at be this have from or one had by word".split()


def words_of(number: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of 20 to 60 words, which begin with their number, and answers of 48 to 80 tokens."""
    rng = random.Random(seed)
    return [
        {
            "prompt": " ".join([str(index), *rng.choices(WORDS, k=rng.randint(20, 60))]),
            "max_tokens": rng.randint(48, 80),
            "temperature": 0,
            "ignore_eos": True,
        }
        for index in range(number)
    ]


def run_overhead(args: argparse.Namespace) -> dict[str, Any]:
    clients = args.clients[0]
    config = CONFIG | {"max_requests": clients}
    offline = Offline(args.model, config, dtype=args.dtype, threads=args.threads)
    rounds = []
    with served(args.model, *flags(config), "--dtype", args.dtype, "--threads", str(args.threads)) as server:
        for number in range(args.rounds + 1):  # the first one warms up
            bodies = words_of(args.requests if number else clients, number)
            total = sum(one["max_tokens"] for one in bodies)
            pids = server.processes() | {offline.process.pid: "offline", os.getpid(): "clients"}
            before = cpu_seconds(pids)
            for side in ("offline", "server") if number % 2 else ("server", "offline"):
                if side == "offline":
                    alone_s, texts = offline.generate(bodies)
                else:
                    done = asyncio.run(load(server.url, [(one, None) for one in bodies], clients=clients, spread_s=0))
            done.check()
            assert done.num_tokens == total, f"{done.num_tokens} tokens came, {total} were asked for"
            after = cpu_seconds(pids)
            through = {heard.prompt: heard.text for heard in done.heard}
            one = {
                "offline": total / alone_s,
                "server": done.tokens_per_s,
                "different": sum(through[body["prompt"]] != text for body, text in zip(bodies, texts, strict=True)),
                "cpu_s": {name: round(after[name] - before[name], 2) for name in after},
            }
            if number:
                rounds.append(one | {"share": one["server"] / one["offline"]})
            print(f"round {number} of {args.rounds}: {json.dumps(one)}", flush=True)
    offline.close()
    spent = {name: sum(one["cpu_s"][name] for one in rounds) for name in rounds[0]["cpu_s"]}
    by_server = sum(seconds for name, seconds in spent.items() if name != "offline")
    shares = [one["share"] for one in rounds]
    print(f"median {statistics.median(shares):.1%} of offline, {min(shares):.1%} to {max(shares):.1%}; "
          f"{spent['offline'] / by_server:.1%} by CPU time alone")  # fmt: skip
    return {"rounds": rounds, "median_share": statistics.median(shares), "share_by_cpu": spent["offline"] / by_server}


# ---------------------------------------------------------------------- vLLM


def run_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Medians of tokens a second, and of milliseconds to the first token and between tokens."""
    from megatron_infer.cli.bench import make_workload

    ours = ("--dtype", args.dtype, "--threads", str(args.threads), "--max-sequence-length", "1024")
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    with contextlib.ExitStack() as stack:
        theirs = vllm_served(args.vllm_python, args.model, args.dtype, args.threads)
        urls = {"vLLM": stack.enter_context(theirs)}
        urls["megatron_infer"] = stack.enter_context(served(args.model, *ours)).url

        def ask(url: str, clients: int, requests: int, seed: int) -> dict[str, Any]:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
                common = {"model": json.load(reply)["data"][0]["id"], "temperature": 0, "ignore_eos": True}
            sizes: dict[str, Any] = {"num_requests": requests, "input_len": (64, 256), "output_len": (64, 128)}
            drawn = make_workload(**sizes, concurrency=clients, token_ids=range(100, 1000), seed=seed)
            pairs = zip(drawn.prompts, drawn.output_lens, strict=True)
            work: Work = [({**common, "prompt": ids, "max_tokens": count}, None) for ids, count in pairs]
            done = asyncio.run(load(url, work, clients=clients, spread_s=0))
            done.check()
            return {"tokens_per_s": round(done.tokens_per_s, 1), "ms": done.table()}

        for url in urls.values():
            ask(url, 16, 16, 99)  # warms up
        for clients, number in itertools.product(args.clients, range(args.rounds)):
            requests = max(args.requests // 8, 2) if clients == 1 else max(args.requests, clients)
            for name in sorted(urls, reverse=bool(number % 2)):
                # prompts that no run has had: none is in a prefix cache
                one = ask(urls[name], clients, requests, 1000 * clients + number)
                found.setdefault(name, {}).setdefault(clients, []).append(one)
                print(f"{clients} at once, round {number + 1}: {name} {json.dumps(one)}", flush=True)
    print("\n| at once | server | tokens/s | first token, ms: p50, p99 | between tokens, ms: p50, p99 |")
    print("|---|---|---|---|---|")
    for clients, (name, runs) in itertools.product(args.clients, found.items()):
        cells = [
            ", ".join(f"{statistics.median(one['ms'][key][p] for one in runs[clients]):.1f}" for p in ("p50", "p99"))
            for key in ("TTFT", "ITL")
        ]
        rate = statistics.median(one["tokens_per_s"] for one in runs[clients])
        print(f"| {clients} | {name} | {rate:.0f} | {' | '.join(cells)} |")
    return found


# ---------------------------------------------------------------------- HTTP processes

STREAM_TOKENS, STEP_S = 100, 0.02
"""Tokens of a stream, and seconds between two of them."""


def _counting_clients(url: str, count: int, seconds: float, pipe: Any) -> None:
    """Streams one after the other on `count` connections, whose bytes are counted and not parsed."""
    end_with_parent()
    until, found = time.perf_counter() + seconds, {"events": 0, "seconds": [], "gaps": []}

    async def one(number: int) -> None:
        body = {"prompt": [number % 900, 1, 2], "max_tokens": STREAM_TOKENS, "temperature": 0, "stream": True}
        data = json.dumps(body).encode()
        async with connected(url) as (reader, writer):
            while time.perf_counter() < until:
                began = time.perf_counter()
                writer.write(f"{HEAD}{len(data)}\r\n\r\n".encode() + data)
                last, tail = 0.0, b""
                while b"[DONE]" not in tail:
                    piece = await reader.read(1 << 16)
                    assert piece, "the connection was cut"
                    now, num_events = time.perf_counter(), piece.count(b"data: {")
                    found["events"] += num_events
                    if last and num_events:
                        found["gaps"].append(now - last)
                    last, tail = now, (tail + piece)[-64:]
                if not tail.endswith(b"0\r\n\r\n"):
                    await reader.readuntil(b"0\r\n\r\n")
                found["seconds"].append(time.perf_counter() - began)

    async def every() -> None:
        await asyncio.gather(*(one(number) for number in range(count)))

    asyncio.run(every())
    pipe.send(found)


def _carried(url: str, pids: dict[int, str], streams: int, seconds: float, num_processes: int = 2) -> dict[str, Any]:
    """What the processes carried of so many streams."""
    pipes, processes = [], []
    for _ in range(num_processes):
        pipe, other = SPAWN.Pipe()
        arguments = (url, streams // num_processes, seconds, other)
        processes.append(SPAWN.Process(target=_counting_clients, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    before, began = cpu_seconds(pids), time.perf_counter()
    found = [pipe.recv() for pipe in pipes]
    taken, after = time.perf_counter() - began, cpu_seconds(pids)
    for process in processes:
        process.join()
    gaps, times = ([value for one in found for value in one[name]] for name in ("gaps", "seconds"))
    tokens = STREAM_TOKENS * len(times)
    return {
        "streams": streams,
        "tokens_per_s": round(streams * STREAM_TOKENS / statistics.mean(times)),
        "asked_per_s": round(streams / STEP_S),
        "tokens_per_event": round(tokens / sum(one["events"] for one in found), 2),
        "gap_ms": {f"p{share}": round(1e3 * quantile(gaps, share / 100), 1) for share in (50, 99)},
        "cores": {name: round((after[name] - before[name]) / taken, 2) for name in after},
        "tokens_per_cpu_s_of_http": round(tokens / max(after["http"] - before["http"], 1e-9)),
    }


def run_workers(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_infer.server.launch import save_tokenizer_in_subprocess

    os.environ["PYTHONPATH"] = str(ROOT)
    folder = tempfile.mkdtemp()
    try:
        tokenizer = save_tokenizer_in_subprocess(args.model, folder)
        return {f"{count} processes": carried_by(count, args, tokenizer, folder) for count in args.http_workers}
    finally:
        shutil.rmtree(folder)


def carried_by(count: int, args: argparse.Namespace, tokenizer: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """Two engines that compute nothing, a coordinator, and `count` HTTP processes."""
    import psutil

    from megatron_infer.server.process_options import HttpOptions
    from megatron_infer.server.server_config import ServerConfig
    from megatron_infer.server.supervisor import Process, coordinator_process

    address = f"ipc://{folder}/coordinator{count}"
    settings = ServerConfig(port=0, log_requests=False, max_queue=1 << 14, http_workers=count)
    options = HttpOptions(settings=settings, coordinator=address, tokenizer=tokenizer, folder=folder, model="echo")
    engine = {"num_blocks": 1 << 16, "max_requests": 512, "step_s": STEP_S}
    engines = [
        SPAWN.Process(target=serve_echo, args=(address, f"e{number}", engine), daemon=True) for number in range(2)
    ]
    coordinator = Process(coordinator_process({"bind": address, "max_queue": 1 << 14}))
    http = Process(options.process())
    try:
        coordinator.start()
        coordinator.wait_ready(60)
        for engine in engines:
            engine.start()
        http.start()
        url = http.wait_ready(60)["url"]
        children = [child.pid for child in psutil.Process(http.pid).children()]
        pids = dict.fromkeys(children or [http.pid], "http") | {coordinator.pid: "coordinator"}
        pids |= {engine.pid: "engines" for engine in engines}
        found = []
        for streams in args.clients:
            found.append(_carried(url, pids, streams, args.seconds))
            print(json.dumps({"workers": count, **found[-1]}), flush=True)
        return found
    finally:
        http.signal(signal.SIGTERM)
        http.wait(10)
        for engine in engines:
            engine.kill()
        coordinator.signal(signal.SIGKILL)


# ---------------------------------------------------------------------- roles

LAYOUTS = {"both": ("--dp", "2"), "roles": ("--prefill", "1", "--decode", "1")}
"""What the two engines do -> how they are asked for."""


async def _beside_prompts(url: str, clients: int, every_s: float, seconds: float, seed: int) -> tuple[Load, Load]:
    """What came of the streams, and of the long prompts that came meanwhile."""
    rng, prompts = random.Random(seed), Load()
    fixed = {"temperature": 0, "ignore_eos": True}

    async def long_prompt() -> None:
        ids = [rng.randrange(100, 40000) for _ in range(2048)]
        heard = await stream(url, {"prompt": ids, "max_tokens": 32, "stream_options": {"include_usage": True}, **fixed})
        (prompts.errors if heard.error else prompts.heard).append(heard.error or heard)

    async def arrive() -> None:
        began, tasks = time.perf_counter(), []
        while time.perf_counter() < began + seconds:
            tasks.append(asyncio.create_task(long_prompt()))
            await asyncio.sleep(every_s)
        await asyncio.gather(*tasks)
        prompts.seconds = time.perf_counter() - began

    short = [({**one, **fixed, "max_tokens": 128}, None) for one in words_of(8 * clients, seed)]
    streams, _ = await asyncio.gather(load(url, short, clients=clients, seconds=seconds, spread_s=1.0), arrive())
    return streams, prompts


def run_roles(args: argparse.Namespace) -> dict[str, Any]:
    config = {"max_requests": 4 * args.clients[0], "max_sequence_length": 4096, "buffer_size_gb": 1}
    common = (args.model, *flags(config), "--dtype", args.dtype, "--threads", str(args.threads))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(served(*common, *flag)).url for name, flag in LAYOUTS.items()}
        for number in range(args.rounds + 1):  # the first one warms up
            for name in urls if number % 2 else reversed(urls):
                seconds = args.seconds if number else min(args.seconds, 8.0)
                done = asyncio.run(_beside_prompts(urls[name], args.clients[0], args.every_s, seconds, number))
                for one in done:
                    one.check()
                streams, prompts = done
                one = {
                    "itl_ms": streams.table()["ITL"] | {"p99.9": round(1e3 * quantile(streams.gaps, 0.999), 1)},
                    "stream_tokens_per_s": round(streams.tokens_per_s, 1),
                    "prompt_ttft_ms": prompts.table()["TTFT"],
                    "prompts": len(prompts.heard),
                    "prompts_per_s": round(len(prompts.heard) / prompts.seconds, 2),
                }
                if number:
                    found[name].append(one)
                print(f"round {number} of {args.rounds}: {name}: {json.dumps(one)}", flush=True)

    def ratio(of: Callable[[dict[str, Any]], float]) -> list[float]:
        pairs = zip(found["roles"], found["both"], strict=True)
        shares = sorted(of(roles) / of(both) for roles, both in pairs)
        return [round(one, 2) for one in (statistics.median(shares), shares[0], shares[-1])]

    return found | {
        "roles / both: median, least, most": {
            "p99 between tokens": ratio(lambda one: one["itl_ms"]["p99"]),
            "p99.9 between tokens": ratio(lambda one: one["itl_ms"]["p99.9"]),
            "p50 between tokens": ratio(lambda one: one["itl_ms"]["p50"]),
            "tokens a second of streams": ratio(lambda one: one["stream_tokens_per_s"]),
            "p50 to the first token of prompts": ratio(lambda one: one["prompt_ttft_ms"]["p50"]),
            "prompts a second": ratio(lambda one: one["prompts_per_s"]),
        }
    }


# ---------------------------------------------------------------------- command line

PARTS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], dict[str, Any]]] = {
    "load": (run_load, {"clients": [200], "seconds": 180.0}),
    "kills": (run_kills, {"clients": [200], "seconds": 180.0, "http_workers": [1]}),
    "overhead": (run_overhead, {"clients": [32], "requests": 64}),
    "vllm": (run_vllm, {"clients": [1, 16, 32], "requests": 32, "dtype": "bfloat16"}),
    "workers": (run_workers, {"clients": [64, 128, 256, 512], "seconds": 10.0, "http_workers": [1, 2, 3]}),
    "roles": (run_roles, {"clients": [8], "seconds": 40.0, "threads": 1}),
}
"""Part -> what runs it, and its defaults."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="load")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", help="of overhead and vllm")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of overhead and vllm")
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", help="at once; vllm, workers: several runs")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--requests", type=int, help="of a round; vllm with one client: an eighth of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--storms", type=int, default=5)
    parser.add_argument("--kill-s", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=4.0, help="between two long prompts of roles")
    parser.add_argument("--http-workers", type=int, nargs="+", metavar="N")
    parser.add_argument("--dp", type=int, default=1, help="engines of kills")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="of the environment that has vLLM")
    parser.add_argument("--json", type=Path)
    asked, _ = parser.parse_known_args()
    run, defaults = PARTS[asked.part]
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if args.part == "vllm" and not args.vllm_python:
        parser.error("--part vllm needs --vllm-python")
    result = run(args)
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(result.get("failed", False))


if __name__ == "__main__":
    sys.exit(main())
