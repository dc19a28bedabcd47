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
from child_paths import python_path

pytestmark = pytest.mark.long  # imports everything again, in a process of its own

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results():
    path = python_path(HERE / "stand_ins")
    command = [sys.executable, str(HERE / "foreign_models.py")]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("kind", "least"),
    [("adopted: ", 8), ("refused: ", 5), ("fp8: ", 24)],
    ids=["adopted", "refused", "fp8"],
)
def test_such_a_model_answers_and_trains_on_as_its_own_forward_does_or_is_refused_by_name(results, kind, least):
    """Its cases are in foreign_models and fp8_models."""
    found = {case: error for case, error in results.items() if case.startswith(kind)}
    assert len(found) >= least
    failed = {case: error for case, error in found.items() if error is not None}
    assert not failed, "\n".join(f"{case}\n{error}" for case, error in failed.items())
