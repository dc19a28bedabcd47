"""A plain pytest run sees every test file of the tree."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_with_tests_is_passed_over(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {part for path in TESTS.rglob("test_*.py") for part in path.parent.relative_to(TESTS.parent).parts}
    hidden = [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)]
    assert not hidden, f"pytest does not look into {hidden} (norecursedirs)"
