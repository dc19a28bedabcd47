"""`megatron-infer speak` and a pipeline made from a configuration: what is heard is what the engine's tokens say."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
from audio_case import NUM_SPEECH, write_model, write_voice

from megatron_infer.cli.main import main
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.pipelines import AudioGenerationConfig, AudioGenerationRequest, AudioGeneratorPipeline
from megatron_infer.server.audio.registry import open_decoder

TEXT = "Seventeen ships left the harbour."
SETTINGS = {"buffer_size_gb": 0.02, "max_length": 256, "threads": 1, "dtype": "float32", "max_batch_size": 4}
FLAGS = ["--buffer-size-gb", "0.02", "--max-length", "256", "--threads", "1", "--dtype", "float32"]
FLAGS += ["--seed", "4", "--max-tokens", "60", "--logit-bias", "328=-20"]
BLOCKS = ["--chunk-size", "5,10", "--buffer", "4", "--prepend-prompt-speech-tokens", "rolling"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("voice"))


@pytest.fixture(scope="module")
def expected(folder):
    config = AudioGenerationConfig(model_path=str(folder), audio_decoder="codec", run_model_test_mode=True, **SETTINGS)
    pipeline = AudioGeneratorPipeline(config)
    params = SamplingParams(max_tokens=60, seed=4, logit_bias={328: -20.0})
    (output,) = pipeline.generate(AudioGenerationRequest(input=TEXT, voice="anna", sampling_params=params))
    assert pipeline.engine.config.batching == "phased" and len(output.tokens) > 30
    return output


def test_the_file_has_the_sound_of_the_tokens(folder, expected, tmp_path, capsys):
    out = tmp_path / "out.wav"
    assert main(["speak", str(folder), "--text", TEXT, "--output", str(out), "--voice", "anna", *FLAGS, *BLOCKS]) == 0
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        sound = np.frombuffer(file.readframes(1 << 24), dtype="<i2") / 32767
    heard = open_decoder("tones", config={"vocab_size": NUM_SPEECH}).encoder.encode(sound)
    assert heard == list(expected.tokens) and "s of sound, the first after" in capsys.readouterr().err


def test_the_stream_is_the_file_without_its_header(folder, expected, tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    voice = str(write_voice(tmp_path / "like_anna.wav"))
    assert main(["speak", str(folder), "--stream", "--voice-prompt", voice, *FLAGS, *BLOCKS]) == 0
    sound = np.frombuffer(raw.getvalue(), dtype="<i2") / 32767
    assert open_decoder("tones", config={"vocab_size": NUM_SPEECH}).encoder.encode(sound) == list(expected.tokens)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "one of --output FILE and --stream"),
        (["--output", "x", "--stream"], 2, "one of --output FILE and --stream"),
        (["--stream", "--text", ""], 1, "input is empty"),
        (["--output", "/no/where/x.wav"], 2, "cannot write /no/where/x.wav"),
        (["--output", "/"], 2, "cannot write /: it must be a file"),
        (["--stream", "--n", "2"], 1, "n is 2, which does nothing for speech"),
        (["--stream", "--stop", "."], 1, "which does nothing for speech"),
        (["--stream", "--chunk-size", "0"], 2, "chunk_size is [0]"),
        (["--stream", "--audio-decoder", "tone"], 2, "did you mean 'tones'"),
        (["--stream", "--audio-decoder-config", '{"vocab_size": 32}'], 2, "32 in the decoder"),
    ],
)
def test_bad_command_line_is_refused_before_a_model_is_loaded(flags, code, message, folder, capsys, tmp_path):
    given = ["speak", str(folder), *FLAGS, *(flags if "--text" in flags else ["--text", TEXT, *flags])]
    assert main(given) == code
    assert message in capsys.readouterr().err


def test_a_model_without_speech_tokens_is_refused(tmp_path, capsys):
    assert main(["speak", str(tmp_path), "--text", TEXT, "--stream"]) == 1
    assert "has no speech.json" in capsys.readouterr().err


def test_a_terminal_gets_no_pcm(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["speak", str(folder), "--text", TEXT, "--stream"]) == 2
    assert "pipe it to a player" in capsys.readouterr().err
