"""What an engine or a server logs, on standard error, for the person watching."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(name: str = "megatron_infer", *, times: bool = False) -> None:
    """Show messages of logger `name` from INFO on, unless somebody has given it a handler already."""
    log = logging.getLogger(name)
    log.setLevel(logging.INFO)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        if times:
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        log.addHandler(handler)
