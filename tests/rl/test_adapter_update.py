"""Updates of adapters by the commands of a replica, without a server."""

from __future__ import annotations

import pytest
import torch
from engines import make_engine

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.errors import AdapterInUse, ConfigError, ModelError, WeightUpdateError, WrongState
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


def test_files_of_the_model_do_not_enter_an_update_of_an_adapter(receiver):
    begin(receiver, "a", 1)
    with pytest.raises(WrongState, match="the update under way is of an adapter"):
        receiver.load_weights("model.safetensors")
    receiver.finish_weights(0)
    assert receiver.settle_weights()["name"] == "a"


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.security
@pytest.mark.parametrize("fields", [{"r": nested(900)}, {"loftq_config": nested(900)}, {"r": "2"}, {"r": 1 << 60}])
def test_config_that_is_none_ends_its_update_alone(receiver, fields):
    receiver.begin_weights({"name": "a", "config": CONFIG | fields})
    with pytest.raises((ModelError, RecursionError)):
        receiver.finish_weights(0)
    receiver.cancel_weights()
    assert not digests(receiver) and not receiver._engine.controls.adapters._readings
    bring(receiver, "a", 1)
    assert list(digests(receiver)) == ["a"]


@pytest.mark.security
def test_an_adapter_has_no_more_elements_than_twice_the_models_also_in_many_tensors(receiver):
    most = 2 * sum(one.numel() for one in tiny_gpt().parameters())
    receiver.begin_weights({"name": "a", "config": CONFIG})
    for number in range(2):
        receiver.write_weights(f"half {number}", "U8", [most // 2], 0, bytes(most // 2))
    with pytest.raises(WeightUpdateError, match=f"one more: an adapter may have {most:,} elements"):
        receiver.write_weights("one more", "U8", [1], 0, bytes(1))
    assert len(receiver._update._tensors) == 2
    receiver.cancel_weights()


def test_an_engine_without_adapters_refuses_the_begin_and_takes_an_update_of_the_model():
    receiver = WeightReceiver(make_engine(tiny_gpt()))
    with pytest.raises(ConfigError, match="this engine has no adapters"):
        receiver.begin_weights({"name": "a", "config": CONFIG})
    receiver.begin_weights()
    receiver.cancel_weights()
