"""For every test: a home, Ctrl-C as Python has it, long cases, heavy files first, imports that no collection walks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
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
def pytest_collection_modifyitems(items):
    seen = defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None:
            continue
        number, turns = sum(_numbers(item, seen)) % mark.args[0], mark.args[0]
        # A third is not slow. Each pair of values stays: cases that differ by a step of the third parameter have
        # numbers in a row.
        is_thinned = turns not in (2, 4) and len(item.callspec._idlist) > 2
        if is_thinned and number % 3 != 1:
            item.add_marker(pytest.mark.slow)
        if number != (1 if is_thinned else 0):
            item.add_marker(pytest.mark.long)
    # a layer of both kinds: what attention and recurrences hold alone is repeated in few of its cases
    parallel = [item for item in items if {"parallel", "parallel bf16"} & {*_values(item)}]
    for number, item in enumerate(parallel):
        if number % 8:
            item.add_marker(pytest.mark.long if number % 8 == 4 else pytest.mark.slow)
    place = {f"tests/{name}.py": number for number, name in enumerate(HEAVY)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def _values(item):
    """The names in the id of a case."""
    return item.callspec.id.split("-") if hasattr(item, "callspec") else []


def _numbers(item, seen):
    """For each parametrization of a test, the number of this case's values in the order they are collected."""
    for place, one in enumerate(item.callspec._idlist):
        known = seen[item.nodeid.partition("[")[0], place]
        yield known.setdefault(one, len(known))


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
