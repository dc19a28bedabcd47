"""Frames between processes, and when a silent peer counts as lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from megatron_infer.distributed.wire import Link, LinkClosed, Silence, answer, ask, frame, receive_frame

MESSAGES = [{}, {"beat": True}, ["x" * 70_000]]
DATA = b"".join(frame(json.dumps(one).encode()) for one in MESSAGES)


@contextlib.contextmanager
def link_of(data: bytes, *, size: int = 1 << 20) -> Iterator[Link]:
    """The receiving end of a link to which `data` is sent in pieces."""
    far, near = socket.socketpair()

    def send() -> None:
        with far:
            for start in range(0, len(data), size):
                far.sendall(data[start : start + size])

    thread = threading.Thread(target=send)
    thread.start()
    with contextlib.closing(Link(near)) as link:
        yield link
    thread.join()


@pytest.mark.parametrize("size", [3, 4096, len(DATA)])
def test_messages_come_out_of_bytes_in_any_pieces_and_end_with_the_last(size):
    with link_of(DATA, size=size) as link:
        assert [link.receive(5.0) for _ in MESSAGES] == MESSAGES
        with pytest.raises(LinkClosed, match="end of file"):
            link.receive(5.0)


async def receive_from(data: bytes, max_bytes: int = 1 << 20) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await receive_frame(reader, max_bytes)


def test_streams_give_the_same_bodies():
    assert asyncio.run(receive_from(frame(b"one"))) == b"one"
    for cut in (b"", DATA[:2], frame(b"one")[:-1]):
        with pytest.raises(LinkClosed, match="end of file"):
            asyncio.run(receive_from(cut))
    with pytest.raises(LinkClosed, match="1,048,576 bytes, the limit is 4,096"):
        asyncio.run(receive_from((1 << 20).to_bytes(4, "big"), max_bytes=4096))


@pytest.mark.parametrize("damaged", [b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_a_closed_link(damaged):
    with link_of(frame(damaged)) as link, pytest.raises(LinkClosed, match="a damaged message"):
        link.receive(5.0)


def test_questions_are_answered_and_dropped_when_who_asked_leaves(tmp_path):
    path, dropped = str(tmp_path / "s"), []

    async def reply(question: bytes) -> bytes:
        try:
            await asyncio.sleep(0 if question == b"now" else 60)
        except asyncio.CancelledError:
            dropped.append(question)
            raise
        return question[::-1]

    async def case() -> None:
        with pytest.raises(FileNotFoundError):
            await ask(path, b"now")
        (tmp_path / "s").touch()  # of a process that has ended
        async with await answer(path, reply, max_bytes=10):
            assert await ask(path, b"now") == b"won"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(path, b"later"), 0.1)
            with pytest.raises((LinkClosed, OSError)):
                await ask(path, b"more than ten")
            while not dropped:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(case(), 20))
    assert dropped == [b"later"]


def test_silence_is_counted_only_while_this_process_runs():
    now = [100.0]
    silence = Silence(1.0, clock=lambda: now[0])
    for passed, seconds in ((0.5, 0.5), (1.0, 1.5), (60.0, 2.5), (0.5, 3.0)):
        now[0] += passed
        assert silence.seconds() == seconds
    silence.heard()
    assert silence.seconds() == 0
    now[0] += 60.0
    silence.heard()  # read after this process went on
    assert silence.seconds() == 0
