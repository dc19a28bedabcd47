"""Reads the body of an HTTP call within limits of size and time, and checks its content type."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from megatron_infer.coordinator.peers import caller_share
from megatron_infer.server.http_errors import ApiError, unavailable

BODY_TIMEOUT_S = 60.0
DISCARD_TIMEOUT_S, DISCARD_BYTES = 5.0, 64 << 20

MAX_VALUES, MAX_FIELDS = 1 << 20, 1 << 17
"""Most values (by their commas) and fields (by their colons) of a JSON body, texts included: what is decoded within
some 50 ms, for which all other calls wait."""

COUNTED_BYTES = 256 << 10
"""Bytes that are searched at once: between these other threads run."""

Receive = Callable[[], Awaitable[Any]]


INLINE_BYTES = 64 << 10
"""A longer body is decoded in a thread: one with fields without an action is decoded twice and searched, object by
object."""


class BodyRoom:
    """The bytes of the bodies of all calls that are under way, and of each caller's."""

    def __init__(self, limit: int, *, body_limit: int) -> None:
        """limit: max_bodies_bytes. body_limit: max_body_bytes, which one caller may hold in any case."""
        self._limit, self._caller_limit = limit, max(caller_share(limit), body_limit)
        self._held: Counter[str] = Counter()
        """By caller: those that hold some."""

    @contextlib.contextmanager
    def reserve(self, caller: str) -> Iterator[Callable[[int], None]]:
        """A call's share: a function that adds bytes to it, which are given back at the end of the context.

        The function raises ApiError 503 where they do not fit.
        """
        share = 0

        def add(num_bytes: int) -> None:
            nonlocal share
            for whose, held, limit in (
                ("calls under way", self._held.total(), self._limit),
                ("your calls under way", self._held[caller], self._caller_limit),
            ):
                if held + num_bytes > limit:
                    text = f"{whose} hold bodies of {held:,} bytes, the limit is {limit:,} (max_bodies_bytes)"
                    raise unavailable(f"{text}; ask again in a moment", "too_many_bodies")
            self._held[caller] += num_bytes
            share += num_bytes

        try:
            yield add
        finally:
            self._held[caller] -= share
            if not self._held[caller]:
                del self._held[caller]


class Disconnected(Exception):
    """The client has closed the connection; no reply can be sent."""


def check_content_type(headers: dict[bytes, bytes]) -> None:
    """JSON only: a browser lets a page of another site post other types without asking. Raises ApiError 415."""
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity":
        message = f"the body is compressed (Content-Encoding: {encoding.decode('latin-1')[:40]}); send it as it is"
        raise ApiError(415, message, code="unsupported_media_type")
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not re.fullmatch(rb"application/[\w.-]+\+json", kind):
        shown = kind.decode("latin-1")[:60] or "none"
        message = f"the body must come as Content-Type: application/json, got {shown!r}"
        raise ApiError(415, message, code="unsupported_media_type")


def check_structure(data: bytes) -> None:
    """Raises ApiError 413 for JSON of so many values that decoding it would keep other calls waiting."""
    for what, mark, most in (("values", b",", MAX_VALUES), ("fields", b'":', MAX_FIELDS)):
        pieces = range(0, len(data), COUNTED_BYTES) if len(data) > most else ()
        if (count := sum(data.count(mark, start, start + COUNTED_BYTES) for start in pieces)) > most:
            message = f"the body has about {count:,} JSON {what}, the limit is {most:,}; send less at once"
            raise ApiError(413, message, code="body_too_large")


async def read_body(
    headers: dict[bytes, bytes],
    receive: Receive,
    *,
    limit: int,
    option: str = "max_body_bytes",
    add: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    """The body, holding `limit` bytes at most. option: that sets `limit`. add: is called with the bytes that come.

    Raises ApiError 413 or 408, Disconnected, and what `add` raises.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(headers, receive, limit, option, add)
    except TimeoutError:
        message = f"the body has not come within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None


async def _read(
    headers: dict[bytes, bytes], receive: Receive, limit: int, option: str, add: Callable[[int], None]
) -> bytes:
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > limit:
        await discard(receive)
        raise _too_large(limit, option, f"{int(announced):,}")
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        total += len(part)
        if total > limit:
            if message.get("more_body", False):
                await discard(receive)
            raise _too_large(limit, option, f"more than {limit:,}")
        try:
            add(len(part))
        except ApiError:
            parts.clear()
            if message.get("more_body", False):
                await discard(receive)
            raise
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def discard(receive: Receive) -> None:
    """Read and drop a body, up to DISCARD_BYTES and DISCARD_TIMEOUT_S.

    A client that is still sending when the connection is closed does not see the reply.
    """
    total = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while total < DISCARD_BYTES:
                message = await receive()
                total += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(limit: int, option: str, got: str) -> ApiError:
    message = f"the body has {got} bytes, the limit is {limit:,} ({option}); send less at once"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
