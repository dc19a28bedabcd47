"""Names that the server answers to, and web pages of other sites that may use it.

A browser on this machine can be made to send requests here by a page of any site. Its own rules keep the page from
reading replies and from sending JSON, unless the page's host name leads to this machine (DNS rebinding): then the Host
header has that name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Any

from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.server_config import ServerConfig

ANY = "*"
Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@\[\]]+))(?::\d{1,5})?")


def is_local_name(name: str) -> bool:
    """Whether a host name is this machine's loopback: by its address, or localhost."""
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


class Sites:
    """The rules of one server."""

    def __init__(self, settings: ServerConfig) -> None:
        self._has_key = settings.api_key is not None
        self._hosts = frozenset(map(str.lower, settings.allowed_host))
        self._own = frozenset({"localhost", settings.host.lower(), socket.gethostname().lower()})
        self._origins = frozenset(settings.allow_origin)

    def refusal(self, headers: Headers) -> ApiError | None:
        """The error for a Host that is neither an address nor an allowed name; None: the call is accepted.

        With an API key every name is accepted unless some are listed: a page does not know the key.
        """
        if ANY in self._hosts or (self._has_key and not self._hosts):
            return None
        for given in _all(headers, b"host"):
            name = _name_of(given)
            if name is None or not (_address(name) or name in self._own or name in self._hosts):
                message = (
                    f"the Host {given[:100]!r} is no address and no name of this server, as in an attack by DNS "
                    "rebinding; ask by address or localhost, or start with --allowed-host NAME (or an API key)"
                )
                return ApiError(403, message, code="host_not_allowed")
        return None

    def check_same_site(self, headers: Headers) -> None:
        """Raises ApiError 403 for a page of another site, unless it is listed by its origin. Programs pass.

        For routes without an API key that only this machine may use.
        """
        headers = list(headers)
        (host, *_), origins = _all(headers, b"host") or [""], _all(headers, b"origin")
        if origins and all(origin in self._origins for origin in origins):
            return
        sites = _all(headers, b"sec-fetch-site")
        foreign = any(site not in ("none", "same-origin") for site in sites)
        foreign |= any(origin.partition("://")[2] != host for origin in origins)
        name = _name_of(host) if host else "localhost"
        if foreign or name is None or not (is_local_name(name) or name in self._hosts):
            message = (
                "a page of another site asks for this; without an API key only programs and the server's own page may, "
                "and origins given by --allow-origin"
            )
            raise ApiError(403, message, code="foreign_page")

    def cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Headers that let a page of a listed origin read the reply."""
        origins = _all(headers, b"origin") if self._origins else []
        if len(origins) != 1 or not (ANY in self._origins or origins[0] in self._origins):
            return []
        return [
            (b"access-control-allow-origin", origins[0].encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def preflight(self, scope: Any) -> list[tuple[bytes, bytes]] | None:
        """The headers of the reply to a browser that asks whether a listed origin may call; None: it does not ask."""
        allowed = self.cors(scope["headers"])
        methods = _all(scope["headers"], b"access-control-request-method")
        if scope["method"] != "OPTIONS" or not allowed or not methods:
            return None
        asked = _all(scope["headers"], b"access-control-request-headers")
        return [
            *allowed,
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", ", ".join(asked).encode("latin-1") or b"content-type"),
            (b"access-control-max-age", b"600"),
        ]


def _all(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _name_of(host: str) -> str | None:
    """The name or address in a Host header, in lower case; None: it is malformed."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2]).lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
