"""Starts, watches, restarts and ends the server's subprocesses.

One that ends is restarted after a growing wait, or given up; one that hangs is killed. One thread does it for all of
them. Each is at the other end of a link: it gets its options and reports over it (`subprocess_main`). None outlives the
server (`utils.child_process`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_infer.distributed.wire import Link, LinkClosed, Silence
from megatron_infer.errors import ModelError, brief
from megatron_infer.utils.child_process import ChildProcess

log = logging.getLogger("megatron_infer.server")

STDERR = 2
"""Where a process prints, as its log goes there."""
WATCH_S = 0.1
MAX_PASS_S = 1.0
"""Seconds between two checks of a process while this one runs."""
WINDOW_S = 60.0
"""Seconds of service within which failures count together. The time in which a process loads is not counted."""
MAX_FAILURES = 5
"""Failures within the window after which a process is given up."""
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
OPTIONS_TIMEOUT_S = 60.0
"""Most seconds that a new process may take to read options that do not fit into the link's buffer."""
KILL_TIMEOUT_S = 5.0
"""Most seconds that a killed process is waited for."""
LOADING_FACTOR = 10
"""A process that reads a large tensor may be silent for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A subprocess to start."""

    name: str
    role: str
    """A key of `subprocess_main.ROLES`."""
    options: dict[str, Any] = field(repr=False)
    """Arguments of the role, keys among them."""
    is_worker: bool = False
    """Listed by /health; engines are, and the processes of `http_workers`."""
    inherited: tuple[int, ...] = ()
    """File descriptors of this process that it gets, under the same numbers."""
    hang_timeout_s: float | None = None
    """Seconds without a report after which it is killed; LOADING_FACTOR times as many from its start until it
    serves. None: never, for a role that sends no heartbeats."""


def coordinator_process(options: dict[str, Any]) -> ProcessSpec:
    """Its time is shorter than an engine's: all streams wait for it, and clients hand their requests in again."""
    return ProcessSpec(name="coordinator", role="coordinator", options=options, hang_timeout_s=10.0)


class Process:
    """One subprocess, and what it has reported."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.restarts = 0
        self.ready: dict[str, Any] | None = None
        """What it reported when it began to serve; None while it does not serve."""
        self.error: str | None = None
        self.last_exit: str | None = None
        self.is_given_up = False
        self._child: ChildProcess | None = None
        self._link: Link | None = None
        self._reading = threading.Lock()
        self._silence = Silence(MAX_PASS_S)
        self._is_hanging = False
        self._was_ready = False
        self._ready_at: float | None = None
        self._restart_at: float | None = None
        """When it starts again; None while it runs, or until its end has been noticed."""
        self._served_s = 0.0
        """How long it has served, in all of its runs that have ended."""
        self._failures: list[float] = []
        """Those within the window, each by `_served_s`."""

    def start(self) -> None:
        self.ready = self.error = self._ready_at = self._restart_at = None
        self._is_hanging = False
        self._child = None  # where it cannot be started, this start has failed, whatever the one before ended with
        self._silence = Silence(MAX_PASS_S)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "megatron_infer.server.subprocess_main", self.spec.role]
        with theirs:
            self._child = ChildProcess(command, stdin=theirs, stdout=STDERR, pass_fds=self.spec.inherited)
        with self._reading, contextlib.suppress(LinkClosed):  # it has ended already
            if self._link is not None:
                self._link.close()
            self._link = Link(ours)
            self._link.send(self.spec.options, wait_s=OPTIONS_TIMEOUT_S)

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """What it reports when it begins to serve. Raises ModelError if it ends before, or not in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_running = self.is_running  # before its last report is read
            self.read_reports()
            if self.ready is not None:
                return self.ready
            if not is_running:
                raise ModelError(self.error or f"{self.spec.name} ended with code {self.exit_code}")
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise ModelError(f"{self.spec.name} is not ready after {timeout_s:g} s")
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.poll()

    def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Until it ends, and no longer than timeout_s seconds."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)

    def end(self) -> None:
        """Kill it, if it runs. A process in a call of a driver that does not return is not waited for."""
        self.signal(signal.SIGKILL)
        self.wait(KILL_TIMEOUT_S)
        with self._reading:
            if self._link is not None:
                self._link.close()

    def give_up(self, reason: str) -> None:
        """Kill it and start it no more."""
        self.error = reason
        self.is_given_up = True
        self.signal(signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        state = "failed" if self.is_given_up else "running" if self.ready is not None else "starting"
        return {"name": self.spec.name, "state": state, "restarts": self.restarts, "last_exit": self.last_exit}

    def check(self) -> None:
        """Kill it if it hangs; notice its end; start it again when its wait is over. The supervisor's every pass."""
        is_running = self.is_running  # before its last report is read
        self.read_reports()
        silent = self._silence.seconds()
        if self.is_given_up:
            return
        if is_running:
            self._kill_if_hanging(silent)
        elif self._restart_at is None:
            self._restart_at = self._handle_exit()
        elif time.monotonic() >= self._restart_at:
            self.restarts += 1
            self.start()

    def _kill_if_hanging(self, silent: float) -> None:
        limit = self.spec.hang_timeout_s
        if limit is None or self._is_hanging:
            return
        if silent > limit * (1 if self.ready is not None else LOADING_FACTOR):
            log.error("%s hangs: it has said nothing for %.0f s and is killed", self.spec.name, silent)
            self._is_hanging = True
            self.signal(signal.SIGKILL)

    def _handle_exit(self) -> float:
        """Record that it has ended, and give it up or not -> when to start it again."""
        code, now = self.exit_code, time.monotonic()
        if code is None:
            self.last_exit = "it could not be started"
        else:
            self.last_exit = f"signal {-code}" if code < 0 else f"code {code}"
        if self._is_hanging:
            self.last_exit += " (it hung)"
        self.ready = None
        self._served_s += 0.0 if self._ready_at is None else now - self._ready_at
        if code == 0:  # it was told to end (SIGTERM), and has drained
            self._failures = []
            log.info("%s has ended as it was told: it starts again", self.spec.name)
            return now
        self._failures = [at for at in self._failures if self._served_s - at < WINDOW_S] + [self._served_s]
        is_misconfigured = self.error is not None and not self._was_ready  # a restart would fail in the same way
        self.is_given_up = is_misconfigured or len(self._failures) >= MAX_FAILURES
        wait: float = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (len(self._failures) - 1))
        what = "is given up" if self.is_given_up else f"starts again in {wait:g} s"
        log.warning("%s has ended (%s): it %s", self.spec.name, self.last_exit, what)
        return now + wait

    def read_reports(self) -> None:
        """Take what it has reported; from the supervisor's thread, and from one that waits until it serves."""
        with self._reading, contextlib.suppress(LinkClosed):
            while self._link is not None and (message := self._link.receive(0.0)) is not None:
                self._silence.heard()
                if "ready" in message:
                    self._ready_at = time.monotonic()
                    self._was_ready = True
                    self.ready = message["ready"]
                self.error = message.get("error", self.error)


class Supervisor:
    """Keeps subprocesses running until `stop`."""

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        self.processes = [Process(spec) for spec in specs]
        self._workers = [process for process in self.processes if process.spec.is_worker]
        self._is_stopping = False
        self._all_ended = threading.Event()
        self._all_started = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megatron-infer-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._all_started.wait()

    def process(self, name: str) -> Process:
        return next(process for process in self.processes if process.spec.name == name)

    def failure(self) -> str | None:
        """Why no worker will serve again; None while one serves or may still come up."""
        lost = [process for process in self.processes if process.is_given_up and not process.spec.is_worker]
        if not lost and not (self._workers and all(process.is_given_up for process in self._workers)):
            return None
        first = (lost or self._workers)[0]
        return first.error or f"{first.spec.name} has ended ({first.last_exit}) and was given up; see the log"

    def status(self) -> list[dict[str, Any]]:
        return [process.status() for process in self._workers]

    def terminate_workers(self) -> None:
        """Send SIGTERM to every worker; no process is restarted any more."""
        self._is_stopping = True
        for process in self._workers:
            process.signal(signal.SIGTERM)

    def stop(self, *, number: int, timeout_s: float) -> None:
        """End all: signal `number` to each, then SIGKILL to those that still run after timeout_s seconds."""
        self._is_stopping = True
        running = [process for process in self.processes if process.is_running]
        for process in running:
            process.signal(number)
        deadline = time.monotonic() + timeout_s
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
            process.end()
        self._all_ended.set()

    def _watch(self) -> None:
        for process in self.processes:
            _attend(process, process.start)
        self._all_started.set()
        while not self._all_ended.wait(WATCH_S):
            for process in self.processes:
                # a child that cannot report does not end in time
                _attend(process, process.read_reports if self._is_stopping else process.check)


def _attend(process: Process, act: Callable[[], None]) -> None:
    """Call a method of a process; its error is that process's, and the others are watched further."""
    try:
        act()
    except OSError as error:  # it could not be started: the next check counts a failure, and tries again later
        log.warning("%s does not start: %s", process.spec.name, error)
    except Exception as error:
        log.exception("%s cannot be watched and is given up", process.spec.name)
        process.give_up(f"{process.spec.name} cannot be watched: {brief(error)}")
