"""What the server needs beside the package's core, said at once when it is missing."""

from __future__ import annotations

from importlib.util import find_spec


def require() -> None:
    """Raises ModuleNotFoundError that says what to install."""
    for name in ("starlette", "uvicorn", "msgspec", "zmq", "prometheus_client"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"the server needs {name}: pip install 'megatron-infer[server]'", name=name)
