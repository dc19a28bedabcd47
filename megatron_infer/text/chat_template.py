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
import jinja2.visitor

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.text.template_limits import Budget, RenderLimits, bounded_filter, rendering

__all__ = ["RenderLimits", "check", "reads", "render"]


class _Bounding(jinja2.visitor.NodeTransformer):
    """Rewrites a template so that each round of a loop reads something, and what is written or compared is checked."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        read = jinja2.nodes.Getattr(jinja2.nodes.Const(""), "round", "load")
        node.body.insert(0, jinja2.nodes.ExprStmt(read, lineno=node.lineno))
        return self.generic_visit(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.nodes = [_checked(one) for one in node.nodes]
        return jinja2.nodes.Add(node, jinja2.nodes.Const(""), lineno=node.lineno)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = _checked(node.expr)
        for operand in node.ops:
            operand.expr = _checked(operand.expr)
        return node


_CHECKED = "checked size"
"""A filter that no template can name."""


def _checked(node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    if isinstance(node, jinja2.nodes.Const):
        return node
    return jinja2.nodes.Filter(node, _CHECKED, [], [], None, None, lineno=node.lineno)


def _check_size(value: Any) -> Any:
    if rendering.budget is not None:
        rendering.budget.check_text(value)
    return value


@jinja2.pass_context  # without a context jinja2 would write constants when it compiles
def _check_output(_: Any, value: Any) -> Any:
    return _check_size(value)


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with RenderLimits: whatever a template repeats, it reads, calls or computes something."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "/", "//", "%"])

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Bounding().visit(source), *args, **options)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if rendering.budget is not None:
            rendering.budget.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if rendering.budget is not None:
            rendering.budget.spend()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if rendering.budget is not None:
            owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
            is_text = isinstance(owner, str | bytes)
            name = "str.join" if is_text and name == "join" else name
            rendering.budget.check_call(name, (owner, *args) if is_text or isinstance(owner, int) else args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        return bounded_filter(value.__name__, lambda _, *args, **named: wrapped(*args, **named), (value.__self__,))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if rendering.budget is not None:
            rendering.budget.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


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
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        finalize=_check_output,
        optimized=False,  # constants too are computed within the limits, and not when the template is compiled
    )
    environment.filters["tojson"] = _tojson
    for name, function in environment.filters.items():
        environment.filters[name] = bounded_filter(name, function)
    for name, function in environment.tests.items():
        environment.tests[name] = bounded_filter(f"is {name}", function)
    environment.filters[_CHECKED] = _check_size
    del environment.globals["lipsum"]  # makes as much text as it is asked for
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
    limits: RenderLimits | None = None,
) -> str:
    """The conversation as text.

    `variables` are further names the template may use (bos_token, eos_token, enable_thinking, ...). limits: None: the
    template may take what it takes.
    Raises ModelError for a template that does not parse, InvalidPrompt for messages that it refuses or that take it
    beyond the limits.
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
    # A key without a value is no key: templates test for a key's presence, and would write "None".
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return _rendered(
            compiled,
            {
                "documents": None,
                **(variables or {}),
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            },
            limits,
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


def _rendered(template: jinja2.Template, variables: dict[str, Any], limits: RenderLimits | None) -> str:
    if limits is None:
        return template.render(variables)
    rendering.budget = budget = Budget(limits)
    try:
        pieces, size = [], 0
        for piece in template.generate(variables):
            budget.spend()
            budget.check_size(size := size + len(piece))
            pieces.append(piece)
        return "".join(pieces)
    finally:
        rendering.budget = None
