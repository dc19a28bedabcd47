"""Processes beside the HTTP server's, kept alive: one that ends is started again, later each time, or given up.

A thread of its own starts and watches all of them: they die with it, so none outlives the server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("megatron_infer.server")

LOOK_S = 0.1
STEADY_S = 60.0
"""Who has served so long since its last start begins anew to count its failures."""
MAX_FAILURES = 5
"""Ends in a row, without being steady in between, after which a process is given up."""
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A process to keep alive: the `child` role and what it is told."""

    name: str
    role: str
    told: dict[str, Any]
    reported: bool = False
    """Whether it belongs into what /health says: engines do."""


class Process:
    """One role's process, and what it has told."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.restarts = self.num_failures = 0
        self.ready: dict[str, Any] | None = None
        """What it said once it served; None while it does not."""
        self.ever_ready = False
        self.error: str | None = None
        self.last_exit: str | None = None
        self.next_start = 0.0
        self.given_up = False
        self._popen: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._started = 0.0

    def start(self) -> None:
        """From the thread that it shall die with."""
        self.ready, self.error, self._started = None, None, time.monotonic()
        command = [sys.executable, "-m", "megatron_infer.server.subprocess_main", self.role.role]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        told = json.dumps({**self.role.told, "parent": os.getpid()})
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(told + "\n")
            self._popen.stdin.close()
        self._listener = threading.Thread(target=self._listen, args=(self._popen,), daemon=True)
        self._listener.start()

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._popen is None else self._popen.poll()

    def signal(self, number: int) -> None:
        if self._popen is not None:
            self._popen.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        if self._popen is None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
            return True
        return False

    def heard_out(self) -> None:
        """Wait until all that it said before it ended has been read."""
        if self._listener is not None:
            self._listener.join(5.0)

    def describe(self) -> dict[str, Any]:
        state = "failed" if self.given_up else "running" if self.ready is not None else "starting"
        return {"name": self.role.name, "state": state, "restarts": self.restarts, "last_exit": self.last_exit}

    def ended(self) -> bool:
        """Take note of its end -> whether to start it again, at `next_start`."""
        code, now = self.exit_code, time.monotonic()
        self.last_exit = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        self.ready = None
        if now - self._started > STEADY_S:
            self.num_failures = 0
        self.num_failures += 1
        mistaken = self.error is not None and not self.ever_ready  # a wrong option stays wrong
        self.given_up = mistaken or self.num_failures >= MAX_FAILURES
        wait = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (self.num_failures - 1))
        self.next_start = now + wait
        what = "is given up" if self.given_up else f"starts again in {wait:g} s"
        log.warning("%s has ended (%s): it %s", self.role.name, self.last_exit, what)
        return not self.given_up

    def _listen(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                log.info("%s: %s", self.role.name, line.rstrip())
                continue
            if "ready" in message and popen is self._popen:
                self.ready, self.ever_ready = message["ready"], True
            self.error = message.get("error", self.error)
        popen.stdout.close()


class Supervisor:
    """Keeps roles alive until `stop`."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self.processes = [Process(role) for role in roles]
        self._stopping = False
        self._all_ended = threading.Event()
        self._all_started = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megatron-infer-fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._all_started.wait()

    def process(self, name: str) -> Process:
        return next(process for process in self.processes if process.role.name == name)

    def failure(self) -> str | None:
        """Why there will be no engine any more; None: there is one, or there will be."""
        engines = [process for process in self.processes if process.role.reported]
        lost = [process for process in self.processes if process.given_up and not process.role.reported]
        if not lost and not (engines and all(process.given_up for process in engines)):
            return None
        first = (lost or engines)[0]
        return first.error or f"{first.role.name} has ended ({first.last_exit}) and was given up; see the log"

    @property
    def was_ready(self) -> bool:
        """Whether any engine has served."""
        return any(process.ever_ready for process in self.processes if process.role.reported)

    def status(self) -> list[dict[str, Any]]:
        return [process.describe() for process in self.processes if process.role.reported]

    def end_one(self, name: str) -> None:
        """SIGTERM to one, which is not started again."""
        self._stopping = True
        self.process(name).signal(signal.SIGTERM)

    def stop(self, *, number: int, patience_s: float) -> None:
        """End all: `number` to each, SIGKILL to whoever is there patience_s later."""
        self._stopping = True
        alive = [process for process in self.processes if process.is_running]
        for process in alive:
            process.signal(number)
        deadline = time.monotonic() + patience_s
        for process in alive:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.signal(signal.SIGKILL)
                process.wait(5.0)
        self._all_ended.set()

    def _watch(self) -> None:
        for process in self.processes:
            process.start()
        self._all_started.set()
        ended: set[int] = set()
        while not self._all_ended.wait(LOOK_S):  # whoever it started dies with this thread
            for place, process in enumerate(self.processes):
                if self._stopping or process.is_running or process.given_up:
                    continue
                if place not in ended:
                    process.heard_out()
                    if not self._stopping and process.ended():
                        ended.add(place)
                elif time.monotonic() >= process.next_start:
                    ended.discard(place)
                    process.restarts += 1
                    process.start()
