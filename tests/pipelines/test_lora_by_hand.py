"""Adapters in a loop by hand: `lora_ids` of its inputs give what a request that names the adapter gets."""

from __future__ import annotations

import pytest
import torch
from lora_cases import random_adapter
from pipeline_case import CLOSE, contexts_of, free_pages, generate_by_hand, make_engine, model_of, run_to_end

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import CapacityError, ConfigError, DuplicateRequest, RequestError, UnknownAdapter
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline

PROMPT = [7 * i % 121 + 3 for i in range(37)]
CACHED = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"}
NAMES = (None, "a", "b", None, "a")


def params(name: str | None, **how) -> SamplingParams:
    base = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(**base | how, adapter=name)


def engine_of(kind: str = "attention", *, max_loras: int = 2, **settings):
    engine = make_engine(kind, lora={"max_loras": max_loras, "max_rank": 8}, max_tokens=256, **settings)
    for seed, name in enumerate(("a", "b", "c")):
        engine.load_adapter(name, random_adapter(model_of(kind), name, rank=2 + seed, seed=seed, scale=0.7))
    return engine


def scores(output) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in entry.items()} for entry in output.outputs[0].logprobs]


def by_hand(model: McorePipelineModel, contexts) -> list[list[dict[int, float]]]:
    """Greedy tokens -> top log probabilities of each step by context."""
    found = generate_by_hand(model, contexts, claims=False, steps=5, top=2)
    return [[top for scores in steps for top in scores.top_log_probabilities] for steps in found]


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_logits_by_hand_are_the_engines_with_each_adapter(kind):
    engine = engine_of(kind)
    expected = engine.generate([PROMPT] * len(NAMES), [params(name) for name in NAMES])
    assert len({tuple(one.outputs[0].token_ids) for one in expected}) > 1
    model = McorePipelineModel.wrap(engine)
    assert model.lora_manager.loras == ["a", "b", "c"]
    contexts = contexts_of([(PROMPT, params(name)) for name in NAMES])
    inputs = model.prepare_initial_token_inputs(contexts)
    ids, ranks = inputs.lora_ids.tolist(), inputs.lora_ranks.tolist()
    assert ids == [model.lora_manager.id_of(name) for name in NAMES] and ids[0] == ids[3] == -1 and ids[1] == ids[4]
    assert ranks[0] == 0 and 0 < ranks[1] < ranks[2] and [id(one) for one in inputs][-2:] == [
        id(inputs.lora_ids), id(inputs.lora_ranks)
    ]  # fmt: skip
    for context in contexts:
        model.kv_manager.release(context.request_id)
    before = free_pages(engine)
    for context, one, mine in zip(contexts, expected, by_hand(model, contexts), strict=True):
        assert context.generated == one.outputs[0].token_ids
        for got, want in zip(mine, scores(one), strict=True):
            assert got == pytest.approx(want, abs=CLOSE)
        model.kv_manager.release(context.request_id)
    assert free_pages(engine) == before


def test_ids_that_the_caller_sets_choose_the_adapter_and_no_prompt_finds_its_keys():
    engine = engine_of(**CACHED)
    model = McorePipelineModel.wrap(engine)
    lora = model.lora_manager
    (context,) = contexts_of([(PROMPT, params(None))])
    logits = {}
    for name in ("a", "c", None):
        inputs = model.prepare_initial_token_inputs([context])
        assert context.start == 0
        inputs.update(lora_ids=torch.tensor([lora.id_of(name)]))
        logits[name] = model.execute(inputs).logits.log_softmax(-1).max().item()
        context.start = len(PROMPT)
        model.kv_manager.step([context])
        model.kv_manager.release(context.request_id)
    for name, found in logits.items():
        (output,) = engine.generate([PROMPT], params(name, max_tokens=1))
        entry = output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]]
        assert entry.logprob == pytest.approx(found, abs=CLOSE)
        assert output.num_cached_tokens == (32 if name is None else 0)


def test_a_row_that_had_an_adapter_computes_without_one_by_hand():
    engine = engine_of()
    model = McorePipelineModel.wrap(engine)
    engine.generate([PROMPT] * 8, params("a"))
    expected = engine_of().generate([PROMPT], params(None))[0]
    engine.generate([PROMPT] * 8, params("a"))
    (context,) = contexts_of([(PROMPT, params(None))])
    by_hand(model, [context])
    assert context.generated == expected.outputs[0].token_ids


def test_an_adapter_that_is_replaced_or_unloaded_under_a_loop_by_hand():
    engine = engine_of(**CACHED)
    model = McorePipelineModel.wrap(engine)
    other = random_adapter(model_of("attention"), "a", rank=3, seed=9, scale=0.7)
    (context,) = contexts_of([(PROMPT, params("a"))])
    inputs = model.prepare_initial_token_inputs([context])
    first = model.execute(inputs).logits.clone()
    engine.load_adapter("a", other, replace=True)
    context.start = len(PROMPT)
    model.kv_manager.step([context])
    assert engine.generate([PROMPT], params("a", max_tokens=1))[0].num_cached_tokens == 0
    assert not torch.equal(model.execute(inputs).logits, first)
    engine.unload_adapter("a")
    with pytest.raises(UnknownAdapter, match="adapter 'a' was unloaded; load it again, or take -1"):
        model.execute(inputs)
    with pytest.raises(UnknownAdapter, match="unknown adapter 'a'"):
        model.prepare_initial_token_inputs(contexts_of([(PROMPT, params("a"))], "x"))


def test_ids_that_stand_for_nothing_and_too_few_slots_are_refused():
    engine = engine_of(max_loras=1)
    model = McorePipelineModel.wrap(engine)
    contexts = contexts_of([(PROMPT, params("a")), (PROMPT, params("b"))])
    with pytest.raises(CapacityError, match=r"adapter 'b' has no slot on the device: 1 \(max_loras\)"):
        model.execute(model.prepare_initial_token_inputs(contexts))
    inputs = model.prepare_initial_token_inputs(contexts)
    for wrong, message in (([7, -1], "7, which stands for no adapter"), ([-1], "has 1 ids, the step 2 sequences")):
        with pytest.raises(ConfigError, match=message):
            inputs.update(lora_ids=torch.tensor(wrong))
            model.execute(inputs)
    for context in contexts:
        model.kv_manager.release(context.request_id)
    running = engine.add_request(PROMPT, params("c", max_tokens=9))
    engine.step()
    with pytest.raises(DuplicateRequest, match="is that of a request of the engine; give the context its own id"):
        model.prepare_initial_token_inputs(contexts_of([(PROMPT, params("c"))], running.removesuffix("0")))
    with pytest.raises(CapacityError, match="are those of running requests"):
        model.execute(model.prepare_initial_token_inputs(contexts[1:]))
    plain = McorePipelineModel.wrap(make_engine())
    assert plain.lora_manager is None
    with pytest.raises(RequestError, match="this engine has no adapters"):
        plain.prepare_initial_token_inputs(contexts[:1])


def test_execute_runs_contexts_that_name_adapters():
    engine = engine_of(overlap=True)
    expected = engine.generate([PROMPT] * len(NAMES), [params(name) for name in NAMES])
    pipeline = OverlapTextGenerationPipeline.of_engine(engine)
    answers = run_to_end(pipeline, contexts_of([(PROMPT, params(name)) for name in NAMES]))
    assert [answers[str(i)].tokens for i in range(len(NAMES))] == [one.outputs[0].token_ids for one in expected]
    assert pipeline.pipeline_model.lora_manager.loras == ["a", "b", "c"]
