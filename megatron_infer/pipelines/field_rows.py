"""What a field of the configuration tree acts as: the row in its annotation.

    max_length: Annotated[int | None, Engine("max_sequence_length")] = None

A field that sets an option is checked, and gets its default, where the option is declared; a field without a string
under it is described by the option's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.options import docs_of
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.server.server_config import ServerConfig

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig
    from megatron_infer.pipelines.resolve import Asked

FieldPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sets:
    """The field sets an option. None as its value leaves the option at its default."""

    option: str
    convert: Callable[[Any], Any] | None = None
    """Converts the field's value into the option's value. None: both are the same."""
    note: Callable[[PipelineConfig], str] | None = None
    """Why the value is what it is. None: the option's name says it."""
    has_own_words: bool = False
    """The field's values are other words than the option's, so that errors of the option cannot name the field."""

    def converted(self, value: Any) -> Any:
        return value if self.convert is None else self.convert(value)


class Engine(Sets):
    """An option of InferenceConfig."""


class Server(Sets):
    """An option of ServerConfig."""


class Model(Sets):
    """An argument of LLM."""


class Drafts(Sets):
    """An option of SpeculativeConfig, in the section whose row sets it."""


class Adapters(Sets):
    """An option of LoRAConfig, in the section whose row sets it."""


@dataclass(frozen=True, slots=True)
class RanksOf:
    """A number of ranks: dp or ep."""

    axis: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A function of `pipelines.field_rules` acts on the field."""

    act: Callable[[Any, Asked], tuple[Any, str]] | None = None
    """(value, what is asked for so far) -> (value in effect, note). None: the field is read before all others."""
    instead_of: str = ""
    """The option that the rule sets, by its own name; only one of the field and the option may be given."""
    needs_model: bool = False
    """The rule runs after the model's description is read."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Any value but the default is refused for this reason."""

    reason: str


Row = Sets | RanksOf | Rule | Refused


def rows_of(config: type[BaseModel], prefix: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldInfo, Row]]:
    """(path, field, row) of every field of a tree that has a row, in order; a section without one has its fields'."""
    for name, info in config.model_fields.items():
        row = next((one for one in info.metadata if isinstance(one, Row)), None)
        if row is not None:
            yield (*prefix, name), info, row
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from rows_of(info.annotation, (*prefix, name))


def parts_of(section: BaseModel) -> dict[str, Any]:
    """The options that the fields of a section set, without those that are None."""
    found = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        for row in info.metadata:
            if isinstance(row, Drafts | Adapters) and value is not None:
                found[row.option] = row.converted(value)
    return found


DECLARED_BY: Mapping[type[Sets], type] = {
    Engine: InferenceConfig,
    Server: ServerConfig,
    Drafts: SpeculativeConfig,
    Adapters: LoRAConfig,
}


def description_of(info: FieldInfo) -> str:
    """What a field does: the string under it, else that under the option that it sets."""
    if info.description is not None:
        return " ".join(info.description.split())
    row = next(one for one in info.metadata if isinstance(one, Sets))
    return docs_of(DECLARED_BY[type(row)])[row.option]


@cache
def fields_by_option(config: type[BaseModel]) -> Mapping[str, FieldPath]:
    """Option by its own name -> the field that sets it."""
    found: dict[str, FieldPath] = {}
    for path, _, row in rows_of(config):
        if isinstance(row, Engine | Server):
            found[row.option] = path
        elif isinstance(row, RanksOf):
            found[row.axis] = path
        elif isinstance(row, Rule) and row.instead_of:
            found[row.instead_of] = path
    return found
