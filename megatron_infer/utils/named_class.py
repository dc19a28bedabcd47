"""Objects that an environment variable or an option names."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_infer.errors import ConfigError


def named_object(named: str, *, variable: str, remedy: str) -> Any:
    """What "module:name" names. Raises ConfigError with the variable, or the option, and the remedy."""
    module, _, attribute = named.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of one's own raises
        raise ConfigError(f"{variable} is {named!r}: {error}; {remedy}") from error


def make_named(named: str, *, variable: str, remedy: str) -> Any:
    """An object of the class that "module:class" names. Raises ConfigError with the variable and the remedy."""
    return named_object(named, variable=variable, remedy=remedy)()
