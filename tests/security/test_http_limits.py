"""HTTP: what a caller does not end, repeats or does not read has limits; headers out of place say nothing."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from durable_case import make_engine, make_model
from echo import EchoEngine
from mutations import no_errors_logged
from server_case import post, serving, wait_for
from test_fuzz_http import BODY, GOOD, case, raw, replies, serves_as_before

from megatron_infer.server import call_limits

__all__ = ["case"]
pytestmark = pytest.mark.security

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def flooded(port: int, head: bytes, piece: bytes, *, most: int = 8 << 20) -> tuple[int, bytes]:
    """Send `head`, then `piece` without end -> (bytes sent before the connection was closed, reply)."""
    sent, got = 0, b""
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.settimeout(20)
        one.sendall(head)
        with contextlib.suppress(ConnectionError):
            while sent < most:
                one.sendall(piece)
                sent += len(piece)
        with contextlib.suppress(ConnectionError):
            while data := one.recv(1 << 16):
                got += data
    return sent, got


CHUNKED = raw("POST", "/v1/completions", b"", "Content-Type: application/json", "Transfer-Encoding: chunked")


@pytest.mark.parametrize("piece", [b"X: a\r\n" * 1000, b"a" * 4096], ids=["lines", "one line"])
@pytest.mark.parametrize("end", [b"0\r\nX: ", b"4;ext="], ids=["trailers", "chunk extension"])
@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_what_follows_a_chunked_body_has_an_end(case: SimpleNamespace, path: str, end: bytes, piece: bytes) -> None:
    head = CHUNKED.replace(b"/v1/completions", path.encode()) + b"2\r\n{}\r\n" + end
    with no_errors_logged():
        sent, got = flooded(case.port, head, piece)
    assert sent < 4 << 20, f"{sent:,} bytes were taken"  # what the system's buffers hold
    assert got.count(b"HTTP/1.1 ") <= 1
    assert not got or re.match(rb"HTTP/1\.1 (400|405|431) ", got), got[:100]
    serves_as_before(case)


def test_rest_of_a_body_after_its_reply_has_an_end(case: SimpleNamespace) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", case.port))) as one:
        one.settimeout(20)
        one.sendall(CHUNKED.replace(b"POST /v1/completions", b"GET /version") + b"1\r\na\r\n")
        deadline, got = time.monotonic() + 20, b""
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                one.sendall(b"1\r\na\r\n")
                time.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            got = one.recv(1 << 16)
    assert time.monotonic() < deadline, "it went on"
    assert not got or got.startswith(b"HTTP/1.1 200 ")
    serves_as_before(case)


def test_header_in_a_trailer_says_nothing() -> None:
    body = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    with serving(EchoEngine(), api_key="k") as case:
        for lines, trailer, status in (
            ((), b"Authorization: Bearer k\r\n", 401),
            (("Authorization: Bearer k",), b"Authorization: Bearer wrong\r\nHost: evil.example\r\n", 200),
            (("Authorization: Bearer k",), b"X-Request-Id: theirs\r\nContent-Encoding: gzip\r\n", 200),
        ):
            extra = "".join(f"{line}\r\n" for line in (*lines, "Connection: close")).encode()
            head = CHUNKED[:-2] + extra + b"\r\n"
            (got,) = replies(case.port, [head + body + trailer + b"\r\n"])
            assert got.startswith(b"HTTP/1.1 %d " % status), got[:300]
            assert b"theirs" not in got


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /version HTTP/1.0\r\nHost: localhost\r\nHost: b.example\r\n\r\n", 400),
        (b"GET http://localhost/version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version\r\n\r\n", 400),
        (b"GET /version HTTP/0.9\r\n\r\n", 400),
        (b"GET /version HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /version HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_request_has_one_host_and_a_version_that_is_served(case: SimpleNamespace, head: bytes, status: int) -> None:
    (got,) = replies(case.port, [head])
    assert got.startswith(b"HTTP/1.1 %d " % status), got[:200]
    if status != 200:
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_replies_that_are_not_read_are_let_go_of() -> None:
    """uvicorn hands a whole reply to the system, which holds it until the client reads: also of a closed connection."""
    engine = EchoEngine(num_blocks=1 << 12)
    with serving(engine, request_timeout_s=5.0) as case:
        connections = case.server._running[0].server_state.connections

        def buffered() -> int:
            return sum(one.transport.get_write_buffer_size() for one in list(connections))

        asked = {"prompt": [1] * 10_000, "max_tokens": 1, "n": 128, "echo": True, "return_token_ids": True}
        lines = ("Connection: close",), ()
        unread = []
        for extra in lines:
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", case.port))
            one.sendall(raw("POST", "/v1/completions", json.dumps(asked).encode(), *extra))
            unread.append(one)
        try:
            wait_for(lambda: buffered() > 10_000_000, 20)  # beyond what the system takes
            wait_for(lambda: buffered() == 0 and len(connections) <= 1, 30)
        finally:
            for one in unread:
                one.close()
        assert post(case, "/v1/completions", **GOOD).status_code == 200


def test_bodies_of_one_caller_leave_room_for_others() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    held, body = [], {"prompt": [1], "max_tokens": 1, "user": "x" * 5000}
    with serving(max_body_bytes=10_000, max_bodies_bytes=80_000) as one:
        try:
            for _ in range(10):  # half bodies of one address, as many as are taken
                held.append(socket.create_connection(("127.0.0.1", one.port)))
                held[-1].sendall(head + b"Content-Length: 10000\r\n\r\n" + b" " * 9500)
            wait_for(lambda: post(one, COMPLETIONS, **body).status_code == 503)
            assert "the limit is 70,000 (max_bodies_bytes)" in post(one, COMPLETIONS, **body).json()["error"]["message"]
            transport = httpx.HTTPTransport(local_address="127.0.0.2")
            with httpx.Client(base_url=one.url, transport=transport, timeout=60) as other:
                assert other.post(COMPLETIONS, json=body).status_code == 200
        finally:
            for connection in held:
                connection.close()
        wait_for(lambda: post(one, COMPLETIONS, **body).status_code == 200)
    with serving(max_body_bytes=10_000, max_bodies_bytes=10_000) as one:
        assert post(one, COMPLETIONS, **(body | {"user": "x" * 9500})).status_code == 200, "a body always fits"


ECHOES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [7, 90] * 80, "echo": True, "logprobs": 3, "prompt_logprobs": 5, "return_token_ids": True,
                 "n": 8, "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "\0" * 130}], "return_raw_text": True, "return_token_ids": True,
           "logprobs": True, "top_logprobs": 2, "n": 8, "max_tokens": 2},
    "/generate": {"input_ids": [7, 90] * 80, "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 4,
                  "sampling_params": {"n": 8, "max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [7, 90] * 80, "sampling_params": {"prompt_logprobs": 4, "logprobs": 4,
                                                                                  "n": 8, "max_tokens": 2}},
    "/generate/": {"prompts": [[7, 90] * 80] * 4, "logprobs": 4, "n": 8, "max_tokens": 2},
    "/get_sequence_logprobs/": {"sequences": [[7, 90] * 80, *[[1, 2]] * 40], "prompt_lengths": [0] * 41,
                                "top_logprobs": 5, "response_format": "binary"},
}  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("path", ECHOES)
def test_reply_is_no_larger_than_estimated_however_much_its_choices_repeat(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    real = call_limits.reply_bytes
    monkeypatch.setattr(call_limits, "reply_bytes", lambda *args: (seen.append(real(*args)), seen[-1])[1])
    body = ECHOES[path]
    engine = EchoEngine() if path == CHAT else make_engine(make_model())  # whose vocabulary lacks the marks of turns
    with serving(engine, control=True) as case:
        reply = post(case, path, **body)
    assert reply.status_code == 200, reply.text[:300]
    assert len(reply.content) <= seen[-1] + 1000, "more than was estimated"
    assert len(reply.content) > seen[-1] / 8, "the estimate refuses what is small"
