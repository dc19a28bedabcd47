"""For every test: which cases are long, heavy files first, and a collector that leaves alone what was imported."""

from __future__ import annotations

import gc

import pytest

HEAVY = (
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
    "kernels/test_bit_identical",
    "engine/test_staleness",
)
"""Files that take long in one go: one that starts last would keep a worker alone."""


def pytest_configure():
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items):
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None and sum(_indices(item)) % mark.args[0]:
            item.add_marker(pytest.mark.long)
    place = {f"tests/{name}.py": number for number, name in enumerate(HEAVY)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def _indices(item):
    """Where the values of its parameters stand in their lists; parameters that come together count once."""
    together = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        together |= {name.strip() for name in names[1:]}
    return [index for name, index in item.callspec.indices.items() if name not in together]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
