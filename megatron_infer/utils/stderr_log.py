"""Shows the log of an engine or a server on standard error."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(name: str = "megatron_infer", *, times: bool = False) -> None:
    """Show messages of logger `name` from INFO on, unless it has a handler."""
    log = logging.getLogger(name)
    log.setLevel(logging.INFO)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        if times:
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        log.addHandler(handler)
