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
    "a norm that no operation runs is refused",
]


IN_FP8 = [
    f"fp8: {case}"
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")
    for case in (recipe, f"{recipe}, weights in FP8", f"training after {recipe}")
] + [
    "fp8: training after delayed, weights in bfloat16",
    "fp8: grouped experts",
    "fp8: grouped experts, weights in FP8",
    "fp8: hybrid",
    "fp8: first and last layer in bfloat16",
    "fp8: updates",
    "fp8: updates of weights in FP8",
    "fp8: rows",
    "fp8: ranks",
    "fp8: padded steps",
    "fp8: padded steps, tensorwise",
    "fp8: refusals",
]


@pytest.fixture(scope="module")
def results():
    path = python_path(HERE / "stand_ins")
    command = [sys.executable, str(HERE / "foreign_models.py")]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_every_case_is_looked_at(results):
    assert sorted(results) == sorted(ADOPTED + REFUSED + IN_FP8)


@pytest.mark.parametrize("case", ADOPTED)
def test_such_a_model_is_adopted_and_gives_the_tokens_of_its_own_forward(results, case):
    assert results[case] is None, results[case]


@pytest.mark.parametrize("case", IN_FP8)
def test_a_model_that_trains_in_fp8_answers_as_its_own_forward_and_trains_on_as_without_requests(results, case):
    assert results[case] is None, results[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_paged_path_would_compute_otherwise_is_refused_by_name(results, case):
    assert results[case] is None, results[case]
