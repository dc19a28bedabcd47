"""Tools of a chat: `tools`, `tool_choice`, `parallel_tool_calls`, and calls taken out of what the model writes."""

from __future__ import annotations

import logging
import secrets
import string
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.config.structured_output import check_schema
from megatron_infer.errors import ModelError, RequestError
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.extra_fields import Draft, ExtraField
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.routes import App
from megatron_infer.server.schemas import Body
from megatron_infer.server.settings import ServerConfig
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.text.tool_grammar import call_grammar
from megatron_infer.text.tool_parsers import FORMATS, HERMES, CallFormat, CallParser, Piece, format_of

log = logging.getLogger("megatron_infer.server")

MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; none: it takes none."""
    strict: bool | None = None


class Tool(Body, kw_only=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body, kw_only=True):
    name: FunctionName


class Chosen(Body, kw_only=True):
    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | Chosen


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    for name, kind in (("tools", Tools), ("tool_choice", Choice), ("parallel_tool_calls", bool)):
        app.fields.add("chat", ExtraField(name=name, type=kind, apply=None))
    app.fields.add_rule("chat", ToolRule(service.tokenizer, settings).settle)


def form_of(tokenizer: Tokenizer | None, settings: ServerConfig) -> CallFormat | None:
    """How the model writes calls; None: auto, and its chat template teaches a format that is not known here."""
    if settings.tool_call_parser != "auto":
        return FORMATS[settings.tool_call_parser]
    if tokenizer is None:
        return HERMES
    try:
        return format_of(tokenizer.tool_template, knows_tools=tokenizer.knows_tools)
    except ModelError as error:  # a template that does not parse: chats are told of it, all else is served
        log.warning("tool calls: %s", error)
        return None


class ToolRule:
    """What the fields on tools make of a chat."""

    def __init__(self, tokenizer: Tokenizer | None, settings: ServerConfig) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._form = form_of(tokenizer, settings)

    async def settle(self, body: Any, draft: Draft) -> None:
        """Raises ApiError 400 for what does not go together, or cannot be done."""
        draft.call_format = self._form or HERMES
        choice = body.tool_choice
        if body.tools is None:
            for name in ("tool_choice", "parallel_tool_calls"):
                if getattr(body, name) not in (None, "none"):
                    raise bad_request(f"{name} goes with tools; give both or none", name)
            return
        names = _names(body.tools)
        if choice == "none":
            return
        if self._form is None:
            text = "tools: the chat template teaches calls in a format that is not known here; start with"
            raise bad_request(f"{text} --tool-call-parser NAME where one fits ({', '.join(FORMATS)})", "tools")
        keep_special(self._tokenizer, draft, (self._form.opening, self._form.closing), "tools")
        draft.tools = [_plain(tool) for tool in body.tools]
        only_one = body.parallel_tool_calls is False or isinstance(choice, Chosen)
        if choice in (None, "auto"):
            _check_free(body.tools, draft)
        else:
            self._force(self._form, choice, body.tools, draft, only_one=only_one)
        draft.make_splitter = partial(ToolSplitter, self._form, frozenset(names), only_one=only_one)

    def _force(self, form: CallFormat, choice: Any, tools: list[Tool], draft: Draft, *, only_one: bool) -> None:
        """Have the answer be calls: of any tool, or of the chosen one."""
        if isinstance(choice, Chosen):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
            if not tools:
                text = f"tool_choice: there is no {choice.function.name!r} among tools"
                raise bad_request(text, "tool_choice")
        for tool in tools:
            try:
                check_schema(tool.function.parameters or {}, max_depth=self._settings.max_schema_depth)
            except RequestError as error:
                raise bad_request(f"tools: {tool.function.name}: {error}", "tools") from None
        described = [{"name": tool.function.name, "parameters": tool.function.parameters} for tool in tools]
        special = {
            mark: id for mark in (form.opening, form.closing) if (id := _special_id(self._tokenizer, mark)) is not None
        }
        draft.structured = ("tools", {"grammar": call_grammar(form, described, only_one=only_one, special=special)})


def _names(tools: list[Tool]) -> list[str]:
    names = [tool.function.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            where = f"tools[{place}].function.name"
            raise bad_request(f"{where}: {name!r} stands there twice", where)
    return names


def _check_free(tools: list[Tool], draft: Draft) -> None:
    """Raises ApiError 400 where the model may choose to call and something would be promised of the text."""
    for place, tool in enumerate(tools):
        if tool.function.strict:
            where = f"tools[{place}].function.strict"
            text = (
                "arguments are held to their schema where calls are forced only (tool_choice: required, or a function)"
            )
            raise bad_request(f"{where}: {text}; give one, or no strict: true", where)
    if draft.sampling.get("structured") is not None:
        text = (
            "tools: the answer is held to a form in which there are no calls; give tool_choice: none, or no such form"
        )
        raise bad_request(text, "tools")


def _special_id(tokenizer: Tokenizer | None, mark: str) -> int | None:
    id = None if tokenizer is None or not mark else tokenizer.token_id(mark)
    return id if tokenizer is not None and id in tokenizer.special_ids else None


def keep_special(tokenizer: Tokenizer | None, draft: Draft, marks: tuple[str, ...], field: str) -> None:
    """Have special tokens in the text where marks are such. Raises ApiError 400 where they are asked to be left out."""
    if all(_special_id(tokenizer, mark) is None for mark in marks):
        return
    if draft.sampling.get("skip_special_tokens"):
        text = f"skip_special_tokens: the marks that {field} are told by are special tokens of this model; leave it out"
        raise bad_request(text, "skip_special_tokens")
    draft.sampling["skip_special_tokens"] = False


def _plain(tool: Tool) -> dict[str, Any]:
    """As templates know tools."""
    function = msgspec.to_builtins(tool.function)
    plain = {name: value for name, value in function.items() if value is not None and name != "strict"}
    return {"type": "function", "function": plain}


class ToolSplitter:
    """Calls of one sample's text as tool_calls deltas: id and name first, then the arguments."""

    def __init__(self, form: CallFormat, tools: frozenset[str], *, only_one: bool) -> None:
        self._parser = CallParser(form, tools)
        self._id_length = form.id_length
        self._only_one = only_one

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        pieces = self._parser.feed(text)
        if finished:
            pieces += self._parser.finish()
        return [self._delta(piece) for piece in pieces if not (self._only_one and piece.call)]

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.call is None:
            return {"content": piece.content}
        delta: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.arguments}}
        if piece.name is not None:
            head = {"index": piece.call, "id": self._new_id(), "type": "function"}
            delta = {**head, "function": {"name": piece.name, "arguments": piece.arguments}}
        return {"tool_calls": [delta]}

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self._id_length))
