"""What a call asks for, the same for every dialect, and the server's limits on it.

A dialect's body becomes a GenerationRequest by the names of its fields and by what the dialect's `read` adds. Fields
and rules of modules change it (`ExtraFields`), and `Generator` makes engine requests of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import RequestError
from megatron_infer.server.body_types import Message, StreamOptions
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.text.tool_call_formats import HERMES, CallFormat

if TYPE_CHECKING:
    from megatron_infer.server.endpoint import Call

MAX_BIASES = 4096
"""Most entries of logit_bias."""
MAX_IDS = 1 << 18
"""Most entries of allowed_token_ids and bad_token_ids: as many as the largest vocabularies have."""


class Splitter(Protocol):
    """Turns the growing text of one sequence into deltas of a chat message: content, reasoning, tool calls."""

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        """The deltas of the next piece of text, in order: {"content": "..."}, {"tool_calls": [...]}."""

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish_reason to reply with: "tool_calls" where the text was tool calls, else `reason`."""


class PlainSplitter:
    """All text is content."""

    def feed(self, text: str, *, finished: bool) -> list[dict[str, Any]]:
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class CopiedFields(msgspec.Struct, kw_only=True):
    """Fields of a GenerationRequest that come from the body's attribute of the same name; None: it is not given."""

    model: str | None = None
    prompt: Any = None
    """A text, token ids, or a list of either."""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prevent_retokenization: bool | None = None
    add_BOS: bool | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    """The reply has the prompts as the caller's texts."""
    return_raw_text: bool | None = None
    """The reply has the prompts as texts with their special tokens."""


class GenerationRequest(CopiedFields, kw_only=True):
    body: Any
    """As the modules' fields and rules read it."""
    caller: str
    """Whose turn it is to have a grammar compiled."""
    ignored: list[str]
    """Fields that have no effect in this call, for the header x-ignored-fields; see `inactive_fields.ignore`."""
    field: str = "prompt"
    """The body's field with the prompts, for errors."""
    conversations: list[list[Message]] = []
    """Prompts in the form of messages, in place of `prompt`."""
    tools: list[dict[str, Any]] | None = None
    """Tools for the chat template."""
    call_format: CallFormat = HERMES
    """Format of tool calls for a chat template without tools."""
    template: dict[str, Any] = {}
    """Further variables of the chat template."""
    sampling: dict[str, Any]
    """Fields of SamplingParams by name."""
    each: list[dict[str, Any]] = []
    """Fields of SamplingParams that differ between the prompts: a dict for each prompt; []: none differ."""
    names: Mapping[str, str] = {}
    """Fields of SamplingParams -> those of the body, in errors about the server's limits."""
    grammars: Callable[[], Awaitable[Sequence[StructuredOutput | None]]] | None = None
    """Compiles what the output of each prompt must be, or of all of them; awaited once the call is known to be within
    its limits. For dialects whose fields no module applies."""
    structured: tuple[str, dict[str, Any]] | None = None
    """(field to blame, fields of StructuredOutput) that another module needs; `structured_outputs` applies them."""
    parts: dict[str, dict[str, Any]] = {}
    """JSON schemas that the grammar in `structured` is made of, by what to blame where one cannot be enforced. The
    error of the grammar as a whole is about a text that no caller wrote."""
    begins_freely: bool = False
    """Whether the structured output may begin with any text, reasoning say."""
    make_splitter: Callable[[], Splitter] = PlainSplitter
    """Makes the splitter of each sequence of a chat, once `prompt_end` is known."""
    prompt_end: str = ""
    """The end of a chat's prompt as text, special tokens included."""
    prompt_bytes: Callable[[int, int], float] | None = None
    """(place of a prompt, number of its tokens) -> `EngineRequest.prompt_bytes`, without the prompt's text."""

    @classmethod
    def of(cls, body: Any, call: Call, **further: Any) -> GenerationRequest:
        """What the attributes of `body` say by their names. further: fields of this class."""
        names = [name for name in CopiedFields.__struct_fields__ if name in body.__struct_fields__]
        fields = {name: getattr(body, name) for name in names} | {"sampling": sampling_of(body)} | further
        return cls(body=body, caller=call.caller, ignored=call.ignored, **fields)


SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__)


def sampling_of(*bodies: Any) -> dict[str, Any]:
    """Attributes of bodies that SamplingParams has under the same name; a later body goes before those before it."""
    values = {}
    for body in bodies:
        for name in body.__struct_fields__:
            if name in SAMPLING_FIELDS and (value := getattr(body, name)) is not None:
                values[name] = value
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraField:
    """A field of a module.

    `apply` is awaited with the field's value, unless it is missing or null, in the order of registration; it raises
    ApiError 400 for a value it cannot honour. None: a rule of the module reads the field.
    """

    name: str
    type: Any
    apply: Callable[[Any, GenerationRequest], Awaitable[None]] | None


Rule = Callable[[Any, GenerationRequest], Awaitable[None]]


class ExtraFields:
    """Fields and rules by the route they belong to: "chat", "completions"."""

    def __init__(self) -> None:
        self._fields: dict[str, list[ExtraField]] = {}
        self._rules: dict[str, list[Rule]] = {}

    def add(self, route: str, extra: ExtraField) -> None:
        fields = self._fields.setdefault(route, [])
        assert extra.name not in [one.name for one in fields], f"{route}: {extra.name} is registered already"
        fields.append(extra)

    def add_rule(self, route: str, rule: Rule) -> None:
        """`rule` is awaited with every body and its GenerationRequest, after all fields."""
        self._rules.setdefault(route, []).append(rule)

    def extend(self, route: str, base: type[msgspec.Struct]) -> type[msgspec.Struct]:
        """`base` with the route's fields: the type that its bodies are decoded as."""
        added = self._fields.get(route, ())
        if not added:
            return base
        fields = [(extra.name, extra.type | None, None) for extra in added]
        return msgspec.defstruct(
            base.__name__, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True, module=base.__module__
        )

    async def apply(self, route: str, body: Any, asked: GenerationRequest) -> None:
        for extra in self._fields.get(route, ()):
            value = getattr(body, extra.name, None)
            if value is not None and extra.apply is not None:
                await extra.apply(value, asked)
        for rule in self._rules.get(route, ()):
            await rule(body, asked)


def check_request(asked: GenerationRequest, settings: ServerConfig) -> None:
    """Raises ApiError 400 for values beyond the server's limits."""
    for values in asked.each or ({},):
        check_values(asked.sampling | values, asked.names, settings)
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("stream_options is given without stream: true; give both or none", "stream_options")
    if asked.stream and asked.sampling.get("prompt_logprobs") is not None:
        raise bad_request("prompt_logprobs comes with whole replies only; give no stream: true", "prompt_logprobs")


def check_values(values: Mapping[str, Any], names: Mapping[str, str], settings: ServerConfig) -> None:
    """Raises ApiError 400 for fields of SamplingParams beyond the server's limits. names: see `GenerationRequest`."""
    check_limit(names.get("n", "n"), values.get("n") or 1, settings.max_n, "max_n")
    for name in ("logprobs", "prompt_logprobs"):
        check_limit(names.get(name, name), values.get(name) or 0, settings.max_logprobs, "max_logprobs")
    for name, most in (("logit_bias", MAX_BIASES), ("allowed_token_ids", MAX_IDS), ("bad_token_ids", MAX_IDS)):
        if len(values.get(name) or ()) > most:
            raise bad_request(f"{name} has {len(values[name]):,} entries, the limit is {most:,}; give fewer", name)
    stops = values.get("stop") or ()
    stops = [stops] if isinstance(stops, str) else stops
    for name, items in (("stop", stops), ("stop_token_ids", values.get("stop_token_ids") or ())):
        if len(items) > settings.max_stop:
            raise bad_request(f"{name} has {len(items)} entries, the limit is {settings.max_stop} (max_stop)", name)
    longest = max(map(len, stops), default=0)
    if longest > settings.max_stop_chars:
        limit = settings.max_stop_chars
        raise bad_request(f"stop has a text of {longest:,} characters, the limit is {limit:,} (max_stop_chars)", "stop")


def check_limit(name: str, value: int, limit: int, option: str) -> None:
    """Raises ApiError 400 for a value beyond what the server allows."""
    if value > limit:
        raise bad_request(f"{name} is {value:,}, the limit here is {limit:,} ({option}); ask for less at once", name)


def params_from(values: dict[str, Any]) -> SamplingParams:
    """Raises RequestError naming the field."""
    if values.get("top_p") == 0.0:  # Megatron's routes only: it means no limit there
        values = {name: value for name, value in values.items() if name != "top_p"}
    try:
        return SamplingParams.from_dict(values)
    except TypeError as error:
        raise RequestError(str(error)) from None
