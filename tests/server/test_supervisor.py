"""Subprocesses of the server: restarted when they die, abandoned when that fails, ended with the server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from coordinator_case import coordinator
from server_case import wait_for

from megatron_infer.coordinator.client import AsyncInferenceClient, InferenceClient
from megatron_infer.server import subprocess_main
from megatron_infer.server.supervisor import ProcessSpec, Supervisor


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
    supervisor = Supervisor([coordinator_process(tmp_path)])
    supervisor.start()
    try:
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
    finally:
        supervisor.stop(number=signal.SIGTERM, timeout_s=5)
    assert gone(process.pid) and process.exit_code == 0


def test_wrong_option_is_reported_and_not_retried(tmp_path):
    supervisor = Supervisor([coordinator_process(tmp_path, max_queue=0)])
    supervisor.start()
    try:
        wait_for(supervisor.failure)
        assert (
            "max_queue is 0" in supervisor.failure()
            and supervisor.processes[0].restarts == 0
            and not supervisor.was_ready
        )
    finally:
        supervisor.stop(number=signal.SIGTERM, timeout_s=5)


def test_process_that_stood_still_and_goes_on_beats_again(monkeypatch):
    beats = []
    monkeypatch.setattr(subprocess_main, "BEAT_S", 0.005)
    monkeypatch.setattr(subprocess_main, "report", lambda **message: beats.append(message))
    beat = subprocess_main.Beat()
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


def test_processes_end_with_their_parent(tmp_path):
    code = (
        "import sys, time\nfrom megatron_infer.server.supervisor import ProcessSpec, Supervisor\n"
        f"options = {{'bind': 'ipc://{tmp_path}/c', 'max_queue': 7}}\n"
        "one = Supervisor([ProcessSpec(name='c', role='coordinator', options=options)])\n"
        "one.start()\nwhile one.processes[0].ready is None: time.sleep(0.01)\n"
        "print(one.processes[0].pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child))


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
