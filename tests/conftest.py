"""For every test: Python's collector waits while tests are collected, and leaves alone what was imported for them."""

from __future__ import annotations

import gc


def pytest_configure():
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
