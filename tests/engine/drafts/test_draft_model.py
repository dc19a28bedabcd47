"""A model that drafts: rejection keeps the distribution, other kinds of models, and what cannot draft is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from chi_square import homogeneity
from drafters import VOCAB, check_all_kept, noisy
from engines import make_engine
from model_kinds import make_model
from test_same_answer import FEATURES, run, workload
from test_speculative import shown

from megatron_infer.config.checks import check_draft, check_draft_weights
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import CapacityError, ConfigError, StaleCache
from megatron_infer.models.adopt import adopt
from megatron_infer.runner.speculative.model_drafter import ModelDrafter

pytestmark = pytest.mark.filterwarnings('ignore:preemption_mode="swap" has no effect')
"""On a model without attention layers."""
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model("attention", vocab_size=VOCAB)


twin = model
"""Another model of the same weights."""


@pytest.fixture(scope="module")
def guesser() -> torch.nn.Module:
    return noisy()


@pytest.mark.parametrize("kind", ["attention", "hybrid", "mamba"])
def test_wrong_drafts_change_no_answer_whatever_else_happens(kind, guesser):
    model = make_model(kind, vocab_size=VOCAB)
    expected = run(make_engine(model), "sampled")
    for settings in ({"prefix": "lru", "overlap": True, **FEATURES["chunked"]}, FEATURES["tiny_pool_swap"]):
        engine = make_engine(model, draft=guesser, **settings)
        assert run(engine, "sampled") == expected
        found = engine.spec_decode_metrics()
        assert found.num_accepted < found.num_drafted and found.seconds_drafting > 0


RESIDUAL = {"verification": "residual", "adaptive": False, "num_speculative_tokens": 3}


def test_rejection_keeps_greedy_answers_and_returns_the_targets_log_probabilities(model, guesser):
    prompts, _ = workload("sampled")
    plain = make_engine(model)
    engine = make_engine(model, speculative=RESIDUAL | {"method": "draft", "draft_model": guesser})
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    assert shown(engine.generate(prompts, greedy)) == shown(plain.generate(prompts, greedy))
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=16, ignore_eos=True, logprobs=0)
    outputs = engine.generate(prompts, params)
    whole = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    scored = plain.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for output, other in zip(outputs, scored, strict=True):
        drawn = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        wanted = other.prompt_logprobs[len(output.prompt_token_ids) :]
        for (token, own), one in zip(drawn, wanted, strict=True):
            assert abs(own[token].logprob - one[token].logprob) < 1e-5
    with pytest.raises(ConfigError, match="'residual' with batch_invariant=True"):
        InferenceConfig(batch_invariant=True, speculative={"verification": "residual"})


def test_a_draft_step_that_fails_leaves_nothing_for_the_next_one(model, twin, monkeypatch):
    """Each draft is compared with the distribution that it was drawn from."""
    prompts, _ = workload("sampled")
    engine = make_engine(model, speculative=RESIDUAL | {"method": "draft", "draft_model": twin})
    forward, by_chunk, first_drafts = ModelDrafter._forward, ModelDrafter._by_chunk, itertools.count()
    seen: list[torch.Tensor] = []

    def fail_once(self, plan, *table_writes):
        if not table_writes and next(first_drafts) == 4:  # drafts are drawn, and the forward behind them fails
            raise RuntimeError("this step fails")
        return forward(self, plan, *table_writes)

    def note(self, plan, drawn):
        tokens = by_chunk(self, plan, drawn)
        seen.extend([] if self.proposals is None else [self.proposals.probs_NV])
        return tokens

    monkeypatch.setattr(ModelDrafter, "_by_chunk", note)
    engine.generate(prompts, SAMPLED)
    wanted = list(seen)
    monkeypatch.setattr(ModelDrafter, "_forward", fail_once)
    outputs = engine.generate(prompts, SAMPLED, on_error="return")
    assert any(output.error for output in outputs)
    seen.clear()
    engine.generate(prompts, SAMPLED)
    assert len(seen) == len(wanted) > 3
    torch.testing.assert_close(seen, wanted, rtol=0.0, atol=1e-4)


def test_copies_of_a_draft_models_weights_are_checked_and_renewed_with_the_models(model):
    draft = noisy()
    engine = make_engine(model, draft=draft, speculative={"method": "draft", "draft_model": draft, "adaptive": False})
    draft.load_state_dict(model.state_dict())
    if engine.kernels.packed.layout:
        with pytest.raises(StaleCache, match="packed weights of the draft model"):
            engine.verify_weights()
    engine.refresh_weights()
    engine.verify_weights()
    engine.generate([[5, 6, 7, 8]], SAMPLED)
    check_all_kept(engine)


@pytest.mark.long
def test_rejection_draws_sequences_of_the_same_distribution(model, guesser):
    """The first three tokens of five, of three each: 27 sequences, drafted together."""
    prompt, count = [5, 9, 17, 30], 2000
    counts = []
    for seed, speculative in ((0, None), (count, RESIDUAL | {"method": "draft", "draft_model": guesser})):
        engine = make_engine(model, speculative=speculative)
        common = {"temperature": 1.3, "top_k": 3, "max_tokens": 5, "ignore_eos": True}
        params = [SamplingParams(seed=seed + index, **common) for index in range(count)]
        outputs = engine.generate([prompt] * count, params)
        drawn = Counter(tuple(output.outputs[0].token_ids[:3]) for output in outputs)
        counts.append(drawn)
    assert engine.spec_decode_metrics().num_drafted > 2 * count
    names = sorted(counts[0].keys() | counts[1].keys())
    assert len(names) == 27
    first, second = (np.array([found[name] for name in names]) for found in counts)
    assert homogeneity(first, second) > 0.01


def test_models_that_cannot_draft_are_refused_by_name(model):
    hybrid, other = make_model("hybrid", vocab_size=VOCAB), make_model("attention", vocab_size=96)
    learned = {"max_sequence_length": 128, "position_embedding_type": "learned_absolute"}
    short = make_model("attention", vocab_size=VOCAB, **learned)
    for draft, message in (
        (hybrid, "the draft model has recurrent states"),
        (other, "the draft model has 96 tokens, the model 128"),
        (short, "the draft model has 128 positions, max_sequence_length is 160; set max_sequence_length=128"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_engine(model, draft=draft)
    shape = adopt(model).shape
    with pytest.raises(ConfigError, match="draft_model is one of several pipeline stages"):
        check_draft(InferenceConfig(), shape, dataclasses.replace(shape, is_stage=True))
    with pytest.raises(CapacityError, match=r"big has [\d,]+ parameters of float32, 0.000 GiB; 0.000 GiB are free"):
        check_draft_weights("big", shape, 1000)


def test_a_live_draft_model_is_named_in_plain_values(model):
    config = InferenceConfig(speculative={"method": "draft", "draft_model": model})
    assert json.loads(json.dumps(config.to_dict()))["speculative"]["draft_model"] == "a live GPTModel"
    named = InferenceConfig(speculative={"method": "draft", "draft_model": "small"})
    assert InferenceConfig.from_dict(named.to_dict()) == named


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Llama checkpoints with a tokenizer of one word a token."""
    transformers = pytest.importorskip("transformers")
    found = {}
    for name, layers, words in (("target", 2, "w"), ("small", 1, "w"), ("foreign", 1, "v")):
        torch.manual_seed(4)
        folder = found[name] = tmp_path_factory.mktemp(name)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        known = {f"{words if token == 7 else 'w'}{token}": token for token in range(VOCAB)}
        words_of = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0"))
        words_of.save(str(folder / "tokenizer.json"))
    return found


def test_a_draft_model_is_loaded_by_name(folders, capsys):
    from megatron_infer.cli.main import main
    from megatron_infer.engine.llm import LLM

    settings = {"buffer_size_gb": 0.01, "max_sequence_length": 128, "max_requests": 4, "max_tokens": 64}

    def llm(**speculative: Any) -> LLM:
        drafting = {"speculative": {"method": "draft", **speculative}} if speculative else {}
        return LLM(str(folders["target"]), config=settings | drafting, dtype="float32")

    params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True)
    wanted = llm().generate([[5, 6, 7, 8]], params)
    for name, is_twin in (("target", True), ("small", False)):
        own = llm(draft_model=str(folders[name]))
        assert shown(own.generate([[5, 6, 7, 8]], params)) == shown(wanted)
        assert (own.engine.spec_decode_metrics().acceptance_rate == 1) == is_twin
    with pytest.raises(ConfigError, match="in 2 tokens: 'v7' is 7 there and unknown here, 'w7' is unknown there and 7"):
        llm(draft_model=str(folders["foreign"]))
    drafting = ["--speculative", "draft", "--draft-model", str(folders["small"])]
    assert main(["plan", str(folders["target"]), *drafting, "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert sizes["draft_block_bytes"]["value"] * 3 == sizes["block_bytes"]["value"]
