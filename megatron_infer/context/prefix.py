"""The hash chain that names a block by everything its keys and values depend on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_SIZE = 16
"""Bytes. 128 bits: among 2**40 blocks the chance of one collision is 2**-49."""


def root_digest(*, model: str, adapter: str = "", weight_version: int = 0, update: int = 0, salt: str = "") -> bytes:
    """First link of a chain: roots are equal only if model, adapter, version, count of updates and salt all are."""
    parts = repr((model, adapter, weight_version, update, salt))  # repr quotes, so ("a", "bc") and ("ab", "c") differ
    return blake2b(parts.encode(), digest_size=DIGEST_SIZE).digest()


def chain(prev: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a full block that follows the block (or root) `prev`."""
    return blake2b(prev + array("q", tokens).tobytes(), digest_size=DIGEST_SIZE).digest()
