"""HTTP: damaged requests byte by byte and field by field; the server answers in its own words and serves on."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from durable_case import make_engine, make_model
from echo import EchoEngine
from mutations import HOSTILE, Rounds, altered, damaged, no_errors_logged, rounds, shown, within
from server_case import free_blocks, post, raw_stream, serving, wait_for

from megatron_infer.errors import InferenceError
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server import http_protocol, request_body

__all__ = ["rounds"]
pytestmark = pytest.mark.security

DOCS = Path(__file__).parents[2] / "docs"
GOOD = {"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
UNAVAILABLE = (501, 503, 504)
"""Said in so many words: not served here, the engines are paused or asleep, or nothing came of it in time."""


@pytest.fixture(scope="module")
def case() -> Iterator[SimpleNamespace]:
    patch = pytest.MonkeyPatch()
    with patch.context() as quick:
        quick.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
        quick.setattr(request_body, "BODY_TIMEOUT_S", 0.3)
        quick.setattr(request_body, "DISCARD_TIMEOUT_S", 0.3)
        limits = {"max_body_bytes": 1 << 16, "max_reply_bytes": 1 << 18, "max_prompts": 8, "max_n": 4}
        with serving(EchoEngine(num_blocks=256), control=True, request_timeout_s=5.0, **limits) as one:
            one.before = post(one, "/v1/completions", **GOOD).json()["choices"]
            yield one


def serves_as_before(case: SimpleNamespace) -> None:
    """The next good request has the same answer. What a control route was made to do is undone first."""
    for path in ("/cancel_weight_update", "/wake_up", "/resume"):
        case.http.post(path)
    assert post(case, "/v1/completions", **GOOD).json()["choices"] == case.before
    assert case.http.get("/health").json()["status"] == "ok"


# ---------------------------------------------------------------------- bytes


def raw(method: str, path: str, body: bytes = b"", *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", *lines]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*head, "", ""]).encode() + body


def chunked(body: bytes) -> bytes:
    head = raw("POST", "/v1/completions", b"", "Content-Type: application/json", "Transfer-Encoding: chunked")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:])) + b"0\r\n\r\n"


BODY = json.dumps(GOOD).encode()
SEEDS = (
    raw("GET", "/v1/models"),
    raw("GET", "/v1/models/tiny?a=b&c=%41", b"", "Accept: */*", "Cookie: a=b", "X-Request-Id: mine"),
    raw("POST", "/v1/completions", BODY),
    raw("POST", "/v1/completions", BODY, "Expect: 100-continue"),
    raw("POST", "/v1/completions", json.dumps({**GOOD, "stream": True}).encode(), "Connection: close"),
    chunked(BODY),
    raw("GET", "/health") + raw("POST", "/v1/completions", BODY) + raw("HEAD", "/version"),
    raw("OPTIONS", "*", b"", "Origin: https://a.example", "Access-Control-Request-Method: POST"),
    raw(
        "GET",
        "/",
        b"",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: a",
        "Sec-WebSocket-Version: 13",
    ),
    raw("GET", "/", b"", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def replies(port: int, sent: list[bytes]) -> list[bytes]:
    """What comes back on a connection for each of `sent`, until the server closes it or is silent for long."""
    got: dict[int, bytearray] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for index, data in enumerate(sent):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            got[index] = bytearray()
            with contextlib.suppress(OSError):
                one.sendall(data)
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ, index)
        deadline = time.monotonic() + 20
        while selector.get_map():
            ready = selector.select(0.2)
            for key, _ in ready:
                try:
                    piece = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                except OSError:
                    piece = b""
                got[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
            # a whole request is answered and its connection kept; what has no end is closed by a time limit
            left = [key.data for key in selector.get_map().values()]
            if not ready and all(STATUS.search(got[index]) for index in left):
                break
            assert time.monotonic() < deadline, [sent[index] for index in left if not STATUS.search(got[index])]
    return [bytes(one) for one in got.values()]


def test_damaged_bytes_are_answered_in_http_or_closed(case: SimpleNamespace, rounds: Rounds) -> None:
    with no_errors_logged():
        for rng in rounds(long=2):
            sent = []
            for _ in range(150):
                data = rng.choice(SEEDS)
                sent.append(damaged(data, rng) if rng.random() < 0.8 else data + damaged(rng.choice(SEEDS), rng))
            for data, got in zip(sent, replies(case.port, sent), strict=True):
                with shown((data, got)):
                    assert not got or STATUS.match(got)
                    codes = {int(code) for code in STATUS.findall(got)}
                    assert all(code < 500 or code in UNAVAILABLE for code in codes)
            serves_as_before(case)


# ---------------------------------------------------------------------- fields


def documented_fields() -> list[str]:
    """Names in the first columns of the tables of docs/request_fields*.md."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("request_fields*.md")))
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return sorted({name for cell in cells for name in re.findall(r"`([A-Za-z_]\w*)`", cell)})


def operations(case: SimpleNamespace) -> list[tuple[str, str, Any]]:
    """(method, path, JSON schema of the body or None) of everything that is served."""
    document = case.http.get("/openapi.json").json()
    found = []
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            found.append((method.upper(), path, None if body is None else (body, document)))
    return found


def sample(schema: Any, document: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value that the schema allows, or nearly."""
    if not isinstance(schema, dict) or depth > 6:
        return rng.choice(HOSTILE)
    if "$ref" in schema:
        for part in schema["$ref"].removeprefix("#/").split("/"):
            document_part = document if part == "components" else document_part[part]  # noqa: F821
            document_part = document_part[part] if part == "components" else document_part
        return sample(document_part, document, rng, depth + 1)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return sample(rng.choice(schema[name]), document, rng, depth + 1)
    if "const" in schema or "enum" in schema:
        return schema.get("const", rng.choice(schema.get("enum", [None])))
    kind = schema.get("type")
    if kind == "object":
        fields, needed = schema.get("properties", {}), schema.get("required", [])
        chance = min(1.0, 4 / max(1, len(fields)))
        return {
            name: sample(field, document, rng, depth + 1)
            for name, field in fields.items()
            if name in needed or rng.random() < chance
        }
    if kind == "array":
        return [sample(schema.get("items", {}), document, rng, depth + 1) for _ in range(rng.choice((1, 1, 2)))]
    plain = {"string": ("a", "user", "auto", "json", "tiny"), "boolean": (True, False), "null": (None,)}
    numbers = {"integer": (1, 2, 5), "number": (0.5, 1)}
    return rng.choice({**plain, **numbers}.get(kind, HOSTILE))


def test_damaged_fields_are_a_client_error_or_an_answer(case: SimpleNamespace, rounds: Rounds) -> None:
    fields, known = documented_fields(), operations(case)
    assert len(fields) > 100 and len(known) > 60
    with no_errors_logged():
        for rng in rounds(long=2):
            for method, path, body in known:
                if body is None and rng.random() < 0.7:
                    continue
                value = None if body is None else sample(*body, rng)
                if rng.random() < 0.6:
                    value = altered(value, rng)
                if isinstance(value, dict) and rng.random() < 0.5:
                    value = {**value, rng.choice(fields): rng.choice(HOSTILE)}
                query = rng.choice(("", "", f"?{rng.choice(fields)}={rng.choice(('1', 'true', '%00', 'a' * 500))}"))
                at = re.sub(r"\{.*?\}", lambda _, rng=rng: rng.choice(("tiny", "x", "..", "%2e%2e%2f", "%00")), path)
                data = json.dumps(value).encode()
                with shown((method, at + query, data)), within(5.0):
                    reply = case.http.request(
                        method, at + query, content=data, headers={"Content-Type": "application/json"}
                    )
                    assert reply.status_code < 500 or reply.status_code in UNAVAILABLE, reply.text[:300]
                    if reply.status_code >= 400 and "json" in reply.headers.get("content-type", ""):
                        assert "error" in reply.json()
            serves_as_before(case)


# ---------------------------------------------------------------------- what was found


def test_running_request_ends_with_its_connection_though_others_wait_behind_it() -> None:
    """uvicorn tells the last request of a connection alone that its client has left."""
    with no_errors_logged(), serving(EchoEngine(step_s=0.01)) as case:
        before = free_blocks(case)
        connection = socket.create_connection(("127.0.0.1", case.port))
        connection.sendall(raw("POST", "/v1/completions", json.dumps({"prompt": [1, 2], "max_tokens": 1500}).encode()))
        wait_for(lambda: free_blocks(case) != before)
        connection.sendall(raw("GET", "/version") * 3)
        time.sleep(0.1)
        connection.close()
        wait_for(lambda: free_blocks(case) == before)  # it would take 15 s to its end


def test_bytes_that_are_no_http_do_not_stand_within_a_reply_that_flows() -> None:
    with no_errors_logged(), serving(EchoEngine(step_s=0.01)) as case:
        with contextlib.closing(raw_stream(case, "/v1/completions", prompt=[1, 2], max_tokens=500)) as connection:
            got = connection.recv(1 << 12)
            connection.sendall(b"\0 no http\r\n\r\n" * 3)
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(1 << 16):
                    got += piece
        assert got.startswith(b"HTTP/1.1 200 ") and got.count(b"HTTP/1.1") == 1
        wait_for(lambda: case.server._running[1].num_calls == 0)


def test_what_is_no_http_is_answered_as_every_other_mistake(case: SimpleNamespace) -> None:
    (got,) = replies(case.port, [b"\x16\x03\x01 hello\r\n\r\n"])
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"


def test_line_of_the_log_stays_one_line_whatever_a_caller_sends(caplog: pytest.LogCaptureFixture) -> None:
    false = "a\n12:00:00 x POST /v1/completions 200 1 ms\x1b[2J\u202e"
    with serving(EchoEngine(), log_requests=True) as case, caplog.at_level(logging.INFO, "megatron_infer.server"):
        for body in ({"prompt": "a", false: 1}, {"prompt": "a", "stream_options": {false: 1}, "stream": True}):
            assert post(case, "/v1/completions", **body).status_code == 400
        assert case.http.get("/x%0aGET%20/%1b[2J").status_code == 404
        wait_for(lambda: len(lines_of(caplog)) == 3)
    assert all(line.isprintable() for line in lines_of(caplog))
    assert sum(r"a\n12:00:00" in line and r"\x1b[2J\u202e" in line for line in lines_of(caplog)) == 2


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those of calls."""
    return [one.getMessage() for one in caplog.records if " ms" in one.getMessage()]


def test_weights_that_cannot_be_read_do_not_say_where_their_root_is(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"x" * 100)
    engine = make_engine(make_model())
    weights = WeightReceiver(engine, weights_root=tmp_path)
    with pytest.raises(InferenceError, match=r"bad/model\.safetensors: damaged") as caught:
        weights.commands()["load_weights"](path="bad")
    assert str(tmp_path) not in str(caught.value)
