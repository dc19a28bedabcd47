"""Builds a tokenizer from GGUF metadata, with the `tokenizers` library."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from megatron_infer.errors import ModelError
from megatron_infer.text.end_ids import gguf_end_ids
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.text.tokenizer_classes import LLAMA3_WORDS, QWEN2_WORDS, pieces_decoder, words_in_bytes

log = logging.getLogger("megatron_infer")


class _Kind(IntEnum):
    """tokenizer.ggml.token_type, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# How text is split before BPE, per `tokenizer.ggml.pre`.
_GPT2_LIKE = ("gpt-2", "gpt2", "default", "mpt", "olmo", "phi-2", "jais")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3_LIKE = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
)
"""They begin texts with BOS where the file has no add_bos_token, as in llama.cpp's table."""
_LLAMA3_WORDS = ("dbrx", "smaug-bpe")
_QWEN2_LIKE = ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez")


def tokenizer_from_metadata(metadata: Mapping[str, Any], *, name: str = "") -> Tokenizer:
    """The tokenizer that a GGUF file describes under `tokenizer.*`.

    Supports byte-level BPE ("gpt2") and SentencePiece-style BPE with byte fallback ("llama"). Raises ModelError for
    other kinds, and for pre-tokenizers without a known pattern.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(f"{name}: the GGUF file holds no tokenizer; prompts must be given as token ids")
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [_Kind.NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{name}: {len(tokens)} tokens but {len(kinds)} token types in the GGUF metadata")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, name)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, name)
    else:
        raise ModelError(f"{name}: GGUF tokenizer kind {kind!r} is not supported (supported: gpt2, llama)")
    ends = set(gguf_end_ids(metadata))
    added = [
        AddedToken(token, normalized=False, special=id in ends or kinds[id] in (_Kind.CONTROL, _Kind.UNKNOWN))
        for id, token in enumerate(tokens)
        if id in ends or kinds[id] in (_Kind.CONTROL, _Kind.USER_DEFINED, _Kind.UNKNOWN)
    ]
    backend.add_tokens(added)
    special = _special_tokens(metadata, tokens, name)
    add_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_LIKE
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _add_bos_eos(backend, special.get("bos_token") if add_bos else None, special.get("eos_token") if add_eos else None)
    return Tokenizer(
        backend, eos_ids=gguf_end_ids(metadata), special_tokens=special, template=_templates(metadata), name=name
    )


_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
"""Special tokens -> their names in GGUF keys ("seperator" is spelled so)."""


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> dict[str, str]:
    """Special tokens by name. A SentencePiece vocabulary without such keys begins with <unk>, <s> and </s>."""
    ids = {"unk": 0, "bos": 1, "eos": 2} if metadata["tokenizer.ggml.model"] == "llama" else {}
    for short, long in _NAMES.items():
        ids[short] = metadata.get(f"tokenizer.ggml.{long}_token_id", ids.get(short))
    wrong = {short: id for short, id in ids.items() if id is not None and not 0 <= id < len(tokens)}
    if wrong:
        raise ModelError(f"{name}: special tokens of the GGUF tokenizer {wrong} are none of its {len(tokens)} tokens")
    return {f"{short}_token": tokens[id] for short, id in ids.items() if id is not None}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: tokenizer.chat_template is the default one, tokenizer.chat_template.NAME another."""
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    return named | ({"default": metadata[key]} if key in metadata else {})


def _add_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make encode(add_special=True) begin with `bos` and end with `eos`."""
    tokens = [token for token in (bos, eos) if token is not None]
    if tokens:
        single = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
        pair = single + " " + single.replace("$A", "$B").replace(":0", ":1")
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _merges(metadata: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(metadata["tokenizer.ggml.merges"]):
        left, space, right = line.partition(" ")
        if not space or not left or not right:
            raise ModelError(f"{name}: merge {index} of the GGUF tokenizer is {line!r}, expected two pieces")
        merges.append((left, right))
    return merges


def _model(tokens: Sequence[str], merges: list[tuple[str, str]], name: str, **options: Any) -> models.BPE:
    vocab = {token: id for id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception, e.g. for a merge outside the vocabulary
        raise ModelError(f"{name}: the GGUF tokenizer is inconsistent: {error}") from error


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> Backend:
    if "tokenizer.ggml.merges" not in metadata:
        raise ModelError(f"{name}: the GGUF tokenizer is BPE but lists no merges")
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        text = "%s: no tokenizer.ggml.pre: texts are split as for GPT-2, perhaps not as in training; convert it again"
        log.warning(text, name)
        pre = "default"
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    merges = _merges(metadata, name)
    # Llama 3's vocabulary has words that no merge produces: a word that is a token needs no merges.
    backend = Backend(
        _model(tokens, merges, name, fuse_unk=False, byte_fallback=False, ignore_merges=pre in _LLAMA3_LIKE)
    )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    if pre in _GPT2_LIKE:
        backend.pre_tokenizer = gpt2
    elif pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    elif pre in (*_LLAMA3_LIKE, *_LLAMA3_WORDS):
        backend.pre_tokenizer = words_in_bytes(LLAMA3_WORDS, add_prefix_space=prefix_space)
    elif pre in _QWEN2_LIKE:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = words_in_bytes(QWEN2_WORDS, add_prefix_space=prefix_space)
    else:
        known = sorted({*_GPT2_LIKE, *_SINGLE_DIGITS, *_LLAMA3_LIKE, *_LLAMA3_WORDS, *_QWEN2_LIKE})
        raise ModelError(f"{name}: GGUF pre-tokenizer {pre!r} is not supported (supported: {', '.join(known)})")
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> Backend:
    """SentencePiece BPE. Without merges in the file they follow from the scores: pieces merge in order of score."""
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata, name)
    else:
        merges = _merges_from_scores(tokens, metadata.get("tokenizer.ggml.scores"), name)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Backend(_model(tokens, merges, name, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "\u2581")
    steps = [normalizers.Prepend("\u2581"), spaces] if prefix_space else [spaces]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = pieces_decoder(strips=prefix_space)
    return backend


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float] | None, name: str) -> list[tuple[str, str]]:
    if scores is None or len(scores) != len(tokens):
        raise ModelError(
            f"{name}: the GGUF tokenizer has neither merges nor a score for each of its {len(tokens)} tokens"
        )
    id_of = {token: id for id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in id_of and right in id_of:
                found.append((-scores[id], id_of[left], id_of[right], (left, right)))
    return [merge for *_, merge in sorted(found)]
