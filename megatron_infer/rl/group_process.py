"""A rank's place in a trainer's gloo group, held by a process of its own.

    engine's rank                                    python -m megatron_infer.rl.group_process
    GroupProcess  --- a line of JSON: place, join, receive --->  TrainerGroup
                  <-- a line of JSON: value or error ----------      |
        bytes  <========== memory that both have mapped ============ +

gloo ends its process where more bytes come than a tensor has. Here this ends an update, and not an engine.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megatron_infer.rl.trainer_group import GroupAddress, TrainerGroup
from megatron_infer.utils.child_process import ChildProcess

START_S = 120.0
"""Seconds for the process to begin, in addition to what its first command may take."""
GRACE_S = 5.0
_REASON = re.compile(r"what\(\):\s*(?:\[[^\]]*\])?\s*(.*)")


class GroupProcess:
    """A `Membership` that another process holds."""

    def __init__(self, where: GroupAddress, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s + START_S
        self._memory = _memory_file()
        self._errors = _file()
        self._mapped: mmap.mmap | None = None
        descriptor = self._memory.fileno()
        given = json.dumps({"where": asdict(where), "timeout_s": timeout_s, "memory": descriptor})
        self._process = ChildProcess(
            [sys.executable, "-m", __name__, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=(descriptor,),
        )
        self._ask("connect", 0)
        self._timeout_s = timeout_s + GRACE_S

    def place(self, num_ranks: int) -> int:
        return int(self._ask("place", num_ranks))

    def join(self, rank: int) -> None:
        self._ask("join", rank)

    def receive(self, num_bytes: int) -> Tensor:
        if self._mapped is None or len(self._mapped) < num_bytes:
            self._memory.truncate(max(1, num_bytes))
            self._mapped = mmap.mmap(self._memory.fileno(), 0)
        self._ask("receive", num_bytes)
        return torch.frombuffer(self._mapped, dtype=torch.uint8)[:num_bytes]

    def close(self) -> None:
        self._process.end()
        for file in (self._process.stdin, self._process.stdout, self._memory, self._errors):
            if file is not None and not file.closed:
                file.close()

    def _ask(self, command: str, value: int) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps([command, value]).encode() + b"\n")
            stdin.flush()
            is_there = bool(select.select([stdout], [], [], self._timeout_s)[0])
            line = stdout.readline() if is_there else b""
        except OSError:
            is_there, line = True, b""
        if not line:
            self._process.end()
            self._errors.seek(0)
            found = _REASON.findall(self._errors.read().decode(errors="replace"))
            late = f"no answer within {self._timeout_s:g} s"
            raise RuntimeError(late if not is_there else found[-1] if found else "the process of the group has ended")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]


def _file() -> Any:
    """A file without a name."""
    return tempfile.TemporaryFile(buffering=0)


def _memory_file() -> Any:
    """A file without a name, in memory where the system has such files."""
    if sys.platform != "linux":
        return _file()
    return os.fdopen(os.memfd_create("megatron-infer-weights"), "r+b", buffering=0)


def main(given: dict[str, Any]) -> None:
    """The process: carries out one command a line until its input ends."""
    group: Any = None
    mapped: mmap.mmap | None = None
    for line in sys.stdin:
        command, value = json.loads(line)
        result: Any = None
        try:
            if command == "connect":
                where = GroupAddress(**given["where"])
                group = TrainerGroup(where, device=torch.device("cpu"), timeout_s=given["timeout_s"])
            elif command == "receive":
                if mapped is None or len(mapped) < value:
                    mapped = mmap.mmap(given["memory"], 0)
                group.receive_into(torch.frombuffer(mapped, dtype=torch.uint8)[:value])
            else:
                result = getattr(group, command)(value)
        except RuntimeError as error:
            reply = {"error": str(error).partition("\n")[0]}
        else:
            reply = {"value": result}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
