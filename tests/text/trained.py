"""Directories with small tokenizers that are trained here, in the shapes of real ones."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from vocabularies import byte_fallback

from megatron_infer.text.tokenizer_classes import QWEN2_WORDS

SENTENCES = [
    "Hello, world! The hello of the world, the world of hellos; I'll say it's 1234567890.",
    "Two  words and   spaces,\n\nnew lines\tand tabs. été, naïve, 日本語の文章。",
    "def f(x): return {'a': [1, 2], 'b': None}  # the words of a line of code",
    "<s>system</s> <|user|> user assistant \U0001f600",
] * 4
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if 'content' in m else '(nothing)' }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ unk_token }}{{ pad_token }}{{ image_token }}"
)


def _byte_level(pattern: str | None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([split, whole])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    return backend


def _byte_fallback() -> tokenizers.Tokenizer:
    learned = tokenizers.Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*first, *sorted(model["vocab"], key=model["vocab"].get)]
    pieces = [piece for piece in pieces if piece not in "日本語"]  # spelled in bytes
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    merges = [merge for merge in merges if {*merge, "".join(merge)} <= set(vocab)]
    backend = byte_fallback(vocab, merges)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def _unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    backend.decoder = decoders.Metaspace()
    return backend


@cache
def _file(shape: str) -> str:
    made = {
        "byte level": lambda: _byte_level(None),
        "qwen": lambda: _byte_level(QWEN2_WORDS),
        "byte fallback": _byte_fallback,
        "unigram": _unigram,
    }
    text: str = made[shape]().to_str()
    return text


def write(directory: Path, shape: str, config: dict[str, Any], **files: Any) -> Path:
    """A directory with a tokenizer; files: others by name without .json, their contents as objects."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(_file(shape), encoding="utf-8")
    for name, content in {"tokenizer_config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def token(content: str, **flags: bool) -> dict[str, Any]:
    """A token as added_tokens_decoder has it."""
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | flags


def add_post_processor(directory: Path, bos: str, eos: str) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(one) for one in (bos, eos)])
    ids = [(one, backend.token_to_id(one)) for one in (bos, eos)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", pair=f"{bos} $A {eos} $B:1", special_tokens=ids
    )
    backend.save(str(directory / "tokenizer.json"))
