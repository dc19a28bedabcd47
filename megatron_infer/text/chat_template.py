"""Chat templates: Jinja2 in a sandbox, with the helpers that Hugging Face templates expect."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from megatron_infer.errors import InvalidPrompt, ModelError


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training masks; rendering keeps its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@contextlib.contextmanager
def _model_errors() -> Iterator[None]:
    """What jinja2, and Python's compiler behind it, raise for a template, as ModelError."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat template: line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"chat template: it does not compile: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    with _model_errors():
        return _environment().from_string(template)


@lru_cache(maxsize=16)
def check(template: str) -> None:
    """Raise ModelError for a template that does not parse."""
    _compile(template)


def reads(template: str, variable: str) -> bool:
    """Whether a template uses a variable. Raises ModelError for one that does not compile."""
    with _model_errors():
        return variable in jinja2.meta.find_undeclared_variables(_environment().parse(template))


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text.

    `variables` are further names the template may use (bos_token, eos_token, enable_thinking, ...).
    Raises ModelError for a template that does not parse, InvalidPrompt for messages that it refuses.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidPrompt("messages: expected a list of {'role': ..., 'content': ...} objects")
    if not messages:
        raise InvalidPrompt("messages: the conversation is empty; give at least one message")
    for index, message in enumerate(messages):
        if "role" not in message:
            raise InvalidPrompt(f"messages[{index}]: no 'role'")
    compiled = _compile(template)
    try:
        return compiled.render(
            **{"documents": None, **dict(variables or {})},
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
    except RecursionError:
        raise InvalidPrompt("the chat template refused the messages: they are nested too deep") from None
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise InvalidPrompt(f"the chat template refused the messages: {error}") from error
