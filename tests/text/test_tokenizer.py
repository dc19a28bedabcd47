"""Tokenizers load as they were saved, and damaged files are refused."""

from __future__ import annotations

import json

import pytest
from vocabularies import byte_level

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.text.tokenizer import Tokenizer

TEXTS = ["", "hello héllo 日本 😀", "<|user|>hello<|end|>", "two words 日本!", "  spaces \t\n"]


def test_save_and_load_keep_ids_special_tokens_and_template(tmp_path):
    original = byte_level()
    special = original.special_tokens
    original = Tokenizer(original.backend, special_tokens=special, template="{{ messages[0].content }}", name="x")
    original.save(tmp_path)
    loaded = Tokenizer.from_directory(tmp_path)
    assert loaded.eos_ids == original.eos_ids
    assert loaded.special_ids == original.special_ids
    assert loaded.vocab_size == original.vocab_size
    assert loaded.apply_chat_template([{"role": "user", "content": "c"}]) == "c"
    for text in TEXTS:
        ids = loaded.encode(text)
        assert ids == original.encode(text)
        assert loaded.decode(ids, skip_special=False) == text


def test_transformers_reads_what_was_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    original = byte_level()
    original.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == original.encode(text)
    assert theirs.eos_token_id == original.eos_ids[0]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    original = byte_level()
    original.backend.enable_truncation(4)
    original.backend.enable_padding(length=8)
    original.backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("hello " * 10)) > 8


def test_an_output_ends_with_the_end_tokens_of_every_file(tmp_path):
    original = byte_level()
    original.save(tmp_path)
    own = original.eos_ids[0]
    assert Tokenizer.from_directory(tmp_path, eos_ids=[3, 4, 3]).eos_ids == (own, 3, 4)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5, own]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == (own, 6, 5)


def test_missing_or_damaged_files_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)
    byte_level().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not UTF-8"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", [None, 3, b"bytes", "lone \ud800 surrogate"])
def test_non_text_is_refused(text):
    with pytest.raises(InvalidPrompt):
        byte_level().encode(text)
