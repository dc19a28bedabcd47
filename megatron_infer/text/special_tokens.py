"""Special tokens in the files of a model's directory: the one place that reads them.

Source of the semantics: `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from megatron_infer.errors import ModelError
from megatron_infer.utils.json_file import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The added and special tokens that the files next to tokenizer.json name."""

    named: Mapping[str, str | AddedToken]
    """By name, `eos_token` for example; chat templates read them under these names."""
    extra: tuple[str | AddedToken, ...]
    """Special tokens without a name."""
    added: tuple[AddedToken, ...]
    """Tokens to be added to the vocabulary, in order of their ids."""

    def add_to(self, backend: Backend) -> None:
        """Add to the vocabulary, as special tokens, what it lacks; a token that it has keeps its id."""
        names = {str(token) for token in self.named.values()}
        known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *self.added)}
        wanted = list(self.added)
        for token in (*self.named.values(), *self.extra):
            if _content(token) not in known:
                known.add(_content(token))
                wanted.append(AddedToken(token, special=True) if isinstance(token, str) else token)
        for token in wanted:
            token.special = token.special or token.content in names
        backend.add_tokens(wanted)


def read_special_tokens(
    directory: Path, config: Mapping[str, Any], backend: Backend, defaults: Mapping[str, str]
) -> SpecialTokens:
    """Special tokens of a directory whose tokenizer_config.json is `config`.

    defaults: by name, where the files name none. Raises ModelError for entries that are no tokens.
    """
    if not isinstance(config.get("added_tokens_decoder", {}), Mapping):
        raise ModelError(f"{directory}: added_tokens_decoder is no mapping of ids to tokens")
    merged = {key: value for key, value in config.items() if value is not None or key in defaults}
    if not merged.get("extra_special_tokens"):
        merged["extra_special_tokens"] = merged.pop("additional_special_tokens", None)
    if "added_tokens_decoder" in config:
        added = {int(id): _token(entry, directory) for id, entry in config["added_tokens_decoder"].items()}
    else:
        merged |= _older_map(directory)
        added = _older_added(directory, merged)
        added |= backend.get_added_tokens_decoder()
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    named = {key: value for key, value in merged.items() if key in _NAMES or key in defaults}
    named |= {key: value for key, value in merged.items() if key.endswith("_token") and isinstance(value, str)}
    if isinstance(extra, Mapping):
        named, extra = named | dict(extra), []
    if backend.padding is not None:
        named.setdefault("pad_token", backend.padding["pad_token"])
    by_content = {token.content: token for token in added.values()}
    named = dict(defaults) | named
    order = [key for key in (*_NAMES, *named) if named.get(key) is not None]  # in which they get their ids
    tokens = {key: _token(named[key], directory) for key in order}
    return SpecialTokens(
        named={key: by_content.get(_content(token), token) for key, token in tokens.items()},
        extra=tuple(_token(entry, directory) for entry in extra),
        added=tuple(token for _, token in sorted(added.items())),
    )


def _older_map(directory: Path) -> dict[str, Any]:
    """special_tokens_map.json, which goes before tokenizer_config.json where the latter has no added_tokens_decoder."""
    path = directory / "special_tokens_map.json"
    return read_json(path) if path.is_file() else {}


def _older_added(directory: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """added_tokens.json: content -> id."""
    path = directory / "added_tokens.json"
    if not path.is_file():
        return {}
    special = {_content(_token(entry, directory)) for entry in config.get("extra_special_tokens") or ()}
    special |= {_content(_token(config[name], directory)) for name in _NAMES if config.get(name) is not None}
    found = {}
    for content, id in read_json(path).items():
        is_special = content in special
        found[int(id)] = AddedToken(content, normalized=not is_special, special=is_special)
    return found


def _token(entry: Any, directory: Path) -> Any:
    """A token of a file: a text stays one, an object becomes an AddedToken."""
    if isinstance(entry, str | AddedToken):
        return entry
    if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        return AddedToken(entry["content"], **{key: bool(entry[key]) for key in flags if key in entry})
    raise ModelError(f"{directory}: {str(entry)[:80]!r} is no token: a text, or an object with a content")


def _content(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content
