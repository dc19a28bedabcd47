"""Prompts from flags and JSON lines -> token ids; an invalid line is an error of that line only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError, InvalidPrompt, check_known
from megatron_infer.utils.files import regular

PROMPT_KEYS = ("prompt", "messages", "token_ids", "prompt_token_ids")
"""A line has one of them; prompt_token_ids, as outputs have it, is token_ids."""
SAMPLING_KEYS = tuple(SamplingParams.__dataclass_fields__)


class PromptFileError(InferenceError, ValueError):
    """A prompts file that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """One prompt to run, or the error that prevents it."""

    where: str
    """Where it comes from, for errors: `file:line`, or `--prompt 2`."""
    prompt: str | list[int] | list[dict[str, Any]] | None = None
    """Text, token ids, or chat messages."""
    sampling: Mapping[str, Any] | None = None
    """Sampling fields of this line."""
    id: Any = None
    """The line's "id", copied to the output."""
    error: str | None = None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)


def read_jobs(path: str) -> Iterator[PromptJob]:
    """The lines of a JSON Lines file ("-": standard input); blank lines are skipped.

    Raises PromptFileError when the file cannot be opened or is UTF-16.
    """
    name = "<stdin>" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else regular(path, or_pipe=True).read_bytes()
    except OSError as error:
        raise PromptFileError(f"{name}: cannot be read: {error.strerror or error}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise PromptFileError(f"{name}: this is UTF-16, not UTF-8; convert it, e.g. iconv -f UTF-16 -t UTF-8")
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield parse_line(line, where=f"{name}:{number}")


def parse_line(line: bytes, *, where: str) -> PromptJob:
    """One line -> a PromptJob; an invalid line becomes the job's error."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return PromptJob(
            where=where, error=f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        )
    except json.JSONDecodeError as error:
        return PromptJob(where=where, error=f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return PromptJob(where=where, error="JSON nested too deeply")
    try:
        return _job_of(value, where)
    except InvalidPrompt as error:
        return PromptJob(where=where, error=str(error), id=value.get("id") if isinstance(value, dict) else None)


def _job_of(value: Any, where: str) -> PromptJob:
    if not isinstance(value, dict):
        raise InvalidPrompt(f'expected an object such as {{"prompt": "..."}}, got {type(value).__name__}')
    check_known("field", value, (*PROMPT_KEYS, *SAMPLING_KEYS, "id"), error=InvalidPrompt)
    given = [key for key in PROMPT_KEYS if key in value]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise InvalidPrompt(f"a line holds exactly one of prompt, messages and token_ids, got {found}")
    key, prompt = given[0], value[given[0]]
    is_ids = key in ("token_ids", "prompt_token_ids")
    if key == "messages":
        if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) for m in prompt):
            raise InvalidPrompt('messages: expected a non-empty list of {"role": ..., "content": ...} objects')
    elif isinstance(prompt, list):
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            raise InvalidPrompt(f"{key}: token ids are integers")
    elif is_ids or not isinstance(prompt, str):
        wanted = "a list of token ids" if is_ids else "text or a list of token ids"
        raise InvalidPrompt(f"{key}: expected {wanted}, got {type(prompt).__name__}")
    sampling = {name: value[name] for name in SAMPLING_KEYS if name in value}
    return PromptJob(where=where, prompt=prompt, sampling=sampling, id=value.get("id"))


def to_token_ids(job: PromptJob, tokenizer: Any, *, chat: bool, system: str | None = None) -> str | list[int]:
    """The prompt for the engine: token ids, or text to be completed.

    chat: plain text becomes a user's message in the chat template; token ids are not changed.
    """
    if job.is_chat:
        messages = list(job.prompt)  # type: ignore[arg-type]
    elif isinstance(job.prompt, str) and chat:
        if not job.prompt:
            raise InvalidPrompt("the prompt is empty; write something")
        messages = [{"role": "user", "content": job.prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
    else:
        return job.prompt  # type: ignore[return-value]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode(text, add_special=False)
