"""What strangers send: too much, too long, too slowly, under a false name. It is refused, and others go on."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import closing, suppress

import httpx
import pytest
from echo import EchoEngine
from server_case import TEMPLATE, Background, post, serving, tokenizer, wait_for

from megatron_infer.server import call_limits, engine_client, http_protocol, traffic_log
from megatron_infer.server.http_server import listen
from megatron_infer.server.inactive_fields import FieldTable

USER = [{"role": "user", "content": "\0" * 1500}]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTH = 2048
"""Tokens of prompt and output that the engine of `case` holds."""


@pytest.fixture(scope="module")
def case():
    with serving(EchoEngine(num_blocks=128, max_requests=4), max_queue=8, max_reply_bytes=1 << 20) as one:
        yield one


@pytest.fixture
def counted(case, monkeypatch):
    """Characters that the server has tokenized since the test began."""
    seen, backend = [], tokenizer()
    real = type(backend).encode
    monkeypatch.setattr(
        type(backend), "encode", lambda self, text, **how: (seen.append(len(text)), real(self, text, **how))[1]
    )
    return seen


def connect(case):
    connection = socket.create_connection(("127.0.0.1", case.port))
    connection.settimeout(20)
    return connection


def reply_on(connection):
    """The bytes until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):  # it was closed while more was on its way
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def refusal(case, path, body, *, status=400):
    reply = post(case, path, **body)
    assert reply.status_code == status, (reply.status_code, reply.text[:300])
    return reply.json()["error"]


# ---------------------------------------------------------------------- before anything is computed


@pytest.mark.security
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": "a" * 5_000_000, "max_tokens": 1}),
        (COMPLETION, {"prompt": ["a", "b" * 5_000_000], "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5_000_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 2_500_000}] * 2}]}),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * (LENGTH + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": "a" * 5_000_000}}),
        ("/v1/embeddings", {"input": "a" * 5_000_000}),
        ("/tokenize", {"prompt": "a" * 5_000_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 5_000_000}]}),
    ],
)
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(case, counted, path, body):
    error = refusal(case, path, body)
    assert error["code"] == "context_length_exceeded" and not counted
    assert f"{LENGTH:,} tokens" in error["message"]


@pytest.mark.security
def test_text_far_beyond_the_context_costs_a_piece_of_it(case, counted):
    text = "a" * (12 * LENGTH)  # the longest token has 12 characters, so that it might fit; it has a token for each
    error = refusal(case, COMPLETION, {"prompt": text, "max_tokens": 1})
    assert (
        f"the first {8 * LENGTH:,} of your prompt's {len(text):,} characters are {8 * LENGTH:,} tokens"
        in error["message"]
    )
    assert counted == [8 * LENGTH]
    error = refusal(case, COMPLETION, {"prompt": "a" * LENGTH, "max_tokens": 1})
    assert "your prompt has 2,048 tokens, and one more must fit" in error["message"]
    assert post(case, COMPLETION, prompt="a" * (LENGTH - 1), max_tokens=1).status_code == 200


@pytest.mark.security
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETION, {"prompt": [1] * LENGTH, "max_tokens": 1}, "your prompt has 2,048 tokens"),
        ("/detokenize", {"tokens": [1] * LENGTH}, "your prompt has 2,048 tokens"),
        (COMPLETION, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}, "the limit is 4,096"),
        (COMPLETION, {"prompt": "a", "bad_token_ids": [1] * 5000}, "5,000 ids, the vocabulary has 1,000"),
        (COMPLETION, {"prompt": "a", "allowed_token_ids": [1] * 300_000}, "300,000 entries, the limit is 262,144"),
        (COMPLETION, {"prompt": [[1]] * 14, "max_tokens": 1}, "14 prompts, and at most 12 can be under way (5 at"),
        (COMPLETION, {"prompt": "a", "max_tokens": 1000, "n": 100}, "3,200,000 bytes"),
        (COMPLETION, {"prompt": "a", "max_tokens": 600, "logprobs": 20}, "the limit is 1,048,576 (max_reply_bytes)"),
        (COMPLETION, {"prompt": [1] * 1500, "echo": True, "logprobs": 20, "max_tokens": 1}, "3,152,132 bytes"),
        (COMPLETION, {"prompt": "\0" * 1500, "echo": True, "n": 128, "max_tokens": 1}, "1,156,096 bytes"),
        (COMPLETION, {"prompt": [1] * 1500, "return_token_ids": True, "n": 100, "stream": True, "max_tokens": 1},
         "1,203,200 bytes"),
        (COMPLETION, {"prompt": [1] * 1500, "prompt_logprobs": 1, "n": 10, "max_tokens": 1}, "3,000,320 bytes"),
        (CHAT, {"messages": USER, "return_token_ids": True, "n": 60, "max_tokens": 1}, "1,460,"),
        (CHAT, {"messages": USER, "return_raw_text": True, "n": 120, "max_tokens": 1}, "1,090,"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 4, "max_tokens": 500, "logprobs": True,
                "top_logprobs": 10}, "the reply may have 2,264,000 bytes"),
        (COMPLETION, {"prompt": "a", "guided_json": {"const": "a" * 70_000}}, "the limit is 65,536"),
        (COMPLETION, {"prompt": "a", "guided_choice": ["a" * 70_000]}, "the limit is 65,536"),
    ],
)  # fmt: skip
def test_lists_schemas_and_replies_are_bounded_by_their_figures(case, path, body, message):
    assert message in refusal(case, path, body)["message"]


def nested(depth):
    schema = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.security
@pytest.mark.parametrize("parameters", [nested(40), nested(450), {"const": "a" * 70_000}])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_schemas_of_tools_are_bounded_whether_calls_are_forced_or_not(case, parameters, choice):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = [{"role": "user", "content": "a"}]
    error = refusal(case, CHAT, {"messages": messages, "tools": [tool], "tool_choice": choice})
    assert error["param"] == "tools"


@pytest.mark.security
def test_reply_of_a_call_without_max_tokens_ends_at_the_limit(case):
    asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 4}
    choices = post(case, CHAT, **asked).json()["choices"]
    assert {len(one["logprobs"]["content"]) for one in choices} == {(1 << 20) // (4 * (32 + 21 * 100))}
    assert {one["finish_reason"] for one in choices} == {"length"}


@pytest.mark.security
@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"prompt": [' + b"1," * 1_200_000 + b"1]}", "about 1,200,000 JSON values, the limit is 1,048,576"),
        (b'{"messages": [' + b'{"role":"user"},' * 200_000 + b"{}]}", "JSON fields, the limit is 131,072"),
    ],
)
def test_body_that_takes_long_to_decode_is_refused_undecoded(case, body, what):
    began = time.perf_counter()
    reply = case.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 413 and what in reply.json()["error"]["message"]
    assert time.perf_counter() - began < 5


@pytest.mark.security
def test_bodies_of_calls_under_way_are_bounded_together_and_given_back():
    def padded(number):
        return {"prompt": [number], "max_tokens": 400, "ignore_eos": True, "user": "x" * 15_000}

    limits = {"max_body_bytes": 20_000, "max_bodies_bytes": 30_000}
    with serving(EchoEngine(step_s=0.01), **limits) as one, httpx.Client(base_url=one.url, timeout=60) as other:
        with other.stream("POST", COMPLETION, json={**padded(1), "stream": True}) as first:
            assert first.status_code == 200
            refused = post(one, COMPLETION, **padded(2))
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert "the limit is 30,000 (max_bodies_bytes)" in refused.json()["error"]["message"]
            part = json.dumps(padded(3)).encode()
            chunked = one.http.post(
                COMPLETION, content=iter([part[:9000], part[9000:]]), headers={"Content-Type": "application/json"}
            )
            assert chunked.status_code == 503, "a body without a length is counted as it comes"
            assert post(one, COMPLETION, prompt=[4], max_tokens=1).status_code == 200
        wait_for(lambda: post(one, COMPLETION, **padded(5) | {"max_tokens": 1}).status_code == 200)


@pytest.mark.security
def test_bodies_of_callers_without_a_key_take_no_room():
    head = b"POST /ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000\r\n\r\n"
    with (
        serving(api_key="k", max_body_bytes=20_000, max_bodies_bytes=20_000) as one,
        socket.create_connection(("127.0.0.1", one.port)) as stranger,
    ):
        stranger.sendall(head + bytes(19_000))
        time.sleep(0.1)
        one.http.headers["Authorization"] = "Bearer k"
        reply = post(one, COMPLETION, prompt=[1], max_tokens=1, user="x" * 15_000)
        assert reply.status_code == 200, reply.text
        stranger.sendall(bytes(1000))
        assert stranger.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.security
def test_long_body_with_fields_without_an_action_is_taken_apart_beside_the_event_loop(case, monkeypatch):
    threads, real = [], FieldTable.settle
    monkeypatch.setattr(
        FieldTable, "settle", lambda *args, **how: (threads.append(threading.current_thread()), real(*args, **how))[1]
    )
    reply = post(case, COMPLETION, prompt=[1, 2], user="me", max_tokens=1)
    assert reply.headers["x-ignored-fields"] == "user"
    error = refusal(case, COMPLETION, {"prompt": [1] * 40_000, "user": "me", "max_tokens": 1})
    assert error["code"] == "context_length_exceeded"
    small, large = threads
    assert large is not small, "it ran on the event loop"


@pytest.mark.security
def test_recorded_traffic_is_readable_by_its_owner_alone_also_in_a_file_that_was_there(tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.touch(mode=0o644)
    with serving(record=str(path)) as case:
        assert path.stat().st_mode & 0o777 == 0o600
        assert post(case, COMPLETION, prompt=[1], max_tokens=1).status_code == 200
        wait_for(lambda: path.read_text().count("\n") == 1)


@pytest.mark.security
def test_recording_holds_no_more_of_a_body_than_a_call_may_have():
    async def receive():
        return {"type": "http.request", "body": b"a" * 8, "more_body": True}

    async def read():
        call = traffic_log._RecordedCall(receive, None, 20)
        for _ in range(100):
            await call.receive()
        return call.parts

    assert asyncio.run(read()) == [b"a" * 8] * 2


# ---------------------------------------------------------------------- before the key is looked at


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_protocol, "LOG_EVERY_S", 60.0)


@pytest.mark.security
@pytest.mark.parametrize(
    "head",
    [
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000,
        b"GET /" + b"a" * 70_000,
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(300)),
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 60_000 + b"\r\n",
    ],
)
def test_endless_head_is_answered_431_and_closed(case, head):
    with closing(connect(case)) as connection:
        with suppress(ConnectionError):  # closed before it was all sent
            connection.sendall(head)
        data = reply_on(connection)
    assert not data or data.startswith(b"HTTP/1.1 431 "), data[:100]
    if len(head) < 100_000:
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert case.http.get("/version").status_code == 200


def test_large_head_and_many_headers_within_the_limits_are_served(case):
    headers = {f"X-{i}": "a" for i in range(200)} | {"Cookie": "a" * 40_000}
    assert case.http.get("/version", headers=headers).status_code == 200


@pytest.mark.security
@pytest.mark.parametrize("sent", [b"", b"GET /ver", b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_connection_without_a_whole_head_is_closed(case, quick, sent):
    with closing(connect(case)) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        stop = threading.Event()

        def drip():
            while sent and not stop.wait(0.05):
                try:
                    connection.sendall(b"a")  # bytes that come one by one do not prolong it
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        data = reply_on(connection)
        stop.set()
        thread.join()
        assert 0.1 < time.monotonic() - began < 15
    assert data.startswith(b"HTTP/1.1 408 ") if sent else data == b""


@pytest.mark.security
def test_half_a_head_behind_a_reply_is_closed(case, quick):
    with closing(connect(case)) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /ver")
        data = reply_on(connection)
    assert data.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in data


def test_slow_reply_is_not_taken_for_a_slow_head(quick, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 1.0)  # a busy machine may keep the client from sending
    with serving(EchoEngine(step_s=0.075)) as case:
        reply = post(case, COMPLETION, prompt=[1, 2], max_tokens=20)
        assert reply.status_code == 200 and len(reply.json()["choices"][0]["text"].split()) == 20


@pytest.mark.security
def test_pipelined_requests_are_answered_in_order_and_bounded(case):
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with closing(connect(case)) as connection:
        connection.sendall(one * 10 + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert reply_on(connection).count(b"HTTP/1.1 200 ") == 11
    with closing(connect(case)) as connection:
        connection.sendall(one * 500)
        assert reply_on(connection).count(b"HTTP/1.1 200 ") <= 20


@pytest.mark.security
def test_connections_beyond_the_limit_get_503_old_ones_go_on_and_one_line_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(http_protocol, "raise_descriptor_limit", lambda: 6)
    from megatron_infer.server import http_server

    monkeypatch.setattr(http_server, "raise_descriptor_limit", lambda: 6)
    with serving() as case, caplog.at_level(logging.WARNING, "megatron_infer.server"):
        assert case.http.get("/version").status_code == 200  # its connection stays open
        idle = [connect(case) for _ in range(5)]
        wait_for(lambda: len(case.server._running[0].server_state.connections) == 6)
        for _ in range(3):
            with closing(connect(case)) as refused:
                refused.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert reply_on(refused).startswith(b"HTTP/1.1 503 ")
        assert case.http.get("/version").status_code == 200
        for one in idle:
            one.close()
        wait_for(lambda: len(case.server._running[0].server_state.connections) == 1)
        with closing(connect(case)) as again:
            again.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert reply_on(again).startswith(b"HTTP/1.1 200 ")
    assert len([one for one in caplog.records if "connections are open" in one.getMessage()]) == 1


def test_descriptors_are_raised_to_the_hard_limit(monkeypatch):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        allowed = http_protocol.raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(limits[1], 1 << 20)
        assert allowed == min(limits[1], 1 << 20) - 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_replies_do_not_wait_for_the_client_s_acknowledgement():
    with closing(listen("127.0.0.1", 0)) as one:
        assert one.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's algorithm on: 40 ms per reply
    with serving() as case:
        took = []
        for _ in range(10):
            began = time.perf_counter()
            case.http.get("/version")
            took.append(time.perf_counter() - began)
    assert min(took) < 0.03, took


# ---------------------------------------------------------------------- under a false name


NAMES = [
    # (Host, whether a server without options and key answers)
    ("127.0.0.1:80", True),
    ("127.0.0.1", True),
    ("127.5.5.5", True),
    ("192.0.2.7:8000", True),
    ("[::1]:8000", True),
    ("localhost:8000", True),
    ("LOCALHOST.", True),
    (socket.gethostname(), True),
    ("127.evil.example", False),
    ("127.0.0.1.evil.example", False),
    ("localhost.evil.example", False),
    ("evil.example", False),
    ("evil.example:8000", False),
    ("evil.example@127.0.0.1", False),
    ("127.1", False),
    ("2130706433", False),
    ("::1", False),
    ("", False),
]
ROUTES = [("GET", "/health"), ("GET", "/v1/status"), ("GET", "/metrics"), ("GET", "/"), ("POST", COMPLETION)]


@pytest.mark.security
@pytest.mark.parametrize(("host", "is_served"), NAMES)
def test_host_is_checked_by_address_on_every_route(case, host, is_served):
    for method, path in ROUTES:
        body = {"prompt": [1], "max_tokens": 1} if method == "POST" else None
        reply = case.http.request(method, path, json=body, headers={"Host": host})
        assert reply.status_code == (200 if is_served else 403), (host, path, reply.text[:200])
        if not is_served:
            assert reply.json()["error"]["code"] == "host_not_allowed" and "--allowed-host" in reply.text


@pytest.mark.long
def test_allowed_hosts_are_options_and_a_key_takes_the_place_of_names():
    with serving(allowed_host=("Infer.example", "b.example")) as case:
        for host, status in (("infer.example:80", 200), ("B.example", 200), ("evil.example", 403)):
            assert case.http.get("/version", headers={"Host": host}).status_code == status
    with serving(api_key="k") as case:
        assert case.http.get("/version", headers={"Host": "infer.example"}).status_code == 200
        assert case.http.get("/v1/status", headers={"Host": "infer.example"}).status_code == 401
    with serving(api_key="k", allowed_host=("infer.example",)) as case:
        assert case.http.get("/version", headers={"Host": "evil.example"}).status_code == 403
    with serving(allowed_host=("*",)) as case:
        assert case.http.get("/version", headers={"Host": "evil.example"}).status_code == 200


@pytest.mark.security
def test_control_without_key_answers_to_loopback_alone():
    with serving(control=True) as case:
        for host in [name for name, is_served in NAMES if not is_served] + ["192.0.2.7", socket.gethostname()]:
            assert case.http.post("/pause?mode=keep", headers={"Host": host}).status_code == 403
        assert case.http.get("/is_paused").json()["is_paused"] is False


PAGE = "https://app.example"
ASK = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-a"}


@pytest.mark.security
def test_cors_is_off_by_default_and_open_to_the_origins_given(case):
    for path in ("/version", COMPLETION):
        replies = [case.http.options(path, headers=ASK), case.http.get("/version", headers={"Origin": PAGE})]
        assert not any(name.startswith("access-control") for one in replies for name in one.headers)
    with serving(api_key="k", allow_origin=(PAGE,)) as shared:
        asked = shared.http.options(COMPLETION, headers=ASK)
        assert asked.status_code == 204 and asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-headers"] == "authorization, x-a"
        assert "POST" in asked.headers["access-control-allow-methods"]
        for key, status in (("k", 200), ("wrong", 401)):  # the page can read errors, too
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            reply = shared.http.post(COMPLETION, json={"prompt": [1], "max_tokens": 1}, headers=headers)
            assert reply.status_code == status and reply.headers["access-control-allow-origin"] == PAGE
            assert reply.headers["vary"] == "origin"
        other = shared.http.options(COMPLETION, headers=ASK | {"Origin": "https://evil.example"})
        assert other.status_code == 401 and "access-control-allow-origin" not in other.headers
    with serving(allow_origin=("*",), control=True) as shared:
        assert shared.http.get("/version", headers={"Origin": PAGE}).headers["access-control-allow-origin"] == PAGE
        reply = shared.http.post("/pause?mode=keep", headers={"Origin": PAGE})
        assert reply.status_code == 403, "control is for origins that are named"
    with serving(allow_origin=(PAGE,), control=True) as shared:
        headers = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
        assert shared.http.post("/pause?mode=keep", headers=headers).status_code == 200
        assert shared.http.post("/resume", headers=headers).status_code == 200
        several = [*headers.items(), ("Origin", "https://evil.example")]
        assert shared.http.post("/pause?mode=keep", headers=several).status_code == 403


# ---------------------------------------------------------------------- beside others


def asking_from(case, address):
    """A client whose calls come from another address of this machine."""
    return httpx.Client(base_url=case.url, transport=httpx.HTTPTransport(local_address=address), timeout=60)


@pytest.mark.security
def test_a_call_of_many_prompts_does_not_stand_before_another_caller():
    engine = EchoEngine(step_s=0.005, max_requests=4)
    with serving(engine, max_queue=512) as case, asking_from(case, "127.0.0.2") as other:
        asked = {"prompt": [[i + 1] for i in range(400)], "max_tokens": 4, "temperature": 0}
        batch = Background(case, COMPLETION, asked)
        wait_for(lambda: case.coordinator.core.dispatch.num_waiting > 350)
        began = time.monotonic()
        assert other.post(COMPLETION, json={"prompt": [7], "max_tokens": 2}).status_code == 200
        alone = time.monotonic() - began
        assert case.coordinator.core.dispatch.num_waiting > 150, "it did not wait for the batch"
        began = time.monotonic()
        assert post(case, COMPLETION, prompt=[8], max_tokens=2).status_code == 200, "nor does another call of the same"
        assert time.monotonic() - began < 20 * alone + 1
        assert len(batch.result().json()["choices"]) == 400


def cached_tokens(client, **body):
    prompt = list(range(1, 65))
    reply = client.post(COMPLETION, json={"prompt": prompt, "max_tokens": 1, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]


@pytest.mark.security
def test_what_others_have_sent_does_not_show_unless_asked_and_is_not_shared_if_isolated():
    with serving() as case:
        assert [cached_tokens(case.http) for _ in range(2)] == [None, None]
    for isolated, shared in ((False, 48), (True, 0)):
        options = {"show_cached_tokens": True, "isolate_prefix_cache": isolated}
        with serving(**options) as case, asking_from(case, "127.0.0.2") as other:
            assert [cached_tokens(case.http)["cached_tokens"] for _ in range(2)] == [0, 48]
            assert cached_tokens(other)["cached_tokens"] == shared
            assert cached_tokens(other)["cached_tokens"] == 48
            assert cached_tokens(other, cache_salt="s")["cached_tokens"] == 0


@pytest.mark.security
def test_health_says_what_the_process_knows_while_the_coordinator_is_busy(monkeypatch):
    monkeypatch.setattr(engine_client, "REPORT_TIMEOUT_S", 0.2)
    with serving() as case:
        assert case.http.get("/health").json()["status"] == "ok"
        core = case.coordinator.core
        real, core.stats = core.stats, lambda: time.sleep(0.5) or real()  # every report is late
        time.sleep(0.8)
        began = time.monotonic()
        replies = [case.http.get("/health") for _ in range(20)]
        assert time.monotonic() - began < 5 and {one.json()["status"] for one in replies} == {"ok"}
        core.stats = real


@pytest.mark.security
def test_chat_template_that_takes_long_is_a_400_and_others_are_served(monkeypatch):
    monkeypatch.setattr(call_limits, "RENDER_CPU_S", 0.3)
    loops = [f"{{% for {name} in messages %}}" for name in "abc"]
    slow = "".join([*loops, "{% if c.role == a %}{% endif %}", *["{% endfor %}"] * 3])
    with serving(encoder=tokenizer(slow + TEMPLATE)) as case:
        asked = {"messages": [{"role": "user", "content": "x"}] * 200}
        calls = [Background(case, CHAT, asked) for _ in range(3)]
        assert post(case, COMPLETION, prompt=[1, 2], max_tokens=1).status_code == 200
        for reply in [one.result() for one in calls]:
            assert reply.status_code == 400 and "it takes more than 0.3 s (limit)" in reply.json()["error"]["message"]


@pytest.mark.security
@pytest.mark.parametrize("framing", ["Content-Length", "Transfer-Encoding"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_offer_of_another_protocol_is_ignored_and_the_body_read(case, framing, is_cut):
    body = json.dumps({"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n"
    sent = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body[:9], body[9:]]
    if framing == "Transfer-Encoding":
        chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in sent[1:]]
        sent = [f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), *chunks, b"0\r\n\r\n"]
    plain = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
    last = plain + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + plain + b"Connection: close\r\n\r\n"
    with closing(connect(case)) as connection:
        for piece in [*sent, last] if is_cut else [b"".join([*sent, last])]:
            connection.sendall(piece)
            time.sleep(0.02)
        replies = reply_on(connection)
    assert replies.count(b"HTTP/1.1 200 OK") == 3 and b'"completion_tokens":3' in replies


@pytest.mark.security
def test_body_that_is_no_http_has_an_answer_unless_a_reply_has_begun(case):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for broken in (b"Transfer-Encoding: gzip\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\nx"):
        for sent in (head + broken, head + offer + broken):
            with closing(connect(case)) as connection:
                connection.sendall(sent)
                assert reply_on(connection).startswith(b"HTTP/1.1 400 ")


def test_compressed_bodies_and_wrong_keys_are_named(case):
    body = {"prompt": [1], "max_tokens": 1}
    reply = case.http.post(COMPLETION, json=body, headers={"Content-Encoding": "gzip"})
    assert reply.status_code == 415 and "compressed (Content-Encoding: gzip)" in reply.text
    error = refusal(case, COMPLETION, body | {"logit_bias": {"x": 1}})
    assert error["param"] == "logit_bias" and "logit_bias: a key of it is wrong" in error["message"]
