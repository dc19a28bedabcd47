"""Shared by tests of speech: a tiny model that draws speech tokens, its directory, and pipelines over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.pipelines import AudioGenerationRequest, AudioGeneratorPipeline, TextTokenizer
from megatron_infer.server.audio.blocks import BlockSchedule
from megatron_infer.server.audio.decoder import OpenedDecoder
from megatron_infer.server.audio.registry import open_decoder
from megatron_infer.server.audio.speech_model import FILE, SpeechModel
from megatron_infer.server.audio.voices import encode_voices
from megatron_infer.server.audio.wav import pcm16, wav_header
from megatron_infer.server.audio_decoder import DecoderServer
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid
from megatron_infer.text.detokenizer import byte_level_alphabet
from megatron_infer.text.tokenizer import Tokenizer

NUM_SPEECH, FIRST, END = 64, 264, 328
VOCAB = 336
SPEECH: dict[str, Any] = {
    "first_token": FIRST,
    "vocab_size": NUM_SPEECH,
    "end_token": END,
    "frame_rate": 50,
    "prompt": ["voice", 258, "text", 259],
    "decoder": "tones",
    "decoder_config": {"vocab_size": NUM_SPEECH},
}
ENGINE: dict[str, Any] = {
    "buffer_size_gb": 0.01,
    "block_size_tokens": 16,
    "max_sequence_length": 240,
    "max_requests": 8,
    "max_tokens": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "prefix_caching_eviction_policy": "lru",
    "check_invariants": True,
    "batching": "phased",
}
TEXTS = ("Seventeen ships left the harbour.", "It is half past four.", "Yes.", "Two and two are four, and three more.")


@lru_cache(maxsize=1)
def text_tokenizer() -> Tokenizer:
    """One token per byte, and some marks."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([f"<|mark{index}|>" for index in range(4)])
    return Tokenizer(backend, name="tiny")


def speech_model(**changes: Any) -> SpeechModel:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_text(json.dumps(SPEECH | changes))
        return SpeechModel.read(Path(folder))


@lru_cache(maxsize=2)
def tiny_model(kind: str = "attention"):
    return tiny_gpt(vocab_size=VOCAB) if kind == "attention" else tiny_hybrid("M*-M", vocab_size=VOCAB)


def make_engine(kind: str = "attention", **settings: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(tiny_model(kind), InferenceConfig(**ENGINE | settings), tokenizer=text_tokenizer())


def make_pipeline(
    kind: str = "attention", *, schedule: BlockSchedule | None = None, voices=None, engine=None, **settings: Any
) -> AudioGeneratorPipeline:
    return AudioGeneratorPipeline.of_engine(
        engine or make_engine(kind, **settings),
        TextTokenizer(text_tokenizer()),
        speech_model(),
        open_decoder("tones", config={"vocab_size": NUM_SPEECH}),
        schedule=schedule or BlockSchedule(chunk_size=(5, 10), buffer=4),
        voices=voices,
    )


def requests(count: int = 4, *, prefix: str = "r", max_tokens: int = 40, **more: Any) -> list[AudioGenerationRequest]:
    return [
        AudioGenerationRequest(
            input=TEXTS[index % len(TEXTS)],
            sampling_params=SamplingParams(max_tokens=max_tokens - 3 * index, seed=index, temperature=1.0),
            request_id=f"{prefix}{index}",
            **more,
        )
        for index in range(count)
    ]


def write_voice(path: Path, *, tokens=(3, 1, 4, 1, 5, 9, 2, 6) * 5, rate: int = 16_000) -> Path:
    """A recording that `tones` turns into these tokens."""
    tones = open_decoder("tones", config={"vocab_size": NUM_SPEECH, "samples_per_token": rate // 50})
    import torch

    ids = torch.tensor([tokens])
    sound = tones.decoder.decode(ids, torch.tensor([len(tokens)]), None)[0].numpy() / 2
    path.write_bytes(wav_header(rate, len(sound)) + pcm16(sound))
    return path


@contextlib.contextmanager
def decoding(path: str, voices: dict[str, str], opened: OpenedDecoder):
    """A decoder server in a thread."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    server = DecoderServer(opened, encode_voices(voices, opened))
    task = loop.create_task(server.serve(path, ready.set))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        if left := asyncio.all_tasks(loop):  # of connections
            for one in left:
                one.cancel()
            loop.run_until_complete(asyncio.wait(left))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    yield server
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)
    assert not thread.is_alive()


def open_own(*, vocab_size: int) -> OpenedDecoder:
    """A decoder of one's own, for `serve --audio-decoder audio_case:open_own`."""
    return open_decoder("tones", config={"vocab_size": vocab_size})


def equal(first, second) -> bool:
    """Whether outputs have the same tokens and samples."""
    return all(
        one.tokens == two.tokens and np.array_equal(one.audio, two.audio)
        for one, two in zip(first, second, strict=True)
    )


def write_model(folder: Path) -> Path:
    """A directory of random weights that `speak` and `serve` take, with the voice anna."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": 256, "eos_token_id": END, "vocab_size": VOCAB}
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, max_position_embeddings=512, initializer_range=0.2, **sizes, **ids)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[END] = 0  # else answers end after a few tokens
    model.save_pretrained(folder)
    text_tokenizer().save(folder)
    write_voice(folder / "anna.wav")
    (folder / FILE).write_text(json.dumps(SPEECH | {"voices": {"anna": "anna.wav"}}))
    return folder
