"""Fields that say what an answer must be: response_format (OpenAI), guided_* and structured_outputs (vLLM).

A schema, pattern or grammar is compiled here first, in a thread: one that is wrong is refused before an engine hears
of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.config.structured_output import StructuredOutput, check_schema, check_size
from megatron_infer.errors import RequestError
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.extra_fields import Draft, ExtraField
from megatron_infer.server.http_errors import ApiError, bad_request
from megatron_infer.server.routes import App
from megatron_infer.server.settings import ServerConfig
from megatron_infer.text.grammar import COMPILE_TIMEOUT_S, GrammarCache, timed_out

Text = Annotated[str, Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
Schema = dict[str, Any] | bool


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """strict is always kept to: what cannot be enforced is refused."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema_: Schema
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """type says which of the other fields is given."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    regex: Text | None = None
    grammar: Text | None = None
    choice: Texts | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"json_": "json"}):
    """vLLM's field: exactly one of the first five."""

    json_: Schema | str | None = None
    json_object: bool | None = None
    regex: Text | None = None
    grammar: Text | None = None
    choice: Texts | None = None
    disable_any_whitespace: bool | None = None


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    fields = Fields(service, settings)
    for route in ("chat", "completions"):
        for extra in fields.all():
            app.fields.add(route, extra)
        app.fields.add_rule(route, fields.settle)


class Fields:
    """The request fields, and the grammars they lead to."""

    def __init__(self, service: EngineClient, settings: ServerConfig) -> None:
        self._service, self._settings = service, settings
        self._grammars = GrammarCache(service.tokenizer, 0)

    def all(self) -> list[ExtraField]:
        kinds: list[tuple[str, Any, Callable[[Any], dict[str, Any]]]] = [
            ("response_format", ResponseFormat, _of_format),
            ("structured_outputs", StructuredOutputs, _of_outputs),
            ("guided_json", Schema | str, lambda value: {"json_schema": value}),
            ("guided_regex", Text, lambda value: {"regex": value}),
            ("guided_grammar", Text, lambda value: {"grammar": value}),
            ("guided_choice", Texts, lambda value: {"choice": value}),
        ]
        return [ExtraField(name=name, type=kind, apply=self._applied(name, read)) for name, kind, read in kinds]

    async def settle(self, body: Any, draft: Draft) -> None:
        """What other modules ask of the answer."""
        if draft.structured is not None:
            name, asked = draft.structured
            await self._applied(name, dict)(asked, draft)

    def _applied(self, name: str, read: Callable[[Any], dict[str, Any]]) -> Callable[[Any, Draft], Awaitable[None]]:
        async def apply(value: Any, draft: Draft) -> None:
            try:
                asked = read(value)
                if not asked:
                    return
                if draft.sampling.get("structured") is not None:
                    raise RequestError("another field says what the answer must be; give one")
            except RequestError as error:
                raise _refused(name, error) from None
            draft.sampling["structured"] = await self.wanted(name, asked)

        return apply

    async def wanted(self, name: str, asked: dict[str, Any]) -> StructuredOutput:
        """What `asked`, fields of StructuredOutput, says; checked and compiled. Raises ApiError 400, naming `name`."""
        try:
            found = await self._service.off_loop(self._checked, asked)
            await self._compiled(found)
        except RequestError as error:
            raise _refused(name, error) from None
        return found

    async def of_outputs(self, given: Any) -> StructuredOutput | None:
        """Of vLLM's `structured_outputs` as JSON; None: any text. Raises ApiError 400."""
        name = "structured_outputs"
        try:
            asked = _of_outputs(msgspec.convert(given, StructuredOutputs))
        except msgspec.ValidationError as error:
            raise bad_request(f"{name}: {error}", name, "invalid_value") from None
        return await self.wanted(name, asked) if asked else None

    def _checked(self, asked: dict[str, Any]) -> StructuredOutput:
        """Within the server's limits. Raises RequestError."""
        limit = self._settings.max_schema_bytes
        for kind in ("regex", "grammar"):
            if kind in asked:
                check_size(kind, asked[kind], max_bytes=limit)
        if "choice" in asked:
            check_size("choice", "".join(asked["choice"]), max_bytes=limit)
        wanted = StructuredOutput(**asked)
        if wanted.json_schema is not None:
            text = str(wanted.json_schema)
            check_size("json_schema", text, max_bytes=limit)
            check_schema(json.loads(text), max_depth=self._settings.max_schema_depth)
        return wanted

    async def _compiled(self, wanted: StructuredOutput) -> None:
        """Wait for a grammar; in threads of its own, so that texts are encoded meanwhile. Raises RequestError."""
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                await asyncio.shield(asyncio.wrap_future(self._grammars.compile(wanted)))
        except TimeoutError:
            raise timed_out(wanted) from None


def _refused(name: str, error: RequestError) -> ApiError:
    return bad_request(f"{name}: {error}", name, "invalid_structured_output")


def _of_format(given: ResponseFormat) -> dict[str, Any]:
    """Fields of StructuredOutput; {} for free text. Raises RequestError."""
    values = {"json_schema": given.json_schema, "regex": given.regex, "grammar": given.grammar, "choice": given.choice}
    for name, value in values.items():
        if name == given.type and value is None:
            raise RequestError(f"type is {given.type!r} and {name} is missing")
        if name != given.type and value is not None:
            raise RequestError(f"type is {given.type!r} and {name} is given; give what the type says")
    if given.type == "text":
        return {}
    if given.type == "json_object":
        return {"json_object": True}
    if given.json_schema is not None:
        return {"json_schema": given.json_schema.schema_}
    return {given.type: values[given.type]}


def _of_outputs(given: StructuredOutputs) -> dict[str, Any]:
    """Likewise."""
    values: dict[str, Any] = {
        "json_schema": given.json_,
        "json_object": given.json_object,
        "regex": given.regex,
        "grammar": given.grammar,
        "choice": given.choice,
        "compact": given.disable_any_whitespace,
    }
    return {name: value for name, value in values.items() if value is not None}
