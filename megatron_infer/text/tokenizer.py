"""Text to token ids and back, over the `tokenizers` library: no transformers, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.text import chat_template
from megatron_infer.text.end_ids import directory_end_ids
from megatron_infer.text.special_tokens import read_special_tokens
from megatron_infer.text.tokenizer_classes import CLASSES, apply_class, class_of
from megatron_infer.utils.json_file import read_json
from megatron_infer.utils.panics import LibraryPanic, panics_as_errors

LONG = 4096
"""From this many characters or ids on, the library's batch functions are used: they let other Python threads run."""


class Tokenizer:
    """One model's tokenizer: encode, decode, chat template, and the token ids that end an output."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        template: str | Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        """eos_ids: tokens that end an output, besides the eos_token of `special_tokens`, which are texts by name
        (bos_token, eos_token, ...); chat templates read them."""
        # Truncation or padding left in a tokenizer.json would silently change a prompt.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        own = self._special_id("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*(() if own is None else (own,)), *eos_ids)))
        self.bos_id = self._special_id("bos_token")
        self._templates = {"default": template} if isinstance(template, str) else dict(template or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

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
            with panics_as_errors:
                if len(text) < LONG:
                    return list(self.backend.encode(text, add_special_tokens=add_special).ids)
                (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special)
                return list(encoding.ids)
        except LibraryPanic as error:
            raise InvalidPrompt(f"{self.name or 'the tokenizer'} fails for this text: {error}") from error
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
        with panics_as_errors:
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
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ModelError(f"{self.name}: no default chat template, only {', '.join(sorted(self._templates))}")
        return chat_template.render(
            self._templates[name],
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self.special_tokens, **dict(variables or {})},
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
        config |= self.special_tokens
        if self._templates:
            if set(self._templates) == {"default"}:
                config["chat_template"] = self._templates["default"]
            else:
                config["chat_template"] = [{"name": n, "template": t} for n, t in self._templates.items()]
        return config

    @classmethod
    def from_directory(cls, directory: str | Path, *, eos_ids: Iterable[int] = (), name: str = "") -> Tokenizer:
        """Tokenizer of a Hugging Face directory: token ids and rendered conversations are those of AutoTokenizer.

        An output ends with the tokenizer's own end token, those of config.json and generation_config.json, and
        `eos_ids`. Raises ModelError for damaged files, and for a tokenizer class that is not known.
        """
        directory = Path(directory)
        name = name or str(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory}: no tokenizer.json; prompts must be given as token ids")
        try:
            text = path.read_text(encoding="utf-8")
            with panics_as_errors:
                backend = tokenizers.Tokenizer.from_str(text)
                backend.decode(list(range(256)))  # a decoder that fails would fail in the engine's step
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise ModelError(f"{path}: not a readable tokenizer: {error}") from error
        try:
            return cls._of_files(directory, backend, is_byte_level='"ByteLevel"' in text, eos_ids=eos_ids, name=name)
        except ModelError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise ModelError(f"{directory}: a file next to tokenizer.json is damaged: {error!r}") from error

    @classmethod
    def _of_files(
        cls, directory: Path, backend: tokenizers.Tokenizer, *, is_byte_level: bool, eos_ids: Iterable[int], name: str
    ) -> Tokenizer:
        """`backend` of the directory's tokenizer.json with what the files next to it say."""
        config_path, model_path = directory / "tokenizer_config.json", directory / "config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        model = read_json(model_path) if model_path.is_file() else {}
        chosen = class_of(config, model, is_byte_level=is_byte_level, name=name)
        if chosen is not None:
            apply_class(backend, chosen, config, name=name)
        special = read_special_tokens(directory, config, backend, CLASSES[chosen].special_tokens if chosen else {})
        special.add_to(backend)
        return cls(
            backend,
            eos_ids=(*directory_end_ids(directory), *eos_ids),
            special_tokens={key: str(token) for key, token in special.named.items()},
            template=_directory_templates(directory, config),
            name=name,
        )


def _directory_templates(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Chat templates by name; files go before tokenizer_config.json."""
    paths = {"default": directory / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    try:
        files = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    except UnicodeDecodeError as error:
        raise ModelError(f"{directory}: a chat template is not UTF-8 text: {error}") from error
    if files:
        return files
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template
