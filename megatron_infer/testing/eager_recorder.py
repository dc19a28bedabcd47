"""A recorder that captures nothing and runs the padded step each time: tells what padding changes from what capturing
does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EAGER = f"{__name__}:EagerRecorder"
"""For `MEGATRON_INFER_GRAPHS`."""


class EagerRecorder:
    """`runner.cuda_graphs.graph_pool.Recorder` for any device."""

    name = "eager (padded)"
    collectives = None

    def reserve(self, num_bytes: int) -> None:
        """Each run allocates its own memory."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Nothing is different in the first run."""

    def capture(self, run: Callable[[], None]) -> EagerRun:
        return EagerRun(run)

    def reset(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class EagerRun:
    """`runner.cuda_graphs.graph_pool.Recorded`: `replay` runs the step itself."""

    replay: Callable[[], None]
    num_bytes: int = 0
