"""Faults that other engines had with recurrent states: each scenario gives right answers here, and wrong ones as soon
as what protects us is taken away.

Right is what megatron-core's full forward over the same tokens gives: the greedy token, and its logprob within 1e-4.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from model_kinds import RECURRENT, make_model
from plain_forward import full_logits, worst_error
from state_sabotage import (
    captured_at_the_end,
    change_plans,
    finish,
    forget_offloaded,
    in_rows_of,
    lie_to_scan,
    lose_copies,
    never_fresh,
    padded_with,
    without_state_copies,
)

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import StaleCache
from megatron_infer.models.adopt import adopt
from megatron_infer.models.fused_mixer import ScanWeights
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.scheduler.context.block_digest import salted
from megatron_infer.scheduler.context.copies import CopyKind
from megatron_infer.scheduler.context.state_cache import StateCache
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.testing.inspect import inspect

BLOCK = 16
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(4, 128) for _ in range(n)] for n in (50, 37, 70, 23, 61, 44)]
SIZES: dict[str, Any] = {
    "buffer_size_gb": 0.01,
    "block_size_tokens": BLOCK,
    "max_sequence_length": 160,
    "max_requests": 4,
    "max_tokens": 256,
}

both_ways = pytest.mark.parametrize("protected", [True, False], ids=["protected", "unprotected"])


@pytest.fixture(params=RECURRENT)
def kind(request) -> str:
    return request.param


@pytest.fixture
def model(kind) -> torch.nn.Module:
    return make_model(kind)


def greedy(max_tokens: int = 24, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **settings)


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(model, InferenceConfig(**(SIZES | settings)))


def cache(model: torch.nn.Module, num_snapshots: int) -> dict[str, Any]:
    slot_bytes = adopt(model).shape.state.slot_bytes
    return {
        "enable_prefix_caching": True,
        "prefix_caching_eviction_policy": "lru",
        "prefix_caching_mamba_gb": num_snapshots * slot_bytes / 2**30,
    }


def add(engine: DynamicInferenceEngine, *prompts: list[int], named: str = "old", **settings: Any) -> None:
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(**settings), request_id=f"{named}-{i}", stream="final")


def steps(engine: DynamicInferenceEngine, count: int) -> None:
    for _ in range(count):
        assert not any(output.finished for output in engine.step())


def judge(
    model: torch.nn.Module, outputs: list[RequestOutput], protected: bool, *, count: int, is_greedy: bool = True
) -> None:
    assert len(outputs) == count and not any(output.error for output in outputs)
    worst = worst_error(outputs, partial(full_logits, model), greedy=is_greedy)
    assert worst < 1e-4 if protected else worst > 1e-2


def change_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(-0.8)


# ---------------------------------------------------------------------- rows that change hands


@both_ways
def test_evicted_request_does_not_resume_on_what_its_row_or_anothers_held(model, protected):
    engine = make_engine(model, preemption_mode="recompute")
    if not protected:
        lie_to_scan(engine, never_fresh)
    add(engine, *PROMPTS[:3])
    steps(engine, 8)
    live = inspect(engine).scheduler.admitted_requests.decoding
    rows = {request: request.lease.row for request in live}
    for victim in list(live)[:2]:
        inspect(engine).scheduler.preemption.evict(victim)
    steps(engine, 1)
    assert {request.lease.row for request in rows} == set(rows.values())
    assert [request.lease.row for request in rows] != list(rows.values()), "everyone is where it was"
    judge(model, finish(engine), protected, count=3)


@both_ways
def test_swapped_request_comes_back_with_its_own_state(protected):
    model = make_model("hybrid")
    engine = make_engine(model, preemption_mode="swap", swap_buffer_size_gb=0.01)
    add(engine, *PROMPTS[:3])
    steps(engine, 8)
    for victim in list(inspect(engine).scheduler.admitted_requests.decoding)[:2]:
        inspect(engine).scheduler.preemption.evict(victim)
    assert engine.stats().counters["swapped_out"] == 2
    if not protected:
        lose_copies(engine, CopyKind.STATE_IN)
    outputs = finish(engine)
    assert engine.stats().counters["swapped_in"] == 2
    judge(model, outputs, protected, count=3)


@both_ways
def test_newcomer_in_a_row_whose_last_step_was_in_flight_starts_from_nothing(model, protected):
    """With overlap a request ends by a stop token while a step of it runs; that step writes its state once more."""
    answers = make_engine(model).generate(PROMPTS[:2], greedy())
    stops = [output.outputs[0].token_ids[5] for output in answers]
    engine = make_engine(model, overlap=True, max_requests=2)
    if not protected:
        lie_to_scan(engine, never_fresh)
    rows: dict[str, int] = {}
    in_flight_at_end = []
    admitted_requests = inspect(engine).scheduler.admitted_requests
    finish_in_set = admitted_requests.finish

    def seen(request: Any, *args: Any) -> None:
        rows[request.id], before = request.lease.row, request.in_flight
        finish_in_set(request, *args)
        in_flight_at_end.append(before)

    admitted_requests.finish = seen
    for i, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(prompt, greedy(stop_token_ids=[stops[i]]), request_id=f"old-{i}", stream="final")
    add(engine, *PROMPTS[2:], named="new")
    judge(model, finish(engine, keep="new"), protected, count=4)
    assert in_flight_at_end[:2] == [1, 1], "no step of theirs was in flight"
    assert {rows["old-0"], rows["old-1"]} == {rows["new-0"], rows["new-1"]}


@both_ways
def test_padding_rows_do_not_reach_a_live_state(model, protected):
    """Rows that a step of fixed size is filled up with compute in the dummy slot, all of them."""
    engine = make_engine(model, enable_chunked_prefill=True, max_tokens=40)
    lie_to_scan(engine, padded_with(engine.sizes.max_requests if protected else 0))
    add(engine, *PROMPTS[:4])
    judge(model, finish(engine), protected, count=4)


def test_no_slot_is_read_or_written_but_by_its_holder(model):
    """Before each step everything that nobody holds is made NaN, the dummy too; afterwards it is NaN still."""
    settings = cache(model, 6) | {"enable_chunked_prefill": True, "max_tokens": 24, "check_invariants": True}
    engine = make_engine(model, **settings)
    context, store = inspect(engine).context, inspect(engine).store
    every = set(range(engine.sizes.num_state_slots))
    forward = inspect(engine).runner.forward

    def poisoned(plan: Any, *args: Any) -> Any:
        kept = {slot for slot in every if slot > context.num_rows} - set(context.states.slots._free)
        free = sorted(every - set(context._leases) - kept)
        store.write_states(free, torch.full((len(free), store.layout.state.slot_bytes), 0xFF, dtype=torch.uint8))
        flight = forward(plan, *args)
        assert store.read_states(free).eq(0xFF).all(), "a slot was written that nobody holds"
        return flight

    inspect(engine).runner.forward = poisoned
    stem = PROMPTS[4][:40]
    add(engine, *(stem + prompt for prompt in PROMPTS[:4]), max_tokens=12)
    outputs = finish(engine)
    outputs += engine.generate([stem + prompt for prompt in PROMPTS[1:4]], greedy(12))
    assert engine.stats().counters["states_loaded"] > 3
    judge(model, outputs, True, count=7)


def test_requests_that_end_anywhere_leave_no_slot_behind(model):
    """Aborted with a state taken and not yet named, between chunks, while decoding with overlap, as a group."""
    settings = {"enable_chunked_prefill": True, "max_tokens": 24, "overlap": True, "check_invariants": True}
    engine = make_engine(model, **settings, **cache(model, 3))
    for num_steps in range(8):
        add(engine, PROMPTS[2], PROMPTS[4], named=f"alone{num_steps}")
        engine.add_request(PROMPTS[0], greedy(n=2), request_id=f"group{num_steps}")
        steps(engine, num_steps)
        for name in (f"alone{num_steps}-0", f"alone{num_steps}-1", f"group{num_steps}"):
            engine.abort(name)
        engine.step()
    context = inspect(engine).context
    context.check()
    assert not engine.has_unfinished() and not context.held_state_slots()
    assert context.num_free_rows == SIZES["max_requests"]
    assert len(context.states.slots._free) + context.states.slots.num_cached == 3


@both_ways
@pytest.mark.parametrize("fault", ["not copied", "shared"])
def test_siblings_have_states_of_their_own(model, fault, protected):
    engine = make_engine(model)
    if not protected and fault == "not copied":
        change_plans(engine, without_state_copies)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, logprobs=0)
    engine.add_request(PROMPTS[0], params, stream="final")
    engine.step()
    rows = [request.lease.row for request in inspect(engine).scheduler.admitted_requests.decoding]
    assert len(set(rows)) == 3
    states = inspect(engine).store.read_states(rows)
    if not protected and fault == "shared":
        lie_to_scan(engine, in_rows_of(dict.fromkeys(rows, rows[0])))
    outputs = finish(engine)
    assert len({tuple(one.token_ids) for one in outputs[0].outputs}) == 3
    judge(model, outputs, protected, count=1, is_greedy=False)
    assert protected == bool((states == states[0]).all()) or fault == "shared"


# ---------------------------------------------------------------------- states of the prefix cache


@both_ways
@pytest.mark.parametrize("fault", ["too far", "no state"])
def test_a_hit_ends_at_the_newest_state_though_more_blocks_match(model, fault, protected, monkeypatch):
    """One slot: it keeps the state behind the prompt's last whole block, the blocks of the answer have none."""
    engine = make_engine(model, **cache(model, 1))
    first = engine.generate(PROMPTS[1], greedy(48))[0]
    if not protected:
        stop_at = StateCache._stop_at_state

        def no_stop(self: Any, lease: Any, blocks: list[int], *args: Any, **places: Any) -> None:
            found, digests = list(blocks), list(lease.digests)
            stop_at(self, lease, blocks, *args, **places)
            blocks[:], lease.digests[:] = found, digests
            if fault == "no state":
                self._by_row[lease.row].load_from = None

        monkeypatch.setattr(StateCache, "_stop_at_state", no_stop)
    again = PROMPTS[1] + first.outputs[0].token_ids[:35] + [7, 8, 9]
    outputs = engine.generate(again, greedy())
    assert outputs[0].num_cached_tokens == (32 if protected else 64)
    judge(model, outputs, protected, count=1)


@both_ways
def test_a_state_is_kept_only_where_the_slice_gets_to(model, protected, monkeypatch):
    """A chunk of 40 ends before the position that is wanted, 64; the state at its end must not pass for that."""
    engine = make_engine(model, enable_chunked_prefill=True, max_tokens=40, **cache(model, 4))
    if not protected:

        def too_early(self: Any, lease: Any, tokens: list[int], start: int, end: int) -> list[tuple[int, int]]:
            kept, states = [], self._by_row[lease.row]
            for position in sorted(states.keep_at - set(states.pending)):
                if start < position and position > len(lease.digests) * self._block_size:
                    slot = self.slots.take(evict=True)
                    states.pending[position] = slot
                    kept.append((min(position, end), slot))
            return kept

        monkeypatch.setattr(StateCache, "keep", too_early)
    prompt = PROMPTS[2]
    engine.generate(prompt, greedy(4))
    outputs = engine.generate(prompt, greedy())
    assert outputs[0].num_cached_tokens == 64
    judge(model, outputs, protected, count=1)


@both_ways
def test_states_inside_of_slices_are_those_of_their_positions(model, protected):
    """Chunks that end nowhere near a block, so that every state is taken in the middle of one."""
    settings = {"enable_chunked_prefill": True, "max_tokens": 37} | cache(model, 8)
    engine = make_engine(model, **settings)
    captured = []

    def change(plan: Any) -> Any:
        captured.extend(position - piece.start for piece in plan.prefill for position, _ in piece.captures)
        return plan if protected else captured_at_the_end(plan)

    change_plans(engine, change)
    engine.generate([PROMPTS[i] for i in (0, 2, 4)], greedy(2))
    assert len(captured) == 3 and any(n % BLOCK for n in captured)
    outputs = engine.generate([PROMPTS[i][:n] + PROMPTS[3] for i, n in ((0, 48), (2, 64), (4, 48))], greedy())
    assert [output.num_cached_tokens for output in outputs] == [48, 64, 48]
    judge(model, outputs, protected, count=3)


@both_ways
@pytest.mark.parametrize("write", ["announced", "silent"])
def test_states_of_former_weights_are_not_gone_on_from(model, write, protected, monkeypatch):
    engine = make_engine(model, **cache(model, 4))
    if not protected:
        monkeypatch.setattr(WeightManager, "root", b"always the same")
        engine.reset_prefix_cache()
        inspect(engine).scheduler.root = b"always the same"
    engine.generate(PROMPTS[2], greedy(4))
    change_weights(model)
    if write == "announced":
        engine.set_weight_version(7)
    outputs = engine.generate(PROMPTS[2], greedy())
    assert outputs[0].num_cached_tokens == (0 if protected else 64)
    assert outputs[0].outputs[0].spans[-1].policy_version == (7 if write == "announced" else 1)
    judge(model, outputs, protected, count=1)


@both_ways
def test_a_prompt_that_an_update_fell_into_leaves_nothing_to_others(model, protected, monkeypatch):
    """Its state mixes two sets of weights."""
    if not protected:
        set_root = Scheduler.set_root

        def publish_on(self: Any, root: bytes, *, version: int) -> None:
            set_root(self, root, version=version)
            self.context.forget_all()
            for request in self.admitted_requests.live():
                request.lease.root, request.lease.digests = salted(root, request.cache.salt), []
                request.lease.publishes = True

        monkeypatch.setattr(Scheduler, "set_root", publish_on)
    engine = make_engine(model, enable_chunked_prefill=True, max_tokens=60, **cache(model, 4))
    add(engine, PROMPTS[2], max_tokens=4)
    steps(engine, 1)
    assert inspect(engine).scheduler.admitted_requests.prefilling[0].scheduled == 60
    change_weights(model)
    finish(engine)
    outputs = engine.generate(PROMPTS[2], greedy())
    assert outputs[0].num_cached_tokens == (0 if protected else 64)
    judge(model, outputs, protected, count=1)


# ---------------------------------------------------------------------- suspends


def scramble(engine: DynamicInferenceEngine) -> None:
    """Give every state slot the content of memory that somebody else had."""
    store, count = inspect(engine).store, engine.sizes.num_state_slots
    store.write_states(range(count), torch.randint(0, 63, (count, store.layout.state.slot_bytes), dtype=torch.uint8))


@both_ways
@pytest.mark.parametrize("lost", ["rows", "snapshots"])
def test_states_go_to_the_host_and_come_back_with_a_suspend(model, lost, protected):
    engine = make_engine(model, **cache(model, 6))
    stem = PROMPTS[2][:48]
    add(engine, [*stem, 9, 9], PROMPTS[0])
    steps(engine, 6)
    num_rows = engine.sizes.max_requests
    if not protected:
        forget_offloaded(engine, lambda slot: (slot > num_rows) == (lost == "snapshots"))
    engine.suspend("offload")
    engine.resume()
    outputs = finish(engine)
    if lost == "snapshots":
        outputs = engine.generate([[*stem, 1, 2, 3], [*stem, 3, 2, 1]], greedy())
        assert [output.num_cached_tokens for output in outputs] == [48, 48]
    judge(model, outputs, protected, count=2)


@both_ways
def test_states_of_swapped_requests_outlive_a_suspend(protected):
    model = make_model("hybrid")
    engine = make_engine(model, preemption_mode="swap", swap_buffer_size_gb=0.01)
    add(engine, *PROMPTS[:3])
    steps(engine, 6)
    for victim in list(inspect(engine).scheduler.admitted_requests.decoding)[:2]:
        inspect(engine).scheduler.preemption.evict(victim)
    if not protected:
        inspect(engine).executor.finish_copies = lambda: (
            None
        )  # then they are carried out on memory that came back empty
    engine.suspend("offload")
    engine.resume()
    judge(model, finish(engine), protected, count=3)


@both_ways
@pytest.mark.parametrize("fault", ["rows", "snapshots"])
def test_nothing_goes_on_from_states_that_a_suspend_dropped(model, fault, protected):
    engine = make_engine(model, **cache(model, 6))
    if not protected:
        if fault == "rows":
            lie_to_scan(engine, never_fresh)
        else:
            inspect(engine).context.forget_all = inspect(engine).context.forget_free = lambda: 0
    add(engine, *PROMPTS[:2], max_tokens=4)
    finish(engine)
    add(engine, *PROMPTS[:2])
    steps(engine, 6)
    engine.suspend("recompute")
    engine.resume()
    scramble(engine)
    judge(model, finish(engine), protected, count=2)


# ---------------------------------------------------------------------- weights


@both_ways
@pytest.mark.parametrize("dtype, name", [(torch.float32, "A_log"), (torch.bfloat16, "dt_bias")], ids=str)
@pytest.mark.parametrize("write", ["while running", "while idle", "into a copy"])
def test_scans_follow_their_parameters(kind, dtype, name, write, protected, monkeypatch):
    """The fault behind a probability ratio of 1e12: decode kept an exp(A_log) of the weights before."""
    model = make_model(kind, params_dtype=dtype)
    engine = make_engine(model)
    if write != "into a copy":  # which has never computed anything
        engine.generate(PROMPTS[0], greedy(4))
    if not protected:
        monkeypatch.setattr(ScanWeights, "refresh", lambda self: None)
    if write == "while running":
        add(engine, PROMPTS[1])
        steps(engine, 3)
    with torch.no_grad():
        if write == "into a copy":
            trained = make_model(kind, params_dtype=dtype, seed=4)
            for mine, theirs in zip(model.parameters(), trained.parameters(), strict=True):
                mine.copy_(theirs)
        else:
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(name):
                    parameter.sub_(2.5)
    add(engine, *PROMPTS[2:4], named="new")
    outputs = finish(engine, keep="new")
    monkeypatch.undo()
    expected = make_engine(make_like(model, kind, dtype)).generate(PROMPTS[2:4], greedy())
    same = [output.outputs[0].token_ids for output in outputs] == [one.outputs[0].token_ids for one in expected]
    assert same == protected
    if dtype == torch.float32:
        judge(model, outputs, protected, count=2)
    if protected:
        engine.verify_weights()
    else:
        with pytest.raises(StaleCache, match=r"scan weights \(decoder\.layers\.0\.(mixer|self_attention)\."):
            engine.verify_weights()


def make_like(model: torch.nn.Module, kind: str, dtype: torch.dtype) -> torch.nn.Module:
    """A fresh model with the weights that this one has now."""
    fresh = make_model(kind, params_dtype=dtype, seed=9)
    fresh.load_state_dict(model.state_dict())
    return fresh
