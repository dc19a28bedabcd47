"""Idle OpenMP threads spin briefly, unless the user or an earlier import of torch decided."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", before + SHOW], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
