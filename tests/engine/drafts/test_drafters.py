"""Models and MTP layers that draft: the same answers, and all drafts of one like the model are kept, whatever happens
to the memory that it has next to the model's.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import engines
import pytest
import torch
from drafters import KINDS, MOE, VOCAB, Drafter, check_all_kept, knowing, like, unlike
from engines import each_of, finish, submit, suspending, tokens_of
from model_kinds import make_model
from test_same_answer import FEATURES, run, workload
from test_speculative import WAYS, ask, shown

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.runner.speculative.model_drafter import ModelDrafter
from megatron_infer.testing.inspect import inspect

OTHERS = {name: settings for name, settings in FEATURES.items() if name != "drafts"}
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)

kind = each_of(KINDS)


@pytest.fixture(scope="module")
def twin(kind) -> Drafter:
    return like(kind)


@pytest.fixture(scope="module")
def guesser(kind) -> Drafter:
    return unlike(kind)


@pytest.fixture(scope="module")
def expected(twin) -> dict[str, list[list[int]]]:
    engine = twin.plain()
    return {drawing: run(engine, drawing) for drawing in ("greedy", "sampled")}


@pytest.mark.parametrize("drawing", ["greedy", "sampled"])
@pytest.mark.parametrize("feature", OTHERS)
def test_a_drafter_like_the_model_is_accepted_entirely_with_the_feature(twin, expected, feature, drawing):
    """So its keys and values are right wherever blocks are shared, cut, paused, evicted or swapped."""
    settings = dict(OTHERS[feature])
    order = settings.pop("order", None)
    engine = twin.engine(**settings)
    assert run(engine, drawing, order) == expected[drawing]
    check_all_kept(engine)
    counters = engine.stats().counters
    assert counters["swapped_in"] > 0 or feature != "tiny_pool_swap"
    assert counters["prefix_hits"] > 0 or not feature.startswith("prefix")


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_like_the_model_is_accepted_entirely_through_random_events(twin, expected, seed):
    """With too few blocks, prefix hits, suspends, pauses and an aborted request, and with overlap and chunks."""
    rng = random.Random(seed)
    settings = {
        "overlap": bool(seed % 2),
        "prefix": rng.choice(["lru", "ref_zero"]),
        **rng.choice([{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_buffer_size_gb": 0.01}]),
        **(OTHERS["chunked"] if seed // 2 else {}),
    }
    engine = twin.engine(pool_blocks=14, paused_blocks=5, **settings)
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
    assert tokens_of(done[str(index)] for index in range(len(prompts))) == expected["sampled"]
    found = engine.spec_decode_metrics()
    assert found.num_drafted - found.num_accepted in range(5), found  # those of the aborted request
    assert found.num_accepted > 100 and engine.stats().num_free_blocks == 14


@pytest.mark.parametrize("way", WAYS)
def test_wrong_drafts_change_no_answer(kind, way):
    guesser = unlike(kind, **MOE)
    engine = guesser.engine(overlap=True)
    assert shown(ask(engine, WAYS[way])) == shown(ask(guesser.plain(), WAYS[way]))
    found = engine.spec_decode_metrics()
    assert found.num_accepted < found.num_drafted and found.seconds_drafting > 0


@pytest.mark.parametrize("mode", ["persist", "recompute", "offload"])
def test_suspends_keep_what_the_drafter_has_computed(twin, guesser, expected, mode):
    """Of one that guesses, drafts are the same ones as without the suspends."""
    work = list(zip(*workload("sampled"), strict=True))
    for one in (twin, guesser):
        plain = one.engine(prefix="lru")
        engines.run(plain, work)
        engine = one.engine(overlap=mode == "offload", prefix="lru")
        outputs = engines.run(engine, work, suspending(mode, 2, 5))
        if one is twin:
            assert tokens_of(outputs) == expected["sampled"]
            check_all_kept(engine)
        if mode != "recompute":  # which draws a token where it computes a sequence again, without drafts
            assert engine.spec_decode_metrics().num_accepted == plain.spec_decode_metrics().num_accepted


@pytest.mark.parametrize("reader", ["same", "other blocks", "without"])
def test_saved_requests_bring_the_drafters_memory(twin, tmp_path, reader):
    """A reader that drafts computes nothing again."""
    prompts, _ = workload("sampled")
    wanted = twin.plain().generate(prompts, SAMPLED)
    first = twin.engine()
    second = twin.plain() if reader == "without" else twin.engine(block_size_tokens=16 if reader == "same" else 32)
    submit(first, [(prompt, SAMPLED) for prompt in prompts])
    for _ in range(3):
        assert not first.step()
    first.save_requests(tmp_path / "saved", kv=True)
    second.load_requests(tmp_path / "saved")
    done = finish(second)
    assert tokens_of(done[str(place)] for place in range(len(prompts))) == tokens_of(wanted)
    assert (second.stats().counters["prefill_tokens"] == 0) == (reader != "without")
    if reader != "without":
        check_all_kept(second)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("kind", ["itself", *KINDS])
def test_a_weight_update_renews_the_drafter(kind, exact):
    """Of the model that drafts for itself, of another one, and of the MTP layer."""
    model = knowing() if kind == "mtp" else make_model("attention", vocab_size=VOCAB)
    draft = {"itself": model, "model": make_model("attention", vocab_size=VOCAB), "mtp": "mtp"}[kind]
    drafter = Drafter(model, draft)
    prompts, _ = workload("greedy")
    plain, engine = drafter.plain(batch_invariant=exact), drafter.engine(batch_invariant=exact)

    def check(temperature: float = 1.0) -> None:
        params = SamplingParams(temperature=temperature, seed=2, max_tokens=20, ignore_eos=True, logprobs=1)
        assert shown(engine.generate(prompts, params)) == shown(plain.generate(prompts, params))

    check(temperature=0.0)
    check()
    check_all_kept(engine)
    assert engine.spec_decode_metrics().mean_tokens_per_step > 4
    with torch.no_grad():  # the trainer steps: the model and what drafts alike
        if kind != "mtp":
            for parameter in {*model.parameters(), *draft.parameters()}:
                parameter.mul_(1.25)
        else:
            for layer in (model.decoder.layers[0], model.mtp.layers[0].transformer_layer):
                layer.mlp.linear_fc2.weight.mul_(1.5)
            model.output_layer.weight.add_(0.1)
    check()
    check_all_kept(engine)
    if kind == "mtp":
        version = engine.weight_version
        with torch.no_grad():  # the MTP layer alone
            model.mtp.layers[0].transformer_layer.mlp.linear_fc2.weight.mul_(-1)
        check()
        assert engine.weight_version == version + 1 and engine.spec_decode_metrics().acceptance_rate < 1


def test_rejection_keeps_a_drafter_like_the_model(twin):
    prompts, _ = workload("sampled")
    engine = twin.engine(speculative={"verification": "residual"})
    engine.generate(prompts, SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=16, ignore_eos=True))
    assert engine.spec_decode_metrics().acceptance_rate > 0.99


def test_adaptive_depth_stops_where_drafts_do_not_pay(guesser):
    prompts, _ = workload("greedy")
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    adaptive, full = guesser.engine(speculative={"adaptive": True}), guesser.engine()
    assert shown(adaptive.generate(prompts, params)) == shown(full.generate(prompts, params))
    assert 0 < adaptive.spec_decode_metrics().num_drafted < 0.8 * full.spec_decode_metrics().num_drafted


def test_ngrams_come_first_where_both_are_asked_for(twin):
    """A drafter computes tokens that n-grams propose, too: what it draws behind them is as good."""
    prompts = [[7, 8, 9, 10] * 5, [20, 21, 22] * 6, [90]]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = twin.engine(speculative={"method": ("ngram", twin.method["method"])})
    sources: Counter[bool] = Counter()
    proposer = inspect(engine).drafts.proposer

    class Counting:
        def propose(self, request: Any, most: int) -> Any:
            found = proposer.propose(request, most)
            sources[found.source == "draft"] += 1
            return found

    inspect(engine).drafts.proposer = Counting()
    assert shown(engine.generate(prompts, params)) == shown(twin.plain().generate(prompts, params))
    assert sources[True] > 3 < sources[False]
    assert 0.2 < engine.spec_decode_metrics().acceptance_rate <= 1


def test_a_step_that_fails_leaves_nothing_for_the_next_one(twin, expected, monkeypatch):
    prompts, params = workload("sampled")
    engine, forward, calls = twin.engine(), ModelDrafter._forward, []

    def fail_once(self, plan, *table_writes):
        calls.append(plan)
        if len(calls) == 4:
            raise RuntimeError("this step fails")
        return forward(self, plan, *table_writes)

    monkeypatch.setattr(ModelDrafter, "_forward", fail_once)
    outputs = engine.generate(prompts, params, on_error="return")
    assert any(output.error for output in outputs)
    before = engine.spec_decode_metrics()
    assert run(engine, "sampled") == expected["sampled"]
    after = engine.spec_decode_metrics()
    assert after.num_accepted - before.num_accepted == after.num_drafted - before.num_drafted > 0


def test_memory_counts_what_the_drafter_keeps(kind, twin):
    """A model keeps what the target keeps; an MTP layer also a hidden state of a token, which takes as much again:
    heads of 16, two for keys and two for values, are 256 bytes of fp32, and so is a hidden state of 64.
    """
    engine, alone = twin.engine(), twin.plain()
    times = 2 if kind == "mtp" else 1
    assert engine.sizes.draft_block_bytes == times * alone.sizes.block_bytes
    assert engine.sizes.block_bytes == (1 + times) * alone.sizes.block_bytes
    assert engine.sizes.num_blocks == alone.sizes.num_blocks // (1 + times)
    rows = {row.name: row.how for row in engine.sizes.table()}
    assert "attention layers" in rows["draft_block_bytes"] and rows["block_bytes"].endswith("+ draft_block_bytes")
    (tensor,) = OverlapTextGenerationPipeline.of_engine(engine).draft_kv_blocks
    assert tensor.nbytes == engine.sizes.draft_block_bytes * engine.sizes.num_blocks
    assert twin.engine(pool_blocks=14).sizes.num_usable_blocks == 14
