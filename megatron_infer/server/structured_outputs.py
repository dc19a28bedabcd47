"""Fields that restrict the output: response_format (OpenAI), guided_* and structured_outputs (vLLM).

A schema, pattern or grammar is compiled here first, in a thread: an invalid one is refused before it reaches an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_infer.config.structured_output import StructuredOutput, check_schema, check_size
from megatron_infer.errors import RequestError
from megatron_infer.server.body_types import Text, Texts
from megatron_infer.server.call_limits import turned_off
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.generation_request import ExtraField, GenerationRequest
from megatron_infer.server.http_errors import ApiError, bad_request, unavailable
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.text.grammar import COMPILE_TIMEOUT_S, GrammarCache, timed_out

Schema = dict[str, Any] | bool


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """Output is always strict: a schema that cannot be enforced is refused."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema_: Schema
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`type` names the one other field that must be given."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    regex: Text | None = None
    grammar: Text | None = None
    choice: Texts | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"json_": "json"}):
    """vLLM's field; exactly one of the first five is given."""

    json_: Schema | str | None = None
    json_object: bool | None = None
    regex: Text | None = None
    grammar: Text | None = None
    choice: Texts | None = None
    disable_any_whitespace: bool | None = None


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    fields = StructuredOutputFields(client, settings)
    for route in ("chat", "completions"):
        for extra in fields.extra_fields():
            routes.fields.add(route, extra)
        routes.fields.add_rule(route, fields.apply_of_module)


class StructuredOutputFields:
    """The request fields, and the cache of compiled grammars they share."""

    def __init__(self, client: EngineClient, settings: ServerConfig) -> None:
        self._client, self._settings = client, settings
        self._grammars = GrammarCache(client.tokenizer, 0)

    def extra_fields(self) -> list[ExtraField]:
        kinds: list[tuple[str, Any, Callable[[Any], dict[str, Any]]]] = [
            ("response_format", ResponseFormat, _values_of_response_format),
            ("structured_outputs", StructuredOutputs, _values_of_structured_outputs),
            ("guided_json", Schema | str, lambda value: {"json_schema": value}),
            ("guided_regex", Text, lambda value: {"regex": value}),
            ("guided_grammar", Text, lambda value: {"grammar": value}),
            ("guided_choice", Texts, lambda value: {"choice": value}),
        ]
        return [ExtraField(name=name, type=kind, apply=self._apply(name, read)) for name, kind, read in kinds]

    async def apply_of_module(self, body: Any, asked: GenerationRequest) -> None:
        """Apply what another module put into `GenerationRequest.structured`."""
        if asked.structured is None:
            return
        name, values = asked.structured
        asked.sampling["structured"] = await self.compiled(name, values, asked.caller, asked.parts)

    def _apply(
        self, name: str, read: Callable[[Any], dict[str, Any]]
    ) -> Callable[[Any, GenerationRequest], Awaitable[None]]:
        """`ExtraField.apply` of the field `name`. read: its value -> fields of StructuredOutput, {} for any text."""

        async def apply(value: Any, asked: GenerationRequest) -> None:
            try:
                values = read(value)
                if not values:
                    return
                if asked.sampling.get("structured") is not None:
                    raise RequestError("another field says what the answer must be; give one")
            except RequestError as error:
                raise _refused(name, error) from None
            asked.sampling["structured"] = await self.compiled(name, values, asked.caller)

        return apply

    async def compiled(
        self,
        name: str,
        values: dict[str, Any],
        caller: str = "",
        parts: Mapping[str, dict[str, Any]] | None = None,
    ) -> StructuredOutput:
        """A StructuredOutput of these fields, checked and compiled in the caller's turn.

        parts: see `GenerationRequest.parts`. Raises ApiError 400, blaming the field `name`; 503 where others' turns
        took too long.
        """
        if not self._settings.enable_structured_output:  # before it costs anything
            raise turned_off("structured output", "enable_structured_output", name)
        try:
            structured = await self._client.run_in_thread(self._checked, values)
            try:
                await self._compile(structured, caller)
            except RequestError as error:
                raise (await self._error_of_part(parts or {}, caller)) or error from None
        except RequestError as error:
            raise _refused(name, error) from None
        return structured

    async def _error_of_part(self, parts: Mapping[str, dict[str, Any]], caller: str) -> RequestError | None:
        """The error of the first schema that cannot be enforced; None: none was found in the time of one grammar."""
        with contextlib.suppress(TimeoutError, ApiError):
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                for part, schema in parts.items():
                    try:
                        await self._compile(StructuredOutput(json_schema=schema), caller)
                    except RequestError as error:
                        return RequestError(f"{part}: {str(error).removeprefix('json_schema: ')}")
        return None

    async def of_structured_outputs(self, given: Any, caller: str) -> list[StructuredOutput | None]:
        """vLLM's `structured_outputs` as JSON -> [a checked, compiled one]; [None]: any text. Raises ApiError 400."""
        if given is None:
            return [None]
        name = "structured_outputs"
        try:
            values = _values_of_structured_outputs(msgspec.convert(given, StructuredOutputs))
        except msgspec.ValidationError as error:
            raise bad_request(f"{name}: {error}", name, "invalid_value") from None
        return [await self.compiled(name, values, caller) if values else None]

    def _checked(self, values: dict[str, Any]) -> StructuredOutput:
        """Raises RequestError for what is beyond the server's limits."""
        limit = self._settings.max_schema_bytes
        for kind in ("regex", "grammar"):
            if kind in values:
                check_size(kind, values[kind], max_bytes=limit)
        if "choice" in values:
            check_size("choice", "".join(values["choice"]), max_bytes=limit)
        schema, max_depth = values.get("json_schema"), self._settings.max_schema_depth
        if schema is not None:
            if not isinstance(schema, str):
                check_schema(schema, max_depth=max_depth)
                schema = msgspec.json.encode(schema).decode()
            check_size("json_schema", schema, max_bytes=limit)
        structured = StructuredOutput(**values)
        if isinstance(values.get("json_schema"), str):
            check_schema(json.loads(str(structured.json_schema)), max_depth=max_depth)
        return structured

    async def _compile(self, structured: StructuredOutput, caller: str) -> None:
        """Wait for the grammar, which compiles in threads other than tokenization's. Raises RequestError and ApiError.

        A grammar whose calls have all left is not compiled.
        """
        future = self._grammars.compile(structured, caller)
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            if future.running():
                raise timed_out(structured) from None
            text = f"{structured.kind}: others were compiled for {COMPILE_TIMEOUT_S:g} s, and this one has not begun"
            raise unavailable(f"{text}; send it again", "grammars_waiting") from None
        finally:
            self._grammars.leave(future)


def _refused(name: str, error: RequestError) -> ApiError:
    return bad_request(f"{name}: {error}", name, "invalid_structured_output")


def _values_of_response_format(given: ResponseFormat) -> dict[str, Any]:
    """Fields of StructuredOutput; {} for any text. Raises RequestError."""
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


def _values_of_structured_outputs(given: StructuredOutputs) -> dict[str, Any]:
    """Fields of StructuredOutput; {} for any text."""
    values: dict[str, Any] = {
        "json_schema": given.json_,
        "json_object": given.json_object,
        "regex": given.regex,
        "grammar": given.grammar,
        "choice": given.choice,
        "compact": given.disable_any_whitespace,
    }
    return {name: value for name, value in values.items() if value is not None}
