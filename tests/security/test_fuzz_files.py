"""Files that came from elsewhere: damaged and altered ones are an error of the package, and run nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from control_case import WEIGHTS, safetensors
from durable_case import PROMPT, Collector, make_engine, make_model
from mutations import Rounds, altered, damaged, rounds, shown, within
from safetensors.torch import save_file
from test_sample_file import make_groups, make_sample
from vocabularies import byte_level

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.durable import file_format, journal
from megatron_infer.errors import InferenceError, WrongState
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.checkpoint_files import tensors_only
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl import sample_codec, sample_file
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server.control.weight_files import entries_of
from megatron_infer.testing.inspect import inspect

__all__ = ["rounds"]
pytestmark = pytest.mark.security


@contextlib.contextmanager
def refused_or_read(what: Any, *, limit_s: float = 3.0) -> Iterator[None]:
    with shown(what), within(limit_s), contextlib.suppress(InferenceError):
        yield


# ---------------------------------------------------------------------- saved requests


def test_saved_requests_that_are_altered_are_refused_or_served(rounds: Rounds, tmp_path: Path) -> None:
    """With a right checksum: who writes the file can make one. The engine that read them computes on."""
    source = make_engine(make_model())
    source.keep_snapshots(tmp_path / "kept")
    source.add_request(PROMPT[:9], SamplingParams(max_tokens=9, n=2, logprobs=1, prompt_logprobs=0, seed=3))
    source.add_request(PROMPT[:4], SamplingParams(max_tokens=2, temperature=0.0), stream="delta")
    Collector().step(source, 4)
    source.save_requests(tmp_path / "saved", kv=True)
    source.add_request(PROMPT[:3], SamplingParams(max_tokens=4))
    manifest, tensors = file_format.read(tmp_path / "saved")
    records = msgspec.msgpack.decode(tensors["records"].numpy().tobytes())
    kept_lines = journal.journal_path(tmp_path / "kept").read_bytes()
    model = make_model()
    engine = make_engine(model)
    path = tmp_path / "altered"
    for rng in rounds(long=30):
        new = altered(records, rng) if rng.random() < 0.7 else records
        try:
            content = torch.frombuffer(bytearray(msgspec.msgpack.encode(new)), dtype=torch.uint8)
        except (OverflowError, UnicodeEncodeError):  # beyond msgpack
            continue
        about = altered(manifest, rng) if new is records else manifest
        file_format.write(path, about if isinstance(about, dict) else {}, {**tensors, "records": content})
        with refused_or_read(new if new is not records else about):
            engine.load_requests(path)
            while engine.has_unfinished():
                engine.step()
            engine = make_engine(model)
        with refused_or_read(about):
            file_format.read_manifest(path)
        if rng.random() < 0.2:
            journal.journal_path(tmp_path / "kept").write_bytes(_journal(kept_lines, rng))
            with refused_or_read("the journal"):
                inspect(engine).snapshots.read(tmp_path / "kept")


def _journal(content: bytes, rng: random.Random) -> bytes:
    """Its lines with altered records and right checks."""
    first, *rest = content.splitlines()
    begin = json.loads(first)["record"]
    salt = f"{begin['generation'][0]}/{begin['generation'][1]}"
    lines = [first + b"\n"]
    for number, line in enumerate(rest, start=2):
        lines.append(journal._line(salt, number, altered(json.loads(line)["record"], rng)))
    return b"".join(lines)


# ---------------------------------------------------------------------- samples


def test_samples_that_are_altered_are_refused_or_read(rounds: Rounds) -> None:
    rng = random.Random(1)
    sample = make_sample(rng, [1, 2], 5, logprobs=True, raw=True, support=True, routing=True, reward=True)
    sample.text = "an answer"
    message = sample_codec.encode_sample(sample)
    whole = sample_file.encode(make_groups(3))
    for rng in rounds(long=300):
        value = altered(msgspec.msgpack.decode(message), rng)
        with refused_or_read(value), contextlib.suppress(OverflowError):  # beyond msgpack
            sample_codec.decode_sample(msgspec.msgpack.encode(value))
        for decode, content in ((sample_codec.decode_sample, message), (sample_file.decode, whole)):
            data = damaged(content, rng)
            with refused_or_read(data):
                decode(data)  # type: ignore[operator]


# ---------------------------------------------------------------------- models


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    tokenizer = byte_level().backend
    tokens = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda entry: entry[1])
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_array("a.b", [[1, 2], [3]])
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def look_at(path: Path) -> None:
    """What serving a model reads of its files before there is a model."""
    source = open_source(path)
    source.config()
    with contextlib.suppress(InferenceError):
        source.tokenizer().encode("hello")
    for _ in source.tensors():
        pass


def test_damaged_gguf_files_are_refused_or_read(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    good = path.read_bytes()
    look_at(path)
    for rng in rounds(long=150):
        begin = rng.choice((0, 0, good.index(b"tokenizer.ggml.model"), len(good) - 4000))
        data = good[:begin] + damaged(good[begin : begin + 700], rng) + good[begin + 700 :]
        path.write_bytes(data)
        with refused_or_read(data[begin : begin + 700]):
            look_at(path)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 262,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "eos_token_id": [1, 2],
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def test_damaged_model_directories_are_refused_or_read(rounds: Rounds, tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    tensors = {"model.embed_tokens.weight": torch.zeros(262, 32), "model.norm.weight": torch.zeros(32)}
    save_file(tensors, tmp_path / "model-1.safetensors")
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer.json": json.loads((tmp_path / "tokenizer.json").read_text()),
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "bos_token": "<|end|>",
            "eos_token": {"content": "<|user|>"},
            "chat_template": [{"name": "default", "template": "a"}],
        },
        "model.safetensors.index.json": {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")},
    }
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    look_at(tmp_path)
    for rng in rounds(long=150):
        name = rng.choice([*files, "config.json", "model-1.safetensors"])
        if name in files and rng.random() < 0.8:
            data = json.dumps(altered(files[name], rng)).encode()
        else:
            data = damaged(contents[name][:400], rng) + contents[name][400:]
        (tmp_path / name).write_bytes(data)
        with refused_or_read((name, data)):
            look_at(tmp_path)
        (tmp_path / name).write_bytes(contents[name])


class Ran:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_damaged_checkpoint_metadata_run_nothing(rounds: Rounds, tmp_path: Path) -> None:
    folder, ran = tmp_path / "checkpoint", tmp_path / "ran"
    save_checkpoint(make_model(), folder)
    good = (folder / ".metadata").read_bytes()
    attack = pickle.dumps(Ran(ran), protocol=2)[2:-1]
    for rng in rounds(long=60):
        at = rng.randrange(len(good))
        data = damaged(good, rng) if rng.random() < 0.5 else good[:at] + attack + good[at:]
        (folder / ".metadata").write_bytes(data)
        with refused_or_read(data), tensors_only(folder):
            pass
        assert not ran.exists(), data


# ---------------------------------------------------------------------- bundles of weights


def test_damaged_bodies_of_weights_are_refused_or_read(rounds: Rounds) -> None:
    good = safetensors(**WEIGHTS)
    head = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    for rng in rounds(long=300):
        text = json.dumps(altered(head, rng)).encode()
        for data in (damaged(good, rng), len(text).to_bytes(8, "little") + text + bytes(14)):
            with refused_or_read(data):
                for entry in entries_of(data):
                    assert sum(len(chunk["data"]) for chunk in entry.chunks(data)) == entry.end - entry.start


PIECE = {"name": "embedding.word_embeddings.weight", "dtype": "F32", "shape": [128, 64], "offset": 0, "data": bytes(64)}
COMMANDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("begin_weights", {}),
    ("write_weights", PIECE),
    ("write_weights", {**PIECE, "offset": 64}),
    ("finish_weights", {"version": 3, "running": "keep"}),
    ("settle_weights", {}),
    ("cancel_weights", {"version": 0}),
    ("check_weights", {"action": "snapshot"}),
    ("load_weights", {"path": "../model.safetensors"}),
)


def test_damaged_weight_commands_leave_the_weights_as_they_were(rounds: Rounds, tmp_path: Path) -> None:
    from megatron_infer.coordinator import protocol
    from megatron_infer.coordinator.commands import ReplicaCommands

    engine = make_engine(make_model())
    weights = WeightReceiver(engine, weights_root=tmp_path)
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    before = weights.check_weights("checksum"), engine.generate([PROMPT], greedy)[0].outputs[0].token_ids
    for rng in rounds(long=10):
        for _ in range(20):
            name, args = rng.choice(COMMANDS)
            if name == "finish_weights" and rng.random() < 0.7:
                continue
            changed = altered(args, rng)
            given = changed if isinstance(changed, dict) else args
            with shown((name, given)), within(3.0):
                command = protocol.Command(1, 1, name, {str(key): value for key, value in given.items()}, 5.0)
                answer = ReplicaCommands(weights.commands()).execute(engine, command, time.monotonic(), lambda: None)
                msgspec.msgpack.encode(answer)
        weights.cancel_weights()
        after = weights.check_weights("checksum"), engine.generate([PROMPT], greedy)[0].outputs[0].token_ids
        assert before == after


# ---------------------------------------------------------------------- what was found


def test_update_that_has_not_ended_cannot_be_made_final(tmp_path: Path) -> None:
    """It left the engine with weights that are not whole, and nothing that could be cancelled."""
    engine = make_engine(make_model())
    weights = WeightReceiver(engine, weights_root=tmp_path)
    weights.begin_weights()
    with pytest.raises(WrongState, match="settle_weights before finish_weights"):
        weights.settle_weights()
    weights.cancel_weights()
    assert engine.generate([PROMPT], SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize("given", [["F32"], {"a": 1}, None, 5])
def test_type_of_a_tensor_that_is_no_text_is_refused(given: Any) -> None:
    text = json.dumps({"a": {"dtype": given, "shape": [2], "data_offsets": [0, 8]}}).encode()
    with pytest.raises(InferenceError, match="no safetensors file: a is"):
        entries_of(len(text).to_bytes(8, "little") + text + bytes(8))


def test_record_of_a_journal_that_is_no_object_is_refused(tmp_path: Path) -> None:
    engine = make_engine(make_model())
    engine.keep_snapshots(tmp_path / "kept")
    engine.add_request(PROMPT[:3], SamplingParams(max_tokens=2))
    path = journal.journal_path(tmp_path / "kept")
    first, *_ = path.read_bytes().splitlines(keepends=True)
    begin = json.loads(first)["record"]["generation"]
    path.write_bytes(first + journal._line(f"{begin[0]}/{begin[1]}", 2, [1]))  # type: ignore[arg-type]
    with pytest.raises(InferenceError, match="line 2 is no record"):
        make_engine(make_model()).load_requests(tmp_path / "kept")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3.4e38])
def test_weights_that_are_no_numbers_are_refused_at_every_door(value: float, tmp_path: Path) -> None:
    """3.4e38 is a number in fp32, and none in the model's bfloat16."""
    model = make_model(params_dtype=torch.bfloat16, bf16=True).bfloat16()
    engine = make_engine(model)
    state = {name: one.detach().float() for name, one in model.named_parameters()}
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    state[name] = state[name].clone()
    state[name][3, 5] = value
    save_file(state, tmp_path / "model.safetensors")
    broken = make_model()
    with torch.no_grad():
        broken.get_parameter(name)[3, 5] = value
    save_checkpoint(broken, tmp_path / "dist")
    weights = WeightReceiver(engine, weights_root=tmp_path)
    commands = weights.commands()
    before = weights.check_weights("checksum")
    doors: tuple[tuple[str, dict[str, Any]], ...] = (
        ("load_weights", {"path": str(tmp_path / "model.safetensors")}),
        ("load_weights", {"path": str(tmp_path)}),
        ("load_weights", {"path": str(tmp_path / "dist")}),
        ("write_weights", {"name": name, "dtype": "F32", "shape": list(state[name].shape), "offset": 0,
                           "data": state[name].numpy().tobytes()}),
    )  # fmt: skip
    for door, given in doors:
        if door == "write_weights":
            commands["begin_weights"]()
        with pytest.raises(InferenceError, match=rf"{name} got 1 values of \d+ that are NaN or infinite"):
            commands[door](**given)
        commands["cancel_weights"]()
        assert weights.check_weights("checksum") == before, "what had been written was put back"
    assert engine.generate([PROMPT], SamplingParams(max_tokens=1))[0].finished
