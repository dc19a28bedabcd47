"""Writes to weights that an engine has freed arrive or raise; updates, casts, aliases and suspends lose nothing."""

from __future__ import annotations

import threading

import pytest
import torch
from engines import finish
from freed_case import FC1, PARAMS, PROMPTS, answers, assert_equal, freed, make_engine, moved, state
from model_kinds import make_model
from torch import nn

from megatron_infer.engine.durable.kv_restore import content_digest
from megatron_infer.errors import FreedWeightsWritten, StaleCache, TransitionFailed, WeightUpdateError
from megatron_infer.kernels.freed_weights import unpacked
from megatron_infer.rl.updates import WeightUpdate, apply, as_source
from megatron_infer.rl.updates.verify import verify_update
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.usefixtures("native_kernels")


# ---------------------------------------------------------------------- updates and other writes


@pytest.mark.parametrize("how", ["apply", "strict", "partial", "load_state_dict"])
def test_an_update_arrives_and_the_weights_are_freed_again(how):
    model = make_model("hybrid")
    engine, new = make_engine(model), moved(model)
    engine.refresh_weights()
    first = answers(engine)
    assert freed(model)
    if how == "apply":
        report = apply(engine, new, checksum=True)
        assert report.checksum == verify_update(engine, new).checksum
    elif how == "strict":
        with WeightUpdate(engine) as update:
            update.write_all(new.items())
    elif how == "partial":
        name = "decoder.layers.2.mlp.linear_fc1.weight"
        new = state(model) | {name: new[name]}
        engine.refresh_weights()
        with WeightUpdate(engine, strict=False) as update:
            update.write(name, new[name])
    else:
        model.load_state_dict(new)
    fresh = make_model("hybrid")
    fresh.load_state_dict(new)
    assert answers(engine) == answers(make_engine(fresh, owns=False)) != first
    assert freed(model)
    engine.verify_weights()
    assert_equal(state(model), new)


def test_an_update_that_fails_or_is_rolled_back_leaves_the_weights_of_before():
    model = tiny_gpt(init_method_std=0.2)
    engine, before, new = make_engine(model), state(model), moved(model)
    engine.refresh_weights()
    first = answers(engine)
    with pytest.raises(WeightUpdateError), WeightUpdate(engine, undo=True) as update:
        update.write_all(list(new.items())[:5])
    assert answers(engine) == first
    update = WeightUpdate(engine, undo=True)
    update.write_all(new.items())
    update.finish()
    assert freed(model) and answers(engine) != first
    update.rollback()
    assert answers(engine) == first
    assert_equal(state(model), before)


def test_a_trainers_model_is_a_source_for_an_engines_and_the_other_way_round():
    model, other = tiny_gpt(init_method_std=0.2, seed=1), tiny_gpt(init_method_std=0.2, seed=2)
    engine, receiver = make_engine(model), make_engine(other)
    assert freed(model) and freed(other)
    apply(receiver, as_source(model))
    assert answers(receiver) == answers(engine)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.zero_(),
        lambda weight: weight[3].fill_(2.0),
        lambda weight: weight[3, 4].add_(100.0),
        lambda weight: weight.masked_fill_(weight > 0, 0.0),
        lambda weight: weight.index_fill_(0, torch.tensor([1, 2]), 0.0),
        lambda weight: weight.numpy().__setitem__((2, 2), 1.0),
    ],
    ids=["all", "row", "place", "mask", "index", "numpy"],
)
@pytest.mark.parametrize("then", ["generate", "refresh_weights", "state_dict"])
def test_writes_to_freed_weights_raise_and_lose_nothing(write, then):
    model = tiny_gpt(init_method_std=0.2)
    before = state(model)
    engine = make_engine(model)
    first = answers(engine)
    write(model.get_submodule(FC1).weight.detach())
    is_seen = then != "generate" or "numpy" not in repr(write.__code__.co_names)  # as in every owner: by content only
    call = {"generate": lambda: answers(engine), "state_dict": model.state_dict}.get(then) or engine.refresh_weights
    if is_seen:
        with pytest.raises((FreedWeightsWritten, TransitionFailed)) as caught:
            call()
        assert "engine.weights.unpack()" in f"{caught.value} {caught.value.__cause__}"
    assert_equal(state(model), before) if is_seen else None
    assert answers(engine) == first
    engine.verify_weights()


def test_sums_in_place_raise_at_once():
    model = tiny_gpt()
    engine = make_engine(model)
    first, weight = answers(engine), model.get_submodule(FC1).weight
    for write in (lambda: weight.mul_(2.0), lambda: weight.copy_(torch.ones_like(weight))):
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            write()
    assert answers(engine) == first and engine.weight_version == 0


@pytest.mark.parametrize("cast", [lambda m: m.double().float(), lambda m: m._apply(lambda one: one.clone())])
def test_a_cast_of_freed_weights_raises_and_loses_nothing(cast):
    model = tiny_gpt(init_method_std=0.2)
    before, engine = state(model), make_engine(model)
    first = answers(engine)
    cast(model)
    with pytest.raises(FreedWeightsWritten, match=r"unpack\(\)"):
        answers(engine)
    assert answers(engine) == first
    assert_equal(state(model), before)


def test_weights_that_something_else_refers_to_stay():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    kept = model.state_dict()
    buffer = torch.cat([one.weight.detach().flatten() for one in (model.decoder.layers[0].mlp.linear_fc1,) * 2])
    for place, linear in enumerate((model.decoder.layers[0].mlp.linear_fc2, model.decoder.layers[1].mlp.linear_fc2)):
        size = linear.weight.numel()
        buffer[place * size :][:size] = linear.weight.detach().flatten()
        linear.weight.data = buffer[place * size :][:size].view(linear.weight.shape)
    engine, plain = make_engine(model), make_engine(other, owns=False)
    assert not freed(model)
    assert answers(engine) == answers(plain)
    for factor in (-1.3, 0.7):
        for found in (kept, other.state_dict()):
            found[f"{FC1}.weight"].mul_(factor)
        assert answers(engine) == answers(plain)
    del kept, found
    engine.refresh_weights()
    assert f"{FC1}.weight" in freed(model) and "decoder.layers.1.mlp.linear_fc2.weight" not in freed(model)
    buffer.mul_(1.5)
    for layer in other.decoder.layers:
        layer.mlp.linear_fc2.weight.data.mul_(1.5)
    engine.refresh_weights()
    plain.refresh_weights()
    assert answers(engine) == answers(plain)


def test_a_replaced_parameter_is_served():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine = make_engine(model)
    first = answers(engine)
    for one in (model, other):
        linear = one.get_submodule(FC1)
        linear.weight = nn.Parameter(torch.ones_like(linear.weight))
    assert answers(engine) == answers(make_engine(other, owns=False)) != first and engine.weight_version == 1


@pytest.mark.parametrize("meanwhile", ["refresh", "suspend"])
@pytest.mark.parametrize("undo", [False, True])
def test_weights_accepted_within_an_update_do_not_spoil_it(meanwhile, undo):
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine, before, new = make_engine(model), state(model), moved(model)
    first = answers(engine)

    def accept() -> None:
        if meanwhile == "refresh":
            engine.refresh_weights()
        else:
            engine.suspend("recompute")
            engine.resume()

    with WeightUpdate(engine, undo=undo) as update:
        update.write_all(list(new.items())[:5])
        accept()
        update.write_all(list(new.items())[3:])  # some came before, with these values
    other.load_state_dict(new)
    assert answers(engine) == answers(make_engine(other, owns=False)) != first
    if undo:
        update = WeightUpdate(engine, undo=True)
        update.write_all(list(before.items())[:5])
        accept()
        update.write(*list(before.items())[5])
        update.rollback()
        assert_equal(state(model), new)
        assert answers(engine) == answers(make_engine(other, owns=False))


def test_state_dicts_of_another_thread_have_all_values_and_change_no_version():
    model = tiny_gpt(init_method_std=0.2)
    before, engine = state(model), make_engine(model)
    first, errors = answers(engine), []

    def read() -> None:
        try:
            for _ in range(20):
                assert_equal(state(model), before)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert answers(engine) == first
    assert not errors and engine.weight_version == 0


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_copies_that_are_released_while_weights_are_read_lose_nothing(mode):
    model = tiny_gpt(init_method_std=0.2)
    before, engine = state(model), make_engine(model)
    first = answers(engine)
    with unpacked(model):
        engine.suspend(mode)
    engine.resume()
    assert answers(engine) == first
    assert_equal(state(model), before)


def test_a_reader_waits_for_another_that_frees_again():
    model = tiny_gpt(init_method_std=0.2)
    before, engine = state(model), make_engine(model)
    names, found = freed(model), []
    inside, reads = threading.Event(), threading.Event()

    def digest() -> None:
        with unpacked(model):
            inside.set()
            reads.wait(0.3)

    threads = [threading.Thread(target=digest), threading.Thread(target=lambda: found.append(state(model)))]
    threads[0].start()
    inside.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert_equal(found[0], before)
    assert names and not freed(model) and engine.weight_version == 0


def test_digests_leave_freed_weights_freed():
    model, kept = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine, other = make_engine(model), make_engine(kept, owns=False)
    names, num_bytes = freed(model), engine.weights.num_bytes
    assert verify_update(engine).checksum == verify_update(other).checksum
    assert content_digest(inspect(engine).adopted) == content_digest(inspect(other).adopted)
    assert apply(engine, state(kept), checksum=True).checksum == verify_update(other).checksum
    assert freed(model) == names and engine.weights.num_bytes == num_bytes
    engine.verify_weights()
    assert answers(engine) == answers(other)


def test_a_forward_of_the_model_reads_the_weights():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine = make_engine(model)
    first, ids = answers(engine), torch.tensor([PROMPTS[0]])
    x = torch.randn(3, 1, 64)
    for one in (model, other):
        with torch.no_grad():
            one.found = one.decoder.layers[0].mlp(x)[0], one(ids, torch.arange(ids.shape[1])[None], None)
    assert all(map(torch.equal, model.found, other.found))
    assert answers(engine) == first and engine.weight_version == 0


def test_a_parameter_that_is_taken_out_has_its_values():
    model = tiny_gpt(init_method_std=0.2)
    before = state(model)
    engine = make_engine(model)
    first, linear = answers(engine), model.decoder.layers[1].mlp.linear_fc1
    taken = linear.weight
    linear.weight = nn.Parameter(torch.ones_like(taken))
    assert answers(engine) != first
    assert torch.equal(taken, before["decoder.layers.1.mlp.linear_fc1.weight"])
    linear.weight = taken
    assert answers(engine) == first


# ---------------------------------------------------------------------- suspended


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("tags", [None, {"weights"}])
@pytest.mark.parametrize("changes", [False, True])
def test_a_suspended_engine_keeps_what_is_the_only_copy(mode, tags, changes):
    model = make_model("hybrid")
    engine, new = make_engine(model), moved(model)
    engine.refresh_weights()
    first, names = answers(engine), freed(model)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    for _ in range(4):
        engine.step()
    engine.suspend(mode, tags)
    assert freed(model) == names
    if changes:
        apply(engine, new, version=3, running="recompute")
    engine.resume()
    finish(engine)
    assert freed(model) == names
    if changes:
        fresh = make_model("hybrid")
        fresh.load_state_dict(new)
        assert answers(engine) == answers(make_engine(fresh, owns=False)) != first
    else:
        assert answers(engine) == first
        assert engine.weight_version == 1
    engine.verify_weights()


def test_a_copy_that_was_damaged_is_found():
    model = tiny_gpt()
    engine = make_engine(model)
    weight = model.decoder.layers[1].mlp.linear_fc1.weight
    engine.verify_weights()
    panels = engine.kernels.packed.get(id(weight))
    panels.view(torch.uint8)[64 + 5] ^= 1
    with pytest.raises(StaleCache, match="this copy alone"):
        engine.verify_weights()
