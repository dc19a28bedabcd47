"""Updates of adapters by the commands of a replica, without a server."""

from __future__ import annotations

import pytest
import torch
from engines import make_engine

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.errors import AdapterInUse, ConfigError
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.testing.tiny import tiny_gpt

CONFIG = {"r": 2, "lora_alpha": 4}


@pytest.fixture
def receiver():
    engine = make_engine(tiny_gpt(), lora=LoRAConfig(max_loras=2, max_rank=2))
    return WeightReceiver(engine)


def adapter_of(model, seed):
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in model.named_modules():
        if path.endswith("linear_fc2"):
            out, width = module.weight.shape
            tensors[f"{path}.lora_A.weight"] = torch.randn(2, width, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, 2, generator=generator)
    return tensors


def begin(receiver, name, seed, **more):
    receiver.begin_weights({"name": name, "config": CONFIG, **more})
    for path, tensor in adapter_of(tiny_gpt(), seed).items():
        data = tensor.numpy().tobytes()
        receiver.write_weights(path, "F32", list(tensor.shape), 0, data)


def bring(receiver, name, seed, **more):
    begin(receiver, name, seed, **more)
    receiver.finish_weights(0)
    return receiver.settle_weights()


def digests(receiver):
    return {one.name: one.digest for one in receiver._engine.adapters()}


def test_of_the_adapters_of_one_number_the_last_stays_and_those_of_other_numbers_too(receiver):
    assert bring(receiver, "a", 1, number=1)["retires"] is None
    assert bring(receiver, "b", 2, number=1)["retires"] == "a" and list(digests(receiver)) == ["b"]
    bring(receiver, "b", 3, number=2, replace=True)
    assert bring(receiver, "c", 4, number=1)["retires"] is None, "b is the last one of number 2"
    assert bring(receiver, "d", 5, number=2)["retires"] == "b"
    assert sorted(digests(receiver)) == ["c", "d"]


@pytest.mark.parametrize(("running", "name", "error"), [("stop", "new", ConfigError), ("keep", "old", AdapterInUse)])
def test_what_the_end_would_refuse_is_refused_by_the_finish_which_can_be_taken_back(receiver, running, name, error):
    bring(receiver, "old", 1)
    before = digests(receiver)
    begin(receiver, name, 2)
    with pytest.raises(error):
        receiver.finish_weights(0, running=running)
    receiver.cancel_weights()
    assert digests(receiver) == before and not receiver._engine.controls.adapters._readings
    bring(receiver, name, 2, replace=True)
    assert digests(receiver).keys() == {"old", name} and digests(receiver)[name] != before["old"]
