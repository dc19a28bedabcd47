"""What a case of variants.py is made of."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple


class Clock:
    """Elapsed and CPU seconds of the blocks that it surrounds, added up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._began = (0.0, 0.0)

    def __enter__(self) -> Clock:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds += time.perf_counter() - self._began[0]
        self.cpu_seconds += time.process_time() - self._began[1]


class Done(NamedTuple):
    """What one run of a variant did."""

    count: float
    """Units of the measure."""
    figures: Mapping[str, float] = {}
    """Other figures; their medians are printed."""


Variant = Callable[[Clock], Done]
"""Does the work, with the part that is measured within the clock."""


class Measure(NamedTuple):
    what: str
    unit: str
    """What `Done.count` counts, in the singular."""
    variants: Mapping[str, Variant]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    about: str
    """What is compared; the first line is shown in the list of cases."""
    prepare: Callable[[argparse.Namespace], AbstractContextManager[list[Measure]]]
    """Makes the measures; what follows its yield runs after the rounds."""
    rounds: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    """Option -> default."""
