"""A trainer sends an adapter to the engines of a server: they compute with it, or with the one that they had."""

from __future__ import annotations

import base64
import copy

import pytest
import torch
from broadcasting_trainer import Trainer, described
from control_case import Background, call, get, state_of, wait_for
from safetensors.torch import save
from test_real_clients import trained
from test_weight_groups import PROMPT, assert_policy, drawn, join, served

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.server.control import weight_updates
from megatron_infer.server.engine_replica import engine_replica

RANK, ALPHA = 4, 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_of(model, seed, *, targets=TARGETS, infix="default."):
    """Tensors of a PEFT model's trainable parameters, by their names."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            out, width = module.weight.shape
            name = f"base_model.model.{path}.lora_{{}}.{infix}weight"
            tensors[name.format("A")] = torch.randn(RANK, width, generator=generator) / 3
            tensors[name.format("B")] = torch.randn(out, RANK, generator=generator) / 3
    return tensors


def merged(model, tensors):
    """transformers' model with the adapter in its weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                path = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                model.get_submodule(path).weight += ALPHA / RANK * b @ a
    return model


BASE = trained(0)


@pytest.fixture(scope="module")
def case():
    with served(BASE, lora=LoRAConfig(max_loras=2, max_rank=8)) as one:
        yield one


@pytest.fixture(scope="module")
def trainer(case):
    one = Trainer()
    join(case, one)
    yield one
    one.end()


def served_adapters(case):
    return sorted(one["id"] for one in get(case, "/v1/models")["data"] if one.get("parent"))


def areal_body(trainer, tensors, name, **changes):
    targets = {"lora_target_modules": TARGETS, "lora_rank": RANK, "lora_alpha": ALPHA, "lora_bias": "none"}
    about = {**described(tensors), "group_name": trainer.name, "lora_name": name, "lora_int_id": 1, **targets}
    return {**about, "base_model_name": "tiny"} | changes


def sync(case, trainer, tensors, name, *, expected=200, **said):
    """As AReaL's engines do it -> the reply to the tensors."""
    call(case, "/areal_pause_generation", {})
    body = areal_body(trainer, tensors, name, **said)
    call(case, "/areal_set_update_weight_meta_lora", body)
    trainer.send(tensors.values())
    reply = call(case, "/areal_update_weights_lora_xccl", body, expected=expected)
    sent = trainer.sent()
    assert sent or expected != 200
    call(case, "/areal_continue_generation", {})
    return reply


def test_areals_adapter_is_the_trainers_after_each_update_and_the_base_stays(case, trainer):
    base, version = assert_policy(case, BASE), get(case, "/get_weight_version")
    first, second = adapter_of(BASE, 1), adapter_of(BASE, 2)
    sync(case, trainer, first, "lora-v1")
    tokens = assert_policy(case, merged(BASE, first), "lora-v1")
    sync(case, trainer, first, "lora-v2")  # a step at learning rate 0
    assert assert_policy(case, merged(BASE, first), "lora-v2") == tokens != base
    sync(case, trainer, second, "lora-v3", lora_target_modules="all-linear")
    assert assert_policy(case, merged(BASE, second), "lora-v3") != tokens
    assert served_adapters(case) == ["lora-v3"] and assert_policy(case, BASE) == base
    old = {"model": "lora-v2", "prompt": PROMPT, "max_tokens": 1}
    assert call(case, "/v1/completions", old, expected=404)["error"]["code"] == "model_not_found"
    assert get(case, "/get_weight_version") == version and state_of(case) == "SERVING"


@pytest.mark.long
def test_stages_of_a_trainer_bring_their_parts_in_groups_of_their_own(case, trainer):
    other, tensors = Trainer(), adapter_of(BASE, 3)
    join(case, other)
    parts = [{name: one for name, one in tensors.items() if f".layers.{at}." in name} for at in (0, 1)]
    call(case, "/areal_pause_generation", {})
    for stage, part in zip((trainer, other), parts, strict=True):
        stage.send(part.values())
        call(case, "/areal_update_weights_lora_xccl", areal_body(stage, part, "staged"))
        assert stage.sent()
    call(case, "/areal_continue_generation", {})
    assert_policy(case, merged(BASE, tensors), "staged")
    call(case, "/destroy_weights_update_group", {"group_name": other.name})
    other.end()


def without(tensors, ending):
    return {name: one for name, one in tensors.items() if not name.endswith(ending)}


LAST, NAME = "layers.1.mlp.down_proj", "base_model.model.model.{}.lora_A.default.weight"
MISTAKES = {
    "an unknown name": (lambda t: t | {NAME.format("nowhere"): torch.ones(4, 4)}, {}, "nowhere"),
    "a tensor of the model": (lambda t: t | {"model.norm.weight": torch.ones(32)}, {}, "model.norm.weight"),
    "another shape": (lambda t: t | {NAME.format(LAST): torch.ones(4, 9)}, {}, LAST),
    "another type": (lambda t: {n: one.to(torch.int32) for n, one in t.items()}, {}, "int32"),
    "no numbers": (lambda t: {n: one * torch.nan for n, one in t.items()}, {}, "NaN"),
    "half a pair": (lambda t: without(t, f"{LAST}.lora_B.default.weight"), {}, f"{LAST} has no lora_B"),
    "a linear that is missing": (lambda t: {n: one for n, one in t.items() if LAST not in n}, {}, LAST),
    "of all linears one is missing": (
        lambda t: {n: one for n, one in t.items() if LAST not in n}, {"lora_target_modules": "all-linear"}, LAST
    ),
    "another rank than is said": (lambda t: t, {"lora_rank": 3}, "the config says 3"),
    "a rank beyond the engine's": (lambda t: t, {"lora_rank": 9}, "the limit is 8"),
    "biases": (lambda t: t, {"lora_bias": "all"}, "biases"),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(case, trainer):
    tensors = adapter_of(BASE, 4)
    sync(case, trainer, tensors, "kept", lora_int_id=2)
    return assert_policy(case, merged(BASE, tensors), "kept")


@pytest.mark.security
@pytest.mark.parametrize("mistake", MISTAKES)
def test_adapter_that_is_wrong_is_named_and_the_one_before_stays(case, loaded, trainer, mistake):
    change, said, reason = MISTAKES[mistake]
    error = sync(case, trainer, change(adapter_of(BASE, 5)), "kept", expected=400, **said)["error"]
    assert reason in error["message"] and error["phase"] == "weight update (finish)", error
    assert drawn(case, "kept")[0] == loaded and state_of(case) == "SERVING"
    sync(case, trainer, adapter_of(BASE, 4), "kept", lora_int_id=2)  # the group is in step: all had come
    assert drawn(case, "kept")[0] == loaded


LONG = [pytest.param(phase, marks=pytest.mark.long) for phase in ("before the tensors", "before the last stage")]


@pytest.mark.security
@pytest.mark.parametrize("phase", ["amid the tensors", *LONG])
def test_trainer_that_ends_leaves_the_adapter_of_before(case, loaded, phase, monkeypatch):
    """The engines are in another trainer's group too, whose tensors do not come."""
    one, tensors = Trainer(), adapter_of(BASE, 6)
    join(case, one)
    call(case, "/areal_pause_generation", {})
    body = areal_body(one, tensors, "kept")
    if phase == "before the last stage":
        monkeypatch.setattr(weight_updates, "IDLE_S", 0.5)
        one.send(tensors.values())
        call(case, "/areal_update_weights_lora_xccl", body)
        assert one.sent() and state_of(case) == "UPDATING"
        one.end()
        wait_for(lambda: state_of(case).startswith("PAUSED"))
        call(case, "/destroy_weights_update_group", {"group_name": one.name})
    else:
        receiving = Background(case, "/areal_update_weights_lora_xccl", body)
        if phase == "amid the tensors":
            one.send(list(tensors.values())[:3])
            assert one.sent()
        one.end()
        reply = receiving.result(60)
        expected = list(tensors)[3 if phase == "amid the tensors" else 0]
        assert reply.status_code == 400 and expected in reply.text, reply.text
    call(case, "/areal_continue_generation", {})
    assert drawn(case, "kept")[0] == loaded and state_of(case) == "SERVING"


@pytest.mark.long
@pytest.mark.security
def test_adapter_of_more_elements_than_the_model_may_have_is_refused(case, loaded):
    """Also where each call has fewer."""
    stages = Trainer(), Trainer()
    for stage in stages:
        join(case, stage)
    call(case, "/areal_pause_generation", {})
    for stage, name, expected in zip(stages, ("first", "second"), (200, 400), strict=True):
        tensor = torch.zeros(200, 150)
        stage.send([tensor])
        body = areal_body(stage, {name: tensor}, "kept")
        reply = call(case, "/areal_update_weights_lora_xccl", body, expected=expected)
    assert "second: an adapter may have 53,824 elements" in reply["error"]["message"]
    call(case, "/areal_continue_generation", {})
    for stage in stages:
        call(case, "/destroy_weights_update_group", {"group_name": stage.name})
        stage.end()
    assert drawn(case, "kept")[0] == loaded and state_of(case) == "SERVING"


@pytest.mark.long
def test_engine_without_adapters_says_so_and_the_trainers_broadcast_ends():
    with served(BASE) as case:
        one, tensors = Trainer(), adapter_of(BASE, 7)
        join(case, one)
        call(case, "/areal_pause_generation", {})
        one.send(tensors.values())
        error = call(case, "/areal_update_weights_lora_xccl", areal_body(one, tensors, "a"), expected=400)["error"]
        one.sent()  # it has not waited for the engines
        assert "this engine has no adapters" in error["message"] and state_of(case).startswith("PAUSED")


@pytest.mark.long
def test_two_engines_take_miles_adapters_together_and_replace_them_only_when_asked():
    first, second = adapter_of(BASE, 8, infix=""), adapter_of(BASE, 9, infix="")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "lora_dropout": 0.0}
    config |= {"bias": "none", "task_type": "CAUSAL_LM"}
    with served(BASE, count=2, lora=LoRAConfig(max_loras=2, max_rank=8)) as case:
        for replica in case.replicas:  # the commands of a process that was started with --control alone
            replica._commands = engine_replica(replica.engine, "inproc://none", name="r", control=True)._commands
        one = Trainer(world_size=3)
        join(case, one)

        def load(tensors, expected=200, **more):
            one.send(tensors.values())
            about = {"lora_name": "miles", "config_dict": config, "group_name": one.name, "pinned": False}
            body = {**about, **described(tensors), **more}
            reply = call(case, "/load_lora_adapter_from_distributed", body, expected=expected)
            assert one.sent()
            return reply

        assert load(first)["loaded_adapters"] == {"miles": "miles"}
        for _ in range(4):  # on both engines
            assert_policy(case, merged(BASE, first), "miles")
        body = {"model": "miles", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        rollout = Background(case, "/v1/completions", {**body, "return_token_ids": True})
        call(case, "/pause_generation", {"mode": "in_place"})
        assert load(second, expected=409)["error"]["code"] == "adapter_in_use"
        load(second, upsert=True)
        call(case, "/continue_generation", {})
        for _ in range(4):
            assert_policy(case, merged(BASE, second), "miles")
        choice = rollout.result().json()["choices"][0]
        assert len(choice["token_ids"]) == 200 and choice["version_spans"][-1]["adapter_version"] == 2
        text = base64.b64encode(save({name: value.contiguous() for name, value in first.items()})).decode()
        named = {"lora_name": "named", "config_dict": config, "serialized_named_tensors": [text]}
        call(case, "/load_lora_adapter_from_tensors", named)
        assert_policy(case, merged(BASE, first), "named")
        assert call(case, "/unload_lora_adapter", {"lora_name": "miles"})["loaded_adapters"] == {"named": "named"}
        error = call(case, "/load_lora_adapter", {"lora_name": "file", "lora_path": "/tmp"}, expected=403)["error"]
        assert error["code"] == "no_lora_root"
        one.end()
