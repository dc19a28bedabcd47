"""One declaration of an option: a field of a dataclass, with its facts and the string under it.

    buffer_size_gb: int | float = option(20, above=0, is_common=True)
    '''GiB reserved for the KV cache on each rank.'''

The checks of a value, its flag (`cli.config_flags`), its variable in the environment, its key in a file and its row in
docs/options.md are made from the declaration. Importing this module needs neither argparse nor ast.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from enum import Enum
from functools import cache
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, NamedTuple

from megatron_infer.errors import ConfigError, unknown_name


class Option(NamedTuple):
    """A field of a dataclass of options: its name, type and default, and the facts that `option` declares."""

    name: str
    kind: str
    """The type as it is written, without None: "int | float"."""
    is_optional: bool
    """Whether None is a value."""
    default: Any
    enum: type[Enum] | None
    """The type, where it is an enum."""
    least: float | None = None
    """The smallest value."""
    above: float | None = None
    """The largest number that is too small."""
    most: float | None = None
    """The largest value."""
    below: float | None = None
    """The smallest number that is too large."""
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    """The values of a text, or what gives the values of a registry that may grow; empty: any text."""
    remedy: str = ""
    """What an error says after the range."""
    is_common: bool = False
    """--help shows the flag; --help-all shows all flags."""
    flag: str | None = ""
    """The flag without its dashes. "": the option's name. None: the option has no flag."""
    is_file: bool = False
    """The flag's value is the path of a file, whose text is the option's value."""
    default_text: str = ""
    """What help says of the default where it is not a constant."""
    acts_with: str = ""
    """What the option needs to act: "graphs" or "phased"."""
    in_process: bool = False
    """The value is an object of the running process, which no file or message can hold."""
    is_secret: bool = False
    """The value is shown nowhere."""
    since: str = ""
    """The first megatron-core whose InferenceConfig has a field of this name and meaning; "": none has."""

    @property
    def words(self) -> tuple[str, ...]:
        """The texts that it may be; empty: it is no choice."""
        if self.enum is not None:
            return tuple(member.value for member in self.enum)
        return self.choices() if callable(self.choices) else self.choices

    def holds(self, value: float) -> bool:
        """Whether a number is in range; NaN is not."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    @property
    def type_text(self) -> str:
        """The type as it is written."""
        return f"{self.kind} | None" if self.is_optional else self.kind

    @property
    def range_text(self) -> str:
        """What a number must be: "at least 1"."""
        if self.most is not None:
            return f"{self.least} to {self.most}"
        return f"at least {self.least}" if self.above is None else f"more than {self.above}"

    @property
    def expected_text(self) -> str:
        """What a value of this type must be: "a finite number of seconds above 0"."""
        if self.kind == "bool":
            return "True or False"
        if self.kind == "int":
            return "an integer"
        if self.below is not None:
            return f"a number between {self.above} and {self.below} (exclusive)"
        if self.most is not None:
            low = f"from {self.least:g} to" if self.above is None else f"above {self.above:g} and at most"
            return f"a number {low} {self.most:g}"
        unit = _UNITS.get(self.name.rpartition("_")[2])
        number = "a finite number" if unit is None else f"a finite number of {unit}"
        if self.least is None:
            return f"{number} above {self.above}"
        return f"{number} of {self.least:g} or more" if unit is None else f"{number}, {self.least:g} or more"


_UNITS = {"s": "seconds", "ms": "milliseconds", "gb": "GiB"}
"""Last word of an option's name -> its unit."""


def option(default: Any, **facts: Any) -> Any:
    """A field of a dataclass, with facts of `Option` by name."""
    return field(default=default, repr=not facts.get("is_secret", False), metadata=facts)


_FOUND: dict[type, Mapping[str, Option]] = {}


def options_of(config: type) -> Mapping[str, Option]:
    """Every option of a dataclass by name, in order."""
    if config not in _FOUND:
        _FOUND[config] = _read(config)
    return _FOUND[config]


def _read(config: type) -> Mapping[str, Option]:
    names: dict[str, Any] = {}
    for base in reversed(config.__mro__):  # the annotations of each are names of its own module
        names |= vars(sys.modules[base.__module__])
    found = {}
    for item in fields(config):
        kind = str(item.type)
        one = names.get(kind.removesuffix(" | None"))
        found[item.name] = Option(
            name=item.name,
            kind=kind.removesuffix(" | None"),
            is_optional=kind.endswith(" | None"),
            default=item.default,
            enum=one if isinstance(one, type) and issubclass(one, Enum) else None,
            **item.metadata,
        )
    return found


def docs_of(config: type) -> Mapping[str, str]:
    """What each option does, as one line: the string under it, and the strings under the members of its enum."""
    docs = dict(_strings_in(config.__module__)[config.__name__])
    for name, one in options_of(config).items():
        if one.enum is not None:
            of = _strings_in(one.enum.__module__)[one.enum.__name__]
            docs[name] += " " + " ".join(f"{member.value}: {of[member.name]}" for member in one.enum)
    return docs


@cache
def _strings_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """Class of a module -> the string under each of its attributes, as one line."""
    import ast
    import inspect

    found: dict[str, dict[str, str]] = {}
    for owner in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        found[owner.name] = {}
        for above, below in pairwise(owner.body):
            if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
                continue
            target = above.targets[0] if isinstance(above, ast.Assign) else getattr(above, "target", None)
            if isinstance(target, ast.Name):
                found[owner.name][target.id] = " ".join(str(below.value.value).split())
    return found


def whole_number(value: object) -> int | None:
    """`value` as an int if it is a whole number of any integer type; bool is not one."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def finite_number(value: object) -> float | None:
    """`value` as a float if it is a finite number of any type; bool is not one."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        return None
    return number if math.isfinite(number) else None


CHECKED = ("int", "float", "int | float", "bool")
"""Types of the options that `checked` takes."""


def checked(one: Option, value: object, error: type[Exception] = ConfigError, *, where: str = "") -> Any:
    """The value of an option that is a number or a switch, as an int, float or bool.

    Raises `error` with where, name, value and what it must be for another type or a number out of range.
    """
    if value is None and one.is_optional:
        return None
    if one.kind == "bool":
        if isinstance(value, bool):
            return value
    elif one.kind == "int":
        if (whole := whole_number(value)) is not None:
            if one.holds(whole):
                return whole
            raise error(f"{where}{one.name} is {whole:,}, it must be {one.range_text}{_remedy(one)}")
    elif (number := finite_number(value)) is not None and one.holds(number):
        return number if one.kind == "float" or not isinstance(value, int) else value
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    if one.kind in ("int", "bool") or isinstance(value, bool) or not isinstance(value, Real):
        shown += f" ({type(value).__name__})"
    or_none = " or None" if one.is_optional else ""
    raise error(f"{where}{one.name} is {shown}, it must be {one.expected_text}{or_none}{_remedy(one)}")


def _remedy(one: Option) -> str:
    return f"; {one.remedy}" if one.remedy else ""


def choose(one: Option, value: object) -> Any:
    """The value of an option of few values, as a member of its enum. Raises ConfigError with the nearest one."""
    if one.enum is None and value in one.words:
        return value
    try:
        if one.enum is not None:
            return one.enum(value)
    except ValueError:
        pass
    message = unknown_name("value", str(value), one.words)
    raise ConfigError(f"{one.name}: {message}; one of {', '.join(one.words)}")
