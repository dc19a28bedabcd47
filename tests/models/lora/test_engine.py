"""Adapters in an engine: what they compute, when they wait for a slot, how they are replaced and forgotten."""

from __future__ import annotations

import sys
import threading

import engines
import pytest
import torch
from engines import finish, logprobs_of, suspending
from lora_cases import merged, random_adapter
from model_kinds import LATENT
from rehearsal import DRAFTS, check_drafted, rehearse

from megatron_infer import InferenceConfig, LoRAConfig, SamplingParams
from megatron_infer.engine.adapters import MAX_CHANGES
from megatron_infer.errors import AdapterInUse, ConfigError, ModelError, SnapshotError, UnknownAdapter
from megatron_infer.models.lora.adapter import Adapter, LoRAPair
from megatron_infer.scheduler.context.adapter_slots import MAX_FORGOTTEN, AdapterSlots
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

MODELS = {
    "gqa": lambda **how: tiny_gpt(**how),
    "hybrid": lambda **how: tiny_hybrid("M*-M", **how),
    "latent": lambda **how: tiny_gpt(**LATENT, **how),
    "experts": lambda **how: tiny_hybrid("M*-ME", moe_shared_expert_intermediate_size=32, **how),
    "gelu with biases": lambda **how: tiny_gpt(
        gated_linear_unit=False, activation_func=torch.nn.functional.gelu, add_bias_linear=True, **how
    ),
}
PROMPT = [7 * i % 121 + 3 for i in range(45)]
NAMES = [f"a{i}" for i in range(8)]


def engine_of(model, *, max_loras=3, max_rank=64, **settings):
    return engines.make_engine(model, lora=LoRAConfig(max_loras=max_loras, max_rank=max_rank), **settings)


def greedy(adapter=None, *, max_tokens=8, **how):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, adapter=adapter, **how)


def account(output):
    """Tokens, and the log probability of each."""
    one = output.outputs[0]
    return one.token_ids, logprobs_of(one)


@pytest.fixture(scope="module")
def model():
    return tiny_gpt()


@pytest.fixture(scope="module")
def adapters(model):
    return {name: random_adapter(model, name, rank=1 + 2 * i, seed=i, scale=0.7) for i, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def alone(model, adapters):
    """Tokens and log probabilities of each adapter's request, one at a time; None: the base model's."""
    engine = engine_of(model, max_loras=1)
    for adapter in adapters.values():
        engine.load_adapter(adapter.name, adapter)
    return {name: account(engine.generate([PROMPT], greedy(name, logprobs=0))[0]) for name in (None, *NAMES)}


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_computes_what_the_merged_model_does(kind):
    make = MODELS[kind]
    model = make()
    adapters = [random_adapter(model, f"r{rank}", rank=rank, seed=rank, scale=0.25) for rank in (1, 7, 64)]
    params = {"prompt_logprobs": 0, "logprobs": 0}
    engine = engine_of(model)
    for adapter in adapters:
        engine.load_adapter(adapter.name, adapter)
    outputs = engine.generate([PROMPT] * 4, [greedy(name, **params) for name in (None, "r1", "r7", "r64")])
    for adapter, output in zip((None, *adapters), outputs, strict=True):
        whole = make() if adapter is None else merged(make(), adapter)
        want = engines.make_engine(whole).generate([PROMPT], greedy(**params))[0]
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        got_scores, want_scores = (
            torch.tensor(
                [entry[token].logprob for entry, token in zip(one.prompt_logprobs[1:], PROMPT[1:], strict=True)]
            )
            for one in (output, want)
        )
        assert (got_scores - want_scores).abs().max() < (1e-5 if adapter else 1e-9), (kind, adapter)


CACHED = {"prefix": "lru"}
NUM_BLOCKS = 10
"""Of a pool that three requests fill before they end."""
PAUSES = {"pool_blocks": NUM_BLOCKS, "paused_blocks": 4, "max_requests": 8}
SWAPS = {"pool_blocks": NUM_BLOCKS, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01}
CHUNKS = {"enable_chunked_prefill": True, "max_tokens": 24}
SCHEDULES = {
    "together": {},
    "chunks": CHUNKS,
    "prefixes": CACHED,
    "few rows": {"max_requests": 4, **CACHED},
    "in flight": {"overlap": True, "max_steps_in_flight": 2},
    "one slot": {"max_loras": 1, **CACHED},
    "tiny pool": PAUSES,
    "swapped": {**SWAPS, "max_requests": 8},
    "phased": {"batching": "phased", "min_batch_size_tg": 2, "max_queue_size_tg": 4},
    "drafts": DRAFTS,
    "drafts, prefixes, chunks, one slot": {**DRAFTS, **CACHED, **CHUNKS, "max_tokens": 40, "max_loras": 1},
    "chunks, prefixes, in flight": {**CHUNKS, **CACHED, "max_steps_in_flight": 3},
    "prefixes, swapped, few rows": {**SWAPS, "max_requests": 4, **CACHED},
    "tiny pool, chunks, in flight, one slot": {**PAUSES, **CHUNKS, "overlap": True, "max_loras": 1},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_request_has_the_bits_that_it_has_alone(schedule, model, adapters, alone):
    """Base and 8 adapters in one batch, again where prefixes are kept: 3 slots, so some wait for others to end."""
    engine = engine_of(model, **SCHEDULES[schedule])
    for adapter in adapters.values():
        engine.load_adapter(adapter.name, adapter)
    names = [None, *NAMES, *reversed(NAMES), None]
    rehearse(engine, [PROMPT] * len(alone), [tokens for tokens, _ in alone.values()])
    for _ in range(2 if "prefix" in SCHEDULES[schedule] else 1):
        outputs = engine.generate([PROMPT] * len(names), [greedy(name, logprobs=0) for name in names])
        for name, output in zip(names, outputs, strict=True):
            assert account(output) == alone[name], (schedule, name)
            assert output.outputs[0].spans[0].adapter_version == (0 if name is None else 1)
    context = inspect(engine).context
    assert context.adapters.num_loads >= len(NAMES) and len(context.adapters.resident) <= 3
    counters = engine.stats().counters
    check_drafted(engine)
    if "prefix" in SCHEDULES[schedule]:
        assert counters["prefix_hits"] > 8
    if "pool_blocks" in SCHEDULES[schedule]:
        assert counters["paused"] + counters["evicted"] + counters["swapped_out"] > 0


def test_samples_that_fork_from_a_prompt_compute_with_its_adapter(model, adapters, alone):
    engine = engine_of(model, max_loras=1)
    engine.load_adapter("a0", adapters["a0"])
    outputs = engine.generate([PROMPT] * 2, [greedy(None, n=3), greedy("a0", n=3)])
    for name, output in zip((None, "a0"), outputs, strict=True):
        assert [one.token_ids for one in output.outputs] == [alone[name][0]] * 3
    assert engine.stats().counters["forked"] == 4


@pytest.mark.parametrize("mode", ("persist", "offload", "recompute", "pause"))
def test_a_suspended_request_goes_on_with_its_adapter(mode, model, adapters, alone):
    engine = engine_of(model, **CACHED)
    for name in NAMES[:3]:
        engine.load_adapter(name, adapters[name])
    for name in (None, *NAMES[:3]):
        engine.add_request(PROMPT, greedy(name, logprobs=0), request_id=str(name), stream="final")

    def pause(engine):
        if engine.num_steps in (2, 5):
            engine.pause("retract")
            engine.load_adapter("late", adapters["a7"])  # in any state
            engine.unpause()

    done = finish(engine, pause if mode == "pause" else suspending(mode, 2, 5))
    assert all(account(done[str(name)]) == alone[name] for name in (None, *NAMES[:3]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_numbers_that_are_infinite_only_in_the_dtype_of_the_product_are_refused(dtype):
    """Steps would write infinity, or raise where a slot is written: then no other request could run either."""
    model = tiny_gpt(params_dtype=dtype, bf16=dtype is torch.bfloat16)
    engine, good = engine_of(model, max_loras=1), random_adapter(model, rank=2)
    bad = {name: LoRAPair.of(pair.a, pair.b, 1e300) for name, pair in good.pairs.items()}
    cases = [Adapter("a", bad)]
    if dtype is torch.bfloat16:
        a = torch.full((2, model.config.hidden_size), torch.finfo(torch.float32).max)
        name, pair = next(iter(good.pairs.items()))
        cases.append(Adapter("a", {name: LoRAPair.of(a, pair.b, 1.0)}))
    for adapter in cases:
        with pytest.raises(ModelError, match=f"numbers that are not finite in {dtype}"):
            engine.load_adapter("a", adapter)
    assert engine.adapters() == [] and engine.generate([PROMPT], greedy(max_tokens=2))[0].error is None


def test_values_of_other_types_are_errors_of_the_config():
    with pytest.raises(ConfigError, match="adapters has the path 5, it must be a directory"):
        LoRAConfig(adapters={"a": 5})
    with pytest.raises(ConfigError, match="unknown SpeculativeConfig field '1'"):
        InferenceConfig(speculative={1: 2})


def test_no_prefix_crosses_adapters_or_their_versions(model, adapters, alone):
    engine = engine_of(model, **CACHED)
    engine.load_adapter("a", adapters["a0"])
    engine.load_adapter("b", adapters["a1"])

    def cached(name):
        return engine.generate([PROMPT], greedy(name))[0].num_cached_tokens

    assert [cached(name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [cached(name) for name in (None, "a", "b")] == [32, 32, 32]
    assert engine.load_adapter("a", adapters["a2"], replace=True).version == 2
    output = engine.generate([PROMPT], greedy("a", logprobs=0))[0]
    assert output.num_cached_tokens == 0 and account(output) == alone["a2"]
    assert output.outputs[0].spans == [(0, 0, 0, 0, 2)]
    engine.load_adapter("a", adapters["a0"], replace=True)  # blocks of the same content and name are those
    output = engine.generate([PROMPT], greedy("a", logprobs=0))[0]
    assert output.num_cached_tokens == 32 and account(output) == alone["a0"]


@pytest.mark.parametrize("running", ("keep", "recompute"))
def test_running_requests_keep_or_recompute_when_their_adapter_is_replaced(running, model, adapters, alone):
    engine = engine_of(model, **CACHED, overlap=True)
    for name in ("a0", "a1"):
        engine.load_adapter(name, adapters[name])
    for name in (None, "a0", "a1"):
        engine.add_request(PROMPT, greedy(name, max_tokens=20, logprobs=0), request_id=str(name), stream="final")
    for _ in range(6):
        engine.step()
    engine.load_adapter("a0", adapters["a2"], replace=True, running=running)
    done = finish(engine)
    for name in (None, "a1"):  # others are not affected
        tokens, logprobs = account(done[str(name)])
        assert (tokens[:8], logprobs[:8]) == alone[name] and len(done[str(name)].outputs[0].spans) == 1
    changed = done["a0"].outputs[0]
    assert [span.adapter_version for span in changed.spans] == [1, 2]
    at = changed.spans[1].first_token
    assert 0 < at < 8 and changed.token_ids[:at] == alone["a0"][0][:at]
    # what was drawn first and then recomputed with the other adapter is a prompt of that one
    engine = engine_of(model)
    engine.load_adapter("a2", adapters["a2"])
    again = engine.generate([PROMPT + changed.token_ids[:at]], greedy("a2", max_tokens=20 - at))[0]
    assert (again.outputs[0].token_ids == changed.token_ids[at:]) or running == "keep"


def test_a_request_starts_over_where_a_version_of_its_adapter_drew_nothing(model, adapters):
    """Though both replacements say "keep": its keys would be of a content that no span names."""
    engine = engine_of(model)
    engine.load_adapter("a", adapters["a0"])
    engine.add_request(PROMPT, greedy("a", max_tokens=20), stream="final")
    for _ in range(6):
        engine.step()
    for name in ("a1", "a2"):
        engine.load_adapter("a", adapters[name], replace=True, running="keep")
    (output,) = finish(engine).values()
    one = output.outputs[0]
    assert [span.adapter_version for span in one.spans] == [1, 3]
    at, fresh = one.spans[1].first_token, engine_of(model)
    fresh.load_adapter("a", adapters["a2"])
    again = fresh.generate([PROMPT + one.token_ids[:at]], greedy("a", max_tokens=20 - at))[0]
    assert 0 < at < 20 and again.outputs[0].token_ids == one.token_ids[at:]


def test_a_prompt_that_is_half_computed_starts_over_when_its_adapter_is_replaced(model, adapters, alone):
    """Its spans name the version that has drawn its tokens alone."""
    engine = engine_of(model, max_tokens=32, enable_chunked_prefill=True)
    engine.load_adapter("a", adapters["a0"])
    engine.add_request(PROMPT, greedy("a", logprobs=0))
    engine.step()
    engine.load_adapter("a", adapters["a1"], replace=True, running="keep")
    (output,) = finish(engine).values()
    assert account(output)[0] == alone["a1"][0]
    assert [span.adapter_version for span in output.outputs[0].spans] == [2]


def test_an_adapter_in_use_is_unloaded_only_with_its_requests(model, adapters):
    engine = engine_of(model)
    engine.load_adapter("a", adapters["a0"])
    engine.add_request(PROMPT, greedy("a", max_tokens=50), request_id="one")
    engine.add_request(PROMPT, greedy(max_tokens=4), request_id="other")
    engine.step()
    with pytest.raises(AdapterInUse, match=r"used by 1 unfinished requests; .*abort=True"):
        engine.unload_adapter("a")
    assert [info.num_requests for info in engine.adapters()] == [1]
    engine.unload_adapter("a", abort=True)
    assert engine.adapters() == []
    done = finish(engine)
    assert "'a' was unloaded" in str(done["one"].error) and len(done["one"].outputs[0].token_ids) > 0
    assert done["other"].error is None
    with pytest.raises(UnknownAdapter):
        engine.generate([PROMPT], greedy("a"))
    engine.load_adapter("a", adapters["a1"])
    assert engine.adapters()[0].version == 2, "versions of a name rise"


def test_saved_requests_go_on_with_the_content_they_began_with(model, adapters, alone, tmp_path):
    engine = engine_of(model)
    engine.load_adapter("a", adapters["a0"])
    engine.add_request(PROMPT, greedy("a", logprobs=0), request_id="one", stream="final")
    engine.add_request(PROMPT, greedy("a", logprobs=0), request_id="late", stream="final")
    for _ in range(3):
        engine.step()
    engine.save_requests(tmp_path / "kept", kv=True)
    other = engine_of(model)
    with pytest.raises(SnapshotError, match="'one': unknown adapter 'a'"):
        other.load_requests(tmp_path / "kept")
    other.load_adapter("a", adapters["a1"])
    with pytest.raises(SnapshotError, match=r"another content of adapter 'a' .*changed_adapters=.recompute"):
        other.load_requests(tmp_path / "kept")
    assert not other.has_unfinished()
    same = engine_of(model)
    same.load_adapter("a", adapters["a0"])
    assert sorted(same.load_requests(tmp_path / "kept").with_kv) == ["late", "one"]
    done = finish(same)
    assert account(done["one"]) == account(done["late"]) == alone["a0"]
    report = other.load_requests(tmp_path / "kept", changed_adapters="recompute")
    assert sorted(report.recomputed) == ["late", "one"]
    done |= finish(other)
    assert [span.adapter_version for span in done["one"].outputs[0].spans] == [1, 2]


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(model, adapters, tmp_path):
    engine = engine_of(model, max_rank=8)
    engine.load_adapter("a", adapters["a0"])
    path = "decoder.layers.0.self_attention.linear_proj"
    pair = adapters["a0"].pairs[path]
    wrong = {
        "has rank 9, the limit is 8": Adapter("x", {path: LoRAPair.of(torch.ones(9, 64), torch.ones(64, 9), 1.0)}),
        "has rank 0": Adapter("x", {path: LoRAPair.of(torch.ones(0, 64), torch.ones(64, 0), 1.0)}),
        "is for 32 inputs": Adapter("x", {path: LoRAPair.of(torch.ones(4, 32), torch.ones(64, 4), 1.0)}),
        "not finite": Adapter("x", {path: LoRAPair.of(pair.a, pair.b * float("nan"), 1.0)}),
        "is no linear of this model": Adapter("x", {"decoder.layers.7.mlp.linear_fc1": pair}),
        "changes no linear": Adapter("x", {}),
        "no such directory": tmp_path / "nothing",
    }
    for match, source in wrong.items():
        with pytest.raises(ModelError, match=match):
            engine.load_adapter("x", source)
    for source in (5, None, [adapters["a0"]], adapters["a0"].pairs.keys()):
        with pytest.raises(ConfigError, match="adapter 'x'"):
            engine.load_adapter("x", source)
    with pytest.raises(ConfigError, match="config is of type str"):
        engine.load_adapter("x", {}, config="r=4")
    with pytest.raises(ConfigError, match="replace is 'yes'"):
        engine.load_adapter("x", adapters["a0"], replace="yes")
    for name in ("", "a b", "../a", "a" * 200, 5):
        with pytest.raises(ConfigError, match="adapter name"):
            engine.load_adapter(name, adapters["a0"])
    with pytest.raises(AdapterInUse, match="another content"):
        engine.load_adapter("a", adapters["a1"])
    with pytest.raises(ConfigError, match="running"):
        engine.load_adapter("a", adapters["a1"], replace=True, running="stop")
    assert engine.load_adapter("a", adapters["a0"]).version == 1, "the same content again is fine"
    with pytest.raises(UnknownAdapter, match="unknown adapter 'b'"):
        engine.add_request(PROMPT, greedy("b"))
    plain = engines.make_engine(model)
    with pytest.raises(UnknownAdapter, match="this engine has no adapters"):
        plain.add_request(PROMPT, greedy("a"))
    with pytest.raises(ConfigError, match="this engine has no adapters"):
        plain.load_adapter("a", adapters["a0"])
    for values in (
        {"max_loras": 0},
        {"max_rank": True},
        {"adapters": ["x"]},
        {"adapters": ["x=a", "x=b"]},
        {"rank": 4},
    ):
        with pytest.raises((ConfigError, TypeError), match="lora"):
            InferenceConfig(lora=values)


def test_an_adapter_is_read_while_the_engine_steps(model, adapters, alone, tmp_path):
    engine = engine_of(model)
    engine.load_adapter("a0", adapters["a0"])
    engine.add_request(PROMPT, greedy("a0", logprobs=0))
    manager, readings = engine.controls.adapters, []
    for name in NAMES[1:3]:
        readings.append(manager.read(name, adapters[name]))
        engine.step()
    bad = manager.read("bad", tmp_path / "nothing")
    engine.load_adapter("a1", readings[0])
    with pytest.raises(ModelError, match="no such directory"):
        engine.load_adapter("bad", bad)
    with pytest.raises(ConfigError, match="loaded already"):
        engine.load_adapter("a1", readings[0])
    assert [info.name for info in engine.adapters()] == ["a0", "a1"]
    engine.add_request(PROMPT, greedy("a1", logprobs=0))
    assert list(map(account, finish(engine).values())) == [alone["a0"], alone["a1"]]


def test_two_engines_that_read_at_once_leave_the_interpreters_turns_as_they_were(model, adapters, monkeypatch):
    """The one that began first ends first."""
    before, events = sys.getswitchinterval(), [threading.Event(), threading.Event()]
    readers = [engine_of(model).controls.adapters._reader for _ in events]
    tensors = {"x.lora_A.weight": torch.ones(1, 1)}
    begun = threading.Barrier(3)

    def read(name, *_, **__):
        begun.wait(20)
        events[int(name)].wait(20)
        return adapters["a0"]

    monkeypatch.setattr("megatron_infer.models.lora.reader.read_adapter", read)
    futures = [reader.begin(str(number), tensors, None) for number, reader in enumerate(readers)]
    begun.wait(20)
    assert sys.getswitchinterval() < before
    for event, future in zip(events, futures, strict=True):
        event.set()
        future.result(20)
    assert sys.getswitchinterval() == before


def test_a_change_can_be_undone(model, adapters):
    engine = engine_of(model)
    manager = engine.controls.adapters
    digest = manager.load("a", adapters["a0"], change="1").digest
    manager.load("a", adapters["a1"], replace=True, change="2")
    assert manager.undo("2") and manager.info("a").digest == digest and manager.info("a").version == 3
    manager.unload("a", change="3")
    assert manager.undo("3") and manager.info("a").digest == digest and manager.info("a").version == 4
    assert not manager.undo("3") and manager.undo("1") and engine.adapters() == []


def test_a_change_that_is_made_again_is_undone_to_what_was_before_the_first_time(model, adapters):
    """A coordinator sends a load again to an engine that lost its connection before the answer."""
    manager = engine_of(model).controls.adapters
    digest = manager.load("a", adapters["a0"]).digest
    for _ in range(2):
        manager.load("a", adapters["a1"], replace=True, change="1")
    assert manager.info("a").digest != digest and manager.undo("1") and manager.info("a").digest == digest


def test_a_change_is_undone_after_hundreds_of_others_that_were_settled(model, adapters):
    """A slow engine undoes the first of many changes; what replaced contents take is freed as soon as it may be."""
    engine = engine_of(model)
    manager = engine.controls.adapters
    digest = manager.load("slow", adapters["a0"]).digest
    manager.load("slow", adapters["a1"], replace=True, change="slow")
    for number in range(2 * MAX_CHANGES):
        manager.load("fast", adapters[NAMES[number % 2]], replace=True, change=str(number))
        manager.settle(str(number))
        assert len(manager._changes) == 1
    assert manager.undo("slow") and manager.info("slow").digest == digest
    manager.load("slow", adapters["a1"], replace=True, change="kept")
    manager.settle("kept")
    assert not manager.undo("kept") and not manager._changes and manager.info("slow").digest != digest
    for number in range(2 * MAX_CHANGES):
        manager.load("fast", adapters[NAMES[number % 2]], replace=True, change=str(number))
    assert len(manager._changes) == MAX_CHANGES, "of a caller that does not say which it keeps"


def test_no_more_adapters_are_read_ahead_than_the_limit(model, adapters, monkeypatch):
    engine = engine_of(model)
    manager = engine.controls.adapters
    monkeypatch.setattr("megatron_infer.engine.adapters.MAX_READINGS", 2)
    first, second = (manager.read(name, adapters[name]) for name in NAMES[:2])
    with pytest.raises(ConfigError, match=r"2 adapters are read and not loaded.*forget"):
        manager.read("a2", adapters["a2"])
    manager.forget(first)
    manager.forget(first)
    with pytest.raises(ConfigError, match="was forgotten"):
        engine.load_adapter("a0", first)
    third = manager.read("a2", adapters["a2"])
    for name, reading in (("a1", second), ("a2", third)):
        engine.load_adapter(name, reading)
    assert not manager._readings


def test_versions_of_a_name_rise_over_thousands_of_others():
    slots = AdapterSlots(1)
    slots.put("a", "x")
    slots.put("a", "y")
    slots.remove("a")
    for number in range(2 * MAX_FORGOTTEN):
        slots.put(f"b{number}", "x")
        slots.remove(f"b{number}")
    slots.put("a", "x")
    assert slots.versions["a"][0] > 2 and len(slots._last_version) <= MAX_FORGOTTEN


def test_a_content_is_held_once_under_all_its_names(model, adapters):
    engine = engine_of(model)
    for name in ("a", "b"):
        engine.load_adapter(name, Adapter(name, dict(adapters["a0"].pairs)))
    bank = engine.controls.adapters._bank
    assert bank.adapters["a"] is bank.adapters["b"]
    engine.unload_adapter("a")
    assert [info.name for info in engine.adapters()] == ["b"]


def test_a_step_without_adapters_calls_no_kernel_of_theirs(model, adapters, alone, monkeypatch):
    engine = engine_of(model)
    engine.load_adapter("a0", adapters["a0"])
    engine.generate([PROMPT], greedy("a0"))
    monkeypatch.setattr(type(engine.kernels.lora), "run", None)
    monkeypatch.setattr(type(engine.kernels.lora), "plan", None)
    assert account(engine.generate([PROMPT], greedy(logprobs=0))[0]) == alone[None]


def test_a_failed_step_writes_its_adapters_again(model, adapters, alone):
    engine = engine_of(model)
    for name in NAMES[:2]:
        engine.load_adapter(name, adapters[name])
    bank, calls = engine.controls.adapters._bank, []

    def failing(slot, name, write=bank.write):
        calls.append(name)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        write(slot, name)

    inspect(engine).runner.load_adapter = failing
    outputs = engine.generate([PROMPT] * 2, [greedy(name, logprobs=0) for name in NAMES[:2]])
    assert [account(output) for output in outputs] == [alone[name] for name in NAMES[:2]] and len(calls) > 2
