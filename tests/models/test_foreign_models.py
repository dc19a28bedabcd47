"""Models built from Transformer Engine's specs, and with Apex's norms, are adopted as they are and answer as they do.

In a process of its own, where stand-ins of both packages are found: megatron-core decides at import what there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ADOPTED = [
    "rms",
    "layer norm, biases",
    "zero-centred, head norms, window",
    "experts",
    "grouped experts",
    "grouped experts with biases",
    "hybrid",
    "apex",
]
REFUSED = [
    "a norm twice is refused",
    "weights of eight bits are refused",
    "a recipe of its own is refused",
    "a subclass is refused",
    "a norm that nobody would run is refused",
]


@pytest.fixture(scope="module")
def results():
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE / "stand_ins", HERE)))
    command = [sys.executable, str(HERE / "foreign_models.py")]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_every_case_is_looked_at(results):
    assert sorted(results) == sorted(ADOPTED + REFUSED)


@pytest.mark.parametrize("case", ADOPTED)
def test_such_a_model_is_adopted_and_gives_the_tokens_of_its_own_forward(results, case):
    assert results[case] is None, results[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_lean_path_would_compute_otherwise_is_refused_by_name(results, case):
    assert results[case] is None, results[case]
