"""Values of a configuration tree from arguments, the environment and a file: each name is sent to its owner.

flat or nested mapping ── route ──> {path: value}, path = ("model", "kv_cache", "kv_cache_page_size")
{path: value} of file, environment, arguments ── merged, the last wins ──> nested mapping and source of each path
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import Layout, RunOptions
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.options import options_of
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.errors import ConfigError, check_known, unknown_name
from megatron_infer.pipelines.field_rows import FieldPath, rows_of
from megatron_infer.server.server_config import ENV_PREFIX, ServerConfig
from megatron_infer.utils.yaml_file import read_options

OPTIONS = "options"
"""The field that holds options by their own names."""
OWN_FIELDS: Mapping[str, Collection[str]] = {
    "lora": options_of(LoRAConfig),
    "speculative": options_of(SpeculativeConfig),
}
"""Option of InferenceConfig that has the name of a section -> its fields by their own names."""
DRAFT, DRAFT_PREFIX = "draft_model", "draft_"


class Kind(Enum):
    """How a value is written as text."""

    TEXT = "as it is"
    LIST = "parts with commas between them"
    INTEGERS = "integers with commas between them"
    VALUE = "as in YAML"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Every name that a tree takes."""

    paths: Mapping[FieldPath, type[BaseModel]]
    """Fields, and the config that declares each."""
    sections: Mapping[FieldPath, type[BaseModel]]
    """Nested configs."""
    options: Mapping[str, Kind]
    """Options of InferenceConfig, ServerConfig and LLM by their own names, and how their values are written as text."""

    @classmethod
    def of(cls, root: type[BaseModel]) -> Names:
        paths: dict[FieldPath, type[BaseModel]] = {}
        sections: dict[FieldPath, type[BaseModel]] = {}
        left: list[tuple[FieldPath, type[BaseModel]]] = [((), root)]
        for prefix, owner in left:  # grows meanwhile
            for name, info in owner.model_fields.items():
                kinds = (info.annotation, *get_args(info.annotation))
                section = next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)
                if section is None:
                    paths[*prefix, name] = owner
                else:
                    sections[*prefix, name] = section
                    left.append(((*prefix, name), section))
        kinds = {"str": Kind.TEXT, "tuple[str, ...]": Kind.LIST}
        declared = (
            one for kind in (RunOptions, Layout, InferenceConfig, ServerConfig) for one in options_of(kind).values()
        )
        options = {one.name: kinds.get(one.kind, Kind.VALUE) for one in declared}
        acting = {path for path, _, _ in rows_of(root)}
        for path in paths:
            if len(path) == 1 and path not in acting:  # the root's own, whatever the option of that name does
                options.pop(path[0], None)
        return cls(paths=paths, sections=sections, options=options)

    def flat(self) -> dict[str, FieldPath]:
        """Name of a field as it is given flat -> its path."""
        return {flat_name(path): path for path in self.paths}

    def gathered(self, values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[FieldPath, tuple[str, Any]]:
        """(source, value) by path of what arguments, the environment and the file that they name give; arguments go
        before the environment, it before the file. Raises ConfigError."""
        given, variables = self.route(values, ""), self.from_environment(environment)
        at = {path: given.get(path, variables.get(path)) for path in (("config_file",), ("section_name",))}
        file_path, section = at["config_file",], at["section_name",]
        file: dict[FieldPath, Any] = {}
        if file_path is not None:
            file = self.route(read_config_file(str(file_path), section), f"config_file {file_path}: ")
        elif section is not None:
            raise ConfigError(f"section_name is {section!r}, but there is no config_file; give both")
        found = {
            **{path: ("file", value) for path, value in file.items()},
            **{path: ("environment", value) for path, value in variables.items()},
            **{path: ("argument", value) for path, value in given.items()},
        }
        drafts = [path for path in found if path[0] == DRAFT]
        if drafts and (DRAFT, "model_path") not in found:
            raise ConfigError(f"{flat_name(drafts[0])} needs draft_model_path, the model that drafts tokens")
        return found

    def route(self, values: Mapping[str, Any], where: str, prefix: FieldPath = ()) -> dict[FieldPath, Any]:
        """Flat and nested values by path. where: "" or what errors begin with. Raises ConfigError."""
        routed: dict[FieldPath, Any] = {}
        for name, value in self._without_defaults_of_a_dump(values, prefix).items():
            for path, one in self._places(str(name), value, where, prefix):
                if path in routed:
                    raise ConfigError(
                        f"{where}{flat_name(path)} is given twice, by itself and in {path[0]}; give it once"
                    )
                routed[path] = one
        return routed

    def _without_defaults_of_a_dump(self, values: Mapping[str, Any], prefix: FieldPath) -> Mapping[str, Any]:
        """A mapping of all fields of a config, such as model_dump() makes: fields at their default were not given."""
        owners = {path[-1]: owner for path, owner in self.paths.items() if path[:-1] == prefix}
        names = owners.keys() | {path[-1] for path in self.sections if path[:-1] == prefix}
        if not values.keys() >= names:
            return values
        defaults = {
            name: owner.model_fields[name].get_default(call_default_factory=True) for name, owner in owners.items()
        }
        return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}

    def _places(self, name: str, value: Any, where: str, prefix: FieldPath) -> Iterator[tuple[FieldPath, Any]]:
        path = (*prefix, name)
        if path in self.sections and not prefix and self._is_option(name, value):
            yield (OPTIONS, name), value
        elif path in self.sections:
            yield from self._section(path, value, where)
        elif path in self.paths:
            if path == (OPTIONS,):
                yield from self._options(value, where)
            else:
                yield path, value
        elif prefix:
            known = [one[-1] for one in (*self.paths, *self.sections) if one[:-1] == prefix]
            known += sorted(OWN_FIELDS.get(prefix[0], ()))
            message = unknown_name(f"field of {'.'.join(prefix)}", name, known)
            raise ConfigError(f"{where}{message}; one of {', '.join(known)}")
        elif name in (flat := self.flat()):
            yield flat[name], value
        elif name in self.options:
            yield (OPTIONS, name), value
        else:
            known = [*flat, *(one[0] for one in self.sections if len(one) == 1), *self.options]
            begun = [one for one in known if one.startswith(name)]  # max_len is nearer to max_n than to max_length
            raise ConfigError(where + unknown_name("field", name, begun or known))

    def _is_option(self, name: str, value: Any) -> bool:
        """Whether the value of a section is that of the option of its name: it has the option's own fields."""
        own = OWN_FIELDS.get(name, ())
        if isinstance(value, Mapping):
            return any(key in own and (name, key) not in self.paths for key in value)
        return bool(own) and is_dataclass(value)

    def _section(self, path: FieldPath, value: Any, where: str) -> Iterator[tuple[FieldPath, Any]]:
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        if value is None:
            return
        if not isinstance(value, Mapping):
            remedy = f"; model_path: {value} names the model" if path == ("model",) and isinstance(value, str) else ""
            raise ConfigError(f"{where}{'.'.join(path)} is {value!r}, it must be a mapping of its fields{remedy}")
        yield from self.route(value, where, path).items()

    def _options(self, value: Any, where: str) -> Iterator[tuple[FieldPath, Any]]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}{OPTIONS} is {value!r}, it must be a mapping of options by name")
        check_known("option", value, self.options, where=where)
        for name, one in value.items():
            yield (OPTIONS, str(name)), one

    def from_environment(self, environment: Mapping[str, str]) -> dict[FieldPath, Any]:
        """Values of variables MEGATRON_INFER_NAME, by path. Raises ConfigError naming the variable."""
        found: dict[FieldPath, Any] = {}
        for name, path in {**{one: (OPTIONS, one) for one in self.options}, **self.flat()}.items():
            text = environment.get(ENV_PREFIX + name.upper())
            if text is not None and path != (OPTIONS,):
                found[path] = parse_text(text, self.kind(path), ENV_PREFIX + name.upper())
        return found

    def kind(self, path: FieldPath) -> Kind:
        """How a field's value is written on a command line and in the environment."""
        section = self.paths.get(path)
        if section is None:
            return self.options.get(path[-1], Kind.VALUE)
        annotation = section.model_fields[path[-1]].annotation
        if annotation in (str, str | None, Path | None):
            return Kind.TEXT
        return {list[str]: Kind.LIST, list[int] | None: Kind.INTEGERS}.get(annotation, Kind.VALUE)


def flat_name(path: FieldPath) -> str:
    """The name of a field as it is given flat."""
    return DRAFT_PREFIX + path[-1] if path[0] == DRAFT and len(path) > 1 else path[-1]


def parse_text(text: str, kind: Kind, where: str) -> Any:
    """The value of a flag or variable. Raises ConfigError."""
    if text.lower() in ("none", "null"):
        return None
    if kind is Kind.TEXT:
        return text
    if kind is Kind.LIST:
        return [part.strip() for part in text.split(",") if part.strip()]
    import yaml

    try:
        if kind is Kind.INTEGERS:
            return [int(part) for part in text.strip("[]").split(",")]
        if text[0] in "{[":
            with contextlib.suppress(ValueError):
                return json.loads(text)
        return yaml.safe_load(text)
    except ValueError:
        raise ConfigError(f"{where} is {text!r}, it must be {kind.value}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is {text!r}, which is no value: {error}") from None


def read_config_file(path: str, section: str | None) -> dict[str, Any]:
    """The values of a YAML file, or of one section of it. Raises ConfigError naming the file."""
    where = f"config_file {path}"
    content = read_options(path, where)
    if section is None:
        return content
    sections = [str(name) for name, value in content.items() if isinstance(value, dict)]
    if section not in content:
        listed = ", ".join(sections) or "none"
        raise ConfigError(f"{where}: {unknown_name('section', section, sections)}; its sections: {listed}")
    if not isinstance(content[section], dict):
        raise ConfigError(
            f"{where}: section {section} is a {type(content[section]).__name__}, it must be a mapping of fields; "
            f"its sections: {', '.join(sections) or 'none'}"
        )
    return dict(content[section])


def nested(routed: Mapping[FieldPath, Any]) -> dict[str, Any]:
    """Values by path -> nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in routed.items():
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return tree
