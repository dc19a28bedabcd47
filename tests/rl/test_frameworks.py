"""Adapters for other training loops: Megatron-RL's interface and vLLM's colocated LLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engines import finish, tokens_of
from session_case import BASE, train_step
from tiny_llama import VOCAB, save_tiny_llama

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, InferenceError, WeightUpdateError, WrongState
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl.frameworks.megatron_rl import (
    GenericGenerationArgs,
    LLMChatMessage,
    LocalInterface,
    per_token,
)
from megatron_infer.rl.frameworks.vllm_like import ColocateLLM
from megatron_infer.scheduler.request import VersionSpan
from megatron_infer.testing.tiny import tiny_gpt

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


# ------------------------------------------------------------------------------------------------ Megatron-RL
def launched(model, folder: Path, **how):
    tokenizer = open_source(str(folder)).tokenizer()
    config = InferenceConfig(**BASE | {"logprobs_mode": "processed"})
    return LocalInterface.launch(model, config=config, tokenizer=tokenizer, eos_ids=[257], **how)


def test_interface_generates_many_at_a_time_trains_and_continues(folder):
    model = tiny_gpt(vocab_size=VOCAB, init_method_std=0.2).train()
    args = GenericGenerationArgs(temperature=0.7).add(GenericGenerationArgs(max_tokens=8))
    assert args == GenericGenerationArgs(temperature=0.7, max_tokens=8)

    async def main():
        interface = await launched(model, folder)
        request = interface.prepare_request("Hi", args)
        assert request.prompt == [LLMChatMessage("user", "Hi")]
        first = await asyncio.gather(*(interface.agenerate(request) for _ in range(4)))
        for epoch in (7, 8):
            waiting = asyncio.ensure_future(interface.base_generate(request))
            await asyncio.sleep(0)
            await interface.suspend()
            assert model.training and torch.is_grad_enabled()
            train_step(model, epoch)
            interface.set_generation_epoch(epoch)
            await interface.resume()
            last = await waiting
        with pytest.raises(InferenceError, match="await agenerate"):
            interface.generate(request)
        await interface.kill()
        with pytest.raises(InferenceError, match="shut down"):
            await interface.base_generate(request)
        return first, last

    first, last = asyncio.run(main())
    assert model.training
    for response in [*first, last]:
        count = len(response.token_ids) - response.prompt_length
        assert 1 <= count <= 8 and len(response.logprobs) == count and all(p <= 0 for p in response.logprobs)
        assert len(response.policy_iteration) == len(response.kv_cache_iteration) == count
        assert response.raw_text.startswith("<|im_start|>user\nHi<|im_end|>") and response.response.role == "assistant"
    assert all(set(response.policy_iteration) == {0} and response.completed_at_step == 0 for response in first)
    assert last.completed_at_step == 8


def test_a_cancelled_request_leaves_nothing_behind(folder):
    async def main():
        interface = await launched(tiny_gpt(vocab_size=VOCAB, init_method_std=0.2), folder)
        request = interface.prepare_request("Hi", GenericGenerationArgs(max_tokens=90))
        waiting = [asyncio.ensure_future(interface.base_generate(request)) for _ in range(3)]
        while len(interface._thread._sinks) < 3:
            await asyncio.sleep(0)
        for task in waiting[:2]:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results[:2]] == [asyncio.CancelledError] * 2
        assert results[2].prompt_length > 0
        await interface.suspend()
        assert not interface.session.engine.has_unfinished() and not interface._thread._sinks
        await interface.kill()

    asyncio.run(main())


def test_tokens_have_the_versions_of_their_spans():
    spans = [VersionSpan(0, 3, 3, 3), VersionSpan(2, 4, 3, 4)]
    assert per_token(spans, 5) == ([3, 3, 4, 4, 4], [3, 3, 3, 3, 3])
    assert per_token([], 0) == ([], [])
