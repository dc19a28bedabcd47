"""`AudioGenerationConfig`: what each field comes to, flags, and what is refused."""

from __future__ import annotations

import json
import sys
import warnings

import pytest
from audio_case import SPEECH, write_voice
from model_files import write_models

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError, ModelError, RequestError
from megatron_infer.pipelines import (
    AudioGenerationConfig,
    PipelineConfig,
    PrependPromptSpeechTokens,
    PrometheusMetricsMode,
)
from megatron_infer.pipelines.audio_config import POSITIONAL, own_decoders, schedule_of
from megatron_infer.pipelines.config_layers import Kind, parse_text
from megatron_infer.server.audio.blocks import BlockSchedule
from megatron_infer.server.audio.registry import open_decoder
from megatron_infer.server.audio.speech_model import FILE, SpeechModel, voice_files
from megatron_infer.server.audio.voices import encode_voice
from megatron_infer.server.audio.wav import pcm16, read_wav, resample, wav_header


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def configure(models, **fields) -> AudioGenerationConfig:
    fields = {"audio_decoder": "tones", "device_specs": ["cpu"], "buffer_size_gb": 0.05, "max_length": 128} | fields
    return AudioGenerationConfig(model_path=str(models / "llama"), **fields)


def test_fields_come_to_the_schedule_and_the_engine_is_phased(models):
    config = configure(
        models, chunk_size=[15, 30, 60], buffer=8, block_causal=True, prepend_prompt_speech_tokens="rolling",
        prepend_prompt_speech_tokens_causal=True, max_queue_size_tg=4, min_batch_size_tg=2, ce_delay_ms=1.5,
        enable_prioritize_first_decode=True, max_batch_size=6,
    )  # fmt: skip
    assert schedule_of(config, right_context=3) == BlockSchedule(
        chunk_size=(15, 30, 60), buffer=8, prepend=PrependPromptSpeechTokens.ROLLING, block_causal=True,
        prompt_causal=True, right_context=3,
    )  # fmt: skip
    engine = config.resolved.engine
    assert (engine.batching, engine.max_queue_size_tg, engine.min_batch_size_tg) == ("phased", 4, 2)
    assert (engine.ce_delay_ms, engine.enable_prioritize_first_decode, engine.max_requests) == (1.5, True, 6)
    setting = config.effective["buffer"]
    assert (setting.value, setting.source) == (8, "argument") and config.effective["block_causal"].value is True
    assert config.effective["batching"].source == "derived"
    with pytest.raises(ConfigError, match="is resolved, which froze it"):
        config.buffer = 3


def test_defaults_are_those_of_the_page(models):
    config = configure(models)
    fields = (config.chunk_size, config.buffer, config.block_causal, config.prepend_prompt_speech_tokens)
    assert fields == (None, 0, False, PrependPromptSpeechTokens.NEVER)
    assert config.prepend_prompt_speech_tokens_causal is False and config.audio_decoder_config == {}
    assert config.audio_decoder_weights == ""
    assert config.prometheus_metrics_mode is PrometheusMetricsMode.INSTRUMENT_ONLY
    assert config == configure(models) and config != configure(models, buffer=1, chunk_size=[2])
    plain = set(PipelineConfig.model_fields) | {"audio_decoder"}
    assert plain <= set(AudioGenerationConfig.model_fields)


def test_another_policy_may_be_asked_for_and_in_flight_batching_beside_phases_is_refused(models):
    assert configure(models, batching="mixed").resolved.engine.batching == "mixed"
    assert configure(models, enable_in_flight_batching=False).resolved.engine.batching == "phased"
    with pytest.raises(ConfigError, match="enable_in_flight_batching=True"):
        configure(models, enable_in_flight_batching=True)
    with pytest.raises(ConfigError, match="enable_in_flight_batching=True"):
        configure(models, enable_in_flight_batching=True, batching="phased")


def test_metrics_mode_is_the_servers(models):
    for given in ("launch_server", "LAUNCH_SERVER", PrometheusMetricsMode.LAUNCH_SERVER):
        config = configure(models, prometheus_metrics_mode=given)
        assert config.prometheus_metrics_mode is PrometheusMetricsMode.LAUNCH_SERVER
        assert config.resolved.server.prometheus_metrics_mode == "launch_server"
    with pytest.raises(ConfigError, match="prometheus_metrics_mode"):
        configure(models, prometheus_metrics_mode="launch")


def test_values_come_from_file_and_environment_too(models, tmp_path, monkeypatch):
    file = tmp_path / "speech.yaml"
    file.write_text(f"speech: {{model_path: {models / 'llama'}, audio_decoder: tones, buffer: 3, chunk_size: [4]}}")
    monkeypatch.setenv("MEGATRON_INFER_BUFFER", "5")
    config = AudioGenerationConfig(config_file=str(file), section_name="speech", buffer_size_gb=0.05, max_length=64)
    assert (config.buffer, config.chunk_size, config.audio_decoder) == (5, [4], "tones")
    assert config.effective["buffer"].source == "environment" and config.effective["chunk_size"].source == "file"


def test_flags_are_texts(models):
    config = AudioGenerationConfig.from_flags(
        {
            "audio_decoder": "tones", "chunk-size": "15,30,60", "buffer": "8", "block_causal": "FALSE",
            "prepend_prompt_speech_tokens": "Rolling", "prepend_prompt_speech_tokens_causal": "True",
            "audio_decoder_config": '{"vocab_size": 64}',
        },
        model_path=str(models / "llama"), buffer_size_gb=0.05, max_length=64,
    )  # fmt: skip
    assert (config.chunk_size, config.buffer, config.block_causal) == ([15, 30, 60], 8, False)
    assert config.prepend_prompt_speech_tokens is PrependPromptSpeechTokens.ROLLING
    assert config.prepend_prompt_speech_tokens_causal is True and config.audio_decoder_config == {"vocab_size": 64}


BAD_FLAGS = [
    ({}, "audio_decoder is missing"),
    ({"audio_decoder": ""}, "audio_decoder has no value"),
    ({"audio_decoder": "tone"}, "did you mean 'tones'"),
    ({"chunk": "3"}, "chunk"),
    ({"buffe": "3"}, "did you mean 'buffer'"),
    ({"buffer": ""}, "buffer has no value"),
    ({"buffer": "x"}, r"buffer is 'x' \(str\), it must be a valid integer"),
    ({"buffer": "1.5"}, r"buffer is 1.5 \(float\), it must be a valid integer"),
    ({"buffer": "-1"}, "buffer is -1, it must be at least 0"),
    ({"chunk_size": "0"}, r"chunk_size is \[0\]"),
    ({"chunk_size": "4,-1"}, r"chunk_size is \[4, -1\]"),
    ({"chunk_size": ","}, "chunk_size is ',', it must be integers with commas between them"),
    ({"chunk_size": "a,b"}, "chunk_size is 'a,b'"),
    ({"block_causal": "1"}, r"block_causal is 1 \(int\), it must be a valid boolean"),
    ({"prepend_prompt_speech_tokens": "twice"}, "never, once, rolling"),
    ({"prepend_prompt_speech_tokens_causal": "maybe"}, "must be a valid boolean"),
    ({"audio_decoder_config": "vocab_size=3"}, "must be a valid dictionary"),
    ({"audio_decoder_config": "[1"}, r"audio_decoder_config is '\[1', which is no value"),
    ({"audio_decoder_weights": "/no/where"}, "tones has no weights"),
    ({"audio_decoder": "codec"}, "audio_decoder_weights is empty"),
    ({"prometheus_metrics_mode": "launch"}, "prometheus_metrics_mode"),
    ({"run_model_test_mode": "maybe"}, "run_model_test_mode is 'maybe'"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flag_is_refused_by_its_name(flags, message, models):
    given = flags if "audio_decoder" in flags or not flags else {"audio_decoder": "tones", **flags}
    with pytest.raises(ConfigError, match=message):
        AudioGenerationConfig.from_flags(given, model_path=str(models / "llama"), buffer_size_gb=0.05)


def test_a_field_is_given_once_and_by_its_name():
    with pytest.raises(ConfigError, match="buffer is given as an audio flag and as a value"):
        AudioGenerationConfig.from_flags({"audio_decoder": "tones", "buffer": "4"}, buffer=8, model_path="x")
    with pytest.raises(ConfigError, match=r"audio_decoder is given by its place \('voice/'\) and by its name"):
        AudioGenerationConfig("voice/", audio_decoder="tones")
    with pytest.raises(ConfigError, match="takes values by name; write model_path='voice/'"):
        AudioGenerationConfig("tones", "", None, 0, False, "never", False, False, "instrument_only", "voice/")


def test_the_documented_places_are_those_of_the_documented_names(models):
    given = ("tones", "", [4], 2, True, PrependPromptSpeechTokens.ROLLING, True, True, "LAUNCH_SERVER")
    where = {"model_path": str(models / "llama"), "device_specs": ["cpu"], "buffer_size_gb": 0.05, "max_length": 128}
    for count in (1, 4, 9):
        config = AudioGenerationConfig(*given[:count], **where)
        named = AudioGenerationConfig(**dict(zip(POSITIONAL, given[:count], strict=False)), **where)
        assert config == named and config.run_model_test_mode is (count == 9) is named.run_model_test_mode
        assert config.effective["audio_decoder"].source == "argument"
    assert config.chunk_size == [4] and config.block_causal
    assert config.prepend_prompt_speech_tokens_causal and config.buffer == 2
    assert AudioGenerationConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_causal": True, "chunk_size": [3]}, "block_causal=True does nothing without buffer"),
        ({"prepend_prompt_speech_tokens_causal": True}, "does nothing with prepend_prompt_speech_tokens=never"),
        ({"buffer": 4}, "buffer does nothing without chunk_size"),
    ],
)
def test_what_does_nothing_is_said(fields, message, models):
    with pytest.warns(ConfigWarning, match=message):
        configure(models, **fields)


def test_a_sound_configuration_warns_of_nothing(models):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure(models, chunk_size=[3], buffer=2)


def test_test_mode_needs_no_weights(models):
    config = configure(models, audio_decoder="codec", run_model_test_mode=True)
    assert config.audio_decoder == "tones" and config.run_model_test_mode
    with pytest.raises(ConfigError, match="run_model_test_mode is 'x'"):
        configure(models, run_model_test_mode="x")


def test_a_decoder_of_ones_own_is_found_by_custom_architectures(models, tmp_path, monkeypatch):
    (tmp_path / "own_decoders.py").write_text(
        "from megatron_infer.server.audio.tones import open_tones\n"
        "from megatron_infer.pipelines import Architecture\n"
        "def open_low(*, vocab_size=8):\n"
        "    return open_tones(vocab_size=vocab_size, samples_per_token=640)\n"
        "ARCHITECTURES = [Architecture(name='low', open_audio_decoder=open_low)]\n"
    )
    config = configure(models, audio_decoder="low", custom_architectures=[str(tmp_path / "own_decoders")])
    opened = open_decoder("low", config={"vocab_size": 16}, own=own_decoders(config))
    assert opened.format.vocab_size == 16 and opened.decoder.samples_per_token == 640
    with pytest.raises(ConfigError, match="one of low, tones, codec"):
        configure(models, audio_decoder="lowest", custom_architectures=[str(tmp_path / "own_decoders")])
    sys.modules.pop("own_decoders", None)


# ------------------------------------------------------------------ speech.json


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_tokn": 3}, "did you mean 'first_token'"),
        ({"vocab_size": None}, "speech.json"),
        ({"frame_rate": "0/0"}, "speech.json"),
        ({"codebooks": 0}, "codebooks of the speech format is 0"),
        ({"prompt": ["voice", "txt"]}, "prompt holds 'txt'"),
        ({"prompt": ["voice"]}, "prompt must hold text once"),
        ({"prompt": ["text", "voice"]}, "voice must come before text"),
        ({"text_marks": [3, -1]}, r"text_marks is \[3, -1\], it must be \[first token id, count\]"),
        ({"interleaved_text": 5}, "speech.json"),
    ],
)
def test_wrong_speech_file_is_refused(changes, message, tmp_path):
    (tmp_path / FILE).write_text(json.dumps(SPEECH | changes))
    with pytest.raises(ModelError, match=message):
        SpeechModel.read(tmp_path)


def test_a_model_without_speech_tokens_is_refused(tmp_path):
    with pytest.raises(ModelError, match="has no speech"):
        SpeechModel.read(tmp_path)


# ------------------------------------------------------------------ voices


OPENED = open_decoder("tones", config={"vocab_size": 64})


def test_a_voice_of_another_rate_is_resampled_and_said(tmp_path, caplog):
    wanted = encode_voice(str(write_voice(tmp_path / "a.wav")), OPENED)
    assert wanted == (3, 1, 4, 1, 5, 9, 2, 6) * 5 and not caplog.messages
    for rate in (8_000, 48_000):
        found = encode_voice(str(write_voice(tmp_path / "b.wav", rate=rate)), OPENED)
        assert found == wanted and f"{rate:,} Hz and is resampled" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is no WAV file"),
        (b"ID3" + bytes(100), "is no WAV file"),
        (wav_header(16_000, 0)[:20], "without a format"),
        (wav_header(16_000, 0), "has 0 samples"),
        (wav_header(16_000, 3) + bytes(6), "3 samples, less than a frame"),
        (wav_header(16_000, 8_000) + bytes(16_000), "is silent"),
        (wav_header(16_000, 100) + b"\x00\x40" * 100, "100 samples, less than a frame"),
        (wav_header(8_000, 8_000 * 31) + bytes(16_000 * 31), "has 31 s, the limit is 30 s"),
        (wav_header(16_000, 9).replace(b"\x10\x00data", b"\x0c\x00data") + bytes(18), "12 bits"),
    ],
)
def test_a_file_that_is_no_voice_is_refused(content, message, tmp_path):
    path = tmp_path / "voice.wav"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        encode_voice(str(path), OPENED)


def test_a_recording_of_an_hour_is_refused_unread(tmp_path):
    path = tmp_path / "hour.wav"
    with path.open("wb") as file:
        file.write(wav_header(16_000, 3600 * 16_000))
        file.truncate(44 + 3600 * 16_000 * 2)
    with pytest.raises(RequestError, match="110 MiB, the limit is 30 s"):
        encode_voice(str(path), OPENED)


def test_voices_are_name_and_file():
    assert voice_files(["anna=a.wav", "ben=b=c.wav"]) == {"anna": "a.wav", "ben": "b=c.wav"}
    for entry in ("anna", "=a.wav", "anna="):
        with pytest.raises(ConfigError, match="must be NAME=FILE"):
            voice_files([entry])
    with pytest.raises(ConfigError, match="given twice"):
        voice_files(["a=1", "a=2"])


def test_wav_of_every_kind_is_read_as_python_and_numpy_write_it():
    import io
    import wave

    import numpy as np

    rng = np.random.default_rng(0)
    stereo = rng.uniform(-0.9, 0.9, (50, 2))
    for width, scale in ((2, 2**15 - 1), (4, 2**31 - 1)):
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(2)
            file.setsampwidth(width)
            file.setframerate(22_050)
            file.writeframes((stereo * scale).astype(f"<i{width}").tobytes())
        sound, rate = read_wav(buffer.getvalue(), "it")
        assert rate == 22_050 and np.allclose(sound, stereo.mean(-1), atol=2 / 2**15)
    mono = stereo[:, 0].astype(np.float32)
    sound, rate = read_wav(wav_header(16_000, 50) + pcm16(mono), "it")
    assert rate == 16_000 and np.allclose(sound, mono, atol=1e-4)
    with wave.open(io.BytesIO(wav_header(16_000, 50) + pcm16(mono))) as file:  # what we write, Python reads
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (16_000, 50, 1)


def test_resampling_keeps_a_sine():
    import numpy as np

    for rate, wanted in ((48_000, 16_000), (8_000, 16_000), (44_100, 16_000)):
        times, new = np.arange(rate) / rate, np.arange(wanted) / wanted
        found = resample(np.sin(2 * np.pi * 440 * times).astype(np.float32), rate, wanted)
        assert len(found) == wanted
        assert np.abs(found - np.sin(2 * np.pi * 440 * new))[200:-200].max() < 2e-3


@pytest.mark.parametrize(("text", "value"), [('{"gain": 1e-3}', {"gain": 0.001}), ("{gain: 2}", {"gain": 2})])
def test_flag_of_an_object_is_read_as_json_and_else_as_yaml(text, value):
    assert parse_text(text, Kind.VALUE, "audio_decoder_config") == value
