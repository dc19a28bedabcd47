"""docs/security.md names the test of each check: it is there and marked, and what is marked is on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
MARK = "pytest.mark.security"


def marked_tests() -> dict[str, bool]:
    """Every test of the tree -> whether it has the mark, itself or by its module."""
    found: dict[str, bool] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if MARK not in text:
            found |= dict.fromkeys(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE), False)
            continue
        tree = ast.parse(text)
        of_module = any(
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "pytestmark"
            and MARK in ast.unparse(node.value)
            for node in tree.body
        )
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[node.name] = of_module or any(ast.unparse(one) == MARK for one in node.decorator_list)
    return found


def named_tests(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


def test_every_check_names_a_test_and_every_marked_test_is_on_the_page() -> None:
    text, tests = PAGE.read_text(encoding="utf-8"), marked_tests()
    named = named_tests(text)
    assert len(named) > 60
    assert not sorted(named - set(tests)), "there are no such tests"
    assert not sorted(name for name in named if not tests[name]), f"these lack the mark {MARK}"
    assert not sorted({name for name, is_marked in tests.items() if is_marked} - named), "the page does not name these"


def test_every_row_of_its_tables_of_checks_has_a_test() -> None:
    is_checks, without = False, []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            is_checks = False
        elif cells[-1] in ("test", "test |"):
            is_checks = True
        elif is_checks and not line.startswith("|---") and not named_tests(cells[-1]):
            without.append(cells[0])
    assert not without
