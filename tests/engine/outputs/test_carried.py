"""What a sample carries is right, costs its neighbours nothing, and survives all that an engine does to a request."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
from carried_case import ALL, NO_ROUTING, make_engine, make_model, told, workload
from engines import finish, logprobs_of, run, submit, suspending

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import RequestError
from megatron_infer.testing.inspect import inspect

KINDS = ("dense", "experts", "hybrid")
FEATURES = {
    "chunked": {"enable_chunked_prefill": True, "max_tokens": 24},
    "prefix": {"prefix": "lru"},
    "overlap": {"overlap": True},
    "few rows": {"max_requests": 3},
    "evicting": {"pool_blocks": 12},
    "pausing": {"pool_blocks": 14, "paused_blocks": 7},
    "swapping": {"pool_blocks": 12, "preemption_mode": "swap", "swap_buffer_size_gb": 0.02},
    "ugly": {"pool_blocks": 12, "overlap": True, "enable_chunked_prefill": True, "max_tokens": 24, "prefix": "lru"},
    "uglier": {
        "pool_blocks": 14,
        "paused_blocks": 7,
        "overlap": True,
        "enable_chunked_prefill": True,
        "max_tokens": 40,
        "preemption_mode": "swap",
        "swap_buffer_size_gb": 0.02,
    },
}
ONLY = {"dense": ("ugly", "uglier"), "hybrid": ("prefix", "swapping", "ugly")}
"""Models without a new thing to go wrong are in the company of the worst alone."""
TOLERANCE = 2e-5
"""Of log probabilities computed in other pieces by scans that round: see test_scan_tolerance."""


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@functools.cache  # beside tests that choose their kinds themselves, a fixture would be made anew for each
def model_of(kind: str) -> torch.nn.Module:
    return make_model(kind)


@functools.cache
def answers_alone(kind: str) -> list[dict]:
    engine = make_engine(model_of(kind))
    return [told(engine.generate([p], [q])[0].outputs[0]) for p, q in workload(asked_of(kind))]


@pytest.fixture
def model(kind) -> torch.nn.Module:
    return model_of(kind)


def with_kinds(names, only) -> list:
    """(kind, name): experts with all names, the others with those of `only`."""
    return [(kind, name) for kind in KINDS for name in names if kind == "experts" or name in only.get(kind, ())]


def asked_of(kind: str) -> dict[str, bool]:
    return NO_ROUTING if kind == "dense" else ALL


@pytest.fixture
def alone(kind) -> list[dict]:
    """One request at a time, nothing switched on."""
    return copy.deepcopy(answers_alone(kind))


def same(got: dict, want: dict, *, exact: bool) -> None:
    for name in ("tokens", "support", "routing"):
        assert got[name] == want[name], name
    for name in ("logprobs", "raw", "processed"):
        if exact or want[name] is None:
            assert got[name] == want[name], name
        else:
            assert got[name] == pytest.approx(want[name], abs=TOLERANCE), name


def test_asking_changes_no_token_and_no_logprob(model, kind, alone):
    plain = [told(output.outputs[0]) for output in run(make_engine(model), workload({}))]
    assert [one["tokens"] for one in plain] == [one["tokens"] for one in alone]
    for one, asked in zip(plain, alone, strict=True):
        assert one["logprobs"] == pytest.approx(asked["logprobs"], abs=0 if kind != "hybrid" else TOLERANCE)
        assert one["raw"] is one["processed"] is one["support"] is one["routing"] is None


@pytest.mark.parametrize(("kind", "feature"), with_kinds(FEATURES, ONLY), indirect=["kind"])
def test_what_is_carried_does_not_depend_on_the_schedule(model, kind, alone, feature):
    engine = make_engine(model, **FEATURES[feature])
    for output, want in zip(run(engine, workload(asked_of(kind))), alone, strict=True):
        same(told(output.outputs[0]), want, exact=kind != "hybrid")
    counters = engine.stats().counters
    if feature in ("evicting", "ugly"):
        assert counters["evicted"], "nothing was evicted"
    if feature == "swapping":
        assert counters["swapped_in"], "nothing was swapped"


def test_values_are_those_of_their_definitions(model, kind):
    for prompt, params in workload(asked_of(kind)):
        if not params.return_support:
            continue
        (one,) = make_engine(model).generate([prompt], [params])[0].outputs
        ids = prompt + one.token_ids
        with torch.inference_mode():
            positions = torch.arange(len(ids))[None]
            logits = model(torch.tensor([ids]), positions, None)[0, len(prompt) - 1 : -1].float()
        raw = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert one.raw_logprobs == pytest.approx(raw.tolist(), abs=TOLERANCE)
        assert one.raw_logprobs == logprobs_of(one)
        if params.greedy:
            assert one.processed_logprobs == [0.0] * len(one.token_ids)
            assert [one.support.ids_at(i).tolist() for i in range(len(one.support))] == [[t] for t in one.token_ids]
        elif params.logit_bias is None and params.repetition_penalty == 1.0:
            for i, token in enumerate(one.token_ids):
                own = one.support.renormalise(logits[i], i, temperature=params.temperature)[token].item()
                assert own == pytest.approx(one.processed_logprobs[i], abs=TOLERANCE)
                assert one.support.mask(i)[token] and one.support.is_whole(i) == (
                    params.top_p == 1 and not params.top_k
                )


@pytest.mark.parametrize("kind", ["experts", "hybrid"], indirect=True)
def test_routing_is_what_the_routers_of_the_training_forward_choose(model, kind):
    prompt, params = workload(ALL)[2]
    (one,) = make_engine(model).generate([prompt], [params])[0].outputs
    seen, hooks = [], []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            hooks.append(module.register_forward_hook(lambda _, __, out: seen.append(out[1])))
    ids = prompt + one.token_ids
    with torch.inference_mode():
        model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2 and one.routing.dtype == np.uint8 and one.routing.shape == (len(ids) - 1, 2, 2)
    for layer, chosen in enumerate(seen):
        want = [row.nonzero().flatten().tolist() for row in chosen[:-1]]
        assert one.routing[:, layer].tolist() == want


def test_samples_of_one_prompt_share_its_routing_and_carry_their_own(model, kind):
    for settings in ({}, FEATURES["ugly"]):
        work = workload(asked_of(kind), n=3)[1:4]
        for output, (prompt, _) in zip(run(make_engine(model, **settings), work), work, strict=True):
            for one in output.outputs:
                assert len(one.raw_logprobs) == len(one.processed_logprobs) == len(one.support) == len(one.token_ids)
                if kind != "dense":
                    assert len(one.routing) == len(prompt) + len(one.token_ids) - 1
                    assert (one.routing[: len(prompt)] == output.outputs[0].routing[: len(prompt)]).all()


@pytest.mark.parametrize(
    ("kind", "mode"), with_kinds(["cumulative", "delta", "final"], {"dense": ["delta"]}), indirect=["kind"]
)
def test_each_stream_mode_hands_out_what_belongs_to_its_tokens(model, kind, alone, mode):
    engine = make_engine(model, overlap=True)
    place = {}
    for i, (prompt, params) in enumerate(workload(asked_of(kind))):
        place[engine.add_request(prompt, params, stream=mode)] = i
    kept: dict[int, dict] = {}
    while engine.has_unfinished():
        for output in engine.step():
            one, i = told(output.outputs[0]), place[output.request_id]
            assert (output.outputs[0].routing is not None) == (output.finished and alone[i]["routing"] is not None)
            for name in ("raw", "processed", "support"):
                assert one[name] is None or len(one[name]) == len(one["tokens"])
            before = kept.get(i)
            if mode != "delta" or before is None:
                kept[i] = one
            else:
                for name in ("tokens", "logprobs", "raw", "processed", "support"):
                    before[name] = None if one[name] is None else before[name] + one[name]
                before["routing"] = one["routing"]
    for i, want in enumerate(alone):
        same(kept[i], want, exact=kind != "hybrid")


def test_an_aborted_sample_keeps_what_its_tokens_carried(model, kind, alone):
    prompt, params = workload(asked_of(kind))[0]
    engine = make_engine(model, overlap=True)
    name = engine.add_request(prompt, params)
    for _ in range(6):
        engine.step()
    one = engine.abort(name).outputs[0]
    count = len(one.token_ids)
    assert 0 < count < len(alone[0]["tokens"]) and one.finish_reason == "abort"
    assert one.raw_logprobs == pytest.approx(alone[0]["raw"][:count], abs=TOLERANCE)
    assert one.processed_logprobs == [0.0] * count and len(one.support) == count
    if kind != "dense":
        assert one.routing.tolist() == alone[0]["routing"][: len(prompt) + count - 1]
    waiting = engine.add_request(prompt, params)
    one = engine.abort(waiting).outputs[0]
    assert one.raw_logprobs == [] and len(one.support) == 0 and (one.routing is None) == (kind == "dense")


@pytest.mark.parametrize(
    ("kind", "mode"), with_kinds(["persist", "offload", "recompute"], {"hybrid": ["recompute"]}), indirect=["kind"]
)
def test_a_suspend_leaves_what_is_carried_as_it_was(model, kind, alone, mode):
    engine = make_engine(model, kv_cache_management_mode=mode, overlap=True, enable_chunked_prefill=True, max_tokens=40)
    outputs = run(engine, workload(asked_of(kind)), suspending(mode, *range(5, 500, 5)))
    for output, want in zip(outputs, alone, strict=True):
        same(told(output.outputs[0]), want, exact=kind != "hybrid")


@pytest.mark.parametrize(("kind", "kv"), with_kinds([False, True], {"hybrid": [True]}), indirect=["kind"])
def test_saved_requests_keep_what_they_carry(model, kind, alone, tmp_path, kv):
    engine = make_engine(model)
    work = workload(asked_of(kind))
    group = dataclasses.replace(work[2][1], n=2)
    want = told(make_engine(model).generate([work[2][0]], [group])[0].outputs[1])
    submit(engine, work)
    engine.add_request(work[2][0], group, request_id="group", stream="final")
    outputs = {}
    for _ in range(10):
        outputs |= {output.request_id: output for output in engine.step()}
    engine.save_requests(tmp_path / "saved", kv=kv)
    other = make_engine(make_model(kind), overlap=True)
    outputs |= {output.request_id: output for output in other.load_requests(tmp_path / "saved").finished}
    outputs |= finish(other)
    for i, expected in enumerate(alone):
        same(told(outputs[str(i)].outputs[0]), expected, exact=kind != "hybrid")
    same(told(outputs["group"].outputs[1]), want, exact=kind != "hybrid")


@pytest.mark.parametrize("kind", ["experts"], indirect=True)
def test_finished_outputs_come_back_from_a_kept_file_with_all_they_carried(model, kind, alone, tmp_path):
    engine = make_engine(model)
    engine.keep_snapshots(tmp_path / "kept", every_steps=3)
    for i, (prompt, params) in enumerate(workload(asked_of(kind))[:4]):
        engine.add_request(prompt, params, request_id=str(i), stream="delta")
    finish(engine)
    finished = {output.request_id: output for output in make_engine(model).load_requests(tmp_path / "kept").finished}
    for i, expected in enumerate(alone[:4]):
        same(told(finished[str(i)].outputs[0]), expected, exact=kind != "hybrid")


def test_routing_takes_no_cached_prefix_and_leaves_one_for_others():
    model = make_model("experts")
    engine = make_engine(model, prefix="lru")
    prompt = list(range(10, 60))
    asking, plain = (SamplingParams(max_tokens=4, temperature=0, return_routing=on) for on in (True, False))
    cached = [engine.generate([prompt], [params])[0].num_cached_tokens for params in (asking, asking, plain, asking)]
    assert cached == [0, 0, 48, 0]
    assert len(engine.generate([prompt], [asking])[0].outputs[0].routing) == 53


def test_more_than_256_experts_are_told_in_two_bytes():
    model = make_model(
        "experts", num_moe_experts=300, moe_router_topk=3, moe_ffn_hidden_size=4, moe_router_dtype="fp32"
    )
    params = SamplingParams(max_tokens=20, return_routing=True)
    one = make_engine(model).generate([[1, 2, 3, 4]], [params])[0].outputs[0]
    assert one.routing.dtype == np.uint16 and one.routing.shape == (23, 2, 3)
    assert one.routing.max() > 255 and (np.diff(one.routing.astype(int), axis=-1) > 0).all()


def test_routing_of_a_model_without_experts_is_refused():
    with pytest.raises(RequestError, match="return_routing: the model has no mixture-of-experts layers"):
        make_engine(make_model("dense")).add_request([1, 2], SamplingParams(return_routing=True))


def test_a_step_in_which_nobody_asks_makes_no_room_for_routing(monkeypatch):
    engine = make_engine(make_model("experts"))
    rooms = []
    builder = inspect(engine).runner.builder
    build = builder.build
    monkeypatch.setattr(builder, "build", lambda *args, **shape: rooms.append(build(*args, **shape)) or rooms[-1])
    prompt = list(range(4, 20))
    engine.generate([prompt], [SamplingParams(max_tokens=4, return_routing=True)])
    assert all(batch.routing_TLK is not None for batch in rooms)
    rooms.clear()
    engine.generate([prompt, prompt], SamplingParams(max_tokens=4))
    assert rooms and all(batch.routing_TLK is None for batch in rooms)
