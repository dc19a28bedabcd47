"""A trainer broadcasts its weights to the engines of a server, by vLLM's and SGLang's routes: all of them, or none."""

from __future__ import annotations

import contextlib

import pytest
import torch
from broadcasting_trainer import Trainer, described
from control_case import Background, call, get, serving_with_control, state_of
from test_real_clients import trained

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.rl.frameworks.trl import engine_for
from megatron_infer.rl.updates import apply
from megatron_infer.rl.weight_receiver import WeightReceiver

PROMPT = [5, 9, 30, 7, 66, 12, 3]
KINDS = ("torch", "stateless")


@contextlib.contextmanager
def served(model, *, count=1, lora=None, **settings):
    """A server with engines of a transformers model's shape, and its weights."""
    config = {"buffer_size_gb": 0.02, "block_size_tokens": 16, "max_sequence_length": 256, "max_requests": 8}
    own = InferenceConfig(**config, lora=lora, logprobs_mode="processed")
    engines = [engine_for(model, own) for _ in range(count)]
    for engine in engines:
        apply(engine, weights_of(model))
    with serving_with_control(*engines, commands_of=lambda one: WeightReceiver(one).commands(), **settings) as case:
        yield case


@pytest.fixture(scope="module")
def case():
    with served(trained(0)) as one:
        yield one


def join(case, trainer, *, expected=200, **changes):
    where = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1} | {
        "world_size": trainer.world_size, **changes
    }  # fmt: skip
    trainer.begin()
    if trainer.kind == "torch":
        body = {**where, "master_port": str(trainer.port), "group_name": trainer.name, "backend": "gloo"}
        reply = call(case, "/init_weights_update_group", body, expected=expected)
    else:
        reply = call(case, "/init_weight_transfer_engine", {"init_info": {**where, **changes}}, expected=expected)
    if expected == 200:
        trainer.joined()
    return reply


@pytest.fixture(scope="module")
def trainer(case):
    one = Trainer()
    join(case, one)
    yield one
    one.end()


def weights_of(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def step(model, rate):
    """A training step of a few tokens."""
    loss = model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter -= rate * grad


def drawn(case, name="tiny"):
    """The greedy tokens of the model or an adapter, and their log probabilities."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    choice = call(case, "/v1/completions", {**body, "logprobs": 0, "ignore_eos": True})["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def assert_policy(case, model, name="tiny"):
    """Tokens and log probabilities are those of transformers' forward."""
    tokens, logprobs = drawn(case, name)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].double()
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    ratio = (torch.tensor(logprobs, dtype=torch.float64) - expected).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-4, rtol=0)
    return tokens


def sync(case, trainer, tensors, version, *, parts=2, expected=200, said=None):
    """As slime does it: pause, the tensors in buckets, continue -> the last reply."""
    call(case, "/pause_generation", {})
    items = list(tensors.items())
    size = -(-len(items) // parts)
    for at in range(0, len(items), size):
        part = dict(items[at : at + size])
        trainer.send(part.values())
        about = described(part) | (said or {})
        body = {**about, "group_name": trainer.name, "flush_cache": False, "weight_version": str(version)}
        reply = call(case, "/update_weights_from_distributed", body, expected=expected)
        is_sent = trainer.sent()
        if expected != 200:
            return reply
        assert is_sent
    return call(case, "/continue_generation", {})


def test_engine_draws_from_the_trainers_policy_after_each_step_and_from_the_same_at_learning_rate_0(case, trainer):
    model = trained(0)
    sync(case, trainer, weights_of(model), 3)
    first = assert_policy(case, model)
    step(model, 0.0)
    sync(case, trainer, weights_of(model), 4)
    assert assert_policy(case, model) == first
    step(model, 0.5)
    sync(case, trainer, weights_of(model), "after a step")
    assert assert_policy(case, model) != first
    assert get(case, "/get_weight_version")["weight_version"] == "after a step" and state_of(case) == "SERVING"


def test_update_that_lacks_a_tensor_is_none_and_the_next_one_is_taken_in_the_same_group(case, trainer):
    old, new = trained(2), trained(3)
    sync(case, trainer, weights_of(old), 20)
    before = drawn(case)
    call(case, "/pause_generation", {})
    some = dict(list(weights_of(new).items())[:-1])
    trainer.send(some.values())
    call(case, "/update_weights_from_distributed", {**described(some), "group_name": trainer.name})
    assert trainer.sent() and state_of(case) == "UPDATING"
    error = call(case, "/continue_generation", {}, expected=400)["error"]
    assert "no value came for" in error["message"] and error["phase"] == "weight update (finish)"
    assert state_of(case).startswith("PAUSED")
    call(case, "/continue_generation", {})
    assert drawn(case) == before and get(case, "/get_weight_version")["weight_version"] == "20"
    sync(case, trainer, weights_of(new), 21)
    assert_policy(case, new)


@pytest.mark.long
@pytest.mark.parametrize("buffer_bytes", [None, 1, 5000, 1 << 30])
def test_vllms_four_phases_take_tensors_alone_and_packed(case, buffer_bytes):
    model, one = trained(4), Trainer("stateless")
    join(case, one, **({} if buffer_bytes is None else {"packed": True, "packed_buffer_size_bytes": buffer_bytes}))
    for scale in (1.0, 0.5):
        with torch.no_grad():
            model.lm_head.weight.mul_(scale)
        call(case, "/pause?mode=keep")
        call(case, "/start_weight_update", {"is_checkpoint_format": True})
        tensors = weights_of(model)
        one.send(tensors.values(), buffer_bytes=buffer_bytes)
        call(case, "/update_weights", {"update_info": described(tensors, "dtype_names")})
        assert one.sent()
        call(case, "/finish_weight_update")
        call(case, "/resume")
        assert_policy(case, model)
    call(case, "/shutdown_weight_transfer_engine")
    one.end()


@pytest.mark.long
def test_requests_under_way_go_on_with_the_new_weights(case, trainer):
    model = trained(5)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    rollout = Background(case, "/v1/completions", {**body, "return_token_ids": True})
    call(case, "/pause_generation", {"mode": "in_place"})
    trainer.send(weights_of(model).values())
    body = {**described(weights_of(model)), "group_name": trainer.name, "weight_version": 50}
    call(case, "/update_weights_from_distributed", body)
    assert trainer.sent()
    call(case, "/continue_generation", {})
    choice = rollout.result().json()["choices"][0]
    assert len(choice["token_ids"]) == 200 and choice["version_spans"][-1]["policy_version"] == 50


MISTAKES = {
    "an unknown name": ({"names": ["nowhere.weight"]}, "nowhere.weight"),
    "another shape": ({"shapes": [[30, 3]]}, "embed_tokens.weight"),
    "a wider type than came": ({"dtypes": ["float64"]}, "fewer than the"),
    "a narrower type than came": ({"dtypes": ["float16"]}, "embed_tokens.weight"),
    "an unknown type": ({"dtypes": ["__class__"]}, "__class__"),
    "no numbers": ({}, "NaN or infinite"),
    "fewer names": ({"names": []}, "as many of each"),
    "a tensor beyond the model": ({"shapes": [[1 << 40]]}, "twice those of the model"),
}


@pytest.mark.long
@pytest.mark.security
@pytest.mark.parametrize("mistake", MISTAKES)
def test_tensor_that_is_not_what_was_said_changes_nothing_and_hangs_nobody(case, mistake):
    changes, reason = MISTAKES[mistake]
    one, other = Trainer(), Trainer()
    join(case, one)
    before, version = drawn(case), get(case, "/get_weight_version")["weight_version"]
    name, value = next(iter(weights_of(trained(6)).items()))
    value = value * torch.inf if mistake == "no numbers" else value
    error = sync(case, one, {name: value}, 60, expected=400, said=changes)["error"]
    assert reason in error["message"] and error["phase"] == "weight update (receive)"
    assert state_of(case).startswith("PAUSED")
    call(case, "/continue_generation", {})
    assert drawn(case) == before and get(case, "/get_weight_version")["weight_version"] == version
    error = sync(case, one, {name: value}, 60, expected=400)["error"]
    assert "there is no group" in error["message"]
    call(case, "/continue_generation", {})
    one.end()
    join(case, other)
    sync(case, other, weights_of(trained(6)), 61)
    assert_policy(case, trained(6))
    call(case, "/destroy_weights_update_group", {"group_name": other.name})
    other.end()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["before the tensors", "amid the tensors", "before the end"])
def test_trainer_that_ends_leaves_the_old_weights_and_a_new_one_is_taken(case, phase):
    one, other = Trainer("stateless"), Trainer("stateless")
    join(case, one)
    before, model = drawn(case), trained(7)
    call(case, "/pause?mode=keep")
    call(case, "/start_weight_update")
    tensors = weights_of(model)
    update = {"update_info": described(tensors, "dtype_names")}
    if phase == "before the tensors":
        one.end()
        assert (
            "did not come from the trainer" in call(case, "/update_weights", update, expected=400)["error"]["message"]
        )
    elif phase == "amid the tensors":
        one.send(list(tensors.values())[:3])
        receiving = Background(case, "/update_weights", update)
        assert one.sent()
        one.end()
        reply = receiving.result(60)
        assert reply.status_code == 400 and list(tensors)[3] in reply.text, reply.text
    else:
        one.send(tensors.values())
        call(case, "/update_weights", update)
        assert one.sent() and state_of(case) == "UPDATING"
        one.end()
    join(case, other)  # the trainer is started again: what it had left open is undone
    assert state_of(case) == "PAUSED(keep)"
    call(case, "/resume")
    assert drawn(case) == before
    call(case, "/start_weight_update")
    other.send(tensors.values())
    call(case, "/update_weights", update)
    call(case, "/finish_weight_update")
    assert_policy(case, model)
    other.end()


@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_of_a_call_that_the_engines_refuse_ends_at_once(case, kind):
    """The engines serve: no update has begun."""
    one, tensors = Trainer(kind), weights_of(trained(9))
    join(case, one)
    before = drawn(case)
    one.send(tensors.values())
    if kind == "torch":
        body = {**described(tensors), "group_name": one.name}
        error = call(case, "/update_weights_from_distributed", body, expected=409)["error"]
    else:
        error = call(case, "/update_weights", {"update_info": described(tensors, "dtype_names")}, expected=409)["error"]
    one.sent()  # it has not waited for the engines
    assert "SERVING" in error["message"] and state_of(case) == "SERVING" and drawn(case) == before
    one.end()


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_whose_call_is_refused_amid_an_update_forms_a_group_again(case, kind):
    one, other, tensors = Trainer(kind), Trainer(kind), weights_of(trained(10))
    join(case, one)
    before = drawn(case)
    call(case, "/pause?mode=keep")
    if kind == "torch":
        path, wrong = "/update_weights_from_distributed", {"load_format": "pickle"}
        body = {**described(tensors), "group_name": one.name}
        one.send(tensors.values())
        call(case, path, body)
        assert one.sent()
        call(case, path, {**body, **wrong}, expected=400)
    else:
        call(case, "/start_weight_update")
        wrong = {**described(tensors, "dtype_names"), "packed": "perhaps"}
        call(case, "/update_weights", {"update_info": wrong}, expected=400)
    assert state_of(case) == "UPDATING"
    one.end()
    join(case, other)
    assert state_of(case) == "PAUSED(keep)"
    call(case, "/resume")
    assert drawn(case) == before
    other.end()


@pytest.mark.long
def test_two_engines_take_places_in_one_group_and_are_updated_together():
    model = trained(8)
    with served(trained(0), count=2) as case:
        assert get(case, "/get_world_size")["world_size"] == 2
        small, one = Trainer(world_size=2), Trainer(world_size=3)
        error = join(case, small, expected=400)["error"]["message"]
        assert "world_size is 2" in error and "a world_size of 3 at least" in error
        join(case, one)
        sync(case, one, weights_of(model), 5)
        assert call(case, "/weights_checker", {"action": "checksum"})["equal"]
        assert_policy(case, model)
        one.end()
