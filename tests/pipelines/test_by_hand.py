"""A loop by hand over `prepare_initial_token_inputs`, `execute`, `prepare_next_token_inputs` and the cache manager."""

from __future__ import annotations

import pytest
import torch
from pipeline_case import CLOSE, contexts_of, free_pages, generate_by_hand, make_engine, run_to_end, workload

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import (
    AdoptionError,
    CapacityError,
    ConfigError,
    DuplicateRequest,
    RequestError,
    TransitionFailed,
    UnknownRequest,
    WrongState,
)
from megatron_infer.pipelines.interfaces import ReturnLogits, get_paged_manager
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.paged_manager import InsufficientBlocksError
from megatron_infer.pipelines.text_generation import TextGenerationInputs

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, prompt_logprobs=3)
WORK = [(prompt, GREEDY) for prompt, _ in workload(4)]


@pytest.mark.parametrize("claims", [True, False])
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_tokens_and_log_probabilities_by_hand_are_the_engines(kind, claims):
    engine = make_engine(kind, max_tokens=512)
    expected = engine.generate([prompt for prompt, _ in WORK], GREEDY)
    before = free_pages(engine)
    model = McorePipelineModel.wrap(engine, return_logits=ReturnLogits.ALL)
    contexts = contexts_of(WORK)
    found = generate_by_hand(model, contexts, claims=claims, echo=True)
    for context, output, steps in zip(contexts, expected, found, strict=True):
        sequence = output.outputs[0]
        assert context.generated == sequence.token_ids
        entries = [*output.prompt_logprobs[1:], *sequence.logprobs]
        tops = [top for scores in steps for top in scores.top_log_probabilities]
        assert len(tops) == len(entries) == len(context.tokens) - 1
        for top, entry in zip(tops, entries, strict=True):
            assert top == pytest.approx({token: one.logprob for token, one in entry.items()}, abs=CLOSE)
        model.kv_manager.release(context.request_id)
    assert free_pages(engine) == before


def test_return_logits_says_which_rows_come_back():
    engine = make_engine()
    contexts = contexts_of([([5, 6, 7, 8], GREEDY), ([9], GREEDY), ([4, 3, 2], GREEDY)])
    kept = {}
    for mode in ReturnLogits:
        model = McorePipelineModel.wrap(engine, return_logits=mode)
        outputs = model.execute(model.prepare_initial_token_inputs(contexts, return_n_logits=2))
        offsets = None if outputs.logit_offsets is None else outputs.logit_offsets.tolist()
        kept[mode] = outputs.logits
        assert offsets == {"last_token": None, "variable": [0, 2, 3, 5], "all": [0, 4, 5, 8]}[mode.value]
        assert torch.equal(outputs.next_token_logits, kept[ReturnLogits.LAST_TOKEN])
        for context in contexts:
            model.kv_manager.release(context.request_id)
    assert torch.equal(kept[ReturnLogits.ALL][[2, 3, 4, 6, 7]], kept[ReturnLogits.VARIABLE])


def test_a_prefix_of_an_earlier_sequence_is_found_by_hand_and_by_the_engine():
    engine = make_engine(enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    model, prompt = McorePipelineModel.wrap(engine), list(range(4, 60))
    first, second, third = contexts_of([(prompt, GREEDY), (prompt, GREEDY), ([*prompt, 5], GREEDY)])
    generate_by_hand(model, [first], claims=True)
    generate_by_hand(model, [second], claims=True)
    assert second.generated == first.generated
    manager = model.kv_manager
    manager.claim(third.request_id)
    manager.alloc(third)
    assert third.start == 48 and third.active_length == 9 and manager.num_pages_of(third.request_id) == 4
    manager.release(third.request_id)
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0.0))
    assert output.num_cached_tokens == 48 and output.outputs[0].token_ids == first.generated


def test_a_caller_that_claims_and_one_that_does_not_get_the_same_from_execute():
    engine = make_engine(overlap=True)
    pipeline = OverlapTextGenerationPipeline.of_engine(engine)
    manager = get_paged_manager(pipeline)
    assert manager is pipeline.kv_manager and manager is pipeline.kv_managers[0]
    before, answers = free_pages(engine), []
    for claims in (True, False):
        contexts = contexts_of(WORK)
        for context in contexts if claims else ():
            manager.claim(context.request_id)
            manager.alloc(context, num_steps=3)
            assert manager.contains(context.request_id)
        while any(not context.is_done for context in contexts):
            live = [context for context in contexts if not context.is_done]
            for context in live if claims else ():
                manager.alloc(context)  # the scheduler pages for it
            pipeline.execute(TextGenerationInputs.of(live))
            manager.step(live)
        run_to_end(pipeline, [])
        for context in contexts:
            manager.release(context.request_id)
        answers.append([context.generated for context in contexts])
        assert free_pages(engine) == before
    assert answers[0] == answers[1]


def test_pages_are_counted_and_run_out_by_name():
    engine = make_engine(blocks=6)
    manager = McorePipelineModel.wrap(engine).kv_manager
    assert (manager.total_num_pages, manager.num_used_pages, manager.page_size) == (6, 0, 16)
    assert [tuple(one.shape[2:4]) for one in manager.device_tensors] == [(7, 16)]
    large, small, third = contexts_of([([5] * 40, GREEDY), ([6] * 60, GREEDY), ([7], GREEDY)])
    manager.claim("0")
    with pytest.raises(DuplicateRequest, match="'0' is claimed already"):
        manager.claim("0")
    with pytest.raises(UnknownRequest):
        manager.alloc(small)
    manager.alloc(large, num_steps=9)
    assert (manager.num_pages_of("0"), manager.num_used_pages) == (3, 3)
    manager.alloc(large, num_steps=9)
    manager.claim("1")
    with pytest.raises(InsufficientBlocksError, match="pages for 60 tokens, 3 of 6 pages"):
        manager.alloc(small)
    assert manager.num_used_pages == 3 and manager.num_pages_of("1") == 0
    with pytest.raises(UnknownRequest, match="has no pages"):
        manager.runtime_inputs([third])
    manager.release("0")
    manager.alloc(small)
    manager.release("1")
    manager.release("nobody")
    assert manager.num_free_pages == 6


def test_changed_weights_are_noticed_before_a_prompt_by_hand():
    engine = make_engine()
    model = McorePipelineModel.wrap(engine)
    weight = engine.model.output_layer.weight
    kept = weight.detach().clone()
    logits = []
    try:
        for factor in (1.0, 2.0):
            weight.data.copy_(kept * factor)
            (context,) = contexts_of([([5, 6, 7], GREEDY)])
            outputs = model.execute(model.prepare_initial_token_inputs([context]))
            logits.append(outputs.logits.clone())
            model.kv_manager.release(context.request_id)
    finally:
        weight.data.copy_(kept)
    assert torch.allclose(logits[1], 2 * logits[0], atol=1e-5) and engine.weight_version == 1


def test_a_module_that_changed_is_noticed_before_a_prompt_by_hand():
    engine = make_engine()
    model = McorePipelineModel.wrap(engine)
    (context,) = contexts_of([([5, 6, 7], GREEDY)])
    hook = engine.model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(lambda *args: None)
    try:
        with pytest.raises(AdoptionError, match="has a forward hook"):
            model.prepare_initial_token_inputs([context])
    finally:
        hook.remove()


def test_a_step_by_hand_has_the_limit_of_the_engines_steps():
    model = McorePipelineModel.wrap(make_engine())
    (long,) = contexts_of([([5] * 65, GREEDY)])
    with pytest.raises(RequestError, match="65 tokens, the limit is 64"):
        model.prepare_initial_token_inputs([long])


def test_tokens_by_hand_are_one_for_each_sequence_and_a_list_will_do():
    model = McorePipelineModel.wrap(make_engine())
    inputs = model.prepare_initial_token_inputs(contexts_of([([5, 6], GREEDY)]))
    model.execute(inputs)
    with pytest.raises(RequestError, match=r"shape \(2,\), it must be \(1,\): one for each sequence"):
        model.prepare_next_token_inputs(torch.tensor([5, 6]), inputs)
    by_list, by_tensor = (
        model.execute(model.prepare_next_token_inputs(one, inputs)).logits.clone() for one in ([7], torch.tensor([7]))
    )
    assert torch.equal(by_list, by_tensor)
    inputs.update(lora_ids=torch.tensor([0]))
    with pytest.raises(ConfigError, match="lora_ids are given, and this engine has no adapters; set enable_lora"):
        model.execute(inputs)


def test_by_hand_is_refused_beside_a_step_in_flight():
    engine = make_engine(overlap=True)
    pipeline = OverlapTextGenerationPipeline.of_engine(engine)
    a, b = contexts_of([([5], GREEDY), ([6], GREEDY)])
    pipeline.execute(TextGenerationInputs.of([a]))
    with pytest.raises(WrongState, match="in flight"):
        pipeline.pipeline_model.prepare_initial_token_inputs([b])
    pipeline.release(a.request_id)
    pipeline.pipeline_model.prepare_initial_token_inputs([b])


def test_each_execute_computes_with_the_weights_as_they_are():
    found = []
    for when in ("before the inputs", "before execute"):
        engine = make_engine()
        model, live = McorePipelineModel.wrap(engine), engine.replay.model.live
        weights = {name: weight.detach().clone() for name, weight in live.named_parameters()}
        try:
            inputs = model.prepare_initial_token_inputs(contexts_of([([5, 6, 7], GREEDY)]))
            tokens = model.execute(inputs).logits.argmax(-1)
            if when == "before execute":
                inputs = model.prepare_next_token_inputs(tokens, inputs)
            with torch.no_grad():
                for weight in live.parameters():
                    weight.mul_(1.3)
            if when == "before the inputs":
                engine.weights.accept_changes()
                inputs = model.prepare_next_token_inputs(tokens, inputs)
            found.append(model.execute(inputs).logits.clone())
        finally:
            with torch.no_grad():
                for name, weight in live.named_parameters():
                    weight.copy_(weights[name])
    torch.testing.assert_close(found[1], found[0])


def test_what_is_held_by_hand_neither_hangs_nor_breaks_the_engine():
    engine = make_engine(kv_cache_management_mode="recompute", max_requests=2)
    model = McorePipelineModel.wrap(engine)
    contexts = contexts_of([([5, 6, 7], GREEDY), ([8], GREEDY)])
    inputs = model.prepare_initial_token_inputs(contexts)
    waiting = engine.add_request([5, 6], GREEDY)
    assert engine.step(()) == []  # nobody is asked to run
    engine.abort(waiting)
    with pytest.raises(CapacityError, match=r"cannot start: 2 of 2 rows are held by sequences claimed by hand"):
        engine.generate([[5, 6]], GREEDY)
    with pytest.raises(TransitionFailed, match=r"2 sequences claimed by hand are not recomputed; release them first"):
        engine.suspend()
    assert model.execute(inputs).logits.isfinite().all()
    engine.suspend(mode="offload")
    with pytest.raises(WrongState, match=r"execute\(\) while the engine is SUSPENDED"):
        model.execute(inputs)
    engine.resume()
    for context in contexts:
        model.kv_manager.release(context.request_id)
    engine.suspend()
    engine.resume()
    assert len(engine.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) == 6
