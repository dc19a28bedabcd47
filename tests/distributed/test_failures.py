"""A rank that dies or stalls: the others end with an error that names it and the phase, in bounded time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_paths import python_path

TIMEOUT_S = 2.0
SLACK_S = 4.0
"""For noticing: a pulse's interval, a slice of a wait, and a busy machine."""
EXIT_S = 15.0
"""For the interpreter to end after that, on a busy machine: nothing may wait for the rank that is gone."""


@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_is_gone_is_named_within_the_deadline(tmp_path: Path, part: int):
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(here / "failure_case.py"), str(tmp_path / "out"), str(TIMEOUT_S)]
    command.append(str(part))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stderr
    for result in json.loads((tmp_path / "out").read_text()):
        phase, how, victim, layout = result["case"]
        print(f"{layout}: {how} of rank {victim} in {phase}: {result['seconds']} s: {result['error']}")
        assert result["error"] is not None, (result, done.stderr)
        assert result["rank"] == victim and phase in result["phase"], result
        limit = SLACK_S + {"SIGKILL": 0, "SIGSTOP": 1, "STUCK": 4, "RAISES": 1}[how] * TIMEOUT_S
        if how == "STUCK":  # a message that is missed, then two ranks waited for
            assert f"rank {victim} of the engine failed" in result["victim"], result
        assert result["seconds"] < limit, result
        assert result["exit"] == 0 and result["exit_seconds"] < EXIT_S, (result, done.stderr)


_ENDS_MEANWHILE = """
import builtins, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from megatron_infer.distributed.stage_link import OrderedThread

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    signal.pause()
thread = OrderedThread("waits for rank 1")
thread.submit(lambda: dist.irecv(torch.empty(3), 1).wait(timedelta(seconds=1)))
never = thread.submit(lambda: print("ran after the end", flush=True))

class Slow:
    def __del__(self):
        time.sleep(2)

if sys.argv[3] == "dropped":
    del thread
builtins.slow = Slow()  # the interpreter takes this down after its threads have ended
time.sleep(0.5)
"""


@pytest.mark.long
@pytest.mark.parametrize("owner", ["kept", "dropped"])
def test_a_process_ends_cleanly_while_a_thread_waits_for_a_rank_that_is_silent(tmp_path: Path, owner: str):
    command = [sys.executable, "-W", "ignore", "-c", _ENDS_MEANWHILE]
    silent = subprocess.Popen([*command, "1", str(tmp_path / "store"), owner])
    try:
        ended = subprocess.run(
            [*command, "0", str(tmp_path / "store"), owner], capture_output=True, text=True, timeout=100
        )
    finally:
        silent.kill()
        silent.wait()
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
