"""Token ids, rendered conversations and streamed text of a directory are those of transformers' AutoTokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trained import TEMPLATE, add_post_processor, token, write

from megatron_infer.errors import ModelError
from megatron_infer.text.tokenizer import Tokenizer
from megatron_infer.text.tokenizer_classes import CLASSES, REFUSED

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from tokenizer_census import compare  # noqa: E402

ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", **ENDS}
USER = [{"role": "user", "content": "hello"}]


def differences(directory, model_type="llama"):
    if not (directory / "config.json").is_file():
        (directory / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    found = compare(Tokenizer.from_directory(directory), theirs, num_random=40, num_cut=16)
    assert {"ids", "streams", "cuts"} <= set(found)
    assert all(cases > 0 for cases, _ in found.values())
    return {kind: wrong[:3] for kind, (_, wrong) in found.items() if wrong}


SHAPES = ("byte level", "qwen", "byte fallback", "unigram")
CONFIGS = {
    "no config": {},
    "named tokens": PLAIN,
    "tokens of the decoder table alone": PLAIN
    | {
        "added_tokens_decoder": {
            "9001": token("<|user|>", special=True),
            "9000": token("two words", special=False, normalized=True),
            "9002": token("<|image|>", special=True, lstrip=True, rstrip=True),
        }
    },
    "extra tokens by name": PLAIN | {"extra_special_tokens": {"image_token": "<image>", "boi_token": "<boi>"}},
    "extra tokens in a list": PLAIN | {"extra_special_tokens": ["<|user|>", "<|assistant|>"]},
    "additional tokens": PLAIN | {"additional_special_tokens": ["<|user|>"], "image_token": "<image>"},
    "flags": PLAIN | {"add_bos_token": True, "add_eos_token": True},
    "flags of a Llama class": PLAIN | {"add_bos_token": True, "add_eos_token": True, "tokenizer_class": "Unknown"},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_files_are_read_as_transformers_reads_them(shape, name, tmp_path):
    assert not differences(write(tmp_path, shape, CONFIGS[name]))


def test_tokens_of_the_decoder_table_are_whole(tmp_path):
    """torchtitan's test tokenizer has its special tokens there alone."""
    write(tmp_path, "byte level", CONFIGS["tokens of the decoder table alone"])
    assert len(Tokenizer.from_directory(tmp_path).encode("<|user|>two words<|image|>")) == 3


@pytest.mark.parametrize("shape", ["byte level", "byte fallback"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_flags_add_nothing_to_what_the_post_processor_adds(shape, flags, tmp_path):
    write(tmp_path, shape, PLAIN | {"tokenizer_class": "LlamaTokenizerFast", "legacy": True} | flags)
    add_post_processor(tmp_path, "<s>", "</s>")
    assert not differences(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("hello").count(tokenizer.bos_id) == 1


def test_older_files_are_read(tmp_path):
    """special_tokens_map.json and added_tokens.json, where tokenizer_config.json has no table of added tokens."""
    names = {"bos_token": token("<|begin|>"), "pad_token": "<pad>", "additional_special_tokens": ["<|tool|>"]}
    added = {"<|begin|>": 9000, "<pad>": 9001, "<|tool|>": 9002, "plain words": 9003}
    write(tmp_path, "byte level", PLAIN, special_tokens_map=names, added_tokens=added)
    assert not differences(tmp_path)
    rendered = Tokenizer.from_directory(tmp_path).apply_chat_template(USER)
    assert rendered == "<|begin|><|user|>hello</s><|assistant|><unk><pad>"


def test_template_files_go_before_the_config(tmp_path):
    write(tmp_path, "byte level", PLAIN)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").write_text("plain {{ unk_token }}{{ messages | tojson }}")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | tojson }}")
    assert not differences(tmp_path)


def test_a_key_without_a_value_is_no_key_for_templates(tmp_path):
    tokenizer = Tokenizer.from_directory(write(tmp_path, "byte level", PLAIN))
    assert "(nothing)" in tokenizer.apply_chat_template([{"role": "assistant", "content": None}])


def declarations():
    """(spelling, model_type, declared): `make test` has each class, and each model type that declares none."""
    for spelling in ("byte level", "byte fallback"):
        for model_type in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "mamba2"):
            for declared in (*sorted(CLASSES), "PreTrainedTokenizerFast", None):
                if spelling == "byte level" and declared in ("CodeLlamaTokenizer", "GemmaTokenizer"):
                    continue  # these classes need a vocabulary with <unk>
                is_long = spelling == "byte level" or (declared is not None and model_type != "llama")
                yield pytest.param(spelling, model_type, declared, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("spelling", "model_type", "declared"), [*declarations()])
def test_a_class_acts_as_in_transformers(spelling, model_type, declared, tmp_path):
    """Declared by files and by the model's type, right or wrong for the tokenizer."""
    for legacy in (True, False) if declared == "LlamaTokenizer" else (False,):
        config = {**ENDS, "legacy": legacy} | ({} if declared is None else {"tokenizer_class": f"{declared}Fast"})
        if declared == "PreTrainedTokenizerFast":
            config["tokenizer_class"] = declared
        if declared == "CodeLlamaTokenizer":
            config["fill_token"] = None  # transformers rearranges a text around it
        assert not differences(write(tmp_path / str(legacy), spelling, config), model_type)


def test_every_other_class_with_a_pipeline_of_its_own_is_refused_by_name(tmp_path):
    from transformers.models.auto import tokenization_auto as auto

    names = {name for name in auto.TOKENIZER_MAPPING_NAMES.values() if name and name != "TokenizersBackend"}
    classes = {name.removesuffix("Fast"): auto.tokenizer_class_from_name(name) for name in names}
    backend = transformers.PreTrainedTokenizerFast
    own = {name for name, one in classes.items() if one and issubclass(one, backend) and "__init__" in vars(one)}
    assert own - set(CLASSES) <= REFUSED
    write(tmp_path, "byte level", PLAIN | {"tokenizer_class": "CohereTokenizerFast"})
    with pytest.raises(ModelError, match=r"CohereTokenizer has a pipeline of its own.*supported: CodeLlamaTokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_a_class_that_splits_otherwise_than_its_file_says_so(tmp_path, caplog):
    Tokenizer.from_directory(write(tmp_path, "byte level", PLAIN | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert "text is split as Qwen2Tokenizer does" in caplog.text
    caplog.clear()
    Tokenizer.from_directory(write(tmp_path, "qwen", PLAIN | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert not caplog.text
    write(tmp_path, "unigram", PLAIN | {"tokenizer_class": "LlamaTokenizer"})
    with pytest.raises(ModelError, match=r"LlamaTokenizer is BPE, and the model of tokenizer\.json is Unigram"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 3},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"1": 5}},
        {"added_tokens_decoder": {"one": token("a")}},
        {"additional_special_tokens": 5},
        {"eos_token": "\ud800"},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": 5},
        {"extra_special_tokens": [{"text": "<x>"}]},
    ],
)
def test_entries_that_are_no_tokens_are_named(config, tmp_path):
    with pytest.raises(ModelError):
        Tokenizer.from_directory(write(tmp_path, "byte level", PLAIN | config))


@pytest.mark.parametrize("ids", ["2", True, 2.0, [1, [2]]])
def test_an_end_token_that_is_no_id_is_refused(ids, tmp_path):
    write(tmp_path, "byte level", PLAIN, generation_config={"eos_token_id": ids})
    with pytest.raises(ModelError, match="eos_token_id is a token id or a list"):
        Tokenizer.from_directory(tmp_path)
