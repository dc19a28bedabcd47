"""Tool calls of chats: `tools`, `tool_choice`, `parallel_tool_calls`, and parsing of the calls in the model's text."""

from __future__ import annotations

import contextlib
import logging
import secrets
import string
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.config.structured_output import StructuredOutput, check_schema, check_size
from megatron_infer.errors import ModelError, RequestError
from megatron_infer.server.body_types import Body
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.generation_request import ExtraField, GenerationRequest
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import ignore
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.text.json_schema import plain
from megatron_infer.text.named_calls import call_parser
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.text.tool_call_formats import FORMATS, HERMES, CallFormat, format_of
from megatron_infer.text.tool_grammar import arguments_schema, call_grammar, text_and_call_grammar
from megatron_infer.text.tool_parsers import ToolDelta

log = logging.getLogger("megatron_infer.server")

MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; None: it takes none."""
    strict: bool | None = None


class Tool(Body, kw_only=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body, kw_only=True):
    name: FunctionName


class Chosen(Body, kw_only=True, tag_field="type", tag="function"):
    function: ChosenFunction


class AllowedTools(Body, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[Chosen], Meta(min_length=1)]


class Allowed(Body, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Calls of some of the tools only; the model is shown all."""

    allowed_tools: AllowedTools


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
"""Empty: none, as of vLLM."""
ToolChoice = Literal["none", "auto", "required"] | Chosen | Allowed


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    for name, kind in (("tools", Tools), ("tool_choice", ToolChoice), ("parallel_tool_calls", bool)):
        routes.fields.add("chat", ExtraField(name=name, type=kind, apply=None))
    routes.fields.add("tokenize", ExtraField(name="tools", type=Tools, apply=None))
    routes.fields.add_rule("chat", ToolRule(client.tokenizer, settings).apply)


def call_format_of(tokenizer: Tokenizer | None, settings: ServerConfig) -> CallFormat | None:
    """The format the model writes calls in; None: of its chat template (auto), and not one of FORMATS."""
    if settings.tool_call_parser != "auto":
        return FORMATS[settings.tool_call_parser]
    if tokenizer is None:
        return HERMES
    try:
        return format_of(tokenizer.tool_template, knows_tools=tokenizer.knows_tools)
    except ModelError as error:  # a template that does not parse fails chats only
        log.warning("tool calls: %s", error)
        return None


class ToolRule:
    """Applies the tool fields of a chat."""

    def __init__(self, tokenizer: Tokenizer | None, settings: ServerConfig) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._call_format = call_format_of(tokenizer, settings)

    async def apply(self, body: Any, asked: GenerationRequest) -> None:
        """Raises ApiError 400 for fields that contradict each other or cannot be honoured."""
        asked.call_format = self._call_format or HERMES
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                text = "tool_choice goes with tools, those of the type function; give both or none"
                raise bad_request(text, "tool_choice")
            return
        tools = _callable(body.tools, choice)
        self._check_schemas(body.tools)
        asked.tools = plain_tools(body.tools)
        if choice == "none":
            return
        call_format = self._call_format
        if call_format is None:
            text = "tools: the chat template teaches calls in a format that is not known here; start with"
            raise bad_request(f"{text} --tool-call-parser NAME where one fits ({', '.join(FORMATS)})", "tools")
        keep_special_marks(self._tokenizer, asked, call_format.marks, "tools")
        only_one = body.parallel_tool_calls is False or isinstance(choice, Chosen)
        mode = choice.allowed_tools.mode if isinstance(choice, Allowed) else choice
        is_free = mode in (None, "auto")
        form = asked.sampling.pop("structured", None)  # of an answer without calls
        if is_free and form is not None:
            self._hold_form(call_format, tools, asked, form, only_one=only_one)
        elif is_free:
            self._hold_strict(call_format, tools, asked, is_part=len(tools) < len(body.tools))
        else:
            self._force(call_format, tools, asked, only_one=only_one)
        asked.make_splitter = partial(
            ToolSplitter,
            call_format,
            {tool.function.name: tool.function.parameters or {} for tool in tools},
            only_one=only_one,
            only_calls=not is_free,
            ends_with_calls=only_one or form is not None,
            has_stops=bool(asked.sampling.get("stop") or asked.sampling.get("stop_token_ids")),
        )

    def _check_schemas(self, tools: list[Tool]) -> None:
        """Raises ApiError 400 for a tool whose parameters are nested deeper, or are larger, than the server allows."""
        for tool in tools:
            parameters = tool.function.parameters or {}
            try:
                check_schema(parameters, max_depth=self._settings.max_schema_depth)
                text = msgspec.json.encode(parameters).decode()
                check_size("parameters", text, max_bytes=self._settings.max_schema_bytes)
            except RequestError as error:
                raise bad_request(f"tools: {tool.function.name}: {error}", "tools") from None

    def _force(self, call_format: CallFormat, tools: list[Tool], asked: GenerationRequest, *, only_one: bool) -> None:
        """Restrict the output to calls of the tools. Raises ApiError 400."""
        asked.parts = _parts(tools)
        described, special = [_described(tool) for tool in tools], self._special(call_format)
        with _naming_tools():
            grammar = call_grammar(call_format, described, only_one=only_one, special=special)
        asked.structured = ("tools", {"grammar": grammar})

    def _hold_form(
        self,
        call_format: CallFormat,
        tools: list[Tool],
        asked: GenerationRequest,
        form: StructuredOutput,
        *,
        only_one: bool,
    ) -> None:
        """Restrict the output to calls, or to the form of an answer. Raises ApiError 400."""
        special = self._special(call_format)
        with _naming_tools():
            grammar = call_grammar(call_format, _loose(tools), only_one=only_one, special=special, form=form)
        asked.structured, asked.parts = ("tools", {"grammar": grammar}), _parts(tools, only_strict=True)

    def _hold_strict(
        self, call_format: CallFormat, tools: list[Tool], asked: GenerationRequest, *, is_part: bool
    ) -> None:
        """Hold the calls of strict tools to their schemas, where the model may call or not.

        is_part: these are not all tools that the model is shown, and it must not call others.
        """
        has_strict = any(tool.function.strict for tool in tools)
        if not call_format.holds_strict:  # names of other tools make no call
            if not has_strict:
                return
            text = (
                f"calls in the format {call_format.name} have no mark of their own; with tool_choice: required it acts"
            )
            ignore(asked.ignored, "tools[].function.strict", text, strict=self._settings.strict_fields)
            return
        if not has_strict and not is_part:
            return
        with _naming_tools():
            grammar = text_and_call_grammar(call_format, _loose(tools), special=self._special(call_format))
        asked.structured, asked.begins_freely = ("tools", {"grammar": grammar}), True
        asked.parts = _parts(tools, only_strict=True)

    def _special(self, call_format: CallFormat) -> dict[str, int]:
        """Ids of the special tokens in the marks."""
        if self._tokenizer is None:
            return {}
        tokenizer, marks = self._tokenizer, call_format.marks
        ids = {id for mark in marks for id in tokenizer.encode(mark, add_special=False)} & tokenizer.special_ids
        return {tokenizer.token_str(id): id for id in ids}


@contextlib.contextmanager
def _naming_tools() -> Iterator[None]:
    """Raise what a grammar cannot hold as ApiError 400."""
    try:
        yield
    except RequestError as error:
        raise bad_request(f"tools: {error}", "tools") from None


def _described(tool: Tool) -> dict[str, Any]:
    """Its name and parameters."""
    return {"name": tool.function.name, "parameters": tool.function.parameters}


def _parts(tools: list[Tool], *, only_strict: bool = False) -> dict[str, dict[str, Any]]:
    """The schemas that a grammar of calls is made of, by what to blame."""
    held = [tool.function for tool in tools if tool.function.strict or not only_strict]
    return {f"{one.name}: parameters": plain(arguments_schema(one.parameters)) for one in held}


def _loose(tools: list[Tool]) -> list[dict[str, Any]]:
    """Names and parameters; of tools that are not strict, any arguments. Strict ones first."""
    strict = [_described(tool) for tool in tools if tool.function.strict]
    return strict + [{"name": tool.function.name, "parameters": {}} for tool in tools if not tool.function.strict]


def _callable(tools: list[Tool], choice: Any) -> list[Tool]:
    """The tools that the choice allows. Raises ApiError 400 for one of an unknown name, and for a name given twice."""
    names = [tool.function.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            where = f"tools[{place}].function.name"
            raise bad_request(f"{where}: {name!r} stands there twice", where)
    chosen = (
        [choice] if isinstance(choice, Chosen) else choice.allowed_tools.tools if isinstance(choice, Allowed) else ()
    )
    wanted = {one.function.name for one in chosen}
    for name in sorted(wanted.difference(names)):
        raise bad_request(f"tool_choice: there is no {name!r} among tools", "tool_choice")
    return [tool for tool in tools if not wanted or tool.function.name in wanted]


def keep_special_marks(
    tokenizer: Tokenizer | None, asked: GenerationRequest, marks: tuple[str, ...], field: str
) -> None:
    """Keep special tokens in the text where a mark has one. Raises ApiError 400 if skip_special_tokens drops them."""
    if tokenizer is None or tokenizer.special_ids.isdisjoint(
        id for mark in marks for id in tokenizer.encode(mark, add_special=False)
    ):
        return
    if asked.sampling.get("skip_special_tokens"):
        text = f"skip_special_tokens: the marks of {field} are special tokens of this model; leave it out"
        raise bad_request(text, "skip_special_tokens")
    asked.sampling["skip_special_tokens"] = False


def plain_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools in the form that chat templates expect."""
    functions = [msgspec.to_builtins(tool.function) for tool in tools]
    return [
        {
            "type": "function",
            "function": {name: value for name, value in one.items() if value is not None and name != "strict"},
        }
        for one in functions
    ]


class ToolSplitter:
    """Calls in one sequence's text become tool_calls deltas: id and name first, then the arguments.

    only_one: calls after the first are dropped. only_calls: there is no other text, but for a call that was cut.
    ends_with_calls: after a call there is none either. has_stops: a stop text or token of the caller may cut a call;
    a call then comes when it is complete.
    """

    def __init__(
        self,
        call_format: CallFormat,
        tools: dict[str, dict[str, Any]],
        *,
        only_one: bool,
        only_calls: bool,
        ends_with_calls: bool,
        has_stops: bool,
    ) -> None:
        self._parser = call_parser(call_format, tools, holds_calls=has_stops)
        self._id_length = call_format.id_length
        self._only_one, self._only_calls, self._ends_with_calls = only_one, only_calls, ends_with_calls

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        parts = self._parser.feed(text)
        if finished:
            drops_cut = self._only_calls or (self._ends_with_calls and self._parser.num_calls > 0)
            parts += self._parser.finish(drops_cut=drops_cut)
        return [self._delta(part) for part in parts if not (self._only_one and part.call)]

    def finish_reason(self, reason: str | None) -> str | None:
        is_whole = self._parser.num_whole > 0 and (self._only_one or not self._parser.is_cut)
        return "tool_calls" if reason == "stop" and is_whole else reason

    def _delta(self, part: ToolDelta) -> dict[str, Any]:
        if part.call is None:
            return {"content": part.content}
        delta: dict[str, Any] = {"index": part.call, "function": {"arguments": part.arguments}}
        if part.name is not None:
            head = {"index": part.call, "id": part.id or self._new_id(), "type": "function"}
            delta = {**head, "function": {"name": part.name, "arguments": part.arguments}}
        return {"tool_calls": [delta]}

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self._id_length))
