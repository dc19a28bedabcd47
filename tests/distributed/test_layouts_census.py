"""The table of docs/layouts_census.md is what the tool finds, and its sentence says the sum."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "layouts_census.md"
EACH_TRAINER = "PP2, two chunks with MLA;TP2 x EP2, ETP1 with hybrid;FSDP2 with MoE"
FIGURES = re.compile(r"(0|1e-\d) / (0|1e-\d)")


def test_the_page_says_the_sum_of_each_table():
    for section in PAGE.read_text().split("\n## megatron-core ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        cells = [cell.strip() for line in lines[2:] for cell in line[1:] if cell.strip()]
        served = [match for cell in cells if (match := FIGURES.fullmatch(cell)) and float(match[1]) <= 1e-4]
        assert f"Of {len(cells)} pairs of a layout and a kind **{len(served)} are served**." in section


@pytest.mark.parametrize(
    "cells", [pytest.param(EACH_TRAINER, marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(7200)
def test_layouts_are_served_or_refused_as_the_page_says(cells):
    command = [sys.executable, str(ROOT / "tools" / "layouts_census.py"), "--check"]
    run = subprocess.run(
        [*command, "--cells", cells] if cells else command, capture_output=True, text=True, timeout=7000, check=False
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
