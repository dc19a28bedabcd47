"""Pooled hidden states are those of the whole model's final norm, however the prompt was computed."""

from __future__ import annotations

import random
from pathlib import Path

import engines
import numpy as np
import pytest
import torch
from durable_case import make_engine, make_model
from embeddings_case import CHUNKED, assert_equals_transformers

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.llm import LLM
from megatron_infer.errors import RequestError
from megatron_infer.outputs.embeddings import params_for, vector_of
from megatron_infer.testing.tiny import tiny_hybrid

transformers = pytest.importorskip("transformers")


def test_tiny_llama_gives_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    draw = random.Random(4)
    shared = [draw.randrange(211) for _ in range(40)]
    prompts = [[draw.randrange(211) for _ in range(length)] for length in (1, 2, 15, 16, 17, 48, 49, 130)]
    prompts += [[*shared, 7], [*shared, 8, 9], shared]
    llm = LLM(str(tmp_path), config=CHUNKED, dtype="float32", threads=1)
    assert_equals_transformers(llm, reference.model, prompts)
    stats = llm.engine.generate([[*shared, 7]], params_for("last"))[0]
    assert stats.num_cached_tokens == 32 and stats.pooled is not None
    assert llm.engine.generate([[*shared, 7]], params_for("mean"))[0].num_cached_tokens == 0


def test_hybrid_prompts_pool_the_same_in_pieces_beside_others_and_suspended() -> None:
    model = tiny_hybrid("M*-M", vocab_size=128, max_sequence_length=256, init_method_std=0.2)
    draw = random.Random(5)
    prompts = [[draw.randrange(128) for _ in range(length)] for length in (100, 37, 90)]
    base = {"max_sequence_length": 200, "max_requests": 8}
    whole = engines.make_engine(model, **base, max_tokens=256)
    params = [params_for("mean"), params_for("last"), params_for("all")]
    wanted = [whole.generate([prompt], one)[0].pooled for prompt, one in zip(prompts, params, strict=True)]
    for mode in ("persist", "recompute"):
        engine = engines.make_engine(model, **base, max_tokens=32, enable_chunked_prefill=True)
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
        ids = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        found = {}
        for step in range(60):
            if step == 2:
                engine.suspend(mode)
                engine.resume()
            found |= {output.request_id: output.pooled for output in engine.step() if output.finished}
        for place, one in enumerate(ids):
            np.testing.assert_allclose(found[one], wanted[place], atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "all"])
def test_half_a_prompt_that_was_saved_is_pooled_to_its_end(tmp_path, pooling) -> None:
    model = make_model()
    prompt = [(7 * i) % 128 for i in range(150)]
    (wanted,) = make_engine(model).generate([prompt], params_for(pooling))
    engine = make_engine(model)
    engine.add_request(prompt, params_for(pooling), request_id="half")
    engine.step()
    engine.save_requests(tmp_path / "saved")
    other = make_engine(model)
    other.load_requests(tmp_path / "saved")
    found = [output for _ in range(5) for output in other.step() if output.finished]
    np.testing.assert_allclose(found[0].pooled, wanted.pooled, atol=1e-5)


def test_vector_is_cut_then_normalised_and_what_makes_no_sense_is_refused() -> None:
    engine = make_engine(make_model())
    (output,) = engine.generate([[1, 2, 3]], params_for("last"))
    raw = np.asarray(output.pooled, dtype=np.float32)
    unit = vector_of(output, dimensions=8)
    np.testing.assert_allclose(unit, raw[:8] / np.linalg.norm(raw[:8]), rtol=1e-5)
    np.testing.assert_array_equal(vector_of(output, normalize=False), raw)
    with pytest.raises(RequestError, match=f"dimensions is 10000, the model's vectors have {len(raw)}"):
        vector_of(output, dimensions=10_000)
    for wrong, message in (
        ({"pooling": "cls"}, "pooling is last, mean, all, got 'cls'"),
        ({"pooling": "last"}, "needs max_tokens=1 and n=1, got 16 and 1"),
        ({"pooling": "mean", "max_tokens": 1, "n": 2}, "got 1 and 2"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(**wrong)
