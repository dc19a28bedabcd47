"""Text to token ids and back, over the `tokenizers` library: no transformers, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.text import chat_template
from megatron_infer.utils.json_file import read_json

# Tokenizer classes whose add_bos_token / add_eos_token in tokenizer_config.json decide the special tokens that
# encode() adds; every other class leaves that to tokenizer.json's post-processor.
_CONFIG_DECIDES_BOS = frozenset(
    {"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"}
)
LONG = 4096
"""From this many characters or ids on, the library's batch functions are used: they let other Python threads run."""


class Tokenizer:
    """One model's tokenizer: encode, decode, chat template, and the token ids that end an output."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        pad_id: int | None = None,
        template: str | Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        # Truncation or padding left in a tokenizer.json would silently change a prompt.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.name = name
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.pad_id = pad_id
        self._templates = {"default": template} if isinstance(template, str) else dict(template or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text of more than n times as many fits into n tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The default chat template; None if the model has none."""
        return self._templates.get("default")

    def set_chat_template(self, template: str) -> None:
        """Replace the model's templates by one. Raises ModelError for one that does not parse."""
        chat_template.check(template)
        self._templates = {"default": template}

    @property
    def tool_template(self) -> str | None:
        """The chat template for conversations with tools; None if the model has none."""
        return self._templates.get("tool_use", self._templates.get("default"))

    def template_reads(self, variable: str) -> bool:
        """Whether the default chat template uses a variable."""
        template = self._templates.get("default")
        return template is not None and chat_template.reads(template, variable)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        template = self.tool_template
        return template is not None and chat_template.reads(template, "tools")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids; `add_special` adds the BOS and EOS that the model was trained with."""
        if not isinstance(text, str):
            raise InvalidPrompt(f"text to encode must be a str, got {type(text).__name__}")
        try:
            if len(text) < LONG:
                return list(self.backend.encode(text, add_special_tokens=add_special).ids)
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special)
            return list(encoding.ids)
        except TypeError as error:  # raised by the library for lone surrogates
            raise InvalidPrompt("text is not valid Unicode: it holds half of a surrogate pair") from error
        except Exception as error:  # the library raises bare Exception for words without a token
            raise InvalidPrompt(self._without_token(text)) from error

    def _without_token(self, text: str) -> str:
        backend = self.backend
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        parts = [(normal, (0, 0))] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(normal)
        unknown = list(dict.fromkeys(part for part, _ in parts if self.token_id(part) is None))
        return f"the vocabulary has no token for {', '.join(map(repr, unknown[:8])) or 'this text'}; use other words"

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The exact text of the ids, without clean-up of spaces. Ids of the padded vocabulary have no text."""
        if len(ids) < LONG:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special)
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)
        return text

    def token_str(self, id: int) -> str:
        """The vocabulary's own spelling of one token ("" when there is none)."""
        return self.backend.id_to_token(id) or ""

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        limits: chat_template.RenderLimits | None = None,
    ) -> str:
        """The conversation as text; encode it with add_special=False, as the template writes the special tokens.

        limits: see `chat_template.render`.
        """
        if not self._templates:
            raise ModelError(
                f"{self.name or 'this model'} has no chat template; give plain prompts, or use an instruct model"
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ModelError(f"{self.name}: no default chat template, only {', '.join(sorted(self._templates))}")
        known: dict[str, Any] = {}
        if self.bos_id is not None:
            known["bos_token"] = self.token_str(self.bos_id)
        if self.eos_ids:
            known["eos_token"] = self.token_str(self.eos_ids[0])
        if self.pad_id is not None:
            known["pad_token"] = self.token_str(self.pad_id)
        return chat_template.render(
            self._templates[name],
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**known, **dict(variables or {})},
            limits=limits,
        )

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `from_directory` (and transformers) read."""
        directory = Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        text = json.dumps(self.hf_config(), ensure_ascii=False, indent=2)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def hf_config(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for key, id in (
            ("bos_token", self.bos_id),
            ("eos_token", next(iter(self.eos_ids), None)),
            ("pad_token", self.pad_id),
        ):
            if id is not None:
                config[key] = self.token_str(id)
        if self._templates:
            if set(self._templates) == {"default"}:
                config["chat_template"] = self._templates["default"]
            else:
                config["chat_template"] = [{"name": n, "template": t} for n, t in self._templates.items()]
        return config

    @classmethod
    def from_directory(cls, directory: str | Path, *, eos_ids: Iterable[int] = (), name: str = "") -> Tokenizer:
        """Tokenizer of a Hugging Face directory (tokenizer.json, tokenizer_config.json, chat_template.jinja).

        `eos_ids` are those of the model's (generation) config; if empty, the tokenizer's own end token is used.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory}: no tokenizer.json; prompts must be given as token ids")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise ModelError(f"{path}: not a readable tokenizer: {error}") from error
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        bos_id = _config_token_id(backend, config, "bos_token")
        eos_id = _config_token_id(backend, config, "eos_token")
        if config.get("tokenizer_class") in _CONFIG_DECIDES_BOS:
            add_bos_eos(
                backend,
                bos_id if config.get("add_bos_token") else None,
                eos_id if config.get("add_eos_token") else None,
            )
        return cls(
            backend,
            eos_ids=tuple(eos_ids) or (() if eos_id is None else (eos_id,)),
            bos_id=bos_id,
            pad_id=_config_token_id(backend, config, "pad_token"),
            template=_directory_template(directory, config),
            name=name or str(directory),
        )


def add_bos_eos(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None = None) -> None:
    """Make encode(add_special=True) begin with `bos_id` and end with `eos_id`, unless the tokenizer does already."""
    ids = backend.encode("", add_special_tokens=True).ids
    begins = bos_id is None or ids[:1] == [bos_id]
    ends = eos_id is None or ids[-1:] == [eos_id]
    if begins and ends:
        return
    special, single, pair = [], "$A", "$B:1"
    if bos_id is not None:
        bos = backend.id_to_token(bos_id)
        special.append((bos, bos_id))
        single, pair = f"{bos}:0 {single}", f"{bos}:1 {pair}"
    if eos_id is not None:
        eos = backend.id_to_token(eos_id)
        special.append((eos, eos_id))
        single, pair = f"{single} {eos}:0", f"{pair} {eos}:1"
    template = processors.TemplateProcessing(single=single, pair=f"{single} {pair}", special_tokens=special)
    current = backend.post_processor
    backend.post_processor = template if current is None else processors.Sequence([current, template])


def _config_token_id(backend: tokenizers.Tokenizer, config: Mapping[str, Any], key: str) -> int | None:
    token = config.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _directory_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: not UTF-8 text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template
