"""A file of requests that is damaged or foreign is refused whole, with its reason; a good one is replaced at once."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import resource
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
import vocabularies
from durable_case import PROMPT, VOCAB, Collector, add_all, make_engine, make_model, pool_of
from model_kinds import RECURRENT
from model_kinds import make_model as make_kind
from safetensors import safe_open

from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.model_shape import ModelShape, StateShape
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.durable import file_format, request_codec
from megatron_infer.engine.durable.kv_restore import check_places, describe, difference, num_places
from megatron_infer.errors import RequestError, SnapshotError
from megatron_infer.models.extensions import Extensions
from megatron_infer.outputs.schema import ids_to_bytes, output_record
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

FILES = Path(__file__).parent / "files"


@pytest.fixture(scope="module")
def source(model):
    engine = make_engine(model)
    add_all(engine)
    Collector().step(engine, 5)
    return engine


def refused(engine, path) -> str:
    """The reason `path` is refused, nothing of the engine being changed."""
    before = (
        engine.stats(),
        engine.input_processor.num_seeds,
        engine.input_processor.num_ids,
        dict(inspect(engine).snapshots.owed),
    )
    with pytest.raises(SnapshotError) as caught:
        engine.load_requests(path)
    assert before == (
        engine.stats(),
        engine.input_processor.num_seeds,
        engine.input_processor.num_ids,
        dict(inspect(engine).snapshots.owed),
    )
    return str(caught.value)


def test_the_file_says_what_it_is(source, tmp_path):
    source.save_requests(tmp_path / "requests", kv=True)
    with safe_open(tmp_path / "requests", framework="pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {"records", "blocks"}
    assert (metadata["format"], metadata["version"]) == ("megatron_infer.requests", "2")
    manifest = json.loads(metadata["manifest"])
    assert (manifest["num_requests"], manifest["vocab_size"]) == (5, VOCAB)
    assert os.listdir(tmp_path) == ["requests"]


@pytest.mark.long
def test_every_flipped_bit_is_noticed(model, tmp_path):
    source, path = make_engine(model), tmp_path / "requests"
    source.add_request(PROMPT[:3], SamplingParams(max_tokens=4, logprobs=0))
    Collector().step(source, 2)
    source.save_requests(path)
    engine, good = make_engine(model), path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    chooser = random.Random(0)
    for at in [*range(header), *chooser.sample(range(header, len(good)), 300)]:
        damaged = bytearray(good)
        damaged[at] ^= 1 << chooser.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(SnapshotError):
            inspect(engine).snapshots.read(path)
    path.write_bytes(good)
    assert engine.load_requests(path).loaded == ["0"]


def test_a_flipped_bit_in_keys_and_values_is_noticed(source, model, tmp_path):
    path = tmp_path / "requests"
    source.save_requests(path, kv=True)
    engine, good = make_engine(model), path.read_bytes()
    chooser = random.Random(1)
    for _ in range(40):
        damaged = bytearray(good)
        damaged[chooser.randrange(len(good))] ^= 1 << chooser.randrange(8)
        path.write_bytes(damaged)
        refused(engine, path)


def test_a_truncated_or_longer_file_is_refused(source, model, tmp_path):
    path = tmp_path / "requests"
    source.save_requests(path)
    engine, good = make_engine(model), path.read_bytes()
    lengths = [0, 1, 7, 8, 9, 100, len(good) - 1, *random.Random(2).sample(range(len(good)), 60)]
    for length in lengths:
        path.write_bytes(good[:length])
        assert "damaged" in refused(engine, path)
    path.write_bytes(good + b"\0")
    assert "damaged" in refused(engine, path)
    path.write_bytes(b"no safetensors at all, but long enough to hold a header of some kind")
    assert "not a safetensors file" in refused(engine, path)


def test_other_formats_and_newer_versions_are_refused_by_name(source, model, tmp_path):
    path, engine = tmp_path / "requests", make_engine(model)
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    assert "not a file of saved requests: its format is None" in refused(engine, path)
    source.save_requests(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file(tensors, path, metadata={**metadata, "version": "3"})
    newer = "its version is '3', this release reads '2'; it was written by a release that is newer, load it with that"
    assert newer in refused(engine, path)
    safetensors.torch.save_file(tensors, path, metadata={**metadata, "version": "9" * 5000})
    assert "this release reads '2'" in refused(engine, path)
    safetensors.torch.save_file(tensors, path, metadata={**metadata, "format": "else"})
    assert "its format is 'else'" in refused(engine, path)
    with pytest.raises(FileNotFoundError):
        engine.load_requests(tmp_path / "nowhere")


def test_a_number_that_does_not_fit_is_refused_when_it_is_saved(model):
    record = output_record(make_engine(model).generate([PROMPT[:3]], SamplingParams(max_tokens=1))[0], now=0.0)
    with pytest.raises(RequestError, match="more than 64 bits"):
        request_codec.to_bytes(msgspec.structs.replace(record, metadata={"label": 2**80}))


@pytest.mark.parametrize("name", ["saved_requests.v1", "kept_requests.v1"])
def test_files_of_an_earlier_release_are_refused_by_their_version(model, name):
    reason = refused(make_engine(model), FILES / name)
    assert "its version is '1', this release reads '2'; it was written by a release that is earlier" in reason


def test_content_that_makes_no_sense_is_refused_though_its_checksum_is_right(source, model, tmp_path):
    path, engine = tmp_path / "requests", make_engine(model)
    source.save_requests(path)
    manifest, tensors = file_format.read(path)

    def changed(edit) -> str:
        records = msgspec.msgpack.decode(tensors["records"].numpy().tobytes())
        edit(records)
        content = torch.frombuffer(bytearray(msgspec.msgpack.encode(records)), dtype=torch.uint8)
        file_format.write(path, manifest, {**tensors, "records": content})
        return refused(engine, path)

    first = lambda records: records["requests"][0]  # noqa: E731
    assert "`params`" in changed(lambda records: first(records).pop("params"))
    assert "cannot be understood" in changed(lambda records: first(records).update(prompt_ids=[0, 10**9]))
    assert "0 sequences of 1" in changed(lambda records: first(records)["sequences"].clear())
    assert "'0' is in it twice" in changed(lambda records: records["requests"].append(first(records)))
    assert "temperature" in changed(lambda records: first(records)["params"].update(temperature=-1))
    beyond = ids_to_bytes([VOCAB])
    assert f"request '0': token id {VOCAB} is outside the vocabulary" in changed(
        lambda records: first(records).update(prompt_ids=beyond)
    )


def test_a_foreign_engine_refuses_naming_what_differs(source, model, tmp_path):
    path = tmp_path / "requests"
    source.save_requests(path, kv=True)
    other = tiny_gpt(vocab_size=160, max_sequence_length=512)
    assert f"saved with vocab_size {VOCAB}, this engine's is 160" in refused(make_engine(other), path)
    words = "request '1' may grow to 153 tokens, this engine's max_sequence_length is 150"
    assert words in refused(make_engine(model, max_sequence_length=150), path)
    tight = make_engine(model, buffer_size_gb=pool_of(model, 9))
    assert "request '1' may grow to 152 stored tokens, this engine's cache holds 144" in refused(tight, path)
    with_text = make_engine(model, tokenizer=vocabularies.byte_level())
    assert "saved with tokenizer None" in refused(with_text, path)


def test_kv_of_another_shape_is_computed_again(source, tmp_path):
    path = tmp_path / "requests"
    source.save_requests(path, kv=True)
    engine = make_engine(make_model(num_query_groups=4))
    report = engine.load_requests(path)
    assert not report.with_kv and "num_kv_heads is 4, it was 2" in report.recomputed["0"]
    Collector().step(engine)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("attention", {"layernorm_epsilon": 1e-3}, "layernorm_epsilon is 0.001, it was 1e-05"),
        ("attention", {"window_size": (8, 0)}, "window_size is [8, 0], it was None"),
        ("attention", {"softmax_scale": 0.3}, "softmax_scale is 0.3, it was None"),
        ("softcapped", {"extensions": Extensions(norms="both", embedding_scale=4.0)}, "extensions is {'norms': 'both'"),
        ("softcapped", {"activation_func": torch.nn.functional.silu}, "activation_func is silu, it was tanh_gelu"),
        ("sparse", {"dsa_indexer_topk": 13}, "dsa_indexer_topk is 13, it was 12"),
        ("hybrid", {"moe_router_topk": 3}, "moe_router_topk is 3, it was 2"),
    ],
)
def test_kv_of_a_model_with_the_same_weights_and_other_settings_is_computed_again(kind, change, reason, tmp_path):
    source = make_engine(make_kind(kind))
    source.add_request(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    Collector().step(source, 2)
    source.save_requests(tmp_path / "requests", kv=True)
    report = make_engine(make_kind(kind)).load_requests(tmp_path / "requests")
    assert report.with_kv == ["0"] and not report.recomputed
    engine = make_engine(make_kind(kind, **change))
    report = engine.load_requests(tmp_path / "requests")
    assert not report.with_kv and f"the model's {reason}" in report.recomputed["0"]
    assert Collector().step(engine).finished["0"].finished


def test_kv_of_a_model_whose_experts_have_another_bias_is_computed_again(tmp_path):
    settings = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "num_moe_experts": 4}
    model = make_kind("attention", **settings)
    source = make_engine(model)
    source.add_request(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    Collector().step(source, 2)
    source.save_requests(tmp_path / "requests", kv=True)
    other = make_kind("attention", **settings)
    assert make_engine(other).load_requests(tmp_path / "requests").with_kv == ["0"]
    other.decoder.layers[0].mlp.router.expert_bias[1] += 1.0
    assert "the weights differ" in make_engine(other).load_requests(tmp_path / "requests").recomputed["0"]


def test_kv_in_a_file_that_names_no_settings_is_computed_again(source, model, tmp_path):
    path = tmp_path / "requests"
    source.save_requests(path, kv=True)
    manifest, tensors = file_format.read(path)
    del manifest["kv"]["settings"]
    file_format.write(path, manifest, tensors)
    engine = make_engine(model)
    assert "an earlier release wrote it" in engine.load_requests(path).recomputed["0"]
    Collector().step(engine)


@pytest.mark.parametrize("fails", ["save_file", "fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file(source, model, tmp_path, monkeypatch, fails):
    path = tmp_path / "requests"
    source.save_requests(path)
    good = path.read_bytes()

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((safetensors.torch, "save_file") if fails == "save_file" else (os, fails)), broken)
    with pytest.raises(OSError, match="No space left"):
        source.save_requests(path)
    monkeypatch.undo()
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["requests"]
    assert len(make_engine(model).load_requests(path).loaded) == 5


def test_a_full_disk_is_an_oserror_that_names_the_file_and_leaves_the_old_one(source, model, tmp_path):
    """safetensors has an error of its own for it."""
    path = tmp_path / "requests"
    source.save_requests(path)
    good = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for kv in (False, True):
            with pytest.raises(OSError, match=r"File too large.*requests") as caught:
                source.save_requests(path, kv=kv)
            assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["requests"]


# ---------------------------------------------------------------------- keys, values and states in a file

STATE = StateShape(num_layers=3, conv_shape=(10, 4), ssm_shape=(2, 4, 8), conv_dtype="bfloat16", ssm_dtype="float32")
HYBRID = ModelShape(
    num_layers=5,
    num_attention_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=128,
    padded_vocab_size=128,
    max_position=None,
    kv_dtype_bytes=4,
    dtype="float32",
    num_parameters=1000,
    state=STATE,
)
PLAIN = dataclasses.replace(HYBRID, state=None)


def with_state(**changes) -> ModelShape:
    return dataclasses.replace(HYBRID, state=dataclasses.replace(STATE, **changes))


@pytest.mark.parametrize(
    ("here", "saved", "message"),
    [
        (HYBRID, HYBRID, None),
        (PLAIN, HYBRID, "the model's state.num_layers is None, it was 3"),
        (HYBRID, PLAIN, "the model's state.num_layers is 3, it was None"),
        (with_state(ssm_dtype="bfloat16"), HYBRID, "the model's state.ssm_dtype is bfloat16, it was float32"),
        (with_state(conv_dtype="float32"), HYBRID, "the model's state.conv_dtype is float32, it was bfloat16"),
        (with_state(ssm_shape=(2, 4, 16)), HYBRID, "the model's state.ssm_shape is [2, 4, 16], it was [2, 4, 8]"),
        (with_state(conv_shape=(12, 4)), HYBRID, "the model's state.conv_shape is [12, 4], it was [10, 4]"),
        (with_state(num_layers=4), HYBRID, "the model's state.num_layers is 4, it was 3"),
    ],
)
def test_what_differs_of_another_model_is_named_with_the_figures(here, saved, message):
    assert difference(describe(here), json.loads(json.dumps(describe(saved)))) == message


def test_a_state_or_block_that_the_file_lacks_is_an_error():
    tensors = {"blocks": torch.zeros(4, 1), "states": torch.zeros(2, 1)}
    counts, kv = num_places(None, tensors), request_codec.SavedKV(num_tokens=3, blocks=[0, 3], state=1)
    of = {"num_known": 5, "block_size": 2}
    check_places(kv, counts, **of)
    for change, places, message in (
        ({"state": 2}, counts, r"states \[2\] of 2"),
        ({"blocks": [0, 4]}, counts, r"blocks \[4\] of 4"),
        ({"blocks": [3], "state": 2, "num_left_out": 2}, counts, r"states \[2\] of 2"),
        ({"blocks": [3]}, counts, "1 blocks of 2 for tokens 0 to 3"),
        ({"num_left_out": 1}, counts, "2 blocks of 2 for tokens 1 to 3"),
        ({"num_tokens": 5}, counts, "5 tokens computed of 5"),
        ({"num_left_out": 4}, counts, "4 left out"),
        ({"num_tokens": 0}, counts, "0 tokens computed"),
    ):
        with pytest.raises(ValueError, match=message):
            check_places(dataclasses.replace(kv, **change), places, **of)
    with pytest.raises(ValueError, match=r"states \[0\] of 0"):
        check_places(dataclasses.replace(kv, blocks=[], state=0), num_places(None, {}), num_known=5, block_size=None)
    with pytest.raises(ValueError, match="4 blocks, 5 are named"):
        num_places({"num_blocks": 5, "shape": {}}, tensors)


def test_a_file_that_lost_its_blocks_is_refused_whole(source, model, tmp_path):
    path = tmp_path / "requests"
    source.save_requests(path, kv=True)
    manifest, tensors = file_format.read(path)
    for left in ({**tensors, "blocks": tensors["blocks"][:1].clone()}, {"records": tensors["records"]}):
        file_format.write(path, manifest, left)
        assert f"{len(left.get('blocks', ()))} blocks, " in refused(make_engine(model), path)


@pytest.mark.parametrize("kind", RECURRENT, indirect=True)
def test_states_of_another_dtype_are_computed_again(model, tmp_path):
    source = make_engine(model)
    source.add_request(PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    Collector().step(source, 2)
    source.save_requests(tmp_path / "requests", kv=True)
    state = dataclasses.replace(MambaInferenceStateConfig.from_model(model), ssm_states_dtype="bfloat16")
    engine = make_engine(model, mamba_inference_state_config=state)
    report = engine.load_requests(tmp_path / "requests")
    assert report.recomputed == {"0": "the model's state.ssm_dtype is bfloat16, it was float32"}
    assert Collector().step(engine).finished["0"].finished
