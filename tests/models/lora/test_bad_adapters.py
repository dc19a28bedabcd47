"""An adapter that cannot be used exactly as it was meant is refused, with what is wrong and without a path."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from megatron_infer.errors import ModelError
from megatron_infer.models.lora.attach import attach_lora
from megatron_infer.models.lora.peft import read_adapter
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model():
    return tiny_gpt()


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """(config, tensors) of an adapter of every linear."""
    folder = tmp_path_factory.mktemp("good")
    adapter = attach_lora(model, rank=2, alpha=4)
    adapter.save(folder)
    adapter.detach()
    return json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)


def changed(tensors, **values):
    return tensors | {name.replace("__", "."): value for name, value in values.items()}


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


def nan(tensors):
    value = tensors[f"{Q}.lora_A.weight"].clone()
    value[1, 3] = float("nan")
    return tensors | {f"{Q}.lora_A.weight": value}


FIELDS = {
    "DoRA": ({"use_dora": True}, "use_dora=True: DoRA"),
    "biases": ({"bias": "lora_only"}, "bias='lora_only': biases"),
    "biases of pairs": ({"lora_bias": True}, "lora_bias=True: biases"),
    "whole modules": ({"modules_to_save": ["score"]}, "modules_to_save=.*'score'"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "routed experts"),
    "new tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    "a field of tomorrow": ({"use_quadlora": True}, "use_quadlora=True is not known here"),
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "rank 0": ({"r": 0}, "r is 0, a rank is an integer from 1 on"),
    "rank as text": ({"r": "8"}, "r is '8'"),
    "another rank than the tensors'": ({"r": 3}, "has rank 2, and the config says 3"),
    "a rank of a pattern": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is 0"),
    "alpha": ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "an alpha that no float holds": ({"lora_alpha": 10**400}, "lora_alpha is 1000+.*a finite number"),
    "a number as layers_pattern": ({"layers_pattern": 5, "layers_to_transform": [0]}, "layers_pattern is 5, it must"),
    "a group of the same name": (
        {"layers_pattern": "(?P<number>a)", "layers_to_transform": [0]},
        "no regular expression",
    ),
    "rslora": ({"use_rslora": "yes"}, "use_rslora is 'yes', it must be true or false"),
    "a pattern that never ends": ({"target_modules": "(a+)+(b+)+c"}, "may take very long"),
    "a pattern that is none": ({"target_modules": ".*(q_proj"}, "no regular expression"),
    "a long pattern": ({"alpha_pattern": {"a" * 2000: 1}}, "at most 1,024 characters"),
    "targets that are not there": ({"target_modules": ["q_proj", "q_prj"]}, "q_prj is no linear of this .*q_proj"),
    "an embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens is an embedding"),
    "the output layer": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head is an output layer"),
    "a convolution": ({"target_modules": ["conv1d"]}, "conv1d is a convolution"),
    "fewer targets": ({"target_modules": ["q_proj"]}, "_proj has tensors, and target_modules does not name it"),
    "other layers": ({"layers_to_transform": [0, "1"]}, "layers_to_transform is .* a list of integers"),
    "fewer layers": ({"layers_to_transform": [0]}, r"layers\.1\.\S+ has tensors, and target_modules"),
    "layers beside a pattern": ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "PEFT refuses too"),
    "targets of another kind": ({"target_modules": 3}, "target_modules is 3"),
}
TENSORS = {
    "NaN": (nan, "q_proj has NaN or infinity"),
    "one side": (lambda t: without(t, f"{Q}.lora_B.weight"), "q_proj has no lora_B"),
    "a linear is missing": (
        lambda t: without(without(t, f"{Q}.lora_A.weight"), f"{Q}.lora_B.weight"),
        "q_proj is one of target_modules, and has no tensors",
    ),
    "another base": (lambda t: t | {f"{Q}.lora_A.weight": torch.zeros(2, 65)}, r"needs \[rank, 64\] and \[64, rank\]"),
    "rank 0": (
        lambda t: t | {f"{Q}.lora_A.weight": torch.zeros(0, 64), f"{Q}.lora_B.weight": torch.zeros(64, 0)},
        "a rank is at least 1",
    ),
    "a vector": (lambda t: t | {f"{Q}.lora_A.weight": torch.zeros(64)}, "a rank is at least 1"),
    "integers": (
        lambda t: t | {f"{Q}.lora_A.weight": torch.zeros(2, 64, dtype=torch.int8)},
        "dtype I8; known are F32",
    ),
    "DoRA": (lambda t: t | {f"{Q}.lora_magnitude_vector": torch.ones(64)}, "magnitude of DoRA"),
    "an embedding": (
        lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 4)},
        "of an embedding",
    ),
    "a bias": (lambda t: t | {f"{Q}.lora_B.bias": torch.ones(64)}, "a bias of an adapter"),
    "a module": (lambda t: t | {"base_model.model.lm_head.modules_to_save.weight": torch.ones(3)}, "whole module"),
    "the output layer": (lambda t: t | {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 64)}, "output layer"),
    "experts": (
        lambda t: t | {"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight": torch.ones(2, 64)},
        "routed experts",
    ),
    "a layer too many": (
        lambda t: t | {Q.replace("layers.0", "layers.7") + ".lora_A.weight": torch.ones(2, 64)},
        r"layers\.7\.self_attn\.q_proj is no linear",
    ),
    "two adapters": (lambda t: t | {f"{Q}.lora_A.one.weight": torch.ones(2, 64)}, "there twice|several adapters"),
    "one tensor under two names": (
        lambda t: t | {f"{Q.removeprefix('base_model.model.')}.lora_A.weight": torch.ones(2, 64)},
        "there twice, under two names",
    ),
    "both kinds of names": (
        lambda t: t | {"decoder.layers.0.self_attention.linear_qkv.lora_A.weight": torch.ones(2, 64)},
        "under both kinds of names",
    ),
    "something else": (lambda t: t | {"step": torch.ones(1)}, "step is no tensor of a LoRA adapter"),
    "nothing": (lambda t: {}, "there are no tensors"),
}


def refused(folder, model, match, **how):
    started = time.thread_time()  # of this thread: other work of the machine is not counted
    with pytest.raises(ModelError, match=match) as caught:
        read_adapter("french", folder, model, **how)
    assert time.thread_time() - started < 5
    assert "'french'" in str(caught.value) and str(folder) not in str(caught.value)
    assert len(str(caught.value)) < 2500


def put(folder, config, tensors):
    (folder / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


@pytest.mark.parametrize("mistake", FIELDS)
def test_a_config_that_means_something_else_is_refused(mistake, written, model, tmp_path):
    config, tensors = written
    fields, match = FIELDS[mistake]
    put(tmp_path, config | fields, tensors)
    refused(tmp_path, model, match)


@pytest.mark.parametrize("mistake", TENSORS)
def test_every_tensor_is_used_or_refused(mistake, written, model, tmp_path):
    config, tensors = written
    make, match = TENSORS[mistake]
    put(tmp_path, config, make(dict(tensors)))
    refused(tmp_path, model, match)


def test_tensors_in_memory_are_read_like_files(written, model):
    config, tensors = written
    live = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    bare = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    digests = {read_adapter("one", one, model, config=config).digest for one in (tensors, live, bare)}
    assert len(digests) == 1
    adapter = attach_lora(model, rank=2, alpha=4)
    own = read_adapter("own", adapter.state_dict(), model, config={"lora_alpha": 4})
    assert own.digest == adapter.to_adapter().digest and own.rank == 2
    adapter.detach()
    mine = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = read_adapter("one", mine, model, config=config)
    for tensor in mine.values():
        tensor.mul_(2)
    assert kept.digest in digests, "it is the tensors as they were"
    for odd in (tensors[f"{Q}.lora_A.weight"].to("meta"), tensors[f"{Q}.lora_A.weight"].to_sparse()):
        with pytest.raises(ModelError, match=r"lora_A\.weight is no plain tensor with content"):
            read_adapter("one", tensors | {f"{Q}.lora_A.weight": odd}, model, config=config)
    with pytest.raises(ModelError, match="no lora_alpha"):
        read_adapter("one", tensors, model)
    with pytest.raises(ModelError, match=r"adapter 'one': rank 2, the limit is 1 \(max_rank\)"):
        read_adapter("one", tensors, model, config=config, max_rank=1)


def test_damaged_and_hostile_files_are_refused(written, model, tmp_path):
    config, tensors = written
    put(tmp_path, config, tensors)
    whole = (tmp_path / WEIGHTS).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    huge = json.dumps({f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [1 << 40, 64], "data_offsets": [0, 1 << 48]}})
    float_end = json.dumps({f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [10**400, 1.0]}})
    overlapping = json.loads(whole[8 : 8 + header])
    for entry in overlapping.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [0, entry["data_offsets"][1] - entry["data_offsets"][0]]
    overlapping = json.dumps(overlapping)
    lone = json.dumps({"x\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()  # no UTF-8
    contents = {
        b"": "no safetensors file",
        whole[:5]: "no safetensors file",
        whole[: 8 + header // 2]: "not JSON",
        whole[:-1]: "damaged or cut short",
        whole + b"\0" * 9: "damaged or cut short",
        (1 << 62).to_bytes(8, "little") + whole[8:]: "header is over 8,388,608 bytes",
        (9 << 20).to_bytes(8, "little") + b" " * (9 << 20): "header is over 8,388,608 bytes",
        len(huge).to_bytes(8, "little") + huge.encode(): "its header says no shape",
        len(float_end).to_bytes(8, "little") + float_end.encode(): "its header says no shape",
        len(overlapping).to_bytes(8, "little") + overlapping.encode() + whole[8 + header :]: "damaged or cut short",
        whole + b"\0" * (4 << 20): "damaged or cut short",
        (4).to_bytes(8, "little") + b"[[]]": "expected a JSON object|no tensors",
        save({"a" * 3000: torch.ones(1)}): "aaa[.][.][.]",
        len(lone).to_bytes(8, "little") + lone: r"x\\ud800 is no tensor",
    }
    for content, match in contents.items():
        (tmp_path / WEIGHTS).write_bytes(content)
        refused(tmp_path, model, match)
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    refused(tmp_path, model, f"there is no file {WEIGHTS}; adapter_model.bin is not read")
    os.mkfifo(tmp_path / WEIGHTS)  # reading it would wait for ever
    refused(tmp_path, model, f"there is no file {WEIGHTS}")
    for text, match in ((b"{", "not JSON"), (b"[1]", "expected a JSON object"), (b"\xff", "not JSON")):
        (tmp_path / CONFIG).write_bytes(text)
        refused(tmp_path, model, match)
    (tmp_path / CONFIG).write_bytes(b'{"a": "' + b"b" * (1 << 20) + b'"}')
    refused(tmp_path, model, "more than 1,048,576 bytes")
    (tmp_path / CONFIG).write_bytes(b"[" * 100_000)
    refused(tmp_path, model, "not JSON")
    (tmp_path / CONFIG).unlink()
    refused(tmp_path, model, f"there is no file {CONFIG}")
    refused(tmp_path / "nowhere", model, "there is no such directory")


def test_a_hybrid_model_whose_family_is_not_said_is_refused():
    model = tiny_hybrid("M*-")
    name = "model.layers.1.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 64), f"{name}.lora_B.weight": torch.ones(64, 2)}
    with pytest.raises(ModelError, match=r"which family.*give description=open_source"):
        read_adapter("one", tensors, model, config={"lora_alpha": 1})


def test_a_directory_that_cannot_be_written_is_an_error(model, tmp_path):
    adapter = attach_lora(model, rank=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="the adapter cannot be written"):
        adapter.save(tmp_path / "file")
    adapter.detach()
