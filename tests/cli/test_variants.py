"""tools/bench/variants.py measures the variants of a case in turns and reports each with its ratio to the first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench" / "variants.py"


@pytest.mark.long
def test_every_variant_of_a_case_is_measured_in_every_round(tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--requests", "2", "--tokens", "6", "--late-ms", "4", "--device-ms", "1", "--rounds", "2"]
    command = [sys.executable, str(TOOL), "steps-in-flight", *sizes, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["case"] == "steps-in-flight" and report["options"]["late_ms"] == "4"
    rows = {row["variant"]: row for row in report["rows"]}
    assert list(rows) == ["1 step", "1 step, overlap", "2 steps", "4 steps"]
    assert all(len(row["per_s"]) == len(row["time_ratio"]) == 2 for row in rows.values())
    assert rows["1 step"]["time_ratio"] == [1.0, 1.0] and min(rows["4 steps"]["time_ratio"]) < 1.0
    assert "read 4 ms later" in done.stdout and "host ms of a step" in done.stdout
