"""The links between an engine's ranks: strangers at their port, and messages that are cut or damaged."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutations import Rounds, damaged, rounds, shown, within

from megatron_infer.distributed import rank_links, stage_link
from megatron_infer.distributed.rank_links import LinkClosed, RankLink, RankLinks, connect

__all__ = ["rounds"]
pytestmark = pytest.mark.security

HELLO = {"token": "0" * 32, "rank": 1, "for": "calls"}
MESSAGES = (
    HELLO,
    {"phase": "decode of step 7", "lost": [1, "its process has ended", False]},
    ["a call", False, "digest", "text", False],
    "welcome",
)


def framed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def test_damaged_and_cut_messages_of_a_rank_are_an_error_or_a_wait_with_an_end(rounds: Rounds) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rng in rounds(long=200):
            data = damaged(b"".join(framed(rng.choice(MESSAGES)) for _ in range(3)), rng)
            with socket.create_connection(server.getsockname()) as far, shown(data), within(2.0):
                link = RankLink(server.accept()[0])
                far.sendall(data)
                far.shutdown(socket.SHUT_WR)
                with pytest.raises(LinkClosed), contextlib.closing(link):
                    while True:  # until the end of file at the latest
                        link.receive(1.0, max_bytes=1 << 20)


def with_strangers(trouble: Callable[[int], None]) -> tuple[dict[int, RankLinks], float]:
    """Two ranks that connect while `trouble(port)` goes on -> (links by rank, seconds)."""
    barrier, texts, ends = threading.Barrier(2), {}, {}
    began = time.monotonic()

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        found = [texts[0], texts[1]]
        barrier.wait()
        if rank == 1 and found[0].startswith("{"):
            trouble(json.loads(found[0])["port"])
        return found

    def start(rank: int) -> None:
        ends[rank] = connect(rank, 2, lambda text: gather(rank, text), timeout_s=60.0)

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends, time.monotonic() - began


STRANGERS = {
    "silent": b"",
    "half a message": framed(HELLO)[:20],
    "a token that is no ASCII": framed({**HELLO, "token": "é" * 32}),
    "a surrogate": framed({**HELLO, "token": "\ud800"}),
    "nesting": (4000).to_bytes(4, "big") + b"[" * 4000,
    "a list": framed([HELLO]),
    "four gigabytes": b"\xff" * 64,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


def test_strangers_at_the_port_neither_end_nor_delay_the_start_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_links, "HELLO_TIMEOUT_S", 40.0)
    opened: list[socket.socket] = []

    def trouble(port: int) -> None:
        for sent in STRANGERS.values():
            for _ in range(4):
                opened.append(socket.create_connection(("127.0.0.1", port), timeout=30))
                opened[-1].sendall(sent)

    ends, seconds = with_strangers(trouble)
    assert set(ends) == {0, 1} and seconds < rank_links.HELLO_TIMEOUT_S
    ends[0].calls[1].send("on it goes")
    assert ends[1].calls[0].receive(5.0) == "on it goes"
    for one in (*opened, *ends.values()):
        one.close()


def test_damaged_arrays_of_a_stage_run_no_code(rounds: Rounds) -> None:
    """Stages trust each other for values; what is no array is an error, and nothing is unpickled."""
    arrays = {"logprobs": torch.zeros(3, 2), "ids": torch.arange(5).numpy()}
    content = stage_link._pack(arrays)
    for rng in rounds(long=200):
        data = damaged(content, rng)
        with shown(data), within(2.0), contextlib.suppress(stage_link.StageLost):
            stage_link._unpack(data)
