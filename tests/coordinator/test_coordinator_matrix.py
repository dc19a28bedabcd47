"""Requests of every kind over engines with roles answer as those of one engine, to the bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random

import engines
import pytest
import torch
from coordinator_case import coordinator, replica, serve_roles, wait_for
from engine_ranks import take_part, weights_of
from gloo_ranks import new_groups, run_on_ranks
from lora_cases import random_adapter
from model_kinds import is_native, make_model
from structured_case import LANGUAGES, VOCAB, check, tokenizer

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.testing.tiny import EXPERTS

LETTERS = list(range(97, 123))
KINDS = [
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"n": 3, "logprobs": 1},
    {"structured": True, "logprobs": 0, "max_tokens": 60},
    {"stop": True, "allowed_token_ids": LETTERS, "logprobs": 0},
    {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "logit_bias": {99: 2.0},
        "logprobs": 0,
    },
    {"adapter": "one", "logprobs": 1},
    {"adapter": "other", "n": 2, "logprobs": 0, "temperature": 0.0},
    {"top_k": 5, "min_p": 0.02, "return_support": True, "logprobs": 1},
    {"max_tokens": 1, "logprobs": 1},
    {"stop_token_ids": list(range(0, VOCAB, 9)), "n": 2, "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": LETTERS[:3], "return_sampled_logprobs": True, "max_tokens": 40},
]
"""structured: a language in turn; stop: a text that begins in the first token and ends in a later one."""
MODELS = {
    "attention": functools.partial(make_model, "attention", vocab_size=VOCAB),
    "hybrid": functools.partial(make_model, "hybrid", vocab_size=VOCAB),
    "experts": functools.partial(make_model, "attention", vocab_size=VOCAB, **EXPERTS),
}
SETTINGS = {
    "plain": {},
    "drafts": {"speculative": {"num_speculative_tokens": 4, "adaptive": False}},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
}


def make_engine(model, adapters, **settings):
    lora = LoRAConfig(max_loras=2, max_rank=8)
    sizes = {"max_sequence_length": 224, "buffer_size_gb": 0.03, "max_tokens": 128, "enable_chunked_prefill": True}
    engine = engines.make_engine(model, tokenizer=tokenizer(), prefix="lru", lora=lora, **sizes | settings)
    for adapter in adapters:
        engine.load_adapter(adapter.name, adapter)
    return engine


def workload(engine, count, seed):
    """(prompts, params): each kind in turn; prompts of few stems, so that some are cached."""
    rng = random.Random(seed)
    stems = [[rng.randrange(32, 127) for _ in range(70)] for _ in range(3)]
    prompts, params = [], []
    for number in range(count):
        own = [rng.randrange(32, 127) for _ in range(rng.randint(1, 60))]
        prompts.append(rng.choice(stems)[: rng.choice((0, 17, 48, 70))] + own)
        how = {"max_tokens": rng.randint(2, 24), "seed": rng.randrange(1 << 30), "ignore_eos": True}
        how |= KINDS[number % len(KINDS)]
        if "structured" in how:
            how |= {
                "structured": StructuredOutput(**LANGUAGES[number // len(KINDS) % len(LANGUAGES)]),
                "ignore_eos": False,
            }
        if stops := how.pop("stop", False):
            how["max_tokens"] += 3
        params.append(SamplingParams(**how))
        if stops:
            text = engine.generate([prompts[-1]], [params[-1]])[0].outputs[0].text
            params[-1] = dataclasses.replace(params[-1], stop=[text[:3]])
    return prompts, params


WORDS = ("token_ids", "text", "support", "finish_reason", "stop_reason")
NUMBERS = ("logprobs", "raw_logprobs", "cumulative_logprob")
ROUNDED = 0.05
"""Of a log probability, where kernels sum in another order by the batch, and a key of eight bits is rounded the other
way: seldom a draw changes with it."""


def answer(output, names=WORDS + NUMBERS):
    return [[getattr(one, name) for name in names] for one in output.outputs]


def differ(found, wanted):
    """Whether words of an answer differ, or a log probability by what no rounding explains."""
    numbers = [
        [engines.logprobs_of(one) for one in output.outputs if one.logprobs is not None] for output in (found, wanted)
    ]
    return answer(found, WORDS) != answer(wanted, WORDS) or numbers[0] != [
        pytest.approx(each, abs=ROUNDED) for each in numbers[1]
    ]


def adapters_of(model):
    return [random_adapter(model, name, rank=4 + index, seed=index) for index, name in enumerate(("one", "other"))]


def answered_alone(engine, count):
    """(prompts, params, outputs) of one engine; those that have to end early do."""
    prompts, params = workload(engine, count, seed=count)
    want = engine.generate(prompts, params)
    num_stopped = 0
    for output, one in zip(want, params, strict=True):
        if one.structured is not None and output.outputs[0].finish_reason == "stop":
            check(one.structured, output.outputs[0].text)
        num_stopped += bool(one.stop) and output.outputs[0].stop_reason == one.stop[0]
    assert num_stopped >= count // len(KINDS), "a text that ends a sequence did not"
    return prompts, params, want


def compare_served(one, client, prompts, params, want, *, exactly):
    """Engines with roles answer as one engine alone did, and hold no block after. exactly: to the bit."""
    found = client.generate(prompts, params)
    pairs = list(zip(found, want, strict=True))
    assert not [output.error for output in found if output.error is not None]
    if exactly:
        for output, wanted in pairs:
            assert output.prompt_logprobs == wanted.prompt_logprobs and answer(output) == answer(wanted)
    else:
        assert sum(differ(*pair) for pair in pairs) <= len(prompts) // 50
    stats = client.stats()
    assert stats["moved"] > len(prompts) // 2 and not stats["resent"], stats
    wait_for(lambda: not any(state["running"] for state in client.stats()["replicas"]))
    wait_for(lambda: all(has_all_blocks(state["stats"]) for state in client.stats()["replicas"]))
    one.core.check()


def has_all_blocks(stats):
    """stats: empty before the first heartbeat."""
    return bool(stats) and stats["num_free_blocks"] == stats["num_blocks"]


def compare(model, count, layouts, settings):
    """layouts: numbers of engines that compute prompts, and that go on."""
    adapters = adapters_of(model)
    alone = make_engine(model, adapters, **settings)
    case = answered_alone(alone, count)
    for num_prefill, num_decode in layouts:
        roles = ["prefill_only"] * num_prefill + ["decode_only"] * num_decode
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(coordinator(role_min_prompt_tokens=4))
            client = stack.enter_context(InferenceClient(one.address))
            for number, role in enumerate(roles):
                engine = make_engine(model, adapters, **settings)
                stack.enter_context(replica(one.address, engine, name=f"r{number}", role=role))
            wait_for(lambda: len(client.stats()["replicas"]) == len(roles))  # noqa: B023
            compare_served(one, client, *case, exactly=is_native(alone))


def compare_ranks(rank, size, folder, kind, count, settings):
    """On each of four ranks: two engines of two tensor-parallel ranks."""
    new_groups(tensor_model_parallel_size=2)
    model = MODELS[kind](tensor_model_parallel_size=2)
    weights, adapters = torch.load(folder / "whole.pt", weights_only=False)
    take_part(model, weights)
    engine = make_engine(model, adapters, collective_timeout_s=60, **settings)
    case = answered_alone(engine, count) if rank < 2 else ()
    engine.reset_prefix_cache()

    def talk(one, client):
        compare_served(one, client, *case, exactly=is_native(engine))
        (decoding,) = (each["stats"] for each in client.stats()["replicas"] if each["role"] == "decode_only")
        assert decoding["counters"]["prefill_tokens"] == 0, "a prompt was computed again"

    serve_roles(rank, engine, folder, talk, role_min_prompt_tokens=1)


def compare_tensor_parallel(folder, kind, count, settings):
    whole = MODELS[kind]()
    torch.save((weights_of(whole), adapters_of(whole)), folder / "whole.pt")
    run_on_ranks(compare_ranks, 4, folder, kind, count, settings)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "settings"), [("attention", "plain"), ("hybrid", "drafts")])
def test_mixed_requests_over_two_engines_answer_as_those_of_one(kind, settings):
    compare(MODELS[kind](), 33, [(1, 1)], SETTINGS[settings])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_200_mixed_requests_over_engines_of_all_numbers_answer_as_those_of_one(kind, settings):
    compare(MODELS[kind](), 200, [(1, 1), (1, 2), (2, 1)], SETTINGS[settings])


@pytest.mark.long
def test_mixed_requests_over_two_engines_of_two_ranks_answer_as_those_of_one(tmp_path):
    compare_tensor_parallel(tmp_path, "attention", len(KINDS), SETTINGS["plain"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_200_mixed_requests_over_two_engines_of_two_ranks_answer_as_those_of_one(kind, settings, tmp_path):
    compare_tensor_parallel(tmp_path, kind, 200, SETTINGS[settings])
