"""Shared by the fuzz of every wire: rounds with a fixed seed, and damaged bytes and values."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

SECONDS = float(os.environ.get("MEGATRON_INFER_FUZZ_S", "60"))
"""Seconds of a wire under the marker `slow`."""
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.5,
    -0.0,
    1e-300,
    1e308,
    "",
    "a",
    "\0",
    "\n",
    "\x1b[2J",
    "é",
    "\U0001f600",
    "../../etc/passwd",
    "a" * 5000,
    "{{ 7*7 }}",
    "<|im_end|>",
    "__class__",
    [],
    [[]],
    [0],
    [-1],
    [2**40],
    ["a", 1],
    [None],
    {},
    {"": None},
    {"a": {"a": {}}},
    {"$ref": "#"},
)


class Rounds:
    """`for rng in rounds(long=N)`: a fifth of N rounds in `make test`, N under `long`, SECONDS of them under `slow`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, *, long: int) -> Iterator[random.Random]:
        deadline, seed = time.monotonic() + SECONDS, 0
        most = long if self._kind == "long" else math.ceil(long / 5)
        while time.monotonic() < deadline if self._kind == "slow" else seed < most:
            yield random.Random(seed)
            seed += 1


@pytest.fixture(params=["quick", *(pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ("long", "slow"))])
def rounds(request: pytest.FixtureRequest) -> Rounds:
    return Rounds(request.param)


@contextlib.contextmanager
def shown(what: Any) -> Iterator[None]:
    """Adds the input to an error that it causes."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"input: {what!r:.2000}")
        raise


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """CPU seconds of this process: how busy the machine is does not count."""
    began = time.process_time()
    yield
    took = time.process_time() - began
    assert took < limit_s, f"it took {took:.1f} s"


class Errors(logging.Handler):
    """Lines of the log from ERROR on, of every logger."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter().format(record))


@contextlib.contextmanager
def no_errors_logged() -> Iterator[None]:
    """What nobody expected is logged as an error, wherever it was caught."""
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(errors)
    assert not errors.lines, "\n".join(errors.lines[:3])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes, numbers, cuts, parts that come twice."""
    content = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.randrange(1, 17))
        match rng.randrange(7):
            case 0 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 1:
                content[at:end] = rng.randbytes(end - at)
            case 2:
                del content[at:end]
            case 3:
                content[at:at] = content[at:end] * rng.choice((1, 2, 50))
            case 4:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), rng.randrange(2 ** (8 * size))))
                content[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 5 if rng.random() < 0.3:
                del content[at:]
            case _:
                content[at:at] = rng.choice(
                    (b"\0", b"\xff", b"\n", b"\r\n", b'"', b"{", b"[" * 300, b"%00", b"\xc3\x28")
                )
    return bytes(content)


def altered(value: Any, rng: random.Random) -> Any:
    """A JSON value with one to three of its parts replaced, removed, repeated or moved into another."""
    for _ in range(rng.randrange(1, 4)):
        value = _altered_once(value, rng)
    return value


def _altered_once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        result, name = dict(value), rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del result[name]
            case 1:
                result[rng.choice(("", "x", "n", "id", "type", name + "s", "__proto__"))] = result[name]
            case _:
                result[name] = _altered_once(result[name], rng)
        return result
    if isinstance(value, list | tuple) and value and rng.random() < 0.8:
        items, at = list(value), rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                del items[at]
            case 1:
                items[at:at] = [items[at]] * rng.choice((1, 3, 200))
            case _:
                items[at] = _altered_once(items[at], rng)
        return items
    if isinstance(value, bytes) and rng.random() < 0.7:
        return damaged(value, rng)
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 7, -value, 2**20))
    if isinstance(value, str) and value and rng.random() < 0.3:
        return damaged(value.encode(), rng).decode("utf-8", "replace")
    return rng.choice(HOSTILE)
