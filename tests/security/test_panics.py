"""A panic in a Rust library is an error of the package: for a model's files, and for a caller's text."""

from __future__ import annotations

import asyncio
import json

import llguidance
import pytest
from trained import write
from vocabularies import byte_level

from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import InvalidPrompt, ModelError, RequestError
from megatron_infer.models.loading.sources import open_tokenizer
from megatron_infer.text.grammar import GrammarCache
from megatron_infer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.security

OF_FILE = {
    "charsmap of no bytes": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "prefix within the words": {"model.continuing_subword_prefix": "▁"},
    "decoder past the end": {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 2**40}},
}
OF_TEXT = {
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "token outside the vocabulary": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<zz>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


def hostile(directory, changes):
    path = write(directory, "byte level", {}) / "tokenizer.json"
    content = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split(".")
        (content[outer[0]] if outer else content)[last] = value
    path.write_text(json.dumps(content))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("mistake", OF_FILE)
def test_a_file_that_makes_the_library_panic_is_a_model_error(mistake, tmp_path):
    with pytest.raises(ModelError, match="panicked"):
        open_tokenizer(hostile(tmp_path, OF_FILE[mistake]))


@pytest.mark.parametrize("mistake", OF_TEXT)
@pytest.mark.parametrize("length", [1, 9000])
def test_a_text_that_makes_the_library_panic_is_an_invalid_prompt(mistake, length, tmp_path):
    tokenizer = Tokenizer.from_directory(hostile(tmp_path, OF_TEXT[mistake]))
    with pytest.raises(InvalidPrompt, match="fails for this text: the library panicked"):
        tokenizer.encode("a" * length)
    with pytest.raises(InvalidPrompt):  # in a thread, as the server calls it
        asyncio.run(asyncio.to_thread(tokenizer.encode, "a" * length))


def test_a_grammar_library_that_panics_is_a_request_error(monkeypatch):
    class PanicException(BaseException):
        pass

    class Panics:
        grammar_from_regex = staticmethod(llguidance.LLMatcher.grammar_from_regex)

        def __call__(self, *_, **__):
            raise PanicException("index out of bounds")

    for name in ("LLTokenizer", "LLMatcher"):
        with monkeypatch.context() as patched:
            patched.setattr(llguidance, name, Panics())
            with pytest.raises(RequestError, match="index out of bounds"):
                GrammarCache(byte_level(), 300).check(StructuredOutput(regex="a+"))
