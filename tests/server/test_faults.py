"""Nothing ends a stream but its own end: processes that die, hang, or are told to end while streams run.

What a coordinator that is lost costs its clients is in tests/coordinator/test_coordinator_loss.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from coordinator_case import replica, wait_for
from echo import EchoEngine, echo_tokens
from server_case import Streams, coordinator_at, post, serving, stream, supervised, supervised_coordinator
from test_command import Command, processes

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.server import supervisor

COMPLETION = "/v1/completions"


def ask(**changes):
    return {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, **changes}


# ---------------------------------------------------------------------- processes


@pytest.mark.long
def test_process_that_hangs_is_killed_and_started_again_and_what_waits_for_it_goes_on(tmp_path):
    with supervised_coordinator(tmp_path, hang_timeout_s=2.5) as process:
        address = process.ready["address"]
        with replica(address, EchoEngine(step_s=0.01)), InferenceClient(address) as client:
            future = client.submit([1, 2], SamplingParams(max_tokens=100, temperature=0.0))
            time.sleep(0.3)
            process.signal(signal.SIGSTOP)
            wait_for(lambda: process.restarts and process.ready)
            assert process.status()["last_exit"] == "signal 9 (it hung)"
            assert future.result(60).outputs[0].token_ids == echo_tokens([1, 2], 100)


@pytest.mark.long
def test_process_that_hangs_before_its_first_word_is_killed_too(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LOADING_FACTOR", 1)
    with supervised(dataclasses.replace(coordinator_at(tmp_path), hang_timeout_s=3.0)) as one:
        process = one.processes[0]
        process.signal(signal.SIGSTOP)
        assert process.ready is None
        wait_for(lambda: process.last_exit)
        assert process.last_exit == "signal 9 (it hung)"
        monkeypatch.undo()  # it has its time to load again
        wait_for(lambda: process.ready)


@pytest.mark.long
def test_process_that_ends_as_it_was_told_is_started_again_at_once_and_never_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_FAILURES", 1)
    with supervised_coordinator(tmp_path) as process:
        for count in (1, 2):
            process.signal(signal.SIGTERM)
            wait_for(lambda count=count: process.restarts == count and process.ready)
            assert not process.is_given_up
        assert process.status()["last_exit"] == "code 0"


# ---------------------------------------------------------------------- streams


def test_every_replica_is_replaced_in_turn_without_a_failed_request():
    """Each drains: it takes no more requests and ends those that it has."""
    with contextlib.ExitStack() as stack:
        case = stack.enter_context(serving(EchoEngine(step_s=0.005), EchoEngine(step_s=0.005)))
        replies, ending = [], threading.Event()

        def call(number):
            with httpx.Client(base_url=case.url, timeout=60) as http:
                while not ending.is_set():
                    reply = http.post(COMPLETION, json=ask(prompt=[number], max_tokens=30, return_token_ids=True))
                    replies.append((number, reply.status_code, reply.json()))

        def wait_for_more():
            before = len(replies)
            wait_for(lambda: len(replies) > before + 10)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for index, old in enumerate(case.replicas):
            wait_for_more()
            stack.enter_context(replica(case.coordinator.address, EchoEngine(step_s=0.005), name=f"new{index}"))
            old.drain()
            old.thread.join(60)
            assert not old.thread.is_alive() and old.failure is None
        wait_for_more()
        ending.set()
        for thread in threads:
            thread.join()
        assert sorted(one["name"] for one in case.coordinator.core.stats()["replicas"]) == ["new0", "new1"]
        for number, status, body in replies:
            assert status == 200 and body["choices"][0]["token_ids"] == echo_tokens([number], 30)


def test_call_over_its_time_is_aborted_with_an_error_and_its_stream_logged_and_counted_as_such(caplog):
    caplog.set_level(logging.INFO, "megatron_infer.server")
    with serving(EchoEngine(step_s=0.05), request_timeout_s=1.0, log_requests=True) as case:
        chunks = stream(case, COMPLETION, **ask(max_tokens=1000))
        assert chunks[-1]["error"]["code"] == "timeout" and chunks[0]["choices"]
        assert post(case, COMPLETION, **ask(max_tokens=2)).status_code == 200
        reply = post(case, COMPLETION, **ask(max_tokens=1000))
        assert reply.status_code == 504 and "request_timeout_s" in reply.json()["error"]["message"]
        wait_for(lambda: not case.engines[0].stats()["num_requests"])
        wait_for(lambda: len(caplog.records) >= 3)
        text = case.http.get("/metrics").text
    lines = [record.getMessage() for record in caplog.records if COMPLETION in record.getMessage()]
    assert " 504 " in lines[0] and "ms in its stream: the time allowed" in lines[0] and " 200 " in lines[1]
    counted = [line for line in text.splitlines() if "http_requests_total{" in line and COMPLETION in line]
    assert sorted(line.partition('code="')[2][:3] for line in counted) == ["200", "504"]
    assert any('code="504"' in line and line.endswith(" 2.0") for line in counted), "the stream too"


# ---------------------------------------------------------------------- the whole command


def streams(url, count, num_tokens):
    body = {"prompt": "The capital of France is", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return Streams(url, [body] * count, field="text")


def is_serving(url, restarts):
    """Whether an engine that was restarted so many times serves; one that has ended may be shown for a moment."""
    reply = httpx.get(f"{url}/health")
    (worker,) = reply.json()["workers"]
    return reply.status_code == 200 and (worker["restarts"], worker["state"]) == (restarts, "running")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_streams_of_a_server_outlive_its_processes():
    """Health says what is amiss meanwhile; in the end no process of the server is left."""
    sizes = ("--max-sequence-length", "512", "--buffer-size-gb", "0.2", "--threads", "1")
    command = Command("smollm2", "--dtype", "float32", "--logging-step-interval", "10", *sizes)
    try:
        url, parent = command.wait_ready(), command.process.pid
        (expected,), engines = streams(url, 1, 60).join(), 0
        assert expected.startswith(" Paris")
        wait_for(lambda: command.matches(r"step 50: .* tokens"))  # metrics without a writer are console lines
        for role, number in (
            (b"coordinator", signal.SIGKILL),
            (b"engine", signal.SIGTERM),
            (b"engine", signal.SIGSTOP),
        ):
            running = streams(url, 2, 60)
            time.sleep(1.0)
            (pid,) = processes(parent, role)
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                wait_for(lambda: httpx.get(f"{url}/health").json()["status"] == "loading")
                health = httpx.get(f"{url}/health")
                assert health.status_code == 503
                assert health.json()["workers"][0]["last_exit"] == "signal 9 (it hung)"
            assert running.join() == [expected] * 2, (role, number)
            wait_for(lambda pid=pid, role=role: processes(parent, role) not in ([], [pid]))
            engines += role == b"engine"
            wait_for(lambda: is_serving(url, engines))  # noqa: B023
        last, ending = streams(url, 1, 40), processes(parent, b"engine") + processes(parent, b"coordinator")
        time.sleep(1.0)
        command.process.send_signal(signal.SIGTERM)
        assert len(last.join()) == 1
        ended = time.monotonic()
        command.process.wait(20)
        assert time.monotonic() - ended < 15, "a machine with nothing else to do takes 0.5 s"
    finally:
        code = command.end()
    assert code == 0 and "Traceback" not in "".join(command.lines), "".join(command.lines)
    assert len(ending) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ending)
