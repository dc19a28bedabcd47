"""tools/frameworks.py: each framework has an environment and tests; its table counts them, with reasons."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import frameworks  # noqa: E402

CASE = """
import shutil
import sys
from pathlib import Path
import pytest
def test_tiny_passes():
    assert Path(shutil.which("python3")).parent == Path(sys.executable).parent
def test_tiny_fails(): assert False
@pytest.mark.skip(reason="no checkout")
def test_tiny_waits(): pass
@pytest.mark.skip(reason="no checkout")
def test_tiny_waits_too(): pass
def test_of_another_framework(): assert False
"""


def test_each_framework_has_an_environment_and_tests():
    files = {path.stem.removeprefix("frameworks-") for path in (ROOT / "requirements").glob("frameworks-*.txt")}
    assert {frameworks.SHARED.get(name, name) for name in frameworks.FRAMEWORKS} == files
    for name, one in frameworks.FRAMEWORKS.items():
        assert all((ROOT / path).is_file() for path in one.tests), name


@pytest.mark.long
@pytest.mark.parametrize(("chosen", "code", "counts"), [("tiny", 1, "1 1 2"), ("passes or waits", 0, "1 0 2")])
def test_table_counts_what_passed_failed_and_was_skipped(monkeypatch, tmp_path, capsys, chosen, code, counts):
    (tmp_path / "test_case.py").write_text(CASE)
    row = frameworks.Framework((str(tmp_path / "test_case.py"),), chosen, frameworks.package("pytest"))
    monkeypatch.setattr(frameworks, "FRAMEWORKS", {"tiny": row, "lost": row})
    why = {"tiny": "", "lost": "no such wheel"}
    monkeypatch.setattr(frameworks, "made", lambda name, folder: (Path(sys.executable), why[name]))
    monkeypatch.setattr(sys, "argv", ["frameworks.py", "tiny"])
    assert frameworks.main() == code
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line[:5] == ["tiny", pytest.__version__, *counts.split()]
    assert " ".join(line[6:]) == "2 skipped: no checkout"
    monkeypatch.setattr(sys, "argv", ["frameworks.py", "lost"])
    assert frameworks.main() == 1 and "no such wheel" in capsys.readouterr().out
