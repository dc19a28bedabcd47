"""Idle OpenMP threads spin briefly, unless the user or an earlier import of torch decided."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_infer.utils.openmp import VARIABLES, crowd_cores

SHOW = (
    "import os; from megatron_infer.utils.openmp import *; print(limit_spinning(), *map(os.environ.get, VARIABLES[:2]))"
)


@pytest.mark.parametrize(
    ("before", "env", "expected"),
    [
        ("", {}, "True None 1000"),
        ("", {"GOMP_SPINCOUNT": "5"}, "False None 5"),
        ("", {"OMP_WAIT_POLICY": "ACTIVE"}, "False ACTIVE None"),
        ("import sys; sys.modules['torch'] = None; ", {}, "False None None"),
    ],
)
def test_threads_limit_spinning_unless_a_variable_is_set(before, env, expected, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", before + SHOW], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


WAIT = """
import time, torch
from megatron_infer.utils.openmp import crowd_cores
torch.set_num_threads(2)
found = [crowd_cores(), crowd_cores()] if {crowd} else []
x = torch.zeros(1 << 17)
x.add_(1)
begun = time.process_time() - time.thread_time()
for _ in range(100):
    x.add_(1)
    time.sleep(0.002)
print(time.process_time() - time.thread_time() - begun, *found)
"""


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or not 2 <= len(os.sched_getaffinity(0)) <= 8,
    reason="2 threads on 2 to 8 cores of Linux",
)
def test_threads_of_a_torch_that_was_loaded_first_stop_spinning(monkeypatch):
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    seconds = {}
    for crowd in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", WAIT.format(crowd=crowd)], capture_output=True, text=True, check=True
        )
        waited, *found = done.stdout.split()
        seconds[crowd] = float(waited)
        assert found == (["True", "False"] if crowd else [])
    assert seconds[True] < seconds[False] / 3, seconds


@pytest.mark.parametrize("name", VARIABLES)
def test_threads_of_a_loaded_torch_are_left_to_the_variable_that_is_set(name, monkeypatch):
    monkeypatch.setenv(name, "2000")
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not crowd_cores()
    finally:
        torch.set_num_threads(count)
