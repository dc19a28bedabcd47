"""Hybrid models against what we did not write: transformers' models, and megatron-core's own mixer and forward."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from functools import partial

import engines
from hf_models import random_model
from model_kinds import prefix_caching
from plain_forward import full_logits, worst_error
from vocabularies import byte_level

from megatron_infer.cli.main import main
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.tiny import tiny_hybrid

VOCAB = 131
FAMILIES = ("mamba2", "nemotron_h", "nemotron_h_experts", "bamba", "granite_factors_tied", "granite_experts")
QUICK = ("mamba2", "nemotron_h_experts")
SIZES: dict[str, Any] = engines.BASE | {"buffer_size_gb": 0.05, "max_sequence_length": 192, "max_requests": 8}
CHUNKED = {"enable_chunked_prefill": True, "max_tokens": 40}
CACHED = prefix_caching("hybrid")
RUNS = {"batch": {}, "chunks": CHUNKED, "chunks, cache, overlap": CHUNKED | CACHED | {"overlap": True}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


def prompts_of(vocab: int) -> list[list[int]]:
    """Some alone, some on stems of two lengths, shorter and longer than blocks, chunks and scan chunks."""
    rng = random.Random(4)
    stem = [rng.randrange(3, vocab) for _ in range(64)]
    shared = (0, 64, 0, 40, 64, 0, 64, 40, 0, 0)
    return [stem[:n] + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 50))] for n in shared]


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=[pytest.mark.long] * (one not in QUICK)) for one in FAMILIES]
)
def directory(request, tmp_path_factory) -> tuple[Path, Any]:
    """A saved model with its tokenizer, and the model itself."""
    path = tmp_path_factory.mktemp(request.param)
    reference = random_model(request.param)
    reference.save_pretrained(path)
    return path, reference


def forward_of(reference: Any) -> Any:
    """Logits of one sequence without any cache, remembered."""

    @functools.cache
    def forward(ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return reference(torch.tensor([ids]), use_cache=False).logits[0]

    return lambda ids: forward(tuple(ids))


def test_tokens_and_logprobs_are_those_of_transformers(directory):
    path, reference = directory
    logits_of = forward_of(reference)
    for settings in RUNS.values():
        llm = LLM(str(path), config=InferenceConfig(**(SIZES | settings)), dtype="float32", threads=1)
        outputs = llm.generate(prompts_of(VOCAB), GREEDY)
        assert worst_error(outputs, logits_of) < 1e-4
        counters = llm.engine.stats().counters
        assert (counters["states_loaded"] >= 3) == ("enable_prefix_caching" in settings)
        if settings:
            assert counters["steps"] > 2 * sum(map(len, prompts_of(VOCAB))) // 40, "no prompt was cut"


def test_generate_of_transformers_gives_the_same_tokens(directory):
    """Its own decode path, with its own cache of states."""
    path, reference = directory
    prompt = prompts_of(VOCAB)[1]
    llm = LLM(str(path), config=InferenceConfig(**SIZES), dtype="float32", threads=1)
    reference.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    theirs = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=1
    )
    assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", ["mamba2", pytest.param("bamba", marks=pytest.mark.long)])
def test_the_command_line_answers_text_from_a_directory_and_from_its_checkpoint(case, tmp_path, capsys):
    tokenizer = byte_level()
    reference = random_model(case, vocab_size=288, eos_token_id=tokenizer.eos_ids[0])
    reference.save_pretrained(tmp_path / "hf")
    tokenizer.save(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    save_checkpoint(build_model(source), tmp_path / "ckpt", description=source.config(), tokenizer=tokenizer)
    texts = ["hello world, said the snail", "é 日本 two words", "hello"]
    prompts = [tokenizer.encode(text) for text in texts]
    with torch.inference_mode():
        expected = []
        for ids in prompts:
            for _ in range(12):
                ids = [*ids, int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
            expected.append(ids[-12:])
    flags = ["--max-tokens", "12", "--raw", "--dtype", "float32", "--threads", "1", "--buffer-size-gb", "0.05"]
    flags += ["--block-size-tokens", "16", "--enable-prefix-caching", "--prefix-caching-mamba-gb", "0.004"]
    for model in ("hf", "ckpt"):
        out = tmp_path / f"{model}.jsonl"
        asked = [flag for text in texts for flag in ("--prompt", text)]
        assert main(["generate", str(tmp_path / model), *asked, *flags, "--output", str(out)]) == 0
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        assert [answer["token_ids"] for answer in answers] == expected
        assert main(["generate", str(tmp_path / model), "--prompt", texts[0], *flags]) == 0
        assert capsys.readouterr().out == tokenizer.decode(expected[0]) + "\n"


@pytest.mark.parametrize("pattern", ["MM", "M*M*", "*M-", "MEM*E", "M-M*-"])
@pytest.mark.parametrize("settings", [CHUNKED, CACHED], ids=["chunks", "cache"])
def test_decoding_step_by_step_equals_megatron_cores_full_forward(pattern, settings):
    model = tiny_hybrid(pattern, max_sequence_length=192)
    outputs = DynamicInferenceEngine(model, InferenceConfig(**(SIZES | settings))).generate(prompts_of(128), GREEDY)

    assert worst_error(outputs, partial(full_logits, model)) < 1e-5
