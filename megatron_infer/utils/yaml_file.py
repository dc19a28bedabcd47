"""Options by name from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_infer.errors import ConfigError


def read_options(path: str, where: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; {} for an empty file. where: what errors begin with. Raises ConfigError."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {error}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: holds a {type(content).__name__}, it must be a mapping of fields (NAME: VALUE)")
    return content
