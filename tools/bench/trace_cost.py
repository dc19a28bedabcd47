"""CPU time that traces add to a call: the same calls to a server without and with --otlp-traces-endpoint, in turns.

    python tools/bench/trace_cost.py [--rounds 9] [--calls 300]

Client, HTTP server, coordinator, an engine without a model and a collector that reads and forgets are threads of this
process; its CPU time is what is compared, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "server"), str(ROOT / "tests" / "dist")]


class Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=300, help="of each server in each round")
    args = parser.parse_args()
    from server_case import post, serving

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    with contextlib.ExitStack() as stack:
        cases = {
            "off": stack.enter_context(serving()),
            "on": stack.enter_context(serving(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}")),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for round_ in range(args.rounds + 1):
            for name in sorted(cases, reverse=round_ % 2 == 0):
                began = time.process_time()
                for _ in range(args.calls):
                    assert post(cases[name], "/v1/completions", prompt=[1, 2, 3], max_tokens=4).status_code == 200
                if round_:  # the first is a warm-up
                    times[name].append(1e6 * (time.process_time() - began) / args.calls)
    off, on = (statistics.median(times[name]) for name in ("off", "on"))
    print(f"CPU time of a call, median of {args.rounds} rounds: {off:.0f} us without traces, {on:.0f} us with")
    print(f"traces: {on - off:+.0f} us ({min(times['on']) - min(times['off']):+.0f} us between the quickest rounds)")


if __name__ == "__main__":
    main()
