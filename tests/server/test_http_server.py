"""The listening socket."""

from __future__ import annotations

import contextlib
import socket
import time

from server_case import serving

from megatron_infer.server.http_server import listen


def test_replies_do_not_wait_for_the_client_s_acknowledgement():
    with contextlib.closing(listen("127.0.0.1", 0)) as one:
        assert one.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's algorithm on: 40 ms per reply
    with serving() as case:
        took = []
        for _ in range(10):
            began = time.perf_counter()
            case.http.get("/version")
            took.append(time.perf_counter() - began)
    assert min(took) < 0.03, took
