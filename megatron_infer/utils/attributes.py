"""Attributes of an object for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Inside, the object, class or module has these attributes; afterwards those that it had, or none of its own."""
    before = {name: vars(target)[name] for name in attributes if name in vars(target)}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(target, name, before[name])
            elif name in vars(target):
                delattr(target, name)
