"""Child processes that end with their parent, however it ends: killed, timed out, out of memory, its terminal closed.

    parent ── holds the writing end of a pipe
       └── command        in a process group of its own, with what it starts
           guard          a shell in the same group: reads the pipe, and kills the group when the pipe ends

The pipe ends with the parent. The guard is there before the command is, and needs nothing of it: a command that is
stopped, or busy outside its interpreter, ends too. The kernel's own signal at a parent's death would follow the thread
that started the command, and a program with other rights would lose it. The group is of the parent's session: Linux
divides processors between sessions first, and compares how nice threads are within one only.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import IO, Any

GUARD = (
    'trap "" TTIN TTOU; ((trap "" HUP INT QUIT TERM; read -r _; kill -9 0) </dev/fd/$0 >/dev/null 2>&1 &); exec "$@"'
)
"""For a shell, whose $0 is the descriptor of the pipe. The guard is started by another shell, so that it is no child of
the command. The command is no foreground job of a terminal: it gets an error for what it would read there, and may
write to a terminal that stops other jobs for that."""
POLL_S = 0.5
_held: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
"""The writing ends of this process. One that it has forked, which may outlive it, must not hold them."""


def _let_go() -> None:
    for pipe in list(_held):
        pipe.close()


os.register_at_fork(after_in_child=_let_go)


class ChildProcess(subprocess.Popen[Any]):
    """A `Popen` that ends with this process, together with what it has started in its process group.

    What is left of its group is killed once its end has been noticed (`poll`, `wait`). Raises FileNotFoundError.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any) -> None:
        path = (options.get("env") or os.environ).get("PATH")
        if shutil.which(command[0], path=path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        reading, writing = os.pipe()
        self._held = os.fdopen(writing, "wb", buffering=0)
        _held.add(self._held)
        try:
            guarded = ["/bin/sh", "-c", GUARD, str(reading), *command]
            super().__init__(guarded, pass_fds=(*pass_fds, reading), process_group=0, **options)
        except BaseException:
            self._held.close()
            raise
        finally:
            os.close(reading)
        self.args = command  # for messages

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None:
            self._held.close()
        return code

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self._held.close()
        return code

    def end(self, number: int = signal.SIGKILL, *, timeout_s: float = 0.0) -> int:
        """Send it signal `number`, kill it and what it has started after timeout_s seconds -> its exit code."""
        if number != signal.SIGKILL:
            self.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(timeout_s)
        self._held.close()
        self.kill()  # where the guard was killed, or could not begin
        return self.wait()


def run(command: Sequence[str], *, timeout_s: float | None = None, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a command whose outputs are captured as text.

    Raises FileNotFoundError, and subprocess.TimeoutExpired, when the command and all that it has started are killed.
    """
    with ChildProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.end()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_with_parent() -> None:
    """Have this process killed within POLL_S after the one that started it has ended.

    For a process that others have started: torchrun, `multiprocessing`.
    """
    parents = os.getppid(), multiprocessing.parent_process()
    threading.Thread(target=_end_after, args=parents, name="megatron-infer-parent", daemon=True).start()


def _end_after(forked_by: int, started_by: BaseProcess | None) -> None:
    """started_by: another process than forked_by where `multiprocessing` has a fork server."""
    while os.getppid() == forked_by and (started_by is None or started_by.is_alive()):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
