"""Errors -> replies in OpenAI's and Anthropic's form, and their statuses.

{"type": "error", "error": {"message", "type", "param", "code"}}: OpenAI's clients read `error`, Anthropic's both.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from megatron_infer.coordinator import protocol
from megatron_infer.errors import (
    InferenceError,
    LockstepError,
    ModelError,
    PromptTooLong,
    RankFailure,
    RequestError,
    UnknownAdapter,
    UnknownRequest,
    WrongState,
    unknown_name,
)

RETRY_AFTER_S = 2


class ApiError(InferenceError):
    """A reply with a status other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}
        if self.status in (429, 503):
            return "overloaded_error" if self.status == 503 else "rate_limit_error"
        return known.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": error}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def context_overflow(limit: int, num_prompt: int, num_asked: int, *, field: str = "prompt") -> ApiError:
    """The prompt and `num_asked` output tokens exceed the context length. field: the one that holds the prompt."""
    asked = f"you requested {num_prompt + num_asked:,} tokens ({num_prompt:,} in the prompt, {num_asked:,} to generate)"
    if num_prompt >= limit:
        asked = f"your prompt has {num_prompt:,} tokens, and one more must fit"
    message = f"This model's maximum context length is {limit:,} tokens. However, {asked}. Shorten it."
    return bad_request(message, field if num_prompt >= limit else "max_tokens", "context_length_exceeded")


_GONE = (protocol.ConnectionLost, protocol.ReplicaLost, protocol.AccessRefused, RankFailure, LockstepError)
"""No engine answers, or the one that did goes on no more."""


def api_error_of(error: BaseException) -> ApiError:
    """The reply to a call that failed with `error`. An error of no known class reveals nothing of its content."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, protocol.Overloaded):
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(429, str(error), code="queue_full", headers=retry)
    if isinstance(error, PromptTooLong):
        return bad_request(f"This model's maximum context length is exceeded: {error}", None, "context_length_exceeded")
    if isinstance(error, UnknownAdapter):
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError | NotImplementedError):
        return bad_request(str(error), _named_field(str(error)))
    if isinstance(error, protocol.MessageTooLarge):
        return ApiError(413, str(error), code="too_large")
    if isinstance(error, WrongState):
        return ApiError(409, str(error), code="wrong_state")
    if isinstance(error, UnknownRequest):
        return ApiError(404, str(error), code="unknown_request")
    if isinstance(error, _GONE):
        return unavailable(f"no engine answers: {error}", "engine_unavailable")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the time allowed for this request is over (request_timeout_s)", code="timeout")
    if isinstance(error, ModelError):
        return bad_request(str(error))
    if isinstance(error, InferenceError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, "the server failed; its log has the reason under this request's id", code="internal_error")


def _named_field(message: str) -> str | None:
    """The field name that the message of an engine's error begins with."""
    found = re.match(r"([a-z_]+)(?:\[.*?\])?(?: is | holds | has | maps |: )", message)
    return found[1] if found else None


def of_validation(error: Exception, body: Any) -> ApiError:
    """The reply to a body that its msgspec type rejects."""
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"the body is not valid JSON: {error}", None, "invalid_json")
    text, _, place = str(error).partition(" - at `")
    text = text.replace(" | null`", "`")
    _, of_key, where = place.rstrip("`").rpartition("key` in `")
    path = where.removeprefix("$").lstrip(".") or None
    if of_key:
        text = f"a key of it is wrong: {text}"
    unknown = re.match(r"Object contains unknown field `(.*)`", text)
    if unknown and path is None:
        name = unknown[1]
        known = [field.encode_name for field in msgspec.structs.fields(body)]
        told = unknown_name("field", name, known)
        return bad_request(told if told.endswith("?") else f"{told}; remove it", name, "unknown_field")
    missing = re.match(r"Object missing required field `(.*)`", text)
    if missing and path is None:
        return bad_request(f"{missing[1]}: it must be given", missing[1], "missing_field")
    return bad_request(f"{path}: {text}" if path else text, path, "invalid_value")
