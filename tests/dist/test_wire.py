"""Frames between processes, and when a silent peer counts as lost."""

from __future__ import annotations

import asyncio
import io

import pytest

from megatron_infer.comm.wire import (
    FrameBuffer,
    LinkClosed,
    Silence,
    frame,
    json_frame,
    json_message,
    listen_at,
    read_frame,
    receive_frame,
)

BODIES = [b"", b"one", b"\x00" * 70_000]
DATA = b"".join(map(frame, BODIES))


async def receive_from(data: bytes, **limit: int) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await receive_frame(reader, **limit)


@pytest.mark.parametrize("size", [1, 3, 4096, len(DATA)])
def test_frames_come_out_of_bytes_in_any_pieces(size):
    buffer, found = FrameBuffer(), []
    for start in range(0, len(DATA), size):
        buffer.add(DATA[start : start + size])
        while (body := buffer.next()) is not None:
            found.append(body)
    assert found == BODIES


def test_pipes_and_streams_give_the_same_bodies_and_end_with_their_last():
    pipe = io.BytesIO(DATA)
    assert [read_frame(pipe) for _ in BODIES] == BODIES
    assert asyncio.run(receive_from(frame(b"one"))) == b"one"
    for cut in (b"", DATA[:2], frame(b"one")[:-1]):
        with pytest.raises(LinkClosed, match="end of file"):
            read_frame(io.BytesIO(cut))
        with pytest.raises(LinkClosed, match="end of file"):
            asyncio.run(receive_from(cut))


def test_a_body_beyond_the_limit_is_refused_by_its_length():
    length = (1 << 20).to_bytes(4, "big")
    for refused in (
        lambda: read_frame(io.BytesIO(length), 4096),
        lambda: asyncio.run(receive_from(length, max_bytes=4096)),
    ):
        with pytest.raises(LinkClosed, match="1,048,576 bytes, the limit is 4,096"):
            refused()


def test_what_is_no_json_is_a_closed_link():
    assert json_message(json_frame({"beat": True})[4:]) == {"beat": True}
    for damaged in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(LinkClosed, match="a damaged message"):
            json_message(damaged)


def test_a_socket_of_a_process_that_has_ended_is_replaced(tmp_path):
    async def serve() -> None:
        for _ in range(2):
            (await listen_at(str(tmp_path / "s"), lambda reader, writer: asyncio.sleep(0))).close()
            (tmp_path / "s").touch()

    asyncio.run(serve())


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
