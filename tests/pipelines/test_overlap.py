"""`execute`: the batch before, exactly what the engine would have drawn, whoever is named in each call."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from pipeline_case import VOCAB, check_same, contexts_of, free_pages, make_engine, run_to_end, workload
from rehearsal import DRAFTS, rehearse
from server_case import tokenizer
from static_kernels import STATIC

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, DuplicateRequest, RequestError
from megatron_infer.pipelines import PipelineConfig
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.text_generation import (
    GenerationStatus,
    TextContext,
    TextGenerationInputs,
    TextGenerationRequest,
    TextTokenizer,
)
from megatron_infer.testing.eager_recorder import EAGER
from megatron_infer.testing.tiny import tiny_gpt

EMPTY = TextGenerationInputs.empty()


def batch(*contexts: TextContext) -> TextGenerationInputs:
    return TextGenerationInputs.of(contexts)


@pytest.fixture(scope="module")
def pipeline() -> OverlapTextGenerationPipeline:
    return OverlapTextGenerationPipeline.of_engine(make_engine(overlap=True))


WAYS = {
    "overlap": {"overlap": True},
    "none": {},
    "three": {"max_steps_in_flight": 3},
    "prefill_first": {"batching": "prefill_first", "max_batch_total_tokens": 260, "admission_watermark": 0.7},
    "phased": {
        "batching": "phased",
        "min_batch_size_tg": 2,
        "max_queue_size_tg": 3,
        "ce_delay_ms": 2,
        "enable_prioritize_first_decode": True,
    },
}


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("way", WAYS)
def test_execute_gives_what_generate_gives_whoever_runs(kind, way):
    ahead = WAYS[way]
    work = workload()
    expected = make_engine(kind).generate([prompt for prompt, _ in work], [params for _, params in work])
    engine = make_engine(kind, **ahead)
    before = free_pages(engine)
    for number, disabled in enumerate((False, True)):
        one = OverlapTextGenerationPipeline.of_engine(engine, disable_overlap=disabled)
        assert one.overlap_active == (way in ("overlap", "three") and not disabled)
        prefix = f"{number}-"
        check_same(run_to_end(one, contexts_of(work, prefix), random.Random(number)), expected, prefix)
    check_same(run_to_end(one, contexts_of(work)), expected)
    assert free_pages(engine) == before


def test_execute_with_pauses_and_evictions_gives_what_generate_gives():
    work = workload(8)
    expected = make_engine().generate([prompt for prompt, _ in work], [params for _, params in work])
    engine = make_engine(overlap=True, blocks=8)
    one = OverlapTextGenerationPipeline.of_engine(engine)
    check_same(run_to_end(one, contexts_of(work), random.Random(3)), expected)
    assert engine.stats().counters["evicted"] > 0


@pytest.mark.parametrize("ahead", [{"overlap": True}, {}], ids=["overlap", "none"])
def test_drafts_change_no_token_of_execute_and_their_figures_are_the_engines(ahead):
    work = workload()
    prompts = [prompt for prompt, _ in work]
    expected = make_engine().generate(prompts, [params for _, params in work])
    engine = make_engine(**DRAFTS, **ahead)
    rehearse(engine, prompts, [output.outputs[0].token_ids for output in expected])
    one = OverlapTextGenerationPipeline.of_engine(engine)
    before = free_pages(engine)
    check_same(run_to_end(one, contexts_of(work), random.Random(2)), expected)
    figures = one.spec_decode_metrics()
    assert 0 < figures.num_accepted < figures.num_drafted and figures == engine.spec_decode_metrics()
    assert sum(figures.accepted_per_position) == figures.num_accepted and figures.num_verifications > 0
    assert one.draft_kv_blocks is None and free_pages(engine) == before


def test_outputs_are_those_of_the_batch_before(pipeline):
    params = SamplingParams(max_tokens=3, temperature=0.0)
    a, b = contexts_of([([5, 6], params), ([7, 8, 9], params)], "before")
    assert pipeline.execute(batch(a)) == {} and pipeline.has_pending_outputs()
    assert pipeline.execute(batch(b)).keys() == {a.request_id}
    assert pipeline.execute(EMPTY).keys() == {b.request_id}
    assert pipeline.execute(EMPTY) == {} and not pipeline.has_pending_outputs()
    assert len(a.generated) == len(b.generated) == 1
    pipeline.execute(batch(a, b))
    pipeline.execute(batch(a, b))
    last = pipeline.execute(batch(a, b))
    assert [one.final_status.value for one in last.values()] == ["maximum_length"] * 2 and a.is_done and b.is_done
    assert pipeline.execute(batch(a, b)) == {} and not pipeline.has_pending_outputs()


def test_without_overlap_outputs_are_the_calls_own(pipeline):
    one = OverlapTextGenerationPipeline.of_engine(pipeline.engine, disable_overlap=True)
    (a,) = contexts_of([([5, 6], SamplingParams(max_tokens=2))], "own")
    assert one.execute(batch(a)).keys() == {a.request_id} and not one.has_pending_outputs()
    assert one.execute(batch(a))[a.request_id].is_done


def test_a_context_within_its_prompt_gives_nothing(pipeline):
    long, short = contexts_of([([5] * 150, SamplingParams(max_tokens=1)), ([6], SamplingParams(max_tokens=9))], "in")
    seen = [sorted(pipeline.execute(batch(short, long))) for _ in range(4)]
    assert seen[0] == [] and all(long.request_id not in one for one in seen[:3]) and long.request_id in seen[3]
    pipeline.release(short.request_id)
    assert pipeline.execute(EMPTY) == {}


def test_a_context_that_is_not_named_is_not_run_and_gives_way_where_memory_lacks():
    engine = make_engine(overlap=True, blocks=4)
    one = OverlapTextGenerationPipeline.of_engine(engine)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    a, b = contexts_of([([5] * 40, params), ([6] * 40, params)])
    for _ in range(4):
        one.execute(batch(a))
    held = list(a.generated)
    while not b.is_done:
        assert a.request_id not in one.execute(batch(b)) or len(a.generated) - len(held) == 1
    while not a.is_done:
        one.execute(batch(a))
    expected = make_engine().generate([[5] * 40, [6] * 40], params)
    assert [a.generated, b.generated] == [output.outputs[0].token_ids for output in expected]
    assert engine.stats().counters["evicted"] == 1


def test_release_ends_a_request_in_any_state_and_returns_its_pages(pipeline):
    engine = pipeline.engine
    before = free_pages(engine)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    decoding, prefilling, waiting, other = contexts_of(
        [([5] * 40, params), ([6] * 150, params), ([7], params), ([8], params)], "r"
    )
    pipeline.execute(batch(decoding, other))
    pipeline.execute(batch(decoding, prefilling, waiting, other))
    assert pipeline.kv_manager.num_pages_of(decoding.request_id) == 3
    for context in (decoding, prefilling, waiting, decoding):
        pipeline.release(context.request_id)
        assert not pipeline.kv_manager.contains(context.request_id)
    assert decoding.status.value == "cancelled" and not pipeline.engine.loop.num_in_flight
    assert pipeline.execute(EMPTY).keys() == {other.request_id}
    pipeline.release(other.request_id)
    assert free_pages(engine) == before


def test_requests_of_the_engine_itself_keep_their_outputs(pipeline):
    engine = pipeline.engine
    mine = engine.add_request([9, 9], SamplingParams(max_tokens=2), stream="final")
    (a,) = contexts_of([([5, 6], SamplingParams(max_tokens=3))], "mine")
    run_to_end(pipeline, [a])
    assert engine.has_unfinished()
    while not (outputs := engine.step()):
        pass
    assert [output.request_id for output in outputs] == [mine]


def test_a_request_that_is_aborted_elsewhere_ends(pipeline):
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    a, b = contexts_of([([5, 6], params), ([7], params)], "elsewhere")
    pipeline.execute(batch(a, b))
    other = pipeline.engine.add_request([9], params)
    pipeline.engine.abort(a.request_id)
    pipeline.engine.pause("abort")
    pipeline.engine.unpause()
    answers = run_to_end(pipeline, [a, b])
    assert (a.status.value, b.status.value) == ("cancelled", "cancelled") and answers.keys() == {b.request_id}
    assert not pipeline.has_pending_outputs()  # the output that waits is not this pipeline's
    assert [output.request_id for output in pipeline.engine.step()] == [other]


def test_an_id_names_one_context(pipeline):
    a, b, other = contexts_of([([5, 6], SamplingParams()), ([7], SamplingParams()), ([8], SamplingParams())], "twice")
    b.request_id = a.request_id
    for wrong in ((other, a, b), (other, a, a)):
        with pytest.raises(DuplicateRequest, match="another context"):
            pipeline.execute(batch(*wrong))
        assert not pipeline.engine.has_unfinished()
    pipeline.execute(batch(a))
    with pytest.raises(DuplicateRequest, match="another context"):
        pipeline.execute(batch(other, b))
    pipeline.release(a.request_id)
    assert not pipeline.engine.has_unfinished()


def test_what_cannot_be_served_is_refused_and_nothing_is_queued(pipeline):
    good, bad = contexts_of([([5, 6], SamplingParams()), ([5] * 300, SamplingParams())], "bad")
    with pytest.raises(RequestError, match="300 tokens, limit is 199"):
        pipeline.execute(batch(good, bad))
    assert not pipeline.engine.has_unfinished()
    for context, message in (
        (TextContext(request_id="x", tokens=[5, 6], prompt_len=1, params=SamplingParams()), "did not draw"),
        (TextContext(request_id="x", tokens=[5], prompt_len=1, params=SamplingParams(n=2)), "n is 2"),
    ):
        with pytest.raises(RequestError, match=message):
            pipeline.execute(batch(context))


def test_arguments_of_another_kind_are_refused_with_what_to_write(pipeline):
    (context,) = contexts_of([([5, 6], SamplingParams())], "kind")
    for call, message in (
        (lambda: pipeline.execute([context]), r"it must be TextGenerationInputs; TextGenerationInputs.of\(\[context"),
        (lambda: TextGenerationInputs.of(context), r"takes a list of contexts; write of\(\[context\]\)"),
        (lambda: pipeline.release(context), "it must be str; context.request_id is that of a context"),
        (
            lambda: pipeline.generate("Hello"),
            "'Hello' .str., it must be TextGenerationRequest; TextGenerationRequest",
        ),
        (lambda: TextGenerationRequest(prompt="a", sampling_params={"n": 1}), "it must be SamplingParams"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    assert not pipeline.engine.has_unfinished()
    config = PipelineConfig(model_path="nowhere", defer_resolve=True)
    for given, message in (
        (({}, McorePipelineModel, 2, {}, None), "pipeline_config is {}, it must be a PipelineConfig"),
        ((config, "McorePipelineModel", 2, {}, None), "it must be a class: McorePipelineModel, or one of your own"),
        ((config, McorePipelineModel, 2, {}, "smollm2"), "tokenizer is 'smollm2', it must be a TextTokenizer or None"),
    ):
        with pytest.raises(ConfigError, match=message):
            OverlapTextGenerationPipeline(*given)


# ---------------------------------------------------------------------- generate


@pytest.fixture(scope="module")
def speaking() -> OverlapTextGenerationPipeline:
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.engine.engine import DynamicInferenceEngine

    text = tokenizer()
    model = tiny_gpt(vocab_size=258, init_method_std=0.2)
    config = InferenceConfig(
        buffer_size_gb=0.02, block_size_tokens=16, max_sequence_length=200, max_requests=4, max_tokens=64,
        enable_chunked_prefill=True, overlap=True,
    )  # fmt: skip
    return OverlapTextGenerationPipeline.of_engine(
        DynamicInferenceEngine(model, config, tokenizer=text), TextTokenizer(text)
    )


def requests(count: int, **how) -> list[TextGenerationRequest]:
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0} | how)
    return [
        TextGenerationRequest(prompt="ab" * (3 * count - number), sampling_params=params) for number in range(count)
    ]


def test_generate_keeps_the_order_and_gives_what_the_engine_gives(speaking):
    asked = requests(6, logprobs=2)
    answers = speaking.generate(asked)
    expected = speaking.engine.generate([one.prompt for one in asked], asked[0].sampling_params)
    assert [one.request_id for one in answers] == [one.request_id for one in asked]
    assert [(one.tokens, one.text) for one in answers] == [
        (o.outputs[0].token_ids, o.outputs[0].text) for o in expected
    ]
    assert [len(one.log_probabilities.top_log_probabilities) for one in answers] == [len(one.tokens) for one in answers]
    assert speaking.generate(asked[0])[0].tokens == answers[0].tokens and speaking.generate([]) == []
    with pytest.raises(RequestError, match="same request_id"):
        speaking.generate([asked[0], asked[0]])


def test_an_interrupt_of_generate_leaves_no_request(speaking, monkeypatch):
    before = free_pages(speaking.engine)
    real, calls = speaking.engine.step, []

    def step(among=None):
        calls.append(among)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(among)

    monkeypatch.setattr(speaking.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        speaking.generate(requests(6))
    monkeypatch.undo()
    assert free_pages(speaking.engine) == before and not speaking.engine.has_unfinished()
    assert not speaking.has_pending_outputs()


def test_generate_async_cancelled_half_way_leaves_no_page(speaking):
    before = free_pages(speaking.engine)

    async def read(count, tokens):
        async for outputs in speaking.generate_async(requests(count, max_tokens=40, ignore_eos=True)):
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.tokens)

    async def main():
        kept, dropped = {}, {}
        staying = asyncio.create_task(read(2, kept))
        leaving = asyncio.create_task(read(3, dropped))
        while not dropped:
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await staying
        assert sorted(map(len, kept.values())) == [40, 40] and 0 < sum(map(len, dropped.values())) < 120
        async for _ in speaking.generate_async(requests(1)):
            break

    asyncio.run(main())
    assert free_pages(speaking.engine) == before and not speaking.engine.has_unfinished()


def test_two_callers_of_generate_get_their_own_outputs(speaking):
    async def read(asked):
        found = {}
        async for outputs in speaking.generate_async(asked):
            for output in outputs:
                found.setdefault(output.request_id, []).extend(output.tokens)
        return [found[one.request_id] for one in asked]

    async def main(first, second):
        return await asyncio.gather(read(first), read(second))

    first, second = requests(3), requests(2, max_tokens=9)
    mine = asyncio.run(main(first, second))
    assert mine == [
        [one.tokens for one in speaking.generate(requests(3))],
        [one.tokens for one in speaking.generate(requests(2, max_tokens=9))],
    ]


def test_generate_ends_when_its_request_is_aborted_elsewhere(speaking):
    async def main(end):
        asked, found = requests(1)[0], []
        async for outputs in speaking.generate_async(asked):
            found += outputs
            if len(found) == 2:
                end(asked.request_id)
        return found

    for end in (speaking.engine.abort, speaking.release):
        *_, last = asyncio.run(main(end))
        assert last.final_status is GenerationStatus.CANCELLED and not last.tokens
    assert not speaking.engine.has_unfinished()


def test_generate_with_a_taken_id_leaves_its_owner_alone(speaking):
    async def main():
        asked, num_tokens = requests(1, max_tokens=9, ignore_eos=True)[0], 0
        async for (output,) in speaking.generate_async(asked):
            if not num_tokens:
                with pytest.raises(DuplicateRequest, match="under way"):
                    speaking.generate(asked)
            num_tokens += len(output.tokens)
        return num_tokens

    assert asyncio.run(main()) == 9


def test_the_ends_of_a_context_itself_act(pipeline):
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (drawn,) = run_to_end(pipeline, contexts_of([([5, 6, 7], params)], "ends")).values()
    short, stopped = contexts_of([([5, 6, 7], params)] * 2, "ends")
    short.max_length, stopped.eos_ids = 8, frozenset([drawn.tokens[2]])
    found = run_to_end(pipeline, [short, stopped])
    assert found["ends0"].tokens == drawn.tokens[:5] and found["ends0"].final_status.value == "maximum_length"
    end = drawn.tokens.index(drawn.tokens[2]) + 1
    assert found["ends1"].tokens == drawn.tokens[:end] and found["ends1"].final_status.value == "end_of_sequence"
    (long,) = contexts_of([([5] * 9, params)], "ends")
    long.max_length = 9
    with pytest.raises(RequestError, match=r"has 9 tokens, the limit is 9 \(max_length\); shorten"):
        pipeline.execute(batch(long))


# ---------------------------------------------------------------------- structured output


def test_bitmask_is_packed_and_allows_what_the_schema_allows(speaking):
    text = speaking.tokenizer
    plain = text.new_context(TextGenerationRequest(prompt="x"))
    schema = SamplingParams(structured={"regex": "[0-9]{2}"})
    digits = text.new_context(TextGenerationRequest(prompt="x", sampling_params=schema))
    assert speaking.initialize_bitmask([plain, plain]) is None
    mask = speaking.initialize_bitmask([plain, digits])
    assert mask.shape == (2, 9) and mask.dtype == np.int32 and (mask == -1).all()
    for index, context in enumerate((plain, digits)):
        speaking.update_for_structured_output(context, mask, index)
    assert (mask[0] == -1).all() and allowed(mask[1]) == set(text.encode("0123456789").tolist())
    digits.tokens += text.encode("42").tolist()
    speaking.update_for_structured_output(digits, mask, 1)
    assert allowed(mask[1]) == {text.eos}
    speaking.update_for_structured_output(digits, None, 1)
    with pytest.raises(RequestError, match=r"schema|grammar|regex"):
        bad = SamplingParams(structured={"regex": "("})
        speaking.update_for_structured_output(
            text.new_context(TextGenerationRequest(prompt="x", sampling_params=bad)), mask, 0
        )
    (answer,) = speaking.generate(TextGenerationRequest(prompt="x", sampling_params=schema))
    assert answer.text.isdigit() and len(answer.text) == 2


def allowed(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:258]).tolist())


# ---------------------------------------------------------------------- graphs, constructor


def test_warm_up_says_why_nothing_is_captured_and_captures_every_shape_where_it_can(speaking, monkeypatch):
    assert "none is asked for on cpu" in speaking.warmup_graph_capture()
    with pytest.warns(UserWarning, match="every step runs eagerly"):
        asked = OverlapTextGenerationPipeline.of_engine(make_engine(num_cuda_graphs=4))
    assert asked.warmup_graph_capture() == "there are no graphs on a CPU"
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", EAGER)
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
    one = OverlapTextGenerationPipeline.of_engine(make_engine(num_cuda_graphs=4))
    graphs = one.engine.replay.runner.graphs
    assert one.warmup_graph_capture() == ""
    tokens = [shape.num_tokens for shape in graphs.pool.captured]
    assert len(tokens) == len(graphs.pool.index.shapes) and tokens == sorted(tokens, reverse=True)
    work = workload(4)
    expected = make_engine().generate([prompt for prompt, _ in work], [params for _, params in work])
    check_same(run_to_end(one, contexts_of(work)), expected)
    assert graphs.pool.counts.captures == len(tokens)


def test_what_is_not_there_is_none(pipeline):
    assert pipeline.draft_kv_blocks is None and pipeline.spec_decode_metrics() is None
    assert pipeline.pipeline_config is None and pipeline.kv_managers == [pipeline.kv_manager]
    with pytest.raises(ConfigError, match="pass one where it is made"):
        pipeline.tokenizer  # noqa: B018


def test_constructor_refuses_what_it_cannot_serve(tmp_path):
    deferred = PipelineConfig(model_path="nowhere", defer_resolve=True)
    with pytest.raises(ConfigError, match="call its resolve"):
        OverlapTextGenerationPipeline(deferred, McorePipelineModel, 2, {}, TextTokenizer(tokenizer()))


def test_vocabulary_is_that_of_the_model(pipeline):
    assert pipeline.engine.shape.vocab_size == VOCAB and pipeline.pipeline_model.dtype is torch.float32
