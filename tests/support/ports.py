"""Ports for what a test starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that the kernel gives to connections, and to whoever binds port 0."""


def free_port() -> int:
    """A port that is free and that the kernel gives to nobody before the test binds it."""
    first = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(max(1024, first - 16384), first)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
