"""A pipeline stage that dies or stands still: the other ends with an error that names it, and does not hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import engine_ranks
import pytest
import stage_case

from megatron_infer.errors import InferenceError
from megatron_infer.testing.tiny import tiny_gpt

DEADLINE_S = 3.0


def generate_until_lost(rank: int, size: int, folder: str) -> None:
    """The last stage ends, or stands still, within its fifth step."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)
    model = tiny_gpt(
        pipeline_model_parallel_size=size, pre_process=rank == 0, post_process=rank == size - 1, **stage_case.SETTINGS
    )
    engine = stage_case.make_engine(model, collective_timeout_s=DEADLINE_S)
    hidden, calls = engine.parts.adopted.hidden, 0

    def fatal(*arguments):
        nonlocal calls
        calls += 1
        if calls == 5 and rank == size - 1:
            os.kill(os.getpid(), int(Path(folder, "signal").read_text()))
        return hidden(*arguments)

    engine.parts.adopted.hidden = fatal
    started = time.monotonic()
    with pytest.raises(InferenceError) as caught:
        stage_case.generate(engine)
    seconds = time.monotonic() - started
    assert "rank 1" in str(caught.value), caught.value
    assert seconds < 4 * DEADLINE_S, f"{seconds:.1f} s: {caught.value}"
    with pytest.raises(InferenceError):
        engine.step()
    Path(folder, "told").write_text(str(caught.value))
    os._exit(0)  # torch.distributed would wait for the other


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_is_named_in_bounded_time(tmp_path: Path, number: signal.Signals):
    (tmp_path / "signal").write_text(str(int(number)))
    first, last = engine_ranks.launch(generate_until_lost, tmp_path)
    try:
        assert first.wait(timeout=60) == 0, (tmp_path / "error.0").read_text()
        assert (tmp_path / "told").is_file()
    finally:
        for worker in (first, last):
            worker.kill()
            worker.wait()
