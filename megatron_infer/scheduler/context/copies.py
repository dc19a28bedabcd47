"""Copies that the context and the scheduler plan and the large tensors carry out."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class CopyKind(Enum):
    """What is copied: within the pool, out to a host slot, or in from one."""

    BLOCK = "block"
    BLOCK_OUT = "block out"
    BLOCK_IN = "block in"
    STATE = "state"
    STATE_OUT = "state out"
    STATE_IN = "state in"


class Copy(NamedTuple):
    """One place's content to another. A swap makes one for each block: a dataclass takes twice as long to make."""

    kind: CopyKind
    source: int
    destination: int
