"""Two tensor-parallel ranks of an engine are both members of a trainer's group, and take their parts or neither."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from broadcasting_trainer import Trainer, described
from engine_ranks import make_engine, whole_model
from gloo_ranks import run_on_ranks
from test_remote_weights_ranks import PARAMS, PROMPT, answer, changed, serve

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.coordinator import protocol
from megatron_infer.rl.updates import apply

LORA, CONFIG = LoRAConfig(max_loras=1, max_rank=4), {"r": 4, "lora_alpha": 16}


def adapter_of(model):
    generator, tensors = torch.Generator().manual_seed(0), {}
    for path, module in model.named_modules():
        if path.endswith(("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")):
            out, width = module.weight.shape
            tensors[f"{path}.lora_A.weight"] = torch.randn(4, width, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, 4, generator=generator)
    return tensors


def where(trainer):
    place = {"address": "127.0.0.1", "port": trainer.port, "world_size": trainer.world_size, "rank_offset": 1}
    return {**place, "backend": "", "kind": trainer.kind, "prefix": trainer.name}


def steer(client, folder, expected):
    small, one = Trainer(world_size=2), Trainer(world_size=3)
    with pytest.raises(protocol.ControlFailed, match="a world_size of 3 at least"):
        client.control("join_weight_group", name="g", where=where(small), num_ranks=2)
    one.begin()
    client.control("join_weight_group", name="g", where=where(one), num_ranks=2)
    one.joined()
    new = expected["weights"]
    for count, outcome in ((len(new) - 1, "old"), (len(new), "new")):
        client.pause()
        client.control("begin_weights")
        part = dict(list(new.items())[:count])
        one.send(part.values())
        client.control("receive_weights", group="g", **described(part))
        assert one.sent()
        if outcome == "old":
            with pytest.raises(protocol.ControlFailed, match="no value came for"):
                client.control("finish_weights", version=1)
            client.control("cancel_weights", version=0)
        else:
            client.control("finish_weights", version=1)
            client.control("settle_weights")
        client.unpause()
        assert answer(client) == expected[outcome]
    given = {"name": "a", "config": CONFIG}
    for count, outcome in ((len(expected["adapter"]) - 1, None), (len(expected["adapter"]), "adapted")):
        client.control("begin_weights", adapter=given)
        part = dict(list(expected["adapter"].items())[:count])
        one.send(part.values())
        client.control("receive_weights", group="g", **described(part))
        assert one.sent()
        if outcome is None:
            with pytest.raises(protocol.ControlFailed, match="has no lora_B"):
                client.control("finish_weights", version=1)
            client.control("cancel_weights", version=1)
        else:
            client.control("finish_weights", version=1)
            assert client.control("settle_weights")["r"].value["name"] == "a"
            assert client.generate(PROMPT, replace(PARAMS, adapter="a"))[0].outputs[0].token_ids == expected[outcome]
        assert answer(client) == expected["new"]
    one.end()
    client.pause()
    client.control("begin_weights")
    with pytest.raises(protocol.ControlFailed, match="did not come from the trainer"):
        client.control("receive_weights", group="g", **described(new))
    client.control("cancel_weights", version=1)
    client.unpause()
    assert answer(client) == expected["new"]


@pytest.mark.long
def test_two_ranks_receive_a_trainers_broadcasts_and_give_them_back(tmp_path):
    model = whole_model("attention")
    engine, new = make_engine(model, lora=LORA), changed(model)
    expected = {"weights": new, "old": engine.generate([PROMPT], [PARAMS])[0].outputs[0].token_ids}
    apply(engine, new)
    expected["new"] = engine.generate([PROMPT], [PARAMS])[0].outputs[0].token_ids
    expected["adapter"] = adapter_of(model)
    engine.load_adapter("a", expected["adapter"], config=CONFIG)
    expected["adapted"] = engine.generate([PROMPT], [replace(PARAMS, adapter="a")])[0].outputs[0].token_ids
    assert len({tuple(expected[one]) for one in ("old", "new", "adapted")}) == 3
    torch.save(expected, tmp_path / "expected.pt")
    run_on_ranks(serve, 2, tmp_path, steer, {"lora": LORA})
