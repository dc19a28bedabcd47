"""Processes beside the server: started again when they die, given up when they cannot be, gone when the server is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from coordinator_case import coordinator
from server_case import wait_for

from megatron_infer.coordinator.client import AsyncInferenceClient, InferenceClient
from megatron_infer.server.supervisor import Role, Supervisor


def role(tmp_path, name="coordinator", **told):
    return Role(
        name=name, role="coordinator", told={"bind": f"ipc://{tmp_path}/c", "max_queue": 7} | told, reported=True
    )


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_process_that_dies_is_started_again_and_serves(tmp_path):
    fleet = Supervisor([role(tmp_path)])
    fleet.start()
    try:
        process = fleet.processes[0]
        wait_for(lambda: process.ready)
        with InferenceClient(process.ready["address"]) as client:
            assert client.stats()["waiting"] == 0
            first = process.pid
            process.signal(signal.SIGKILL)
            wait_for(lambda: process.restarts == 1 and process.ready)
            assert process.pid != first
            assert fleet.status() == [
                {"name": "coordinator", "state": "running", "restarts": 1, "last_exit": "signal 9"}
            ]
            assert fleet.failure() is None
    finally:
        fleet.stop(number=signal.SIGTERM, patience_s=5)
    assert gone(process.pid) and process.exit_code == 0


def test_mistake_is_told_and_not_repeated(tmp_path):
    fleet = Supervisor([role(tmp_path, max_queue=0)])
    fleet.start()
    try:
        wait_for(fleet.failure)
        assert "max_queue is 0" in fleet.failure() and fleet.processes[0].restarts == 0 and not fleet.was_ready
    finally:
        fleet.stop(number=signal.SIGTERM, patience_s=5)


def test_processes_die_with_the_one_that_started_them(tmp_path):
    code = (
        "import sys, time\nfrom megatron_infer.server.supervisor import Role, Supervisor\n"
        f"told = {{'bind': 'ipc://{tmp_path}/c', 'max_queue': 7}}\n"
        "fleet = Supervisor([Role(name='c', role='coordinator', told=told)])\n"
        "fleet.start()\nwhile fleet.processes[0].ready is None: time.sleep(0.01)\n"
        "print(fleet.processes[0].pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child))


@pytest.mark.asyncio
async def test_client_that_stops_waiting_for_figures_goes_on_being_served():
    """The reply to a question that nobody waits for any more comes to nothing, and harms nothing."""
    with coordinator() as one:
        async with AsyncInferenceClient(one.address) as client:
            await client.ready()
            for _ in range(5):
                asked = asyncio.create_task(client.stats())
                await asyncio.sleep(0)
                asked.cancel()
                assert (await asyncio.wait({asked}))[0]
            assert (await client.stats())["waiting"] == 0
