"""docs/cuda_checks.md says what has never run on a GPU: the checks that no report under docs/results has."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from gloo_ranks import start_ranks

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## Not yet run on a GPU\n"
TOOLS = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]


def list_checks(_: int, output: Path) -> None:
    """`python tools/gpu_check.py --list` in a process that has imported torch and megatron-core already."""
    sys.argv = ["gpu_check.py", "--list"]
    with output.open("w") as file, contextlib.redirect_stdout(file), contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / "tools" / "gpu_check.py"), run_name="__main__")
        raise AssertionError("it ends with a status")


@pytest.fixture(scope="module")
def listed(tmp_path_factory) -> str:
    output = tmp_path_factory.mktemp("checks") / "listed"
    start_ranks(list_checks, (output,), 1)
    return output.read_text().strip()


@pytest.mark.long
def test_page_lists_what_was_never_run_on_a_gpu(listed):
    text = (ROOT / "docs" / "cuda_checks.md").read_text(encoding="utf-8")
    if not listed:
        assert HEADING not in text, "every check has been run on a GPU: the section goes"
        return
    section = text.split(HEADING)[1].split("\n## ")[0]
    printed = section.split("```text\n")[1].split("```")[0]
    assert printed.strip() == listed, "copy what `python tools/gpu_check.py --list` prints"


def test_a_report_takes_what_it_tells_of_off_the_list_and_a_rehearsal_takes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*TOOLS, *sys.path])
    from gpu_checks import registry, report

    names = ("one", "two", "three", "four")
    checks = [registry.Check(name, "", lambda ctx, compare: None, 1.0, group="group") for name in names]
    rows = [
        {"name": name, "status": status} for name, status in (("one", "ok"), ("two", "failed"), ("three", "skipped"))
    ]
    for name, rehearsal in (("gpu_h200.json", False), ("gpu_cpu.json", True), ("other.json", False)):
        told = [{"name": "four", "status": "ok"}] if name != "gpu_h200.json" else rows
        (tmp_path / name).write_text(json.dumps({"rehearsal": rehearsal, "checks": told}))
    left = registry.never_run(checks, report.load_reports(tmp_path))
    assert [one.name for one in left] == ["three", "four"]
    assert registry.not_yet(left) == "group: three, four"
