"""A pipe, a socket or a device under the name of a file: an error in time, where a reader could wait without end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from durable_case import PROMPT, make_engine, make_model
from safetensors.torch import save_file
from test_fuzz_files import CONFIG, look_at, write_gguf
from test_sample_file import make_groups
from vocabularies import byte_level

from megatron_infer.cli.prompts import read_jobs
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.checkpoint_files import tensors_only
from megatron_infer.models.loading.hf_weights import SafetensorsReader
from megatron_infer.pipelines.foreign_runner import read_description, read_weights
from megatron_infer.rl import sample_file
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server.audio.codec import Codec, CodecConfig, open_codec
from megatron_infer.server.audio.voices import read_voice
from megatron_infer.server.audio.wav import pcm16, wav_header

pytestmark = pytest.mark.security


def huggingface(folder: Path) -> None:
    byte_level().save(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("a")
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    huggingface(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.zeros(32)}, folder / "pytorch_model.bin")


def indexed(folder: Path) -> None:
    huggingface(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def saved_requests(folder: Path) -> None:
    engine = make_engine(make_model())
    engine.keep_snapshots(folder / "kept")
    engine.add_request(PROMPT[:4], SamplingParams(max_tokens=2))


def load_requests(folder: Path) -> None:
    make_engine(make_model()).load_requests(folder / "kept")
    make_engine(make_model()).keep_snapshots(folder / "kept")


def voice(folder: Path) -> None:
    sound = pcm16(np.sin(np.arange(8000) / 9).astype(np.float32))
    (folder / "a.wav").write_bytes(wav_header(8000, 8000) + sound)


def load_checkpoint(folder: Path) -> None:
    look_at(folder)
    with tensors_only(folder):
        pass


def custom(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, folder / "a.safetensors")


def below_root(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")


def samples(folder: Path) -> None:
    sample_file.save(folder / "a", make_groups(2))


def prompts(folder: Path) -> None:
    (folder / "a").write_text('{"prompt": "a"}')


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "huggingface": (huggingface, look_at),
    "huggingface, pickled": (pickled, look_at),
    "huggingface, indexed": (indexed, look_at),
    "a .safetensors file": (below_root, lambda folder: SafetensorsReader(folder / "model.safetensors")),
    "gguf": (lambda folder: write_gguf(folder / "model.gguf"), lambda folder: look_at(folder / "model.gguf")),
    "torch_dist": (lambda folder: save_checkpoint(make_model(), folder), load_checkpoint),
    "saved requests": (saved_requests, load_requests),
    "samples": (samples, lambda folder: sample_file.load(folder / "a")),
    "prompts": (prompts, lambda folder: list(read_jobs(str(folder / "a")))),
    "voice": (voice, lambda folder: read_voice(str(folder / "a.wav"))),
    "codec": (lambda folder: Codec(CodecConfig()).save(folder / "a"), lambda folder: open_codec(folder / "a")),
    "a model of one's own": (custom, lambda folder: (read_description(folder), read_weights(folder))),
    "weights below a root": (
        below_root,
        lambda folder: WeightReceiver(make_engine(make_model()), weights_root=folder.parent).load_weights(str(folder)),
    ),
}  # fmt: skip


@contextlib.contextmanager
def special(path: Path, kind: str) -> Iterator[None]:
    """Put something that is no file in a file's place, from which nothing comes."""
    content = path.read_bytes()
    path.unlink()
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            os.mkfifo(path)
            stack.callback(os.close, os.open(path, os.O_RDWR))
        elif kind == "socket":
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(
                f"/proc/self/fd/{stack.enter_context(_folder(path.parent))}/{path.name}"
            )  # its own name may be long
        else:
            master, slave = os.openpty()
            for one_end in (master, slave):
                stack.callback(os.close, one_end)
            path.symlink_to(os.ttyname(slave))
        yield
        path.unlink()
    path.write_bytes(content)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)


def outcome_of(read: Callable[[Path], Any], folder: Path) -> list[BaseException]:
    """The error of a read; fails if it does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            read(folder)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for what never comes"
    return errors


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_and_not_waited_for(reader: str, tmp_path: Path) -> None:
    make, read = READERS[reader]
    folder = tmp_path / "a"
    folder.mkdir()
    make(folder)
    good = outcome_of(read, folder)
    assert all(isinstance(error, InferenceError) for error in good), good  # of tensors that make no whole model
    refused = set()
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        for kind in ("pipe", "socket", "device"):
            if reader == "prompts" and kind == "pipe":
                continue  # what a shell gives for <(command)
            with special(path, kind):
                errors = outcome_of(read, folder)
            assert all(isinstance(error, InferenceError) for error in errors), (path.name, kind, errors)
            if errors:
                refused.add(path.name)
    optional = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "common.pt"}
    assert refused >= {path.name for path in folder.iterdir()} - optional


def test_prompts_may_come_out_of_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "a"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text('{"prompt": "a"}\n'), daemon=True)
    writer.start()
    assert [job.prompt for job in read_jobs(str(path))] == ["a"]
    writer.join(20)
