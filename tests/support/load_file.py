"""Modules of files that are in no package: tools and examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_file(path: str) -> ModuleType:
    """The module of a file, executed once more by each call. path: from the root of the repository."""
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_of_file", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    spec.loader.exec_module(module)
    return module
