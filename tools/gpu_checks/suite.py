"""Runs the part of tests/ that a GPU is for, where what the other tests import may be missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MARKS = ("triton", "gpu")
"""Of pytest, in the order they are run. Tests marked gpu measure the device's memory: they have it to themselves."""
NOTHING_COLLECTED = 5


def files_with(mark: str, root: Path) -> list[str]:
    """Test files in which a test has this mark, from `root`.

    Only these are given to pytest: one file that cannot be imported ends a run over all of tests/.
    """
    marked = re.compile(rf"\bmark\.{mark}\b")
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in files if marked.search(path.read_text(encoding="utf-8"))]


def command_for(mark: str, root: Path, jobs: int) -> list[str]:
    """The command line that runs the tests with this mark, in `jobs` processes where pytest can and they may share."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", mark, "--durations=5"]
    if mark == "triton" and jobs > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(jobs)]
    return command + files_with(mark, root)


def run(root: Path, jobs: int, environment: dict[str, str]) -> int:
    """Run them; the exit status: 0 if none failed."""
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device to run tests on; `make check-kernels` runs what a CPU can")
        return 1
    environment = environment | {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}
    statuses = [_run(command_for(mark, root, jobs), root, environment) for mark in MARKS]
    return 1 if any(status not in (0, NOTHING_COLLECTED) for status in statuses) else 0


def _run(command: Sequence[str], root: Path, environment: dict[str, str]) -> int:
    print(f"gpu_check: {shlex.join(['python', *command[1:]])}", flush=True)
    return subprocess.run(command, cwd=root, env=environment, check=False).returncode
