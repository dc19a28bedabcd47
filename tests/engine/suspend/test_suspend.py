"""suspend and resume with live requests: whatever goes away and when, every answer is that of an undisturbed run."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable

import engines
import pytest
import torch
from engines import each_of, finish, make_engine, submit
from model_kinds import KINDS, RECURRENT, UNALIGNED, is_native, make_model
from suspend_case import (
    MODES,
    PAUSED,
    SITUATIONS,
    VOCAB,
    Engine,
    Suspender,
    answers,
    logprobs,
    run,
    workload,
)

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, TransitionFailed, TransitionTimeout, WrongState
from megatron_infer.memory.store import CacheStore
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.scheduler.request import VersionSpan
from megatron_infer.testing.inspect import inspect

kind = each_of(KINDS)
only_attention = pytest.mark.parametrize("kind", ["attention"], indirect=True)
"""For what does not know what a model keeps."""
each_memory = pytest.mark.parametrize("kind", ["attention", "hybrid", "mamba", "latent"], indirect=True)
"""For what knows the memory alone: keys and values, states next to them, states alone, one plane of keys."""


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_suspended_equals_uninterrupted(model, kind, situation, overlap):
    """The same bits, but for kernels that promise rounding only where something is computed in other pieces.

    Greedy or drawn in turn: every situation has both, one with overlap and one without.
    """
    drawing = ("greedy", "sampled")[([*SITUATIONS].index(situation) + overlap) % 2]
    settings, n, holds = SITUATIONS[situation]
    calm = make_engine(model, overlap=overlap, **settings)
    plain = run(calm, drawing, n)
    if situation == PAUSED and kind == "mamba":
        assert calm.stats().counters["paused"] == calm.stats().counters["evicted"] == 0
        return
    for mode in MODES:
        suspender = Suspender(holds, mode)
        engine = make_engine(model, overlap=overlap, **settings)
        done = run(engine, drawing, n, suspender)
        assert suspender.count >= (1 if situation == "idle" else 2), f"{situation} was met {suspender.count} times"
        assert answers(done) == answers(plain), mode
        if not is_native(engine) and (mode == "recompute" or overlap):
            assert torch.allclose(logprobs(done), logprobs(plain), rtol=0, atol=UNALIGNED), mode
        else:
            assert torch.equal(logprobs(done), logprobs(plain)), f"{mode}: other bits"
        assert (suspender.copied > 0) == (mode == "offload" and situation != "idle")


@each_memory
@pytest.mark.parametrize("mode", MODES)
def test_requests_added_and_aborted_while_suspended(model, mode):
    work = workload("greedy")
    plain = answers(run(make_engine(model), "greedy"))
    engine = make_engine(model, prefix="ref_zero")
    submit(engine, work[:4])
    for _ in range(5):
        engine.step()
    engine.suspend(mode)
    partial = engine.abort("1").outputs[0].token_ids
    assert partial == plain["1"][0][0][: len(partial)] and partial
    engine.add_request(*work[4], request_id="4", stream="final")
    with pytest.raises(WrongState, match=r"SUSPENDED; call resume\(\) first"):
        engine.step()
    context, sizes = inspect(engine).context, engine.sizes
    live = len(context.held_blocks()) * sizes.block_bytes + len(context.held_state_slots()) * sizes.state_slot_bytes
    copied = engine.resume().tags["kv_cache"].bytes_copied
    assert copied == (live if mode == "offload" else 0), "memory of the aborted request stays behind"
    assert answers(finish(engine)) == {name: plain[name] for name in ("0", "2", "3", "4")}


@each_memory
def test_prefix_of_a_request_that_ended_while_its_memory_was_away_is_not_found(model):
    (prompt, params), *_ = workload("greedy")
    plain = make_engine(model).generate([prompt], params)[0].outputs[0].token_ids
    engine = make_engine(model, prefix="lru")
    gone = engine.add_request(prompt, params)
    for _ in range(3):
        engine.step()
    with engine.suspended("offload"):
        engine.abort(gone)
    done = engine.generate([prompt], params)[0]
    assert done.outputs[0].token_ids == plain and done.num_cached_tokens == 0


@each_memory
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_failure_at_every_step_of_suspend_and_resume_is_undone_and_a_retry_works(model, kind, mode, overlap):
    """Fault injection: the n-th thing a transition does fails, for every n; the answers are those of a calm run."""
    plain = answers(run(make_engine(model, overlap=overlap), "greedy"))
    faults = {"suspend": 0, "resume": 0}

    def disturb(engine: Engine) -> None:
        if engine.num_steps not in (3, 8, 17):
            return
        for command, before, after in (
            ("suspend", "running", "suspended"),
            ("resume", "suspended", "running"),
        ):
            call = {"suspend": lambda: engine.suspend(mode), "resume": engine.resume}[command]
            for n in range(100):
                left = n

                def fail(what: str) -> None:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise MemoryError(f"planted at {what}")

                engine.lifecycle.observers.append(fail)
                try:
                    call()
                    break
                except TransitionFailed as error:
                    assert "planted at" in str(error) and engine.state == before
                    assert inspect(engine).store.is_released == (before == "suspended" and mode != "persist")
                    faults[command] += 1
                finally:
                    engine.lifecycle.observers.remove(fail)
            assert engine.state == after

    assert answers(run(make_engine(model, overlap=overlap), "greedy", suspend=disturb)) == plain
    pools = 2 if kind == "hybrid" else 1
    fewest = 3 * {"persist": 1, "offload": 2 + pools, "recompute": 2}[mode]  # three times each of the steps it has
    assert faults["suspend"] >= fewest and faults["resume"] >= fewest, faults


@each_memory
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_ctrl_c_at_the_moment_memory_goes_loses_nothing(model, mode, static, monkeypatch):
    """The longest single call of a suspend: an interrupt lands right behind it, before it is noted."""
    plain = answers(run(make_engine(model), "greedy"))
    engine = make_engine(model, static_kv_memory_pointers=static)
    region, calls = inspect(engine).store._region, []
    release = region.release

    def interrupted() -> None:
        release()
        calls.append(signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(region, "release", interrupted)

    def suspend(engine: Engine) -> None:
        if engine.num_steps == 4:
            with pytest.raises(KeyboardInterrupt):
                engine.suspend(mode)
            assert engine.state == "suspended" and inspect(engine).store.is_released
            engine.resume()
        elif engine.num_steps == 7:
            with pytest.raises(KeyboardInterrupt), engine.suspended(mode):
                raise AssertionError("its body is not for those who pressed Ctrl-C")
            assert engine.state == "running"

    assert answers(run(engine, "greedy", suspend=suspend)) == plain and len(calls) == 2


def test_tags_go_and_come_back_one_by_one_in_the_order_trainers_use(model, kind):
    engine = make_engine(model, kv_cache_management_mode="offload")
    prompt, params = workload("greedy")[0]
    engine.add_request(prompt, params, request_id="a", stream="final")
    for _ in range(4):
        engine.step()
    drawn = engine.output_processor.get("a").sequences[0].request.num_output
    assert len(inspect(engine).context.held_state_slots()) == (kind in RECURRENT), "one for each row, and no more"
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        engine.suspend(tags={"weight"})
    with pytest.raises(ConfigError, match="no tags"):
        engine.suspend(tags=())
    with pytest.raises(ConfigError, match="did you mean 'offload'"):
        engine.suspend(mode="offlode")
    assert engine.state == "running"
    only_graphs = engine.suspend(tags={"graphs"})
    assert (only_graphs.mode, engine.resume().mode) == ("persist", "persist"), "the cache has not moved"
    assert set(engine.suspend(tags={"kv_cache"}).tags) == {"kv_cache"}
    assert engine.kernels.packed.num_weights or not engine.kernels.packed.layout
    assert set(engine.suspend(tags={"weights", "graphs"}).tags) == {"weights", "graphs"}
    assert engine.kernels.packed.num_bytes == 0
    assert engine.suspension.tags == {"kv_cache", "weights", "graphs"}
    report = engine.resume({"weights"})
    assert report.state == "suspended" and engine.suspension.tags == {"kv_cache", "graphs"}
    assert report.mode == "offload", "the cache is away still"
    with pytest.raises(ConfigError, match="weights not suspended"):
        engine.resume({"weights"})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(-1.1)
    try:
        engine.set_weight_version(5)
        assert engine.resume(["kv_cache"]).state == "suspended"
        assert engine.resume().state == "running"
        done = finish(engine)
        assert done["a"].outputs[0].spans == [VersionSpan(0, 0, 0, 0), VersionSpan(drawn, 5, 0, 5)]
        engine.verify_weights()
        fresh = make_engine(model).generate([prompt], params)[0].outputs[0].token_ids
        assert engine.generate([prompt], params)[0].outputs[0].token_ids == fresh
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])


@each_memory
def test_a_suspend_can_go_further_but_not_back(model):
    plain = answers(run(make_engine(model), "greedy"))

    def further(engine: Engine) -> None:
        if engine.num_steps != 4:
            return
        engine.suspend("persist")
        engine.suspend("offload")
        with pytest.raises(ConfigError, match=r'as "offload" already; resume\(\) first'):
            engine.suspend("persist")
        assert inspect(engine).store.host_bytes() > 0
        report = engine.suspend("recompute")
        assert report.tags.get("kv_cache") is not None and inspect(engine).store.host_bytes() == 0
        engine.resume()

    assert answers(run(make_engine(model), "greedy", suspend=further)) == plain


@only_attention
def test_suspended_context_resumes_whatever_its_body_does(model):
    engine = make_engine(model, kv_cache_management_mode="recompute")
    prompt, params = workload("greedy")[1]
    expected = engine.generate([prompt], params)[0].outputs[0].token_ids
    with engine.suspended() as report:
        assert report.state == engine.state == "suspended"
    assert engine.state == "running"
    with pytest.raises(KeyError), engine.suspended(mode="offload"):
        raise KeyError("training failed")
    assert engine.state == "running"
    with engine.suspended():
        engine.resume()  # by hand is fine too
    engine.lifecycle.observers.append(
        lambda what: (_ for _ in ()).throw(MemoryError("full")) if what.startswith("allocate") else None
    )
    with pytest.raises(ZeroDivisionError) as caught, engine.suspended():
        1 / 0  # noqa: B018
    assert any("resume after it failed" in note for note in caught.value.__notes__)
    assert engine.state == "suspended"
    engine.lifecycle.observers.clear()
    engine.resume()
    assert engine.generate([prompt], params)[0].outputs[0].token_ids == expected


@only_attention
def test_paused_engine_suspends_and_resumes_to_paused(model):
    engine = make_engine(model, kv_cache_management_mode="offload")
    engine.pause()
    engine.suspend()
    with pytest.raises(WrongState, match="SUSPENDED"):
        engine.unpause()
    assert engine.resume().state == "paused"
    engine.unpause()
    assert engine.state == "running"


def test_training_between_suspend_and_resume_finds_its_modules_and_is_noticed(kind):
    live = make_model(kind, vocab_size=VOCAB, seed=3).train()
    engine = make_engine(live, prefix="lru")
    prompt, params = workload("greedy")[2]
    engine.add_request(prompt, params, request_id="a", stream="final")
    for _ in range(4):
        engine.step()
    assert not live.training
    with engine.suspended("recompute"):
        assert live.training and all(module.training for module in live.modules())
        ids = torch.tensor([prompt[:8]])
        positions, mask = torch.arange(8)[None], torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        live(ids, positions, mask, labels=ids).sum().backward()
        torch.optim.SGD(live.parameters(), lr=0.05).step()
    done = finish(engine)
    spans = done["a"].outputs[0].spans
    assert [span[1:4] for span in spans] == [(0, 0, 0), (1, 1, 1)]
    assert live.training and engine.stats().weight_version == 1


@only_attention
def test_a_deadline_that_passes_leaves_the_engine_running(model):
    engine = make_engine(model)
    engine.add_request(*workload("greedy")[0])
    engine.step()
    with pytest.raises(TransitionTimeout, match="engine is RUNNING again"):
        engine.suspend("offload", timeout_s=1e-9)
    assert engine.state == "running"
    finish(engine)


@each_memory
def test_static_pointers_keep_the_addresses_and_memory_really_goes(model, kind):
    many = {"max_requests": 2000, "max_tokens": 2000} if kind == "mamba" else {}  # its buffer is states alone
    engine = make_engine(model, buffer_size_gb=0.25, static_kv_memory_pointers=True, **many)
    store = inspect(engine).store
    fill(store)
    before = addresses(store)
    report = engine.suspend("recompute")
    size = store.layout.num_bytes
    assert report.tags["kv_cache"].bytes_freed == pytest.approx(size, rel=0.01) and size > 50 << 20
    assert report.process_bytes_before - report.process_bytes_after > 0.9 * size
    engine.resume()
    assert addresses(store) == before and store.addresses_stable
    assert store.resident_bytes() < 0.01 * size
    assert answers(run(engine, "greedy")) == answers(run(make_engine(model), "greedy"))


def fill(store: CacheStore) -> None:
    """Touch every page with something that is not zero."""
    store.kv_cache.fill_(0.5)
    if store.states is not None:
        store.states.conv_SLCW.fill_(0.5)
        store.states.ssm_SLHPN.fill_(0.5)


def addresses(store: CacheStore) -> list[int]:
    states = () if store.states is None else (store.states.conv_SLCW, store.states.ssm_SLHPN)
    return [tensor.data_ptr() for tensor in (store.kv_cache, *states)]


@pytest.mark.parametrize(
    "kind",
    ["attention", "hybrid", *(pytest.param(k, marks=pytest.mark.long) for k in ("mamba", "latent"))],
    indirect=True,
)
@pytest.mark.parametrize("mode", MODES)
def test_many_cycles_do_not_grow_the_process(model, mode):
    engine, sizes = make_engine(model, kv_cache_management_mode=mode), []
    for number in range(120):
        if not engine.has_unfinished():
            for prompt, params in workload("greedy")[:4]:
                engine.add_request(prompt, params, stream="final")
        with engine.suspended() as report:
            sizes.append(report.process_bytes_after)
        if number % 2:
            engine.step()
    drift = max(sizes[-20:]) - max(sizes[40:60])
    assert drift < 4 << 20, f"{drift:,} bytes more after 120 cycles than after 50: {sizes[::20]}"


def test_offload_moves_what_is_live_and_not_the_pool(model, kind):
    many = {"max_requests": 2000, "max_tokens": 2000} if kind == "mamba" else {}
    engine = make_engine(model, buffer_size_gb=0.25, prefix="lru", **many)
    context, sizes, store = inspect(engine).context, engine.sizes, inspect(engine).store
    fill(store)
    run(engine, "greedy")  # leaves cached blocks behind, and states
    assert context.pool.num_cached > 0
    for prompt, params in workload("greedy")[:4]:
        engine.add_request(prompt, params, stream="final")
    for _ in range(3):
        engine.step()
    blocks, states = context.held_blocks(), context.held_state_slots()
    report = engine.suspend("offload").tags["kv_cache"]
    assert report.bytes_copied == len(blocks) * sizes.block_bytes + len(states) * sizes.state_slot_bytes
    assert report.bytes_freed > 0.95 * store.layout.num_bytes and store.resident_bytes() == 0
    assert context.pool.num_cached == 0, "cached blocks without their memory could be hit"
    assert (len(states) > 4) == (kind in RECURRENT), "a row each, and snapshots behind their blocks"
    assert context.held_state_slots() == states and context.held_blocks() == blocks
    assert engine.resume().tags["kv_cache"].bytes_copied == report.bytes_copied and store.host_bytes() == 0
    finish(engine)


@each_memory
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("how", ["suspend", "retract", "version"])
def test_recomputing_all_requests_after_every_step_ends_prompts_of_several_steps(model, how, overlap):
    """Each cycle or the next brings the oldest request a token, though no single step holds its prompt."""
    settings = {"max_tokens": 32, "max_requests": 4, "enable_chunked_prefill": True, "overlap": overlap}
    rng = random.Random(3)
    work = [
        ([rng.randrange(4, VOCAB) for _ in range(length)], SamplingParams(max_tokens=3, temperature=0.0, n=n))
        for length, n in ((120, 1), (5, 1), (100, 2), (33, 1))
    ]
    expected = all_tokens(engines.run(make_engine(model, **settings), work))
    engine = make_engine(model, **settings)
    submit(engine, work)
    version, finished = 0, {}
    for _ in range(60):
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        if len(finished) == len(work):
            break
        if how == "suspend":
            with engine.suspended("recompute"):
                pass
        elif how == "retract":
            engine.pause("retract")
            engine.unpause()
        else:
            version += 1
            engine.set_weight_version(version, running="recompute")
    assert len(finished) == len(work), f"{len(finished)} of {len(work)} after 60 cycles"
    assert all_tokens(finished[str(place)] for place in range(len(work))) == expected


def all_tokens(outputs: Iterable[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@each_memory
def test_a_step_takes_one_forward_unless_a_request_is_stuck(model):
    engine = make_engine(model, max_tokens=32, max_requests=4, enable_chunked_prefill=True)
    request = engine.add_request(list(range(4, 124)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    engine.step()
    engine.suspend("recompute")
    engine.resume()
    steps = [engine.num_steps]
    for _ in range(6):
        engine.step()
        steps.append(engine.num_steps)
    assert steps == list(range(1, 8)), "one requeue is no reason"
    engine.suspend("recompute")
    engine.resume()
    engine.step()
    engine.suspend("recompute")
    engine.resume()
    (output,) = engine.step()
    assert output.request_id == request and engine.num_steps == 7 + 1 + 4, "its prompt of 120 and 3 tokens, at once"
    engine.abort(request)
