"""A GGUF file's tokenizer begins, ends and renders texts as llama.cpp does."""

from __future__ import annotations

import pytest

from megatron_infer.errors import ModelError
from megatron_infer.text.detokenizer import byte_level_alphabet
from megatron_infer.text.end_ids import gguf_end_ids
from megatron_infer.text.gguf_vocab import tokenizer_from_metadata

NORMAL, CONTROL = 1, 3
SPECIAL = ["<|begin|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<pad>"]


def metadata(pre: str | None = "llama-bpe", special=SPECIAL, kinds=None, **changes):
    """Of a byte-level vocabulary; the first special token is BOS and the last one pads."""
    tokens = [*byte_level_alphabet(), *special, "he"]
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [NORMAL] * 256 + (kinds or [CONTROL] * len(special)) + [NORMAL],
        "merges": ["h e"],
        "bos_token_id": 256,
        "eos_token_id": 257,
        "padding_token_id": 255 + len(special),
    } | changes
    templates = {name: found.pop(name) for name in list(found) if name.startswith("chat_template")}
    own = {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}
    return own | {f"tokenizer.{name}": value for name, value in templates.items()}


def sentencepiece(**changes):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    found = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)} | changes
    found["token_type"] = [2, CONTROL, CONTROL, *[6] * 256, NORMAL, NORMAL]
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "begins"),
    [
        ("llama-bpe", True),
        ("llama3", True),
        ("llama-v3", True),
        ("falcon3", True),
        ("pixtral", True),
        ("lfm2", True),
        ("smaug-bpe", False),
        ("dbrx", False),
        ("qwen2", False),
        ("smollm", False),
        ("gpt-2", False),
        (None, False),
    ],
)
def test_bos_follows_the_pre_tokenizer_where_the_file_does_not_say(pre, begins):
    assert (tokenizer_from_metadata(metadata(pre)).encode("he")[0] == 256) is begins
    assert tokenizer_from_metadata(metadata(pre, add_bos_token=not begins)).encode("he")[0] != (256 if begins else None)
    whole = tokenizer_from_metadata(metadata(pre, add_bos_token=True, add_eos_token=True)).encode("he")
    assert (whole[0], whole[-1], len(whole)) == (256, 257, 3)


def test_sentencepiece_has_its_special_tokens_by_their_places():
    tokenizer = tokenizer_from_metadata(sentencepiece())
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_ids == (2,)
    assert tokenizer_from_metadata(sentencepiece(add_bos_token=False)).encode("a")[0] != 1


def test_a_file_without_a_pre_tokenizer_says_so(caplog):
    tokenizer_from_metadata(metadata(None), name="old.gguf")
    assert "old.gguf: no tokenizer.ggml.pre" in caplog.text
    caplog.clear()
    tokenizer_from_metadata(metadata("gpt-2"))
    tokenizer_from_metadata(sentencepiece())
    assert not caplog.text


def test_outputs_end_by_the_spelling_of_tokens_too():
    tokenizer = tokenizer_from_metadata(metadata(eot_token_id=256))
    assert tokenizer.eos_ids == (257, 256, 258, 259)
    assert gguf_end_ids(metadata(special=["<b>", "<eos>", "<|return|>", "<|call|>", "<|end|>"])) == (257, 258, 259)
    assert gguf_end_ids(metadata(special=["<b>", "<eos>", "</s>", "<|tool_response>", "x"])) == (257, 259)
    plain = tokenizer_from_metadata(metadata(kinds=[CONTROL, CONTROL, NORMAL, CONTROL, CONTROL]))
    assert 258 in plain.special_ids, "a token that ends outputs is a control token whatever its type says"
    assert plain.encode("<|endoftext|>", add_special=False) == [258]


def test_templates_and_special_tokens_of_the_file_are_there():
    user = [{"role": "user", "content": "hi"}]
    tokenizer = tokenizer_from_metadata(
        metadata(
            chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
            **{"chat_template.tool_use": "tools {{ tools | length }}"},
        )
    )
    assert tokenizer.apply_chat_template(user) == "<|begin|>hi<|im_end|><pad>"
    assert tokenizer.apply_chat_template(user, tools=[{}]) == "tools 1"
    assert tokenizer.knows_tools


def test_a_special_token_outside_the_vocabulary_is_named():
    with pytest.raises(ModelError, match=r"special tokens of the GGUF tokenizer \{'bos': 999\} are none of its 262"):
        tokenizer_from_metadata(metadata(bos_token_id=999))


@pytest.mark.parametrize(("pre", "words"), [("llama-bpe", ["he", "123", "45"]), ("qwen2", ["he", *"12345"])])
def test_numbers_are_split_as_the_pre_tokenizer_does(pre, words):
    backend = tokenizer_from_metadata(metadata(pre)).backend
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("he12345")] == words
