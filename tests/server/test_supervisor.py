"""Subprocesses of the server: restarted when they die, abandoned when that fails, ended with the server."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from coordinator_case import coordinator, replica
from echo import EchoEngine
from server_case import running, supervised, wait_for

from megatron_infer.coordinator.client import AsyncInferenceClient, InferenceClient
from megatron_infer.server import launch, subprocess_main
from megatron_infer.server import supervisor as supervisor_module
from megatron_infer.server.http_server import EnginesFailed
from megatron_infer.server.launch import http_server
from megatron_infer.server.process_options import EngineOptions, HttpOptions
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.supervisor import Process, ProcessSpec, Supervisor


def coordinator_process(tmp_path, **changes):
    options = {"bind": f"ipc://{tmp_path}/c", "max_queue": 7} | changes
    return ProcessSpec(name="coordinator", role="coordinator", options=options, is_worker=True)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_dead_process_is_restarted_and_serves(tmp_path):
    with supervised(coordinator_process(tmp_path)) as supervisor:
        process = supervisor.processes[0]
        wait_for(lambda: process.ready)
        with InferenceClient(process.ready["address"]) as client:
            assert client.stats()["waiting"] == 0
            first = process.pid
            process.signal(signal.SIGKILL)
            wait_for(lambda: process.restarts == 1 and process.ready)
            assert process.pid != first
            assert supervisor.status() == [
                {"name": "coordinator", "state": "running", "restarts": 1, "last_exit": "signal 9"}
            ]
            assert supervisor.failure() is None
    assert gone(process.pid) and process.exit_code == 0


@pytest.mark.long
def test_error_while_a_process_is_watched_is_that_processs_and_the_others_go_on(tmp_path, monkeypatch):
    whole, child, refused = Process.check, supervisor_module.ChildProcess, []

    def check(process):
        if process.spec.name == "second" and process.restarts:
            raise ValueError("a report of another kind")
        whole(process)

    def start_child(*arguments, **options):
        if refused:
            raise refused.pop()
        return child(*arguments, **options)

    monkeypatch.setattr(Process, "check", check)
    monkeypatch.setattr(supervisor_module, "ChildProcess", start_child)
    monkeypatch.setattr(supervisor_module, "FIRST_WAIT_S", 0.01)
    (tmp_path / "two").mkdir()
    specs = [coordinator_process(tmp_path), dataclasses.replace(coordinator_process(tmp_path / "two"), name="second")]
    with supervised(*specs, number=signal.SIGKILL) as supervisor:
        first, second = supervisor.processes
        wait_for(lambda: first.ready and second.ready)
        second.signal(signal.SIGKILL)
        wait_for(lambda: second.is_given_up)
        assert second.error == "second cannot be watched: ValueError: a report of another kind"
        refused.append(OSError("no memory"))
        first.signal(signal.SIGKILL)
        wait_for(lambda: first.restarts == 2 and first.ready)
        assert supervisor.failure() is None


def test_process_that_cannot_be_started_is_tried_after_growing_waits_and_then_given_up(tmp_path, monkeypatch):
    clock, starts = SimpleNamespace(now=0.0), []

    def start_child(*arguments, **options):
        starts.append(round(clock.now, 1))
        raise OSError("no memory")

    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(supervisor_module, "ChildProcess", start_child)
    supervisor = Supervisor([coordinator_process(tmp_path)])
    (process,) = supervisor.processes
    supervisor_module._attend(process, process.start)
    while not process.is_given_up:
        supervisor_module._attend(process, process.check)
        clock.now += 0.1
        assert clock.now < 60
    waits = [after - before for before, after in itertools.pairwise(starts)]
    assert waits == pytest.approx([0.5, 1.0, 2.0, 4.0], abs=0.25)
    assert supervisor.failure() == "coordinator has ended (it could not be started) and was given up; see the log"


def test_wrong_option_is_reported_and_not_retried(tmp_path):
    with supervised(coordinator_process(tmp_path, max_queue=0)) as supervisor:
        wait_for(supervisor.failure)
        assert "max_queue is 0" in supervisor.failure() and supervisor.processes[0].restarts == 0


@pytest.mark.parametrize(("window_s", "serves_s", "is_given_up"), [(0.2, 0.3, False), (60.0, 0.0, True)])
def test_process_is_given_up_after_failures_within_the_window_and_never_by_those_far_apart(
    tmp_path, monkeypatch, window_s, serves_s, is_given_up
):
    for name, value in {"WINDOW_S": window_s, "MAX_FAILURES": 3, "FIRST_WAIT_S": 0.01}.items():
        monkeypatch.setattr(supervisor_module, name, value)
    with supervised(coordinator_process(tmp_path), number=signal.SIGKILL) as supervisor:
        process = supervisor.processes[0]
        for count in range(1, 5):
            wait_for(lambda: process.ready or process.is_given_up)
            time.sleep(serves_s)
            if process.is_given_up:
                break
            process.signal(signal.SIGKILL)
            wait_for(lambda count=count: process.restarts == count or process.is_given_up)
        assert process.is_given_up is is_given_up and (supervisor.failure() is not None) is is_given_up


@pytest.mark.parametrize("num_workers", [1, 2])
def test_server_whose_engines_are_given_up_ends_its_calls_with_the_reason_and_itself_with_an_error(
    tmp_path, num_workers
):
    engines = SimpleNamespace(reason=None, status=list, terminate_workers=lambda: None)
    engines.failure = lambda: engines.reason
    settings = ServerConfig(port=0, log_requests=False, http_workers=num_workers)
    tokenizer = {"name": "echo", "eos_ids": None}
    with coordinator(timeout_s=20.0) as one, replica(one.address, EchoEngine(step_s=0.01)):
        options = HttpOptions(
            settings=settings, coordinator=one.address, tokenizer=tokenizer, folder=str(tmp_path), model="echo"
        )
        with running(http_server(options, engines), settings, fails=EnginesFailed) as case:
            body = {"prompt": [1], "max_tokens": 5000, "stream": True, "return_token_ids": True}
            with httpx.stream("POST", f"{case.url}/v1/completions", json=body, timeout=60) as reply:
                lines = reply.iter_lines()
                assert "choices" in (first := next(lines)), first
                engines.reason = "replica0 has ended (signal 9) and was given up"
                rest = list(lines)
            assert engines.reason in "".join(rest[-4:]), rest[-4:]
            case.thread.join(60)
            assert not case.thread.is_alive() and engines.reason in str(case.failure)


@pytest.mark.parametrize("lost", [0, 1])
def test_first_rank_ends_when_its_coordinator_or_http_is_given_up(monkeypatch, lost):
    from megatron_infer.server import torchrun

    made = []

    class Supervised:
        def __init__(self, specs):
            self.reason = None
            made.append(self)

        def process(self, name):
            return SimpleNamespace(wait_ready=lambda timeout_s: {"address": "a"}, ready=None, is_running=True)

        def failure(self):
            return self.reason

        def start(self, **_):
            pass

        stop = start

    monkeypatch.setattr(torchrun, "Supervisor", Supervised)
    monkeypatch.setattr(launch, "save_tokenizer_in_subprocess", lambda *_: {})
    monkeypatch.setenv("WORLD_SIZE", "1")
    frontend = torchrun.FrontendProcesses(EngineOptions(model="m"), ServerConfig())
    frontend.start()
    assert frontend.failure is None
    made[lost].reason = "it has ended and was given up"
    frontend.wait()
    assert frontend.failure == "it has ended and was given up"
    frontend.close()


@pytest.mark.long
def test_coordinator_of_several_machines_comes_back_at_the_port_that_its_peers_know(monkeypatch):
    from megatron_infer.server import torchrun

    monkeypatch.setattr(launch, "save_tokenizer_in_subprocess", lambda *_: {"name": "m", "eos_ids": None})
    monkeypatch.setattr(torchrun, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(torchrun, "STOP_TIMEOUT_S", 0.5)  # HTTP still waits for a replica, and may be killed
    monkeypatch.setenv("WORLD_SIZE", "2")
    frontend = torchrun.FrontendProcesses(EngineOptions(model="m"), ServerConfig(port=0))
    try:
        address = frontend.start()["address"]
        process = frontend._coordinator.process("coordinator")
        process.signal(signal.SIGKILL)
        wait_for(lambda: process.restarts == 1 and process.ready)
        assert address.startswith("tcp://127.0.0.1:") and process.ready["address"] == address
    finally:
        frontend.close()


def test_process_that_stood_still_and_goes_on_beats_again(monkeypatch):
    beats = []
    monkeypatch.setattr(subprocess_main, "BEAT_S", 0.005)
    monkeypatch.setattr(subprocess_main, "report", lambda **message: beats.append(message))
    beat = subprocess_main.ParentHeartbeat()
    wait_for(lambda: beats)
    beat.is_alive = lambda: False
    time.sleep(0.05)
    beats.clear()
    time.sleep(0.05)
    assert not beats
    beat.is_alive = lambda: True
    wait_for(lambda: beats, 5)
    beat.is_alive = sys.exit  # ends its thread
    wait_for(lambda: not any(one.name == "megatron-infer-beat" for one in threading.enumerate()))


def test_http_process_under_torchrun_beats_while_its_event_loop_runs(tmp_path, monkeypatch):
    beat, beats = SimpleNamespace(is_alive=lambda: True), []
    server = SimpleNamespace(pass_s=0.0, run=lambda listening, on_ready: beats.append(beat.is_alive()))
    monkeypatch.setattr(subprocess_main, "ParentHeartbeat", lambda: beat)
    monkeypatch.setattr(subprocess_main, "log_to_stderr", lambda *_, **__: None)
    monkeypatch.setattr(launch, "http_server", lambda options: server)
    asked = {"settings": ServerConfig(port=0), "tokenizer": {"name": "echo", "eos_ids": None}, "model": "echo"}
    spec = HttpOptions(**asked, coordinator="ipc://c", folder=str(tmp_path)).process()
    subprocess_main.http(**spec.options)
    server.pass_s = spec.hang_timeout_s
    assert beats == [True] and not beat.is_alive()


@pytest.mark.asyncio
async def test_client_that_cancels_queries_is_still_served():
    """The reply to a cancelled query is dropped."""
    with coordinator() as one:
        async with AsyncInferenceClient(one.address) as client:
            await client.ready()
            for _ in range(5):
                asked = asyncio.create_task(client.stats())
                await asyncio.sleep(0)
                asked.cancel()
                assert (await asyncio.wait({asked}))[0]
            assert (await client.stats())["waiting"] == 0


def test_an_engine_process_gets_no_key_of_the_server(tmp_path):
    settings = ServerConfig(api_key="a-key-of-clients", lora_root=str(tmp_path))
    spec = EngineOptions(model="m").process(0, "ipc://c", settings)
    assert "a-key-of-clients" not in json.dumps(spec.options)
    assert spec.options["allowed"]["lora_root"] == str(tmp_path)
    assert "lora_root" not in repr(spec)
