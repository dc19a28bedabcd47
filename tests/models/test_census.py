"""The table of docs/models_census.md is what the tool finds, and README says its sum."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_infer.models.loading.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models_census.md"
EACH_KIND = "qwen3_5_moe,nemotron_h,glm_moe_dsa"
PACKAGES = os.environ.get("MEGATRON_INFER_CENSUS", str(Path(sys.prefix) / "census"))


def table():
    """The cells of each row: family, own and transformers, live model, its checkpoint, directory, ..."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    first = next(i for i, row in enumerate(rows) if row[0] == "family")
    return rows[first + 2 :]


def is_small(cell, bound):
    return bool(re.fullmatch(r"0|1e-\d", cell)) and float(cell) <= bound


def test_readme_and_the_page_say_the_sum_of_the_table():
    rows = [row for row in table() if not row[0].endswith("(form)")]
    adopted = sum(is_small(own, 1e-3) and is_small(live, 1e-4) for _, own, live, *_ in rows)
    served = sum(is_small(row[4], 1e-4) for row in rows)
    text = PAGE.read_text()
    assert f"Of {len(rows)} text families of Megatron-Bridge 0.6.2 **{adopted} are adopted**" in text
    assert f"**{served} Hugging Face directories**" in text
    readme = (ROOT / "README.md").read_text()
    assert f"{adopted} of Megatron-Bridge's {len(rows)} text families, [as their recipes build them]" in readme
    assert f"[{len(FAMILIES)} architectures](docs/supported.md#hugging-face)" in readme


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not any((Path(folder) / "megatron" / "bridge").is_dir() for folder in PACKAGES.split(os.pathsep)),
    reason="Megatron-Bridge is not installed: make census-packages",
)
@pytest.mark.parametrize("families", [EACH_KIND, pytest.param("", marks=pytest.mark.slow)], ids=("kinds", "all"))
def test_families_are_adopted_or_refused_as_the_page_says(families):
    command = [sys.executable, str(ROOT / "tools" / "census.py"), "--check"]
    command += ["--families", families] if families else []
    run = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
