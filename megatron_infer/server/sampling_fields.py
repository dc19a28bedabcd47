"""Sampling fields of a request body -> SamplingParams, within the server's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import RequestError
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.openai_protocol import SAMPLING_FIELDS, SamplingBody
from megatron_infer.server.server_config import ServerConfig

MAX_BIASES = 4096
"""Most entries of logit_bias."""
MAX_IDS = 1 << 18
"""Most entries of allowed_token_ids and bad_token_ids: as many as the largest vocabularies have."""


def sampling_of(body: SamplingBody, settings: ServerConfig) -> dict[str, Any]:
    """The fields of SamplingParams that `body` gives. Raises ApiError 400 for values beyond the server's limits."""
    values = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    check_limit("n", values.get("n", 1), settings.max_n, "max_n")
    check_limit("prompt_logprobs", values.get("prompt_logprobs", 0), settings.max_logprobs, "max_logprobs")
    if values.get("top_p") == 0.0:  # Megatron's routes only: it means no limit there
        del values["top_p"]
    check_lists(values, settings)
    check_stream_options(body)
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs comes with whole replies only; give no stream: true", "prompt_logprobs")
    return values


def check_limit(name: str, value: int, limit: int, option: str) -> None:
    """Raises ApiError 400 for a value beyond what the server allows."""
    if value > limit:
        raise bad_request(f"{name} is {value:,}, the limit here is {limit:,} ({option}); ask for less at once", name)


def check_lists(values: Mapping[str, Any], settings: ServerConfig) -> None:
    """Raises ApiError 400 for longer lists than the server allows: stops, biases, ids."""
    for name, most in (("logit_bias", MAX_BIASES), ("allowed_token_ids", MAX_IDS), ("bad_token_ids", MAX_IDS)):
        given = values.get(name)
        if isinstance(given, list | tuple | dict) and len(given) > most:
            raise bad_request(f"{name} has {len(given):,} entries, the limit is {most:,}; give fewer", name)
    stops = [values["stop"]] if isinstance(values.get("stop"), str) else values.get("stop", ())
    for name, items in (("stop", stops), ("stop_token_ids", values.get("stop_token_ids", ()))):
        if not isinstance(items, list | tuple):
            raise bad_request(f"sampling_params: {name} is a list", "sampling_params", "invalid_value")
        if len(items) > settings.max_stop:
            raise bad_request(f"{name} has {len(items)} entries, the limit is {settings.max_stop} (max_stop)", name)
    longest = max((len(text) for text in stops if isinstance(text, str)), default=0)
    if longest > settings.max_stop_chars:
        limit = settings.max_stop_chars
        raise bad_request(f"stop has a text of {longest:,} characters, the limit is {limit:,} (max_stop_chars)", "stop")


def check_stream_options(body: Any) -> None:
    """Raises ApiError 400 for stream_options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is given without stream: true; give both or none", "stream_options")


def params_from(values: dict[str, Any]) -> SamplingParams:
    """Raises RequestError naming the field."""
    try:
        return SamplingParams.from_dict(values)
    except TypeError as error:
        raise RequestError(str(error)) from None
