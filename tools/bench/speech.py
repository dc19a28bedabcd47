"""Speech: how soon the first block sounds, how fast sound is made, what batches and the voice's prefix save.

    python tools/bench/speech.py [--threads 2] [--chunks 15,30,60] [--json FILE]

The weights are random, so nothing is said: a model of text and speech tokens (8 layers of 256, 10 M parameters) and
the codec that examples train (50 tokens a second). Answers have a fixed length, as the end token is not drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is loaded

# ruff: noqa: E402
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.pipelines import AudioGenerationRequest, AudioGeneratorPipeline, TextTokenizer
from megatron_infer.server.audio.blocks import BlockSchedule, Window
from megatron_infer.server.audio.codec import Codec, CodecConfig
from megatron_infer.server.audio.decoder import OpenedDecoder, decode_windows
from megatron_infer.server.audio.layout import Layout, SpeechFormat
from megatron_infer.server.audio.registry import open_decoder
from megatron_infer.server.audio.speech_model import SpeechModel
from megatron_infer.testing.tiny import tiny_gpt
from megatron_infer.text.detokenizer import byte_level_alphabet
from megatron_infer.text.tokenizer import Tokenizer

FIRST, CODES, END, VOCAB = 260, 512, 772, 776
SIZES: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 768,
    "vocab_size": VOCAB, "max_sequence_length": 1024,
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "buffer_size_gb": 0.3, "block_size_tokens": 16, "max_sequence_length": 1024, "max_requests": 16, "max_tokens": 512,
    "enable_chunked_prefill": True, "enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru",
    "batching": "phased",
}  # fmt: skip
BUFFER = 8
TEXT = "Seventeen ships left the harbour at half past four in the morning, and nine of them came back."


def make_pipeline(opened: OpenedDecoder, schedule: BlockSchedule) -> AudioGeneratorPipeline:
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    speech = SpeechModel(
        first_token=FIRST,
        end_token=END,
        format=SpeechFormat(vocab_size=CODES, frame_rate=Fraction(50)),
        layout=Layout(),
        prompt=("voice", 258, "text", 259),
    )
    engine = DynamicInferenceEngine(tiny_gpt(**SIZES), InferenceConfig(**ENGINE))
    tokenizer = TextTokenizer(Tokenizer(backend, name="bytes"))
    return AudioGeneratorPipeline.of_engine(engine, tokenizer, speech, opened, schedule=schedule)


def request(seconds: float, *, voice: tuple[int, ...] = (), seed: int = 0, **more: Any) -> AudioGenerationRequest:
    params = SamplingParams(max_tokens=round(50 * seconds), seed=seed, logit_bias={END: -1e9})
    return AudioGenerationRequest(input=TEXT, audio_prompt_tokens=voice, sampling_params=params, **more)


def timed_stream(pipeline: AudioGeneratorPipeline, one: AudioGenerationRequest) -> tuple[float, float, float]:
    """(seconds until the first block, until the last, of sound)."""
    began, first, sound = time.perf_counter(), 0.0, 0.0
    for chunk in pipeline.stream(one):
        first = first or time.perf_counter() - began
        sound += chunk.seconds
    return first, time.perf_counter() - began, sound


def sixteen(pipeline: AudioGeneratorPipeline, count: int, seconds: float) -> dict[str, float]:
    """Streams that begin together, each heard by a player that starts with the first block."""
    contexts = [pipeline.new_context(request(seconds, seed=number)) for number in range(count)]
    began = time.perf_counter()
    played: dict[str, list[tuple[float, float]]] = {one.request_id: [] for one in contexts}
    while any(not one.is_done for one in contexts):
        for name, chunk in pipeline.execute(contexts).items():
            played[name].append((time.perf_counter() - began, chunk.seconds))
    took, underruns = time.perf_counter() - began, 0
    for chunks in played.values():
        heard_until = chunks[0][0]
        for arrived, length in chunks:
            underruns += arrived > heard_until
            heard_until = max(heard_until, arrived) + length
    sound = sum(length for chunks in played.values() for _, length in chunks)
    first = statistics.median(chunks[0][0] for chunks in played.values())
    return {"first_s": first, "s_a_second_of_a_stream": took / seconds, "underruns": underruns, "sound_s": sound}


def batching(opened: OpenedDecoder, count: int, rounds: int) -> dict[str, float]:
    """Windows of 30 tokens and 8 of context: one by one, and together."""
    part = {"num_prompt": 0, "num_left": 8, "num_new": 30, "block": 1, "is_last": False}
    ids = [tuple((7 * token + number) % CODES for token in range(38)) for number in range(count)]
    windows = [Window(tokens=tokens, **part) for tokens in ids]  # type: ignore[arg-type]
    times: dict[str, list[float]] = {"one_by_one": [], "together": []}
    for _ in range(rounds):
        began = time.perf_counter()
        for window in windows:
            decode_windows(opened.decoder, [window])
        middle = time.perf_counter()
        decode_windows(opened.decoder, windows)
        times["one_by_one"].append(middle - began)
        times["together"].append(time.perf_counter() - middle)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=6.0, help="of sound, of each sentence")
    parser.add_argument("--chunks", default="15,30,60", help="chunk_size")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    figures: dict[str, Any] = {"threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        Codec(CodecConfig()).save(Path(folder, "codec.safetensors"))
        opened = open_decoder("codec", str(Path(folder, "codec.safetensors")))
        chunks = tuple(map(int, args.chunks.split(",")))
        pipeline = make_pipeline(opened, BlockSchedule(chunk_size=chunks, buffer=BUFFER))
        timed_stream(pipeline, request(1.0))  # what the first use costs
        cpu = time.process_time()
        streamed = [timed_stream(pipeline, request(args.seconds)) for _ in range(args.rounds)]
        cpu = (time.process_time() - cpu) / sum(one[2] for one in streamed)
        at_once = [timed_stream(pipeline, request(args.seconds, streaming=False)) for _ in range(args.rounds)]
        whole = statistics.median(one[1] for one in at_once)
        first = statistics.median(one[0] for one in streamed)
        factor = statistics.median(one[1] / one[2] for one in streamed)
        figures["one stream"] = {"first_s": first, "at_once_s": whole, "ratio": first / whole}
        figures["one stream"] |= {"s_a_second": factor, "cpu_s_a_second": cpu}
        pairs = []
        for number in range(args.rounds):
            voice = tuple((token * 31 + number) % CODES for token in range(500))  # ten seconds that no cache has
            pairs.append([timed_stream(pipeline, request(1.0, voice=voice))[0] for _ in range(2)])
        new, known = (statistics.median(column) for column in zip(*pairs, strict=True))
        figures["second request of a voice"] = {"first_s": new, "then_s": known, "ratio": known / new}
        figures[f"{args.streams} streams"] = sixteen(pipeline, args.streams, args.seconds)
        both = batching(opened, args.streams, args.rounds)
        figures[f"decoder, {args.streams} windows"] = both | {"speedup": both["one_by_one"] / both["together"]}
        for name, one in figures.items():
            print(name, json.dumps(one))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
