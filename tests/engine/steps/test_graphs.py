"""Captured steps give the answers of eager ones, whatever the scheduler does; on the CPU by the stand-in of a graph."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import engines
import pytest
import torch
from engines import each_of, finish, submit
from model_kinds import make_model
from replay_recorder import REPLAY
from static_kernels import STATIC

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import TransitionFailed
from megatron_infer.outputs.embeddings import params_for
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.runner.cuda_graphs.graph_pool import GraphPool
from megatron_infer.testing.eager_recorder import EAGER
from megatron_infer.testing.inspect import inspect

VOCAB = 128
SIZES = {"max_sequence_length": 64, "max_requests": 6, "max_tokens": 48, "enable_chunked_prefill": True}
MIXED: dict[str, Any] = {"use_cuda_graphs_for_non_decode_steps": True}
GRAPHS: dict[str, Any] = {"num_cuda_graphs": -1, "cuda_graph_max_tokens": 24, **MIXED}
AT_START: dict[str, Any] = {**GRAPHS, "cuda_graph_max_tokens": 12, "cuda_graph_capture": "start"}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_tokens": 16},
    "prefix": {"prefix": "lru"},
    "overlap": {"overlap": True},
    "tiny_pool": {"pool_blocks": 6, "paused_blocks": 3},
    "tiny_pool_swap": {"pool_blocks": 6, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01, "overlap": True},
}


@pytest.fixture(autouse=True)
def static_kernels(monkeypatch):
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", REPLAY)


kind = each_of(["attention", "hybrid"])


@pytest.fixture(scope="module")
def gpt() -> torch.nn.Module:
    return make_model("attention")


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    return engines.make_engine(model, **SIZES | settings)


def pool_of(engine: DynamicInferenceEngine) -> GraphPool:
    assert inspect(engine).runner.graphs is not None
    return inspect(engine).runner.graphs.pool


def work(count: int = 7) -> list[tuple[list[int], SamplingParams]]:
    """Greedy, drawn and filtered requests, with and without penalties, edited logits and log probabilities."""
    rng, made = random.Random(3), []
    stem = [rng.randrange(4, VOCAB) for _ in range(20)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 12},
        {"temperature": 1.1, "seed": 3, "top_p": 0.8},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
        {"temperature": 0.0, "presence_penalty": 0.7, "min_tokens": 5, "stop_token_ids": (9, 11, 40, 77)},
        {"seed": 5, "logit_bias": {7: 3.0, 90: -9.0}, "bad_token_ids": (8,), "return_sampled_logprobs": True},
    ]
    for i in range(count):
        prompt = stem[: rng.choice([0, 16, 20])] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 18))]
        made.append((prompt, SamplingParams(max_tokens=rng.randint(6, 24), ignore_eos=True, **ways[i % len(ways)])))
    return made


def answers(engine: DynamicInferenceEngine, requests) -> list[list[list[int]]]:
    prompts, params = zip(*requests, strict=True)
    return [[one.token_ids for one in output.outputs] for output in engine.generate(list(prompts), list(params))]


def check_used(engine: DynamicInferenceEngine) -> None:
    """Steps were replayed, and every shape that was met could be captured. Tokens were drawn within, but for steps with
    penalties or edited logits."""
    counts = pool_of(engine).counts
    assert counts.replays > 0 and counts.uncaptured == 0, counts
    assert not pool_of(engine).refused
    assert set(inspect(engine).runner.graphs.drawn_outside) <= {"penalties or edited logits"}


@pytest.fixture(scope="module")
def expected(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_INFER_BACKEND", STATIC)
        return answers(make_engine(model), work())


@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_are_the_same_with_graphs(model, kind, expected, feature):
    engine = make_engine(model, **GRAPHS, **FEATURES[feature])
    assert answers(engine, work()) == expected
    check_used(engine)
    if feature.startswith("tiny_pool"):
        assert engine.stats().counters["evicted"] or engine.stats().counters["paused"]
    if feature == "prefix":
        assert answers(engine, work()) == expected, "the second time from the prefix cache"
        assert engine.stats().counters["prefix_hit_tokens"]
        kept = pool_of(engine).counts.eager["states kept within a chunk"]
        assert bool(kept) == (kind == "hybrid")


def test_tokens_are_the_same_padded_but_not_captured(gpt, monkeypatch):
    expected = answers(make_engine(gpt), work())
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", EAGER)
    engine = make_engine(gpt, **GRAPHS)
    assert answers(engine, work()) == expected
    check_used(engine)


def test_outputs_made_behind_a_replayed_step_come_from_its_logits_and_hidden_states(gpt):
    """Prompts that are scored and pooled come while others decode: their tokens lie behind padded decode rows."""

    def outputs(engine):
        params = [
            SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2),
            SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, n=2),
            SamplingParams(temperature=0.8, seed=6, max_tokens=22, ignore_eos=True, bad_token_ids=(5, 6, 7)),
            SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True),
            *(SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1) for _ in range(2)),
            *(params_for(way) for way in ("mean", "last", "mean")),
        ]
        found = {}
        for i, ((prompt, _), one) in enumerate(zip(work(len(params)), params, strict=True)):
            engine.add_request(prompt[-8:], one, request_id=str(i), stream="final")
            if i >= 3:  # those before decode by now
                found |= {output.request_id: output for output in engine.step()}
        while engine.has_unfinished():
            found |= {output.request_id: output for output in engine.step()}
        return [found[str(i)] for i in range(len(params))]

    plain = outputs(make_engine(gpt))
    engine = make_engine(gpt, **GRAPHS, overlap=True, max_requests=10)
    mixed, ready = [], inspect(engine).runner.graphs.ready
    inspect(engine).runner.graphs.ready = lambda plan, _=None: mixed.append((plan, ready(plan))) or mixed[-1][1]
    replayed = outputs(engine)
    check_used(engine)
    asks = [
        chunk.request.params
        for plan, shape in mixed
        if shape is not None and shape.num_decode > len(plan.decode) > 0
        for chunk in plan.prefill
    ]
    assert any(one.prompt_logprobs is not None for one in asks) and any(one.pooling for one in asks), "too few to test"
    for want, got in zip(plain, replayed, strict=True):
        assert [one.token_ids for one in got.outputs] == [one.token_ids for one in want.outputs]
        assert_close(want.prompt_logprobs, got.prompt_logprobs)
        assert_close(want.outputs[0].logprobs, got.outputs[0].logprobs)
        if want.pooled is not None:
            torch.testing.assert_close(torch.tensor(got.pooled), torch.tensor(want.pooled), rtol=1e-4, atol=1e-5)


def random_params(rng: random.Random) -> SamplingParams:
    """Any mixture of what a draw can be asked for; half of them are two answers to one prompt."""
    ids = rng.sample(range(VOCAB), 12)
    edits: list[dict[str, Any]] = [
        {"repetition_penalty": rng.choice([0.8, 1.4])},
        {"frequency_penalty": 0.5, "presence_penalty": -0.3},
        {"logit_bias": {one: rng.uniform(-4.0, 4.0) for one in ids[:3]}},
        {"bad_token_ids": ids[3 : 3 + rng.randint(1, 6)]},
        {"allowed_token_ids": ids[2:5]},
        {"min_tokens": 4, "stop_token_ids": ids[9:]},
    ]
    options: list[dict[str, Any]] = [
        {"top_p": 0.8},
        {"logprobs": rng.choice([0, 3])},
        {"return_sampled_logprobs": True},
        {"return_support": True},
    ]
    options += edits if rng.random() < 0.25 else []
    chosen = {key: value for one in options if rng.random() < 0.45 for key, value in one.items()}
    how = {"temperature": rng.choice([0.0, 1.0, 0.8]), "seed": rng.randrange(99), "n": rng.choice([1, 2])}
    return SamplingParams(max_tokens=rng.randint(5, 16), ignore_eos=True, **how, **chosen)


@pytest.mark.parametrize("mode", ["raw", pytest.param("processed", marks=pytest.mark.long)])
def test_draws_and_their_details_are_the_same_within_graphs_and_outside(gpt, mode):
    """Rows change hands, fork, are evicted and aborted; some steps have a row whose logits are edited."""
    rng = random.Random(11)
    asked = [([rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))], random_params(rng)) for _ in range(24)]
    plain = make_engine(gpt, logprobs_mode=mode, max_requests=48)
    expected = plain.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    engine = make_engine(gpt, **GRAPHS, logprobs_mode=mode, overlap=True, pool_blocks=9, max_requests=5)
    aborted, found, waiting = 0, {}, [(str(i), *one) for i, one in enumerate(asked)]
    for i in (3, 9, 15):  # these are asked twice, and given up the first time
        waiting.insert(i, (f"aborted {i}", *asked[i]))
    while waiting or engine.has_unfinished():
        for name, prompt, params in waiting[:2]:
            engine.add_request(prompt, params, request_id=name, stream="final")
        waiting = waiting[2:]
        found |= {output.request_id: output for output in engine.step() if output.finished}
        for i in (3, 9, 15):
            if engine.num_steps % 4 == 0 and f"aborted {i}" in engine.output_processor:
                aborted += len(engine.abort(f"aborted {i}").outputs[0].token_ids) > 0
    counts, outside = pool_of(engine).counts, inspect(engine).runner.graphs.drawn_outside
    assert 0 < outside["penalties or edited logits"] == engine.figures().graph_draws_outside < counts.replays
    assert engine.stats().counters["evicted"] and aborted, "too little to test"
    for i, want in enumerate(expected):
        for mine, theirs in zip(found[str(i)].outputs, want.outputs, strict=True):
            assert_same_details(mine, theirs)


def assert_same_details(got: CompletionOutput, want: CompletionOutput) -> None:
    assert got.token_ids == want.token_ids
    assert_close(want.logprobs, got.logprobs)
    for mine, theirs in ((got.raw_logprobs, want.raw_logprobs), (got.processed_logprobs, want.processed_logprobs)):
        assert mine == (None if theirs is None else pytest.approx(theirs, abs=1e-4))
    assert (got.support is None) == (want.support is None)
    for place in range(0 if got.support is None or want.support is None else len(want.token_ids)):
        assert got.support.ids_at(place).tolist() == want.support.ids_at(place).tolist()


def assert_close(want, got) -> None:
    """Log probabilities of the same tokens at the same positions."""
    assert (want is None) == (got is None)
    for one, other in zip(want or (), got or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.keys() == other.keys()
            assert all(one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4) for token in one)
            assert all(one[token].rank == other[token].rank for token in one)


def test_an_abort_between_replays_leaves_the_others_their_answers(gpt):
    requests, expected = work(5), answers(make_engine(gpt), work(5))
    engine = make_engine(gpt, **GRAPHS)
    submit(engine, requests)
    found = finish(engine, lambda engine: engine.abort("1") if engine.num_steps == 3 else None)
    check_used(engine)
    for name in "0234":
        assert [one.token_ids for one in found[name].outputs] == expected[int(name)]


# ---------------------------------------------------------------------- what a capture may write to, what a graph holds


def test_a_capture_writes_to_padding_alone(model):
    engine = make_engine(model, **GRAPHS | {"cuda_graph_max_tokens": 12})
    for prompt, params in work(4):
        engine.add_request(prompt, params)
    for _ in range(3):
        engine.step()
    runner, store = inspect(engine).runner, inspect(engine).store
    pool = pool_of(engine)
    pool.drop("test")
    dummy_block, dummy_row = store.layout.dummy_block, engine.sizes.max_requests
    rows = [row for row in range(store.layout.num_state_slots) if row != dummy_row]

    def in_use() -> list[torch.Tensor]:
        kept = [store.kv_cache[:, :, :dummy_block], runner.builder.rows.block_table]
        kept.append(runner.builder.token_pool[:dummy_row])
        if store.states is not None:
            kept += [store.states.conv_SLCW[rows], store.states.ssm_SLHPN[rows]]
        return [tensor.clone() for tensor in kept]

    before = in_use()
    with torch.inference_mode():
        for shape in pool.index.shapes:
            pool.ready(shape)
    assert set(pool.captured) == set(pool.index.shapes)
    for was, now in zip(before, in_use(), strict=True):
        assert torch.equal(was, now)
    finish(engine)


def test_a_number_of_the_host_that_leaks_into_a_capture_shows(gpt, monkeypatch):
    """The stand-in repeats the numbers of the capture, as CUDA does: a step that reads the host goes wrong."""
    expected = answers(make_engine(gpt), work())
    engine = make_engine(gpt, **GRAPHS)
    attention, run = engine.kernels.attention, type(engine.kernels.attention).run

    def leaky(self, q, *args, **kwargs):
        return run(self, q * float(1.0 + self._step.kv_len.max()), *args, **kwargs)

    monkeypatch.setattr(type(attention), "run", leaky)
    assert answers(engine, work()) != expected
    check_used(engine)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda q: q * q.sum().item(), "asks the device"),
        (lambda q: q * q.flatten().tolist()[0], "tolist asks the device"),
        (lambda q: q if q.sum() > 0 else -q, "asks the device"),
        (lambda q: q.index_fill(0, (q.flatten(1).sum(1) > 1e9).nonzero().flatten(), 0.0), "nonzero"),
        (lambda q: q + torch.tensor([1.0] * q.shape[-1]), "allocated for each run"),
        (lambda q: torch.where(q[0, 0, 0, 0] > 0, q, q)[(q.flatten(1).sum(1) < 1e9)], "asks the device"),
    ],
    ids=["item", "tolist", "comparison", "nonzero", "host tensor", "boolean mask"],
)
def test_what_a_graph_cannot_hold_is_refused_and_the_step_runs_uncaptured(gpt, monkeypatch, ask, what):
    expected = answers(make_engine(gpt), work(3))
    engine = make_engine(gpt, **GRAPHS)
    run = type(engine.kernels.attention).run
    monkeypatch.setattr(
        type(engine.kernels.attention),
        "run",
        lambda self, q, *rest, **named: run(self, ask(q) * 0 + q, *rest, **named),
    )
    assert answers(engine, work(3)) == expected
    pool = pool_of(engine)
    assert not pool.captured and pool.counts.replays == 0 < pool.counts.uncaptured
    assert all(what in reason for reason in pool.refused.values()), pool.refused


# ---------------------------------------------------------------------- suspends and weights


@pytest.mark.few
@pytest.mark.parametrize("static", [False, True], ids=["addresses move", "static pointers"])
@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_graphs_survive_a_suspend_exactly_when_addresses_do(gpt, mode, static):
    expected = answers(make_engine(gpt), work())
    engine = make_engine(gpt, **GRAPHS, static_kv_memory_pointers=static)
    submit(engine, work())
    for _ in range(4):
        engine.step()
    pool = pool_of(engine)
    captured, num_bytes = set(pool.captured), pool.num_bytes
    assert captured and num_bytes
    report = engine.suspend(mode=mode).tags["graphs"]
    if mode == "persist" or static:
        assert set(pool.captured) == captured and (report.bytes_freed, report.bytes_resident) == (0, num_bytes)
    else:
        assert not pool.captured and (report.bytes_freed, report.bytes_resident) == (num_bytes, 0)
    engine.resume()
    found = finish(engine)
    assert [[one.token_ids for one in found[str(i)].outputs] for i in range(len(expected))] == expected
    check_used(engine)
    assert sum(pool.counts.invalidated.values()) == (mode != "persist" and not static)


def test_a_suspend_that_fails_drops_graphs_of_a_cache_that_other_ranks_may_have_moved(gpt, monkeypatch):
    engine = make_engine(gpt, **GRAPHS)
    expected, pool, store = answers(engine, work()), pool_of(engine), inspect(engine).store

    def offload(*args, **kwargs):
        raise MemoryError("no room on this rank; another is done already")

    with monkeypatch.context() as patch:
        patch.setattr(store, "offload", offload)
        with pytest.raises(TransitionFailed):
            engine.suspend("offload")
    assert not pool.captured and pool.counts.invalidated == {"a suspend failed": 1}
    assert answers(engine, work()) == expected


def test_graphs_of_a_cache_that_moved_by_itself_are_dropped(gpt):
    engine = make_engine(gpt, **GRAPHS)
    expected, pool, store = answers(engine, work()), pool_of(engine), inspect(engine).store
    kept = store.kv_cache  # so that its place is not taken again
    store.offload([], lambda what: None)
    store.restore(set(), lambda what: None)
    assert store.kv_cache.data_ptr() != kept.data_ptr()
    assert answers(engine, work()) == expected
    assert pool.counts.invalidated == {"the cache moved": 1}


def test_the_tag_of_graphs_gives_their_memory_back_and_they_are_captured_again(gpt):
    engine = make_engine(gpt, **GRAPHS)
    expected, pool = answers(engine, work()), pool_of(engine)
    captures, num_bytes = pool.counts.captures, pool.num_bytes
    report = engine.suspend(tags=["graphs"])
    assert report.tags["graphs"].bytes_freed == num_bytes > 0 == pool.num_bytes
    engine.resume()
    assert answers(engine, work()) == expected
    assert pool.counts.captures == 2 * captures and engine.figures().graph_captures == 2 * captures


def test_a_replay_sees_weights_updated_in_place_and_replaced_ones_make_new_graphs():
    model = make_model("attention")
    engine = make_engine(model, **GRAPHS)
    first, pool = answers(engine, work()), pool_of(engine)
    captures = pool.counts.captures
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.01)
    second = answers(engine, work())
    assert second != first and second == answers(make_engine(model), work())
    assert pool.counts.captures == captures and not pool.counts.invalidated, "the same addresses, the same graphs"

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.detach() * 0.9 + 0.02)
    third = answers(engine, work())
    assert third not in (first, second) and third == answers(make_engine(model), work())
    assert pool.counts.invalidated == {"weights moved": 1} and pool.counts.captures == 2 * captures


# ---------------------------------------------------------------------- bounds and reasons


def test_no_more_graphs_than_were_asked_for_and_steps_beyond_them_run_eagerly(gpt):
    expected = answers(make_engine(gpt), work())
    engine = make_engine(gpt, num_cuda_graphs=2, cuda_graph_max_tokens=16, **MIXED)
    assert answers(engine, work()) == expected
    check_used(engine)
    pool = pool_of(engine)
    assert len(pool.index) == 2 and 1 <= len(pool.captured) <= 2
    assert pool.counts.eager["no shape so large"] > 0
    figures = engine.figures()
    assert figures.graphs == len(pool.captured) and figures.graph_bytes == pool.num_bytes > 0
    assert figures.graph_steps["replayed"] == pool.counts.replays
    assert sum(figures.graph_steps.values()) == engine.num_steps


def test_at_start_every_shape_is_captured_decode_first_and_none_beside_requests(gpt, caplog):
    requests = [([5, 6, 7 + i], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)) for i in range(5)]
    expected = answers(make_engine(gpt), requests)
    with caplog.at_level("INFO", "megatron_infer"):
        engine = make_engine(gpt, **AT_START)
    pool = pool_of(engine)
    decode = [shape for shape in pool.index.shapes if shape.is_decode_only]
    assert set(pool.captured) == set(pool.index.shapes) and len(pool.index) > len(decode) > 2
    captured = [line.split()[2] for line in caplog.messages if line.startswith("graph of ")]
    assert captured[: len(decode)] == [str(shape.num_tokens) for shape in reversed(decode)]
    assert "all at start and at a resume" in engine.kernels.table()
    assert answers(engine, requests) == expected
    assert pool.counts.captures == len(pool.index) and pool.counts.replays > 0


@pytest.mark.parametrize(
    "tags", [None, pytest.param(["kv_cache"], marks=pytest.mark.long)], ids=["all", "the cache alone"]
)
def test_what_start_captured_is_captured_again_by_the_resume_and_not_beside_requests(gpt, tags):
    expected = answers(make_engine(gpt), work())
    engine = make_engine(gpt, **AT_START)
    submit(engine, work())
    for _ in range(4):
        engine.step()
    pool = pool_of(engine)
    every = set(pool.captured)
    engine.suspend("offload", tags=tags)
    assert not pool.captured
    resumed = engine.resume()
    assert set(pool.captured) == every and pool.counts.captures == 2 * len(every)
    if tags is None:
        assert resumed.tags["graphs"].bytes_resident == pool.num_bytes > 0
    found = finish(engine)
    assert [[one.token_ids for one in found[str(i)].outputs] for i in range(len(expected))] == expected
    assert pool.counts.captures == 2 * len(every)


def test_graphs_of_start_whose_weights_moved_are_captured_together_by_the_next_step():
    model = make_model("attention")
    engine = make_engine(model, **AT_START)
    pool = pool_of(engine)
    model._apply(lambda weight: weight.detach() * 0.9)
    assert answers(engine, work()) == answers(make_engine(model), work())
    assert set(pool.captured) == set(pool.index.shapes) and pool.counts.captures == 2 * len(pool.index)


def test_without_a_gpu_or_kernels_that_can_be_captured_the_reason_is_given(gpt, monkeypatch):
    expected = answers(make_engine(gpt), work(3))
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", "torch")
    with pytest.warns(ConfigWarning, match="attention 'torch' decides on the host; every step runs eagerly"):
        engine = make_engine(gpt, **GRAPHS)
    assert inspect(engine).runner.graphs is None and answers(engine, work(3)) == expected
    assert "decides on the host" in engine.kernels.table()
    monkeypatch.delenv("MEGATRON_INFER_GRAPHS")
    with pytest.warns(ConfigWarning, match="no graphs on a CPU; every step runs eagerly"):
        make_engine(gpt, **GRAPHS)


def test_graph_options_on_a_cpu_without_graphs_are_not_ignored_silently(gpt):
    asked = {"cuda_graph_max_tokens": 24, "cuda_graph_all_prefills": True}
    message = "cuda_graph_max_tokens, cuda_graph_all_prefills act only with num_cuda_graphs, which is left at None"
    with pytest.warns(ConfigWarning, match=message):
        make_engine(gpt, **asked)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"overlap": True, "cuda_graph_mixed_prefill_count": 1},
        pytest.param({"num_cuda_graphs": 3}, marks=pytest.mark.long),
    ],
)
def test_with_all_prefills_every_step_hits_a_graph(gpt, settings):
    expected = answers(make_engine(gpt), work(9))
    asked = {"num_cuda_graphs": -1, **MIXED, **settings}
    engine = make_engine(gpt, **asked, cuda_graph_all_prefills=True, max_tokens=24)
    assert answers(engine, work(9)) == expected
    check_used(engine)
    assert not pool_of(engine).counts.eager and pool_of(engine).counts.replays == engine.stats().counters["steps"]


@pytest.mark.parametrize(
    "feature", ["prefix", *(pytest.param(n, marks=pytest.mark.long) for n in ("plain", "overlap"))]
)
def test_captured_steps_keep_what_an_mtp_layer_drafts_from(feature):
    """Prompts and every other request are in captured steps; the drafts behind them are as good as without graphs."""
    from drafters import MTP, knowing

    model = knowing(max_sequence_length=64)
    requests = [(one, replace(params, speculate=number % 2 == 0)) for number, (one, params) in enumerate(work(10))]
    eager = make_engine(model, speculative=MTP, **FEATURES[feature])
    engine = make_engine(model, speculative=MTP, **FEATURES[feature], **GRAPHS)
    for _ in range(2):
        assert answers(engine, requests) == answers(eager, requests)
    assert pool_of(engine).counts.replays > 4, pool_of(engine).counts
    for found in (engine.spec_decode_metrics(), eager.spec_decode_metrics()):
        assert found.num_accepted == found.num_drafted > 20, found
