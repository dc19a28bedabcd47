"""Two tensor-parallel ranks speak with the sound of one process, each rank the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_ranks
import numpy as np
import pytest
from audio_case import speech_model, text_tokenizer

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.pipelines import AudioGenerationRequest, AudioGeneratorPipeline, TextTokenizer
from megatron_infer.server.audio.blocks import BlockSchedule
from megatron_infer.server.audio.registry import open_decoder

pytestmark = pytest.mark.long
SPEECH: dict[str, Any] = {"first_token": 100, "vocab_size": 24, "end_token": 124, "prompt": ["voice", 126, "text", 127]}


def spoken(engine, schedule: BlockSchedule) -> np.ndarray:
    """Several requests at once, one after the other; the voice is in the prefix cache from the second on."""
    opened = open_decoder("tones", config={"vocab_size": 24})
    pipeline = AudioGeneratorPipeline.of_engine(
        engine, TextTokenizer(text_tokenizer()), speech_model(**SPEECH), opened, schedule=schedule
    )
    asked = [
        AudioGenerationRequest(
            input="Yes." * (number + 1),
            audio_prompt_tokens=tuple(range(20)) * 2,
            sampling_params=SamplingParams(max_tokens=30, seed=number, temperature=1.0, logit_bias={124: -9.0}),
            request_id=f"r{number}",
        )
        for number in range(4)
    ]
    return np.concatenate([output.audio for output in pipeline.generate(asked)])


def speak_on_a_rank(rank: int, size: int, folder: str) -> None:
    engine = engine_ranks.make_engine(engine_ranks.part_of_model("attention", folder, rank, size), max_tokens=64)
    sound = spoken(engine, BlockSchedule(chunk_size=(4, 8), buffer=4))
    assert np.array_equal(sound, np.load(Path(folder, "expected.npy")))


def test_two_ranks_sound_as_one_process(tmp_path):
    sound = spoken(engine_ranks.make_engine(engine_ranks.whole_model("attention")), BlockSchedule())
    assert len(sound) > 100 * 320
    np.save(tmp_path / "expected.npy", sound)
    engine_ranks.run_ranks(speak_on_a_rank, tmp_path)
