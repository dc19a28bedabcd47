"""Where a child process of a test finds what the test finds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_path(*first: Path | str) -> str:
    """PYTHONPATH of a child: `first`, the repository, and the folders of tests that pytest looks in."""
    tests = [path for path in sys.path if Path(path).is_relative_to(ROOT / "tests")]
    return os.pathsep.join(map(str, [*first, ROOT, *tests]))
