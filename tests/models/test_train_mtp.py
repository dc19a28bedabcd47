"""examples/train_mtp.py on a tiny model: an MTP layer learns to agree with it, and what is written can be served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from small_model import installed, write_package

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.skipif(not installed(), reason="needs the package of SmolLM2, whose tokenizer it takes")
def test_a_layer_is_trained_measured_and_served(tmp_path):
    write_package(tmp_path / "packages")
    paths = os.pathsep.join(map(str, (tmp_path / "packages", ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(ROOT / "examples" / "train_mtp.py")]
    # 12 s of sampling, then 40 steps: how long they take is the machine's
    sized = "--minutes 20 --sampling-share 0.01 --max-steps 40"
    sized += " --answer-tokens 24 --at-once 8 --batch 8 --rounds 1 --answers a.json"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*script, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    done = run("trained", *sized.split())
    assert done.returncode == 0, done.stderr
    *_, said, last = done.stdout.splitlines()
    found = json.loads(last)
    assert said.startswith("40 steps") and json.loads((tmp_path / "a.json").read_text()), done.stdout
    assert found["acceptance_by_position"][0] > 0.05 and found["tokens_a_second"]["off"] > 0, done.stdout
    serve = "from megatron_infer.cli.main import main; import sys; sys.exit(main())"
    asked = "generate trained --speculative mtp --prompt Hello --max-tokens 8 --temperature 0"
    served = subprocess.run(
        [sys.executable, "-c", serve, *asked.split()], cwd=tmp_path, env=environment, capture_output=True, timeout=300
    )
    assert served.returncode == 0, served.stderr
    again = run("trained", *sized.split())
    assert again.returncode == 1 and "trained exists; give a directory that does not" in again.stderr
