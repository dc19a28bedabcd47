"""A plain pytest run sees every test file of the tree, and docs/contributing.md says where to begin in each folder."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_with_tests_is_passed_over(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {part for path in TESTS.rglob("test_*.py") for part in path.parent.relative_to(TESTS.parent).parts}
    hidden = [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)]
    assert not hidden, f"pytest does not look into {hidden} (norecursedirs)"


def test_page_names_the_promises_of_each_folder():
    page = (TESTS.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \| [^|]+ \| ((?:`test_\w+\.py`(?:, )?)+) \|$", page, re.MULTILINE)
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert {folder for folder, _ in rows} == folders
    missing = [
        file
        for folder, files in rows
        for file in re.findall(r"`(.+?)`", files)
        if not (TESTS / folder / file).is_file()
    ]
    assert not missing
