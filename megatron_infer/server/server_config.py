"""Options of the HTTP server, from the command line, else the environment, else a YAML file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from megatron_infer.config.layout import EngineRoles, Layout, RunOptions
from megatron_infer.config.options import CHECKED, Option, checked, option, options_of
from megatron_infer.engine.metrics.modes import PrometheusMetricsMode
from megatron_infer.errors import ConfigError, check_known, unknown_name
from megatron_infer.text.reasoning_parsers import REASONING
from megatron_infer.text.tool_call_formats import FORMATS
from megatron_infer.utils.yaml_file import read_options

if TYPE_CHECKING:
    from megatron_infer.config.sampling_params import SamplingParams

ENV_PREFIX = "MEGATRON_INFER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server; an invalid value raises ConfigError."""

    host: str = option("127.0.0.1", is_common=True)
    """Address to listen at. Other machines reach any address but loopback: set an API key with it."""
    port: int = option(8000, least=0, most=65535, is_common=True)
    """Port to listen at; 0: the system chooses one."""
    http_workers: int = option(1, least=1, is_common=True)
    """HTTP processes that share the port. Limits on connections, threads and bodies hold for each of them; callers,
    queues and metrics are those of all. More than one cannot be had with control, whose state is one process's: let a
    second server of the same coordinator have control."""
    api_key: str | None = option(None, is_common=True, is_secret=True)
    """Key that clients must send as "Authorization: Bearer KEY". None: no key is needed."""
    allowed_host: tuple[str, ...] = option((), is_common=True)
    """Names that the Host header may have besides addresses, localhost and this machine's name; "*": any. Without an
    API key all others are refused, with one only if names are given here."""
    allow_origin: tuple[str, ...] = option((), is_common=True)
    """Origins of web pages that may use the API from a browser (CORS), such as https://app.example; "*": any."""
    served_model_name: tuple[str, ...] = option((), is_common=True)
    """Names of the model in requests; replies have the first one. Empty: the name it was loaded by."""
    tool_call_parser: str = option("auto", choices=lambda: ("auto", *FORMATS), is_common=True)
    """Format of the model's tool calls (docs/server_tools.md); auto: the chat template's."""
    reasoning_parser: str | None = option(None, choices=lambda: tuple(REASONING), is_common=True)
    """Format of the model's reasoning: deepseek_r1, qwen3, granite, gpt_oss. None: reasoning stays in the content."""
    control: bool = option(False, is_common=True)
    """Serve the routes that control the engines (pause, suspend, weights). Needs an API key beyond loopback."""
    weights_root: str | None = option(None, is_common=True)
    """Directory that paths of new weights must lie in. None: weights are not read from files."""
    lora_root: str | None = option(None, is_common=True)
    """Directory below which LoRA adapters may be loaded over HTTP (/v1/load_lora_adapter), also without control. Needs
    an API key beyond loopback. None: none is loaded over HTTP."""
    trainer_host: tuple[str, ...] = ()
    """Where the engines may meet a trainer that broadcasts weights: names, addresses or networks (10.0.0.0/8), besides
    the address that asks for the group. Only with control."""
    max_weight_bytes: int = option(512 << 20, least=1)
    """Most bytes in one body of new weights; send a larger update in several."""
    strict_fields: bool = False
    """Refuse request fields that have no effect here, which are otherwise listed in the header x-ignored-fields."""
    enable_echo: bool = True
    """Take calls that return log probabilities of the prompt (echo with logprobs, prompt_logprobs, scores), which
    computes a row of the vocabulary for each prompt token. False: 400."""
    pool_embeddings: bool = True
    """/v1/embeddings gives one vector a prompt where a call does not say (`pooling`). False: one a token."""
    enable_structured_output: bool = True
    """Take calls with structured output, tools that must be called among them. False: 400."""
    enable_penalties: bool = True
    """Take calls with a repetition, presence or frequency penalty. False: 400."""
    enable_min_tokens: bool = True
    """Take calls with min_tokens. False: 400."""
    voice: tuple[str, ...] = ()
    """Voices of a model that speaks: NAME=FILE, a WAV file of at most 30 seconds, besides those of the model."""
    audio_decoder: str = ""
    """MODULE:FUNCTION that opens the audio decoder that speech.json names, where it is one of your own."""
    speech_chunk_size: str = "15,30,60"
    """New speech tokens of each block of sound that is sent, where a call does not say, raised to whole frames; the
    last repeats. "none": all at once."""
    speech_buffer: int = -1
    """Speech tokens decoded again as left context of a block, raised to whole frames. -1: as many as the audio decoder
    looks back, or 32 frames where that has no bound."""
    speech_prompt_tokens: str = option("never", choices=("never", "once", "rolling"))
    """Whether the audio decoder sees the voice's tokens: never, once (before the first block) or rolling (also before
    later ones, to fill speech_buffer)."""
    max_queue: int = option(1024, least=1, is_common=True)
    """Most requests that wait for an engine; further ones are answered 429."""
    isolate_prefix_cache: bool = False
    """Share cached prefixes among the requests of a caller (an address) only."""
    show_cached_tokens: bool = False
    """Say in `usage` how many prompt tokens came from the prefix cache, which tells a caller what others have sent."""
    max_body_bytes: int = option(8 << 20, least=1)
    """Most bytes in a call's body."""
    max_bodies_bytes: int = option(256 << 20, least=1)
    """Most bytes in the bodies of all calls under way in an HTTP process, weights not counted; further ones get 503. An
    eighth is left to other callers, unless one body needs it."""
    max_reply_bytes: int = option(128 << 20, least=1)
    """Most bytes of a reply, or of all events of a stream, as estimated from n, prompts, max_tokens and what is asked
    for each token; a call that may have more is answered 400."""
    max_prompts: int = option(1024, least=1)
    """Most prompts in one call."""
    max_n: int = option(128, least=1)
    """Most sequences of one prompt (n, best_of)."""
    max_logprobs: int = option(20, least=0)
    """Most top tokens per position (logprobs, top_logprobs, prompt_logprobs)."""
    max_stop: int = option(16, least=0, flag=None)
    """Most stop texts of a request, and most stop token ids beyond the model's own."""
    max_stop_chars: int = option(1024, least=1, flag=None)
    """Most characters in one stop text."""
    max_schema_bytes: int = option(64 << 10, least=1, flag=None)
    """Most bytes in a schema, pattern, grammar or list of choices (response_format, structured_outputs, guided_*)."""
    max_schema_depth: int = option(32, least=1, flag=None)
    """Most levels of nested objects and lists in a schema."""
    request_timeout_s: float = option(600.0, above=0, is_common=True)
    """Most seconds from a call's body to the last byte of its reply; then its requests are aborted. A connection whose
    client does not read is dropped after as long."""
    keep_alive_s: float = option(15.0, above=0)
    """Seconds after which an idle stream sends a comment, so that proxies do not close it."""
    drain_timeout_s: float = option(30.0, least=0)
    """Seconds that running calls may go on after SIGTERM."""
    prometheus_metrics_mode: str = option(
        "instrument_only", choices=tuple(mode.value for mode in PrometheusMetricsMode)
    )
    """instrument_only: GET /metrics beside the other routes, with the API key if there is one. launch_server: also at
    metrics_port of this machine, without a key. launch_multiproc_server: there too, together with the metrics that
    other processes write into the folder PROMETHEUS_MULTIPROC_DIR."""
    metrics_port: int = option(9400, least=0, most=65535)
    """Port at 127.0.0.1 of a separate metrics server; 0: the system chooses one."""
    record: str | None = option(None, is_common=True)
    """File that every completed generation call is appended to (JSONL: time, path, body, duration), for
    bench-serve --replay. It holds prompts, but no headers and no keys; only its owner can read it."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318: spans of every POST
    call are sent there. Needs megatron-infer[otel]. None: no traces."""
    log_requests: bool = option(True, is_common=True)
    """Log a line for every call to standard error, without prompts, texts and keys."""

    def __post_init__(self) -> None:
        for name, one in options_of(ServerConfig).items():
            value = getattr(self, name)
            value = checked(one, value) if one.kind in CHECKED else _checked_text(one, value)
            if value is not None and one.words and value not in one.words:
                raise ConfigError(f"{unknown_name(name, value, one.words)}; one of {', '.join(one.words)}")
            object.__setattr__(self, name, value)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key is empty; None means no key")
        if self.control and self.api_key is None and not self.is_local:
            raise ConfigError(f"control at {self.host} needs an API key: others could control the engines; set api_key")
        if self.lora_root is not None:
            if not Path(self.lora_root).is_dir():
                raise ConfigError(f"lora_root is {self.lora_root!r}, which is no directory")
            if self.api_key is None and not self.is_local:
                text = f"lora_root at {self.host} needs an API key: others could load and unload adapters"
                raise ConfigError(f"{text}; set api_key")
        if self.control and self.http_workers > 1:
            text = f"control with {self.http_workers} HTTP processes: the state of the engines is kept by one"
            raise ConfigError(
                f"{text}; leave http_workers at 1, or serve control at another port: a second server with --coordinator"
            )
        if self.max_bodies_bytes < self.max_body_bytes:
            text = f"max_bodies_bytes is {self.max_bodies_bytes:,}, less than one body may have"
            raise ConfigError(f"{text} (max_body_bytes, {self.max_body_bytes:,})")
        for origin in self.allow_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
                raise ConfigError(
                    f"allow_origin is {origin!r}; an origin is like https://app.example:8443, without a path"
                )
        for host in self.trainer_host:
            try:
                ipaddress.ip_network(host if "/" in host else "0.0.0.0")
            except ValueError as error:
                raise ConfigError(f"trainer_host: {error}") from None
        if self.otlp_traces_endpoint is not None:
            object.__setattr__(self, "otlp_traces_endpoint", _traces_url(self.otlp_traces_endpoint))
        if self.weights_root is not None and not Path(self.weights_root).is_dir():
            raise ConfigError(f"weights_root is {self.weights_root!r}, which is no directory")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address it listens at."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def turned_off(self, params: SamplingParams) -> TurnedOff | None:
        """The first thing that a request asks for and an option refuses; None: it is taken."""
        penalties = ("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)
        asked = [
            ("prompt_logprobs", params.prompt_logprobs is not None, "enable_echo"),
            ("structured", params.structured is not None, "enable_structured_output"),
            *((name, getattr(params, name) != off, "enable_penalties") for name, off in penalties),
            ("min_tokens", params.min_tokens > 0, "enable_min_tokens"),
        ]
        found = (TurnedOff(name, option) for name, is_asked, option in asked if is_asked and not getattr(self, option))
        return next(found, None)


class TurnedOff(NamedTuple):
    """What a request asks for and the server does not do."""

    name: str
    """The field of SamplingParams."""
    option: str
    """The option of `ServerConfig` that is False."""

    @property
    def what(self) -> str:
        """The name in words."""
        told = {"prompt_logprobs": "log probabilities of the prompt", "structured": "structured output"}
        return told.get(self.name, self.name)


def _traces_url(given: str) -> str:
    """The URL that spans are posted to; one without a path gets OTLP's own. Raises ConfigError."""
    exporter = [f"opentelemetry.exporter{rest}" for rest in ("", ".otlp", ".otlp.proto", ".otlp.proto.http")]
    for needed in ("opentelemetry", "opentelemetry.sdk", *exporter):
        if find_spec(needed) is None:
            raise ConfigError(f"otlp_traces_endpoint needs {needed}: pip install 'megatron-infer[otel]'")
    url = urlsplit(given)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint is {given!r}; it is the http:// or https:// URL of a collector's OTLP over HTTP "
            "(port 4318; gRPC, port 4317, is not spoken here)"
        )
    return given if url.path.strip("/") else f"{given.rstrip('/')}/v1/traces"


def _checked_text(item: Option, value: Any) -> Any:
    """A text, or a tuple of texts. Raises ConfigError."""
    if item.kind.startswith("tuple"):
        names = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"{item.name} is a name or a list of names, got {value!r}")
        return names
    if not isinstance(value, str) and not (value is None and item.is_optional):
        shown = "what was given" if item.is_secret else repr(value)
        raise ConfigError(f"{item.name} is {shown}, expected {item.type_text}")
    return value


def server_config_from(
    given: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any]
) -> ServerConfig:
    """given (command line) before environment (MEGATRON_INFER_PORT, ...) before file. Raises ConfigError."""
    items = options_of(ServerConfig)
    for name in file:
        if name not in items:
            raise ConfigError(f"{unknown_name('option', str(name), items)} in the configuration file")
    values: dict[str, Any] = dict(file)
    for name, item in items.items():
        text = environment.get(ENV_PREFIX + name.upper())
        if text is not None and name not in given:
            values[name] = _parsed(item, text)
    return ServerConfig(**(values | dict(given)))


def _parsed(item: Option, text: str) -> Any:
    kind, variable = item.kind, ENV_PREFIX + item.name.upper()
    try:
        if kind == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if kind.startswith("tuple"):
            return tuple(name.strip() for name in text.split(","))
        return {"int": int, "float": float}.get(kind, str)(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{variable} is {text!r}, expected {item.type_text}") from None


ENGINE_KEYS = ("model", *options_of(RunOptions), "engine", *options_of(Layout), *options_of(EngineRoles))
"""Keys of a configuration file that are no server options; `engine` holds options of InferenceConfig."""


def read_config_file(path: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A YAML file -> (server options, values of ENGINE_KEYS). Raises ConfigError naming the file."""
    if path is None:
        return {}, {}
    content = read_options(path, f"--config {path}")
    known = [*options_of(ServerConfig), *ENGINE_KEYS]
    check_known("option", content, known, where=f"--config {path}: ")
    engine_options = {name: content.pop(name) for name in ENGINE_KEYS if name in content}
    if not isinstance(engine_options.get("engine", {}), dict):
        raise ConfigError(f"--config {path}: engine holds options of InferenceConfig as NAME: VALUE")
    return content, engine_options
