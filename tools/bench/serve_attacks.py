"""Attacks on a server by strangers, and what they cost all others: tables in Markdown.

    python tools/bench/serve_attacks.py [--model smollm2] [--part limits|callers|rows]

limits: during each attack two others ask for /health and for one token again and again. The last two rows: 400
connections that send nothing at a server that was started with 256 descriptors, and three streams while the HTTP
process stands still.

callers: strangers at different addresses take as much as they get, and another caller streams short replies, one
after the other, every second of them to a new pattern. Its times alone and during each attack are measured in
turns; ratios are of the p99 of all turns.

rows: tokens that one caller draws with 64 rows, alone, while another caller's row decodes, and after that row has
ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from serve_case import HEAD, SPAWN, Heard, Server, quantile, served, stream

from megatron_infer.utils.host import resident_mib

JSON = {"Content-Type": "application/json"}


def call(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[str, float]:
    """One call on a new connection -> (status or error, seconds)."""
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


def attacked(server: Server, name: str, attack: Callable[[], str]) -> None:
    """Print a row of the table."""
    before = resident_mib(server.pid)
    token = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}).encode()
    with asking(server, "GET", "/health") as health, asking(server, "POST", "/v1/completions", token) as tokens:
        time.sleep(1.0)
        outcome = attack()
        time.sleep(0.5)
    time.sleep(5.0)
    shown = f"{1e3 * max(health):,.0f} | {1e3 * max(tokens):,.0f} | {before:.0f} -> {resident_mib(server.pid):.0f}"
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
    """The outcome of 20 calls next to 400 connections that send nothing."""
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


def limits(model: str) -> None:
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


# ---------------------------------------------------------------------- callers

TURN_S, NUM_TURNS, PATIENCE_S = 9.0, 4, 15.0
ATTACKS = (
    "n=128, 8 at once",
    "150 schemas at once",
    "an ambiguous grammar, 4 at once",
    "6 streams of n=16 that are not read",
)
LETTERS = " | ".join(f'"{letter}"' for letter in "abcdefghij")
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}


def schema(number: int) -> dict[str, Any]:
    """One that compiles for about a tenth of a second, unlike any other number's."""
    fields = {f"field_{number}_{index}": {"type": "string", "maxLength": 20} for index in range(300)}
    return {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}


async def again_and_again(url: str, source: str, bodies: Callable[[int], dict[str, Any]], at_once: int) -> None:
    """Streams of one caller, so many at once, until it is cancelled."""

    async def one(lane: int) -> None:
        for number in itertools.count(lane, at_once):
            heard = await stream(url, bodies(number), source=source)
            if heard.error:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(one(lane) for lane in range(at_once)))


async def unread(url: str, source: str) -> None:
    """Streams that are asked for and not read, until it is cancelled."""
    body = {"prompt": "Tell me", "n": 16, "stream": True, "logprobs": 5, **LONG}
    parts, data = urlsplit(url), json.dumps(body).encode()
    writers: list[asyncio.StreamWriter] = []
    try:
        while True:
            while len(writers) < 6:
                address = {"limit": 256, "local_addr": (source, 0)}
                _, writer = await asyncio.open_connection(parts.hostname, parts.port, **address)
                writer.write(f"{HEAD}{len(data)}\r\n\r\n".encode() + data)
                writers.append(writer)
            await asyncio.sleep(0.5)
            writers = [writer for writer in writers if not writer.transport.is_closing()]
    finally:
        for writer in writers:
            writer.transport.abort()


def run_attack(url: str, name: str) -> None:
    """In another process, until it is ended. It takes what others leave of the cores: a stranger has other cores."""
    os.nice(19)
    rows = {"prompt": "Once upon a time", "n": 128, **LONG}
    ambiguous = {"prompt": "Letters:", "n": 4, "guided_grammar": f"start: e\ne: e e | {LETTERS}", **LONG}

    def schemas(number: int) -> dict[str, Any]:
        return {"prompt": "JSON:", "guided_json": schema(number + int(1e6 * time.monotonic())), "max_tokens": 8}

    attacks = (
        lambda: again_and_again(url, "127.0.0.2", lambda _: rows, 8),
        lambda: again_and_again(url, "127.0.0.3", schemas, 150),
        lambda: again_and_again(url, "127.0.0.4", lambda _: ambiguous, 4),
        lambda: unread(url, "127.0.0.5"),
    )
    asyncio.run(attacks[ATTACKS.index(name)]())


async def another(server: Server, seconds: float) -> list[Heard]:
    """Replies to another caller within so many seconds."""
    replies: list[Heard] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        number = time.monotonic_ns()
        body = {"prompt": f"Write a line about the number {number % 1000}:", "max_tokens": 12, "ignore_eos": True}
        if len(replies) % 2:
            body["guided_regex"] = f"[a-z ]{{200}}{number}"
        asking = asyncio.create_task(stream(server.url, {"temperature": 0, **body}, source="127.0.0.9"))
        await asyncio.wait([asking], timeout=PATIENCE_S)
        if not asking.done():
            asking.cancel()
            now = time.perf_counter()
            replies.append(Heard(began=now - PATIENCE_S, ended=now, error=f"no end within {PATIENCE_S:g} s"))
            continue
        replies.append(asking.result())
    return replies


def figures(replies: list[Heard]) -> tuple[list[float], list[float], int]:
    """(seconds to the first token, seconds between tokens, errors)."""
    whole = [one for one in replies if not one.error]
    gaps = [later - sooner for one in whole for sooner, later in itertools.pairwise(one.times)]
    return [one.ttft for one in whole], gaps, len(replies) - len(whole)


async def in_turns(server: Server, attacks: Sequence[str], name: str) -> None:
    """Print the row of an attack."""
    heard: dict[bool, list[Heard]] = {False: [], True: []}
    for turn in range(2 * NUM_TURNS):
        processes = [
            SPAWN.Process(target=run_attack, args=(server.url, attack), daemon=True)
            for attack in (attacks if turn % 2 else ())
        ]
        for process in processes:
            process.start()
        await asyncio.sleep(3.0)
        heard[bool(turn % 2)] += await another(server, TURN_S)
        for process in processes:
            process.terminate()
            process.join()
        await asyncio.sleep(2.0)
    cells = [name]
    (first_alone, gaps_alone, _), (first, gaps, errors) = figures(heard[False]), figures(heard[True])
    for alone, attacked in ((first_alone, first), (gaps_alone, gaps)):
        for q in (0.5, 0.99):
            one, other = 1e3 * quantile(alone, q), 1e3 * quantile(attacked, q)
            cells.append(f"{one:,.0f}, {other:,.0f}: {other / one:.1f}x")
    print(f"| {' | '.join(cells)} | {len(first)}, {errors} |", flush=True)
    for one in [one for one in heard[True] if one.error][:2]:
        print(f"<!-- {one.error[:200]} -->", flush=True)


def callers(model: str) -> None:
    """Print the table."""
    print("| attack | first token, ms: p50 alone, attacked | p99 | between tokens, ms: p50 | p99 | replies, errors |")
    print("|---|---|---|---|---|---|")

    async def every(server: Server) -> None:
        await another(server, 5.0)
        for name in ATTACKS:
            await in_turns(server, [name], name)
        await in_turns(server, ATTACKS, "all of them")

    with served(model, "--threads", "1") as server:
        asyncio.run(every(server))


# ---------------------------------------------------------------------- rows

NUM_ROWS, NUM_STEPS, NUM_ROUNDS = 64, 60, 3


def rows(model: str) -> None:
    """Print the table: tokens of the caller with NUM_ROWS rows, in a second of a core."""
    from megatron_infer import LLM, SamplingParams

    print("| 64 rows of one caller | tokens for a second of a core, by round |")
    print("|---|---|")
    rates: dict[str, list[float]] = {"alone": [], "next to another caller's row": [], "after that row has ended": []}
    for _ in range(NUM_ROUNDS):
        engine = LLM(model, threads=1, config={"max_requests": NUM_ROWS + 8, "buffer_size_gb": 2}).engine
        endless = SamplingParams(max_tokens=1000, ignore_eos=True)
        for number in range(NUM_ROWS):
            engine.add_request([1, number], endless, request_id=str(number), stream="delta", caller=1)
        for name, found in rates.items():
            if "next" in name:
                engine.add_request([1, 2, 3], endless, request_id="other", caller=2)
            elif "ended" in name:
                engine.abort("other")
            for _ in range(10):
                engine.step()
            began, count = time.process_time(), 0
            for _ in range(NUM_STEPS):
                count += sum(len(one.outputs[0].token_ids) for one in engine.step() if one.request_id != "other")
            found.append(count / (time.process_time() - began))
        for number in range(NUM_ROWS):
            engine.abort(str(number))
    for name, found in rates.items():
        print(f"| {name} | {', '.join(f'{rate:,.0f}' for rate in found)} |", flush=True)


PARTS = {"limits": limits, "callers": callers, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--part", choices=PARTS)
    given = parser.parse_args()
    for name, part in PARTS.items():
        if given.part in (None, name):
            part(given.model)


if __name__ == "__main__":
    main()
