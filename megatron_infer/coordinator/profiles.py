"""Profiles that a client of the coordinator asks for: the replica's own environment says where they are written."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from megatron_infer.errors import ConfigError

FOLDER_VARIABLE = "MEGATRON_INFER_PROFILE_DIR"
"""Folder of the traces. A path is never taken from a client, which could write anywhere with it."""


def profile(engine: Any, *, steps: int) -> dict[str, Any]:
    """Trace the engine's next `steps` steps into a new file of the folder -> its path; 0: end the trace now."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise ConfigError(f"profiles need a folder: start the server with {FOLDER_VARIABLE}=FOLDER in its environment")
    if not steps:
        engine.profile(None)
        return {}
    path = Path(folder) / f"profile-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{time.time_ns() % 10**9:09d}.json"
    engine.profile(path, steps=steps)
    return {"path": str(path)}
