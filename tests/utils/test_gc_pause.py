"""Python's collector keeps still where it must, and is afterwards as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

from megatron_infer.utils.gc_pause import no_collection

END = """
import atexit, gc, sys
from megatron_infer.utils.gc_pause import end_without_collection
if "plain" not in sys.argv:
    end_without_collection()
atexit.register(print, "handler")
class Cycle:
    def __del__(self):
        print("walked")
it = Cycle(); it.it = it; del it
"""


def test_the_collector_is_on_again_after_the_last_pause():
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_first_pause_to_end_leaves_the_collector_off_for_the_other():
    """Two engines' threads capture at once."""
    first, second = no_collection(), no_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_program_that_ends_runs_its_handlers_and_looks_for_no_garbage():
    said = [
        subprocess.run([sys.executable, "-c", END, *how], capture_output=True, text=True, check=True).stdout.split()
        for how in ([], ["plain"])
    ]
    assert said == [["handler"], ["handler", "walked"]]
