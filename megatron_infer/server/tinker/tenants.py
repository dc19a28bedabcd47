"""The file of tenants of the Tinker API: a line NAME KEY for each; # begins a remark."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_infer.errors import ConfigError

_LINE = re.compile(r"([a-z0-9][a-z0-9_-]{0,63})\s+(tml-\S+)")


def read_keys(path: Path, *, server_key: str) -> dict[str, str]:
    """Keys by the tenant's name. Raises ConfigError, which has no key in it."""
    try:
        lines = path.read_text().splitlines()
        others_can = path.stat().st_mode & 0o007
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"tenants: {path} cannot be read: {error}") from None
    if others_can:
        raise ConfigError(f"tenants: every user of this machine can read or write {path}; chmod o= {path}")
    keys = dict[str, str]()
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        where, found = f"tenants: line {number} of {path}", _LINE.fullmatch(line)
        if found is None:
            what = "a name has a-z, 0-9, - and _, and the Tinker SDK sends keys that begin with tml-"
            raise ConfigError(f"{where} is not NAME KEY: {what}")
        if found[1] in keys or found[2] in {server_key, *keys.values()}:
            raise ConfigError(f"{where} has a name or a key that is there already")
        keys[found[1]] = found[2]
    if not keys:
        raise ConfigError(f"tenants: {path} names none")
    return keys
