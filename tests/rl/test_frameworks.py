"""Adapters for other training loops: vLLM's colocated LLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import finish, tokens_of
from session_case import BASE
from tiny_llama import save_tiny_llama

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, WeightUpdateError, WrongState
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl.frameworks.vllm_like import ColocateLLM

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
PROMPTS = ["What is the capital of France?", "1, 1, 2, 3, 5,"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


def answers(llm) -> list[list[int]]:
    return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def load(folder: Path) -> ColocateLLM:
    return ColocateLLM(str(folder), config=BASE, dtype="float32", threads=1)


# ------------------------------------------------------------------------------------------------ vLLM's LLM
@pytest.mark.parametrize("form", ["pairs", "mapping", "path"])
def test_pushed_weights_give_the_tokens_of_a_model_loaded_with_them(folder, other, form):
    llm, expected = load(folder), answers(load(other))
    before = answers(llm)
    assert before != expected
    llm.sleep(level=2)
    assert llm.is_sleeping
    with pytest.raises(WrongState, match=r"call update_weights\(\) first"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.wake_up(tags=["weights"])
    pairs = list(open_source(str(other)).tensors())
    llm.update_weights({"pairs": iter(pairs), "mapping": dict(pairs), "path": other}[form])
    assert llm.is_sleeping
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping and answers(llm) == expected


def test_a_request_survives_sleep_of_every_level(folder):
    llm = load(folder)
    (whole,) = llm.engine.generate(PROMPTS[:1], PARAMS)
    for level in (0, 1):
        llm.engine.add_request(PROMPTS[0], PARAMS)
        for _ in range(3):
            llm.engine.step()
        llm.sleep(level=level)
        with pytest.raises(WrongState):
            llm.engine.step()
        llm.wake_up()
        (rest,) = finish(llm.engine).values()
        assert rest.outputs[0].token_ids == whole.outputs[0].token_ids


def test_invalid_levels_tags_and_weights_are_refused(folder):
    llm = load(folder)
    with pytest.raises(ConfigError, match="one of 0"):
        llm.sleep(level=3)
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        llm.sleep(tags=["weight"])
    with pytest.raises(ConfigError, match="frees nothing"):
        llm.sleep(level=0, tags=["weights"])
    assert not llm.is_sleeping and llm.reset_prefix_cache() is True
    with pytest.raises(WeightUpdateError):
        llm.load_weights(list(open_source(str(folder)).tensors())[:-1])
