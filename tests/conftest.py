"""For every test: a home, Ctrl-C as Python has it, long cases, heavy files first, imports that no collection walks."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

HEAVY = (
    "triton/test_scan",
    "triton/test_gpu_check",
    "triton/test_engine",
    "triton/test_experts",
    "triton/test_attention",
    "triton/test_sampling_engine",
    "distributed/test_layouts",
    "models/test_census",
    "engine/memory/test_late_device",
    "distributed/test_tp_parity",
    "distributed/test_dp_attention",
    "kernels/test_targets",
    "distributed/test_reshard",
    "distributed/test_generate_script",
    "engine/answers/test_bit_identical",
    "distributed/test_pp",
    "distributed/test_failures",
    "engine/suspend/test_suspend",
    "engine/steps/test_graphs",
    "engine/answers/test_exact",
    "engine/answers/test_smollm2_parity",
    "server/test_faults",
    "distributed/test_serve_ranks",
    "docs/test_pages",
    "kernels/test_bit_identical",
    "engine/suspend/test_staleness",
    "engine/answers/test_same_answer",
    "engine/outputs/test_carried",
    "rl/test_grpo_example",
    "contract/test_token_outputs",
    "distributed/test_saved_parts",
    "server/test_command",
    "server/test_recorded_clients",
    "models/test_foreign_models",
)
"""Files that take long in one go: one that starts last would keep a worker alone."""
MOST_CASES = 2
"""Cases that `make test` runs of a test over VARIANTS, or marked `few`."""
VARIANTS = {
    *"case dtype kind linear make make_scan name schedule seed settings shape spec target way weight_dtype".split()
}
"""Parameters whose values repeat a promise for another model, dtype or seed.

A table of different mistakes, fields or texts runs whole: its parameter has another name.
"""
INPUTS = {"message", "reason", "value", "values"}
"""Parameters of tables of inputs, which are cheap and run whole."""


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        default="0/1",
        metavar="I/N",
        help="of the cases that `make test` leaves out, and of the kernels', run part I of N",
    )


def pytest_configure(config):
    gc.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell script ignores Ctrl-C
    # no key of a coordinator is left in the user's home, or found there; what is compiled stays where it is
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    # to import torch's compiler is half of what a small training step costs each rank; see models/test_late_compile.py
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    home = os.environ["HOME"] = tempfile.mkdtemp(prefix="home-of-tests-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items):
    _keep_few(items)
    _keep_share(config, items)
    place = {f"tests/{name}.py": number for number, name in enumerate(HEAVY)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def _keep_few(items):
    """Mark as long all but MOST_CASES cases of each test that is over VARIANTS or marked `few`."""
    every = defaultdict(list)
    for item in items:
        parameters = item.callspec.params.keys() if hasattr(item, "callspec") else set()
        is_over_variants = parameters & VARIANTS and not parameters & INPUTS
        if (is_over_variants or item.get_closest_marker("few")) and not _is_left_out(item):
            every[item.nodeid.partition("[")[0]].append(item)
    for name, cases in every.items():
        first = zlib.crc32(name.encode()) % len(cases)
        kept = {(first + turn * len(cases) // MOST_CASES) % len(cases) for turn in range(MOST_CASES)}
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker(pytest.mark.long)


def _keep_share(config, items):
    """Leave out what `--share` does."""
    share = config.getoption("share")
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    if match is None or int(match[1]) >= int(match[2]):
        raise pytest.UsageError(f"--share={share}: give I/N, with I from 0 to N - 1")
    part, num_parts = int(match[1]), int(match[2])
    skipped = [
        item
        for item in items
        if (_is_left_out(item) or item.get_closest_marker("triton"))
        and zlib.crc32(item.nodeid.encode()) % num_parts != part
    ]
    if skipped:
        config.hook.pytest_deselected(items=skipped)
        gone = {*skipped}
        items[:] = [item for item in items if item not in gone]


def _is_left_out(item):
    return bool(item.get_closest_marker("long") or item.get_closest_marker("slow"))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Ctrl-C must be as the test found it; what a file has imported is not walked by each later collection."""
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler, f"the test left a handler of SIGINT behind: {left}"
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
