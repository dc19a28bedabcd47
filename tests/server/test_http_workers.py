"""Several HTTP processes at one port: calls, figures, a process that dies or hangs, the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from unittest import mock

import httpx
import pytest
from coordinator_case import coordinator, replica, wait_for
from echo import EchoEngine, echo_tokens
from server_case import Streams, events, running

from megatron_infer.server import http_workers
from megatron_infer.server.http_server import HttpServer
from megatron_infer.server.http_workers import HttpFrontend
from megatron_infer.server.process_options import HttpOptions
from megatron_infer.server.server_config import ServerConfig

COMPLETION = "/v1/completions"
LONG_S = 60.0
"""Longest wait, on a machine that is busy."""


@contextlib.contextmanager
def workers(folder, *, step_s=0.0, count=2, **settings):
    """A server of `count` HTTP processes in front of an EchoEngine without a tokenizer: .url, .frontend, .pids()."""
    config = ServerConfig(port=0, log_requests=False, http_workers=count, **settings)
    with (
        mock.patch.object(http_workers, "GATHER_S", 0.3),
        coordinator(timeout_s=20.0) as one,
        replica(one.address, EchoEngine(step_s=step_s)),
    ):
        tokenizer = {"name": "echo", "eos_ids": None}
        options = HttpOptions(
            settings=config, coordinator=one.address, tokenizer=tokenizer, folder=str(folder), model="echo"
        )
        frontend = HttpFrontend(options)
        with running(frontend, config) as case:
            case.frontend, case.pids = frontend, lambda: [process.pid for process in frontend._http.processes]
            yield case


@contextlib.contextmanager
def stopped(pid):
    """Only other processes answer meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ask(url, number=1, **changes):
    body = {"prompt": [number, 2], "max_tokens": 8, "temperature": 0, "return_token_ids": True, **changes}
    return httpx.post(url + COMPLETION, json=body, timeout=60)


def tokens_of(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def health_of(case):
    return httpx.get(case.url + "/health", timeout=LONG_S).json()


def figures(url):
    """Series -> value, of a scrape."""
    lines = httpx.get(url + "/metrics", timeout=60).raise_for_status().text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


CALLS = 'megatron_infer_http_requests_total{code="200",method="POST",route="/v1/completions"}'
TOKENS = "megatron_infer_output_tokens_total"


def test_processes_answer_at_one_port_and_any_of_them_shows_the_figures_of_all(tmp_path):
    with workers(tmp_path) as case:
        first, second = case.pids()
        for silent, number in ((first, 1), (second, 2)):
            with stopped(silent):
                assert tokens_of(ask(case.url, number)) == echo_tokens([number, 2], 8)
        wait_for(lambda: figures(case.url)[CALLS] == 2, LONG_S)
        for silent in (first, second):
            with stopped(silent):  # its last figures are in the sum, without its gauges
                wait_for(lambda: figures(case.url)["megatron_infer_http_calls"] == 1, LONG_S)
                found = figures(case.url)
                assert found[CALLS] == 2 and found[TOKENS] == 16
                assert found['megatron_infer_engine_output_tokens_total{replica="r"}'] == 16
        health = health_of(case)
        assert [one["name"] for one in health["workers"]] == ["http0", "http1"] and health["status"] == "ok"

        os.kill(first, signal.SIGKILL)
        wait_for(lambda: case.pids()[0] not in (first, None), LONG_S)
        with stopped(case.pids()[0]):
            assert tokens_of(ask(case.url, 3)) == echo_tokens([3, 2], 8)
        wait_for(lambda: figures(case.url)[CALLS] == 3, LONG_S)  # with what a process that is gone has counted
        wait_for(lambda: health_of(case)["workers"][0]["restarts"] == 1, LONG_S)
        wait_for(lambda: case.frontend.status()[0]["state"] == "running", LONG_S)
        with stopped(second):
            assert tokens_of(ask(case.url, 4)) == echo_tokens([4, 2], 8)
            assert httpx.get(case.url + "/metrics", headers={b"Accept": b"\xff" * 50_000}).status_code == 200
            wait_for(lambda: figures(case.url)[CALLS] == 4, LONG_S)


def streams(url, count, num_tokens):
    body = {"max_tokens": num_tokens, "temperature": 0, "return_token_ids": True}
    return Streams(url, [{**body, "prompt": [number, 2]} for number in range(count)])


@pytest.mark.long
def test_killed_process_ends_its_own_streams_alone_and_sigterm_waits_for_all(tmp_path):
    with workers(tmp_path, step_s=0.01) as case:
        first, second = case.pids()
        with stopped(second):
            lost = streams(case.url, 2, 10_000)
            wait_for(lambda: len(lost.begun) == 2, LONG_S)
            wait_for(lambda: httpx.get(case.url + "/load", timeout=LONG_S).json()["server_load"] == 2, LONG_S)
        with stopped(first):
            kept = streams(case.url, 3, 200)
            wait_for(lambda: len(kept.begun) == 3, LONG_S)
        os.kill(first, signal.SIGKILL)
        assert all(isinstance(one, httpx.HTTPError) for one in lost.join())
        assert kept.join() == [echo_tokens([number, 2], 200) for number in range(3)]
        wait_for(lambda: case.frontend.status()[0]["restarts"] == 1, LONG_S)
        wait_for(lambda: case.frontend.status()[0]["state"] == "running", LONG_S)

        last = streams(case.url, 4, 100)
        wait_for(lambda: len(last.begun) == 4, LONG_S)
        case.frontend.shut_down()
        assert last.join() == [echo_tokens([number, 2], 100) for number in range(4)]
        ended = time.monotonic()
        case.thread.join(20)
        assert time.monotonic() - ended < 15.0, "a machine with nothing else to do takes 0.5 s"
        assert not case.frontend.was_forced


@contextlib.contextmanager
def server_of(address, **settings):
    """The URL of a server of a coordinator, in this process."""
    config = ServerConfig(port=0, log_requests=False, **settings)
    with running(HttpServer(config, coordinator=address, tokenizer=None, model="echo"), config) as case:
        yield case.url


def test_second_server_of_a_coordinator_controls_the_engines():
    with (
        coordinator(timeout_s=20.0) as one,
        replica(one.address, EchoEngine(step_s=0.01)),
        server_of(one.address) as url,
        server_of(one.address, control=True) as control,
    ):
        states = lambda: [each["state"] for each in one.core.stats()["replicas"]]  # noqa: E731
        command = lambda path: httpx.post(control + path, json={}, timeout=60).raise_for_status()  # noqa: E731
        body = {"prompt": [1, 2], "max_tokens": 60, "temperature": 0, "return_token_ids": True, "stream": True}
        for mode, reason in (("keep", "length"), ("abort", "abort")):
            with httpx.stream("POST", url + COMPLETION, json=body, timeout=60) as reply:
                lines = (line for line in reply.iter_lines() if line)
                heard = [next(lines)]
                command(f"/pause?mode={mode}")
                assert states() == ["paused"]
                command("/resume")
                choices = [choice for event in events([*heard, *lines]) for choice in event["choices"]]
            ids = [token for choice in choices for token in choice["token_ids"]]
            assert choices[-1]["finish_reason"] == reason and ids == echo_tokens([1, 2], len(ids))
            assert (len(ids) == 60) == (mode == "keep")
