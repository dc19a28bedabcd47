"""Who may call: the API key, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac


class KeyCheck:
    """Compares what a caller shows with the key; without a key everyone may call."""

    def __init__(self, api_key: str | None) -> None:
        self._digest = None if api_key is None else _digest(api_key.encode())

    def allows(self, authorization: bytes | None) -> bool:
        """authorization: the header's value, "Bearer KEY". As long for a wrong key as for the right one."""
        if self._digest is None:
            return True
        scheme, _, shown = (authorization or b"").partition(b" ")
        same = hmac.compare_digest(_digest(shown.strip()), self._digest)
        return same and scheme.lower() == b"bearer"


def _digest(data: bytes) -> bytes:
    """Of one length whatever the key's is."""
    return hashlib.sha256(data).digest()
