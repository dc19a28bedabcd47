"""An output ends with every token that some file of the model names as an end token, through every door."""

from __future__ import annotations

import json

import pytest
from session_case import BASE
from tiny_llama import save_tiny_llama

from megatron_infer import LLM, InferenceConfig, RolloutSession, SamplingParams, build_model, open_source
from megatron_infer.server.tokenizer_files import load_tokenizer, save_tokenizer

pytest.importorskip("transformers")
CONFIG = InferenceConfig(**BASE)
PROMPT = [72, 105, 33, 9]


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | changes)


def by_llm(folder, params):
    return LLM(str(folder), config=CONFIG, dtype="float32").generate([PROMPT], params)[0].outputs[0].token_ids


def by_session(folder, params):
    source = open_source(folder)
    session = RolloutSession(build_model(source), CONFIG, source.tokenizer(), eos_ids=source.config().eos_ids)
    with session.generating() as roll:
        return roll.generate([PROMPT], params)[0].samples[0].token_ids


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    """What is drawn where nothing ends it."""
    return by_llm(save_tiny_llama(tmp_path_factory.mktemp("free")), greedy(ignore_eos=True))


def name_end(folder, file: str, token: int) -> None:
    path = folder / file
    content = json.loads(path.read_text())
    value = open_source(folder).tokenizer().token_str(token) if file == "tokenizer_config.json" else token
    key = "eos_token" if file == "tokenizer_config.json" else "eos_token_id"
    path.write_text(json.dumps(content | {key: value}))


@pytest.mark.parametrize("drawn_by", [by_llm, by_session])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_an_end_token_of_one_file_alone_ends_the_output(file, drawn_by, free, tmp_path):
    folder = save_tiny_llama(tmp_path)
    name_end(folder, file, free[3])
    assert drawn_by(folder, greedy()) == free[: free.index(free[3]) + 1]


def test_the_server_knows_the_same_end_tokens(free, tmp_path):
    folder = save_tiny_llama(tmp_path / "model")
    name_end(folder, "generation_config.json", free[3])
    (tmp_path / "kept").mkdir()
    kept = save_tokenizer(str(folder), str(tmp_path / "kept"))
    loaded = load_tokenizer(str(tmp_path / "kept"), **kept)
    assert loaded.eos_ids == open_source(folder).tokenizer().eos_ids == (257, free[3])
    assert loaded.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


@pytest.mark.parametrize("drawn_by", [by_llm, by_session])
def test_a_stop_text_ends_outputs_of_ids(drawn_by, free, tmp_path):
    folder = save_tiny_llama(tmp_path)
    text = open_source(folder).tokenizer().token_str(free[2])
    params = greedy(stop=text, detokenize=False, ignore_eos=True)
    assert drawn_by(folder, params) == free[: free.index(free[2]) + 1]
