"""A model that drafts: the same answers, all drafts of a model like the target kept, and what cannot draft refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tokenizers
import torch
from chi_square import homogeneity
from engines import finish, submit, suspending, tokens_of
from model_kinds import buffers, make_model
from test_same_answer import FEATURES, make_engine, run, workload
from test_speculative import WAYS, ask, shown

from megatron_infer.config.checks import check_draft, check_draft_weights
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import CapacityError, ConfigError
from megatron_infer.models.adopt import adopt
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.runner.speculative.model_drafter import ModelDrafter
from megatron_infer.testing.inspect import inspect

pytestmark = pytest.mark.filterwarnings('ignore:preemption_mode="swap" has no effect')
"""On a model without attention layers."""
VOCAB = 128
OTHERS = {name: settings for name, settings in FEATURES.items() if name != "drafts"}
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)


def noisy() -> torch.nn.Module:
    """The attention model with other weights, so that some of its drafts are kept and some are not."""
    model, generator = make_model("attention", vocab_size=VOCAB), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model("attention", vocab_size=VOCAB)


twin = model
"""Another model of the same weights."""


@pytest.fixture(scope="module")
def guesser() -> torch.nn.Module:
    return noisy()


@pytest.fixture(scope="module")
def expected(model) -> dict[str, list[list[int]]]:
    engine = make_engine(model, "attention")
    return {drawing: run(engine, drawing) for drawing in ("greedy", "sampled")}


def check_all_kept(engine: DynamicInferenceEngine) -> None:
    found = engine.spec_decode_metrics()
    assert found is not None and found.num_accepted == found.num_drafted > 0, found


@pytest.mark.parametrize("feature", OTHERS)
def test_a_draft_like_the_target_is_accepted_entirely_with_the_feature(model, twin, expected, feature):
    """So the draft model's keys and values are right wherever blocks are shared, cut, paused, evicted or swapped."""
    check_feature(partial(make_engine, model, "attention", draft=twin), expected, feature)


def check_feature(make: Callable[..., DynamicInferenceEngine], expected: dict[str, list[list[int]]], name: str) -> None:
    """Answers of `make(**settings)` are the expected ones with the feature of this name, and all drafts are kept."""
    settings = OTHERS[name]
    for drawing in ("greedy", "sampled"):
        engine = make(**settings)
        assert run(engine, drawing, settings.get("order")) == expected[drawing]
        check_all_kept(engine)
    counters = engine.stats().counters
    assert counters["swapped_in"] > 0 or name != "tiny_pool_swap"
    assert counters["prefix_hits"] > 0 or not name.startswith("prefix")


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_a_model_drafts_for_itself(exact):
    model = make_model("attention", vocab_size=VOCAB)
    plain = make_engine(model, "attention", batch_invariant=exact)
    engine = make_engine(model, "attention", draft=model, batch_invariant=exact)
    prompts, _ = workload("greedy")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=2, max_tokens=20, ignore_eos=True, logprobs=1)
        assert shown(engine.generate(prompts, params)) == shown(plain.generate(prompts, params))
    check_all_kept(engine)
    assert engine.spec_decode_metrics().mean_tokens_per_step > 4
    with torch.no_grad():  # the trainer steps: target and draft alike
        for parameter in model.parameters():
            parameter.mul_(1.25)
    assert shown(engine.generate(prompts, params)) == shown(plain.generate(prompts, params))
    check_all_kept(engine)


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without_a_draft_model(guesser, way):
    model = make_model("attention", vocab_size=VOCAB, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48)
    engine = make_engine(model, "attention", draft=guesser)
    assert shown(ask(engine, WAYS[way])) == shown(ask(make_engine(model, "attention"), WAYS[way]))
    assert engine.spec_decode_metrics().num_drafted > 0


@pytest.mark.parametrize("kind", ["attention", "hybrid", "mamba"])
def test_wrong_drafts_change_no_answer_whatever_else_happens(kind, guesser):
    model = make_model(kind, vocab_size=VOCAB)
    plain = make_engine(model, kind)
    for settings in ({"prefix": "lru", "overlap": True, **OTHERS["chunked"]}, {**OTHERS["tiny_pool_swap"]}):
        engine = make_engine(model, kind, draft=guesser, **settings)
        assert run(engine, "sampled") == run(plain, "sampled")
        found = engine.spec_decode_metrics()
        assert found.num_accepted < found.num_drafted and found.seconds_drafting > 0


@pytest.mark.parametrize("mode", ["persist", "recompute", "offload"])
def test_suspends_keep_what_the_draft_model_has_computed(model, twin, expected, mode):
    engine = make_engine(model, "attention", draft=twin, overlap=mode == "offload", prefix="lru")
    outputs = engines.run(engine, list(zip(*workload("sampled"), strict=True)), suspending(mode, 2, 5))
    assert tokens_of(outputs) == expected["sampled"]
    check_all_kept(engine)


@pytest.mark.parametrize("reader", ["twin", "other blocks", "without"])
def test_saved_requests_bring_the_draft_models_memory(model, twin, tmp_path, reader):
    settings = {"twin": {"draft": twin}, "other blocks": {"draft": twin, "block_size_tokens": 32}, "without": {}}
    second = make_engine(model, "attention", **settings[reader])
    check_saved(
        make_engine(model, "attention"), make_engine(model, "attention", draft=twin), second, tmp_path / "saved"
    )


def check_saved(
    plain: DynamicInferenceEngine, first: DynamicInferenceEngine, second: DynamicInferenceEngine, path: Path
) -> None:
    """Requests that `first` saves half way go on in `second`, which computes nothing again if it drafts."""
    prompts, _ = workload("sampled")
    wanted = plain.generate(prompts, SAMPLED)
    submit(first, [(prompt, SAMPLED) for prompt in prompts])
    for _ in range(3):
        assert not first.step()
    first.save_requests(path, kv=True)
    second.load_requests(path)
    done = finish(second)
    assert tokens_of(done[str(place)] for place in range(len(prompts))) == tokens_of(wanted)
    drafts = second.spec_decode_metrics() is not None
    assert (second.stats().counters["prefill_tokens"] == 0) == drafts
    if drafts:
        check_all_kept(second)


def test_adaptive_depth_stops_where_drafts_do_not_pay(model, guesser):
    draft = {"method": "draft", "draft_model": guesser, "num_speculative_tokens": 4}
    engine = partial(make_engine, model, "attention")
    check_adaptive(engine(speculative=draft), engine(speculative=draft | {"adaptive": False}))


def check_adaptive(adaptive: DynamicInferenceEngine, full: DynamicInferenceEngine) -> None:
    """Drafts that do not pay are fewer with an adaptive depth, for the same answers."""
    prompts, _ = workload("greedy")
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    assert shown(adaptive.generate(prompts, params)) == shown(full.generate(prompts, params))
    assert 0 < adaptive.spec_decode_metrics().num_drafted < 0.8 * full.spec_decode_metrics().num_drafted


RESIDUAL = {"verification": "residual", "adaptive": False, "num_speculative_tokens": 3}


def test_rejection_keeps_greedy_answers_and_returns_the_targets_log_probabilities(model, guesser):
    prompts, _ = workload("sampled")
    plain = make_engine(model, "attention")
    engine = make_engine(model, "attention", speculative=RESIDUAL | {"method": "draft", "draft_model": guesser})
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
    engine = make_engine(model, "attention", speculative=RESIDUAL | {"method": "draft", "draft_model": twin})
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


@pytest.mark.long
def test_rejection_draws_sequences_of_the_same_distribution(model, guesser):
    """The first three tokens of five, of three each: 27 sequences, drafted together."""
    prompt, count = [5, 9, 17, 30], 2000
    counts = []
    for seed, speculative in ((0, None), (count, RESIDUAL | {"method": "draft", "draft_model": guesser})):
        engine = make_engine(model, "attention", speculative=speculative)
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


def test_ngrams_come_first_where_both_are_asked_for(model, twin):
    """A draft model computes tokens that n-grams propose, too: what it draws behind them is as good."""
    prompts = [[7, 8, 9, 10] * 5, [20, 21, 22] * 6, [90]]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    both = {"method": ("ngram", "draft"), "draft_model": twin, "adaptive": False}
    engine = make_engine(model, "attention", speculative=both)
    sources: Counter[bool] = Counter()
    proposer = inspect(engine).drafts.proposer

    class Counting:
        def propose(self, request, most):
            found = proposer.propose(request, most)
            sources[found.source == "draft"] += 1
            return found

    inspect(engine).drafts.proposer = Counting()
    assert shown(engine.generate(prompts, params)) == shown(make_engine(model, "attention").generate(prompts, params))
    assert sources[True] > 3 < sources[False]
    assert 0.2 < engine.spec_decode_metrics().acceptance_rate <= 1


def test_memory_counts_both_models(model, twin):
    engine = make_engine(model, "attention", draft=twin)
    alone = make_engine(model, "attention")
    assert engine.sizes.draft_block_bytes == alone.sizes.block_bytes == engine.sizes.block_bytes // 2
    assert engine.sizes.num_blocks == alone.sizes.num_blocks // 2
    rows = {row.name: row.how for row in engine.sizes.table()}
    assert "attention layers" in rows["draft_block_bytes"] and rows["block_bytes"].endswith("+ draft_block_bytes")
    (tensor,) = OverlapTextGenerationPipeline.of_engine(engine).draft_kv_blocks
    assert tensor.nbytes == engine.sizes.draft_block_bytes * engine.sizes.num_blocks
    room = buffers(model, blocks=14, block_size=16, max_requests=16, draft=twin)
    assert make_engine(model, "attention", draft=twin, **room).sizes.num_usable_blocks == 14


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
            make_engine(model, "attention", draft=draft)
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


def check_random_events(make: Callable[..., DynamicInferenceEngine], expected: list[list[int]], seed: int) -> None:
    """Sampled answers of `make(**settings)` are the expected ones, and all drafts are kept: with too few blocks, prefix
    hits, suspends, pauses and an aborted request, with and without overlap and chunks."""
    rng = random.Random(seed)
    settings = {
        "overlap": bool(seed % 2),
        "prefix": rng.choice(["lru", "ref_zero"]),
        **rng.choice([{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_buffer_size_gb": 0.01}]),
        **(OTHERS["chunked"] if seed // 2 else {}),
    }
    engine = make(pool_blocks=14, paused_blocks=5, **settings)
    prompts, params = workload("sampled")
    waiting, done, lost = list(range(len(prompts))), {}, False
    rng.shuffle(waiting)
    while waiting or engine.has_unfinished():
        for _ in range(min(len(waiting), rng.randrange(4))):
            index = waiting.pop()
            engine.add_request(prompts[index], params[index], request_id=str(index), stream="final")
        match rng.randrange(12):
            case 0:
                engine.suspend(rng.choice(["persist", "offload", "recompute"]))
                engine.resume()
            case 1:
                engine.pause(rng.choice(["keep", "retract"]))
                engine.unpause()
            case 2 if not lost:
                engine.add_request(prompts[0], params[0], request_id="lost", stream="final")
                lost = True
            case 3 if "lost" in engine.output_processor:
                engine.abort("lost")
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert tokens_of(done[str(index)] for index in range(len(prompts))) == expected
    found = engine.spec_decode_metrics()
    assert found.num_drafted - found.num_accepted in range(5), found  # those of the aborted request
    assert found.num_accepted > 100 and engine.stats().num_free_blocks == 14


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_draft_like_the_target_is_accepted_entirely_through_random_events(model, twin, expected, seed):
    check_random_events(partial(make_engine, model, "attention", draft=twin), expected["sampled"], seed)
