"""For every test: which cases are long, heavy files first, and a collector that leaves alone what was imported."""

from __future__ import annotations

import gc
from collections import defaultdict

import pytest

HEAVY = (
    "triton/test_gpu_check",
    "dist/test_layouts",
    "engine/test_late_device",
    "dist/test_tp_parity",
    "dist/test_reshard",
    "dist/test_generate_script",
    "engine/test_bit_identical",
    "dist/test_pp",
    "dist/test_failures",
    "engine/test_suspend",
    "engine/test_graphs",
    "engine/test_exact",
    "engine/test_smollm2_parity",
    "server/test_command",
    "dist/test_serve_ranks",
    "docs/test_pages",
    "kernels/test_bit_identical",
    "engine/test_staleness",
)
"""Files that take long in one go: one that starts last would keep a worker alone."""


def pytest_configure():
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items):
    seen = defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None and sum(_numbers(item, seen)) % mark.args[0]:
            item.add_marker(pytest.mark.long)
    place = {f"tests/{name}.py": number for number, name in enumerate(HEAVY)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def _numbers(item, seen):
    """For each parametrization of a test, the number of this case's values in the order they are collected."""
    for place, one in enumerate(item.callspec._idlist):
        known = seen[item.nodeid.partition("[")[0], place]
        yield known.setdefault(one, len(known))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
