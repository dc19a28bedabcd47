"""A JSON object from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.utils.files import regular


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError naming the file when it is not one, or not UTF-8."""
    try:
        value = json.loads(regular(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
