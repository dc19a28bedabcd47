"""What traces cost a server: the same calls with and without an endpoint for spans."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cases.case import Case, Clock, Done, Measure, Variant

TESTS = Path(__file__).resolve().parents[3] / "tests"


class Collector(BaseHTTPRequestHandler):
    """Reads spans and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def calls(clock: Clock, server: Any, count: int) -> Done:
    from server_case import post

    with clock:
        for _ in range(count):
            assert post(server, "/v1/completions", prompt=[1, 2, 3], max_tokens=4).status_code == 200
    return Done(count)


@contextlib.contextmanager
def traces(args: argparse.Namespace) -> Iterator[list[Measure]]:
    sys.path[:0] = [str(TESTS / "server"), str(TESTS / "distributed")]
    from server_case import serving

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    with serving() as without, serving(otlp_traces_endpoint=endpoint) as with_traces:
        variants: dict[str, Variant] = {
            "without traces": partial(calls, server=without, count=args.calls),
            "with traces": partial(calls, server=with_traces, count=args.calls),
        }
        yield [Measure("calls of a server without a model", "call", variants)]
    collector.shutdown()


CASES = {
    "traces": Case(
        about="A server with and without --otlp-traces-endpoint.\n\n"
        "Client, HTTP server, coordinator, an engine without a model and the collector are threads of this process.\n"
        "Compare the CPU times: other work on the machine changes them little.",
        prepare=traces,
        rounds=9,
        options={"calls": 300},
    )
}
