"""Engines killed at random points of weight updates, as `tools/bench/update_kills.py` does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_command import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("engine", "kills"), [("echo", 40), ("tiny", 15)])
def test_no_stream_hangs_or_is_altered_and_engines_serve_with_one_version_whenever_one_is_killed(
    tmp_path, engine, kills
):
    tool, report = ROOT / "tools" / "bench" / "update_kills.py", tmp_path / "report.json"
    command = [sys.executable, str(tool), "--engine", engine, "--kills", str(kills), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    result = json.loads(report.read_text())
    assert result["kills"] == kills and result["streams"]["right"] > 0
