"""Progress of long work: a bar on standard error where that is a terminal, nothing elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
DELAY_S = 2.0
"""Work that is shorter than so many seconds shows no bar of `tracked`."""


def is_shown() -> bool:
    """Whether bars are shown unless a caller decides: standard error is a terminal, and this is the first rank."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


def bar(*, total: int, unit: str, what: str | None = None, shown: bool | None = None, delay_s: float = 0.0) -> Any:
    """A bar of tqdm, a context manager. shown: None: as `is_shown` says."""
    from tqdm import tqdm

    hidden = not (is_shown() if shown is None else shown)
    return tqdm(total=total, unit=unit, desc=what, dynamic_ncols=True, disable=hidden, file=sys.stderr, delay=delay_s)


def tracked(items: Collection[T], *, unit: str, what: str) -> Iterator[T]:
    """The items, in order, with a bar that counts them."""
    with bar(total=len(items), unit=unit, what=what, delay_s=DELAY_S) as shown:
        for item in items:
            yield item
            shown.update()
