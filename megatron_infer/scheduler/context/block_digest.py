"""Names of blocks: all that a block's keys and values depend on (the preimage), and its digest to find the block by.

    root ----+                    digest --+
             +- preimage -> digest         +- preimage -> digest ...
    tokens --+                    tokens --+

A digest only finds; the preimage decides. By induction over the chain two blocks with equal preimages follow the same
tokens under the same root, as long as a digest in a preimage stands for one preimage: `BlockPool` keeps one block per
digest and forgets children before their parent. A prompt's blocks are matched in `leases.find_published`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_SIZE = 16
"""Bytes. 128 bits: among 2**40 blocks the chance of one collision is 2**-49; it would cost a hit, never an answer."""
TOKEN_SIZE = array("i").itemsize


def root_of(*, model: str, weight_version: int = 0, update: int = 0) -> bytes:
    """First link of a chain: roots are equal only if model, weight version and count of updates all are."""
    parts = ("root", model, weight_version, update)
    return repr(parts).encode()  # repr quotes: ("a", "bc") and ("ab", "c") differ


def adapted(root: bytes, name: str, digest: str) -> bytes:
    """The root of requests that compute with an adapter; equal only if `root`, its name and its content all are."""
    return repr((root, "adapter", name, digest)).encode()


def salted(root: bytes, salt: str) -> bytes:
    """The root of requests that share with each other only; equal only if `root` and `salt` both are."""
    return repr((root, salt)).encode()


def preimage_of(prev: bytes, tokens: Sequence[int]) -> bytes:
    """All that a full block depends on: the digest of the block before it (or the root), then its tokens as int32."""
    return prev + array("i", tokens).tobytes()


def digest_of(preimage: bytes) -> bytes:
    return blake2b(preimage, digest_size=DIGEST_SIZE).digest()


def parent_of(preimage: bytes, block_size: int) -> bytes | None:
    """Digest of the block before; None for a first block. A root is never as long as a digest."""
    prev = preimage[: -TOKEN_SIZE * block_size]
    return prev if len(prev) == DIGEST_SIZE else None
