"""Launches that do not go through Triton's own search run the kernel that it would have found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from child_paths import python_path

pytestmark = pytest.mark.triton


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stub driver stands for a GPU where there is none")
def test_a_launch_runs_the_kernel_that_triton_would_run(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = python_path()
    case = Path(__file__).with_name("compiled_launch_case.py")
    done = subprocess.run(
        [sys.executable, case, tmp_path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "the same launches" in done.stdout, done.stdout + done.stderr
