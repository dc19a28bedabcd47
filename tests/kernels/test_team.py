"""The kernels' threads: every part of a region runs once, from any thread of the program and in a forked process."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from megatron_infer.kernels.native.cpu_native import NativeOps


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_part_of_a_region_runs_once(native_library, threads):
    assert {native_library.mi_count_threads(threads) for _ in range(200)} == {threads}


def test_regions_of_several_callers_do_not_mix(native_library):
    wrong: list[int] = []

    def call(threads: int) -> None:
        wrong.extend(n for _ in range(500) if (n := native_library.mi_count_threads(threads)) != threads)

    callers = [threading.Thread(target=call, args=(2 + i % 2,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


def test_a_forked_process_has_its_own_workers(native_library):
    assert native_library.mi_count_threads(2) == 2
    child = os.fork()
    if child == 0:
        os._exit(0 if native_library.mi_count_threads(2) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_worker_takes_no_signal_of_the_program(native_library):
    """A program that waits in its main thread must be interrupted there."""
    native_library.mi_count_threads(3)
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    own = {thread.native_id for thread in threading.enumerate()}
    mask = 1 << (signal.SIGINT - 1)
    blocked = []
    for task in set(tasks) - own:
        with open(f"/proc/self/task/{task}/status") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        blocked.append(int(fields["SigBlk"], 16) & mask)
    assert sum(map(bool, blocked)) >= 2


def test_workers_leave_when_the_number_of_threads_falls(native_library):
    """Workers that no region has a part for would spin beside those that compute."""

    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    def call() -> None:
        native_library.mi_count_threads(12)
        most, end = tasks(), time.monotonic() + 30
        while most - tasks() < 10 and time.monotonic() < end:
            native_library.mi_count_threads(2)
        left.append(most - tasks())

    left: list[int] = []
    caller = threading.Thread(target=call)  # with a team that no other test has used
    caller.start()
    caller.join(60)
    assert left[0] >= 10


def test_two_threads_on_one_core_give_the_same_bits(native_library):
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs sched_setaffinity")
    ops, x = NativeOps(native_library, torch.float32), torch.randn(40, 256)
    weight = torch.randn(512, 256)
    torch.set_num_threads(1)  # the fixture sets it back
    alone = ops.linear(x[:8], weight)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(ops.linear(x[:8], weight), alone) for _ in range(50))
    finally:
        os.sched_setaffinity(0, before)
