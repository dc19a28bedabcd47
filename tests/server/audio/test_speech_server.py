"""POST /v1/audio/speech through a server's processes and OpenAI's client: the pipeline's sound, for any client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from audio_case import NUM_SPEECH, SPEECH, TEXTS, write_model, write_voice
from test_command import ROOT, Command, processes

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.pipelines import AudioGenerationConfig, AudioGenerationRequest, AudioGeneratorPipeline
from megatron_infer.server.audio.registry import open_decoder
from megatron_infer.server.audio.speech_model import FILE
from megatron_infer.server.audio.wav import pcm16

pytestmark = pytest.mark.long
TONES = open_decoder("tones", config={"vocab_size": NUM_SPEECH})
ENGINE = {"buffer_size_gb": 0.02, "threads": 1, "dtype": "float32"}
SAMPLING = {"seed": 4, "max_tokens": 60}


class Server(Command):
    def __init__(self, folder, *flags: str, launcher: tuple[str, ...] = ()) -> None:
        sizes = ("--threads", "1", "--dtype", "float32", "--buffer-size-gb", "0.02", "--served-model-name", "voice")
        paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
        super().__init__(str(folder), *sizes, *flags, launcher=launcher, path=paths)
        self.url = self.wait_ready()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("voice"))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    ben = write_voice(tmp_path_factory.mktemp("ben") / "ben.wav", tokens=(7, 8, 9) * 12)
    own = ("--audio-decoder", "audio_case:open_own")
    one = Server(folder, "--voice", f"ben={ben}", "--speech-chunk-size", "5,10", *own)
    yield one
    one.end()


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens that a pipeline draws, by voice."""
    config = AudioGenerationConfig(
        model_path=str(folder), audio_decoder="tones", audio_decoder_config={"vocab_size": NUM_SPEECH},
        max_length=512, max_batch_size=4, **ENGINE,
    )  # fmt: skip
    pipeline = AudioGeneratorPipeline(config)
    return {
        text: pipeline.generate(
            AudioGenerationRequest(input=text, voice="anna", sampling_params=SamplingParams(**SAMPLING))
        )[0]
        for text in TEXTS
    }


def body(text: str = TEXTS[0], **more) -> dict:
    return {"model": "voice", "voice": "anna", "input": text, **SAMPLING, **more}


def sound_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<i2") / 32767


def test_openais_client_gets_the_pipelines_sound_streaming_and_not(server, expected, tmp_path):
    text, out = TEXTS[1], tmp_path / "out.wav"
    ask = {"model": "voice", "voice": "anna", "input": text, "extra_body": SAMPLING}
    whole = server.openai.audio.speech.create(response_format="pcm", **ask)
    assert TONES.encoder.encode(sound_of(whole.content)) == list(expected[text].tokens)
    assert np.abs(sound_of(whole.content) - expected[text].audio).max() < 1e-4
    with server.openai.audio.speech.with_streaming_response.create(response_format="wav", **ask) as reply:
        reply.stream_to_file(out)
    data = out.read_bytes()
    assert data[:4] == b"RIFF" and data[44:] == whole.content


def test_curl_pipes_samples_as_a_player_reads_them(server, expected):
    """As `curl -N ... | aplay -r 16000 -f S16_LE` is fed."""
    url, data = f"{server.url}/v1/audio/speech", json.dumps(body(response_format="pcm"))
    command = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", data]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
        played = b"".join(iter(lambda: curl.stdout.read(640), b""))
    assert curl.returncode == 0 and played == pcm16(expected[TEXTS[0]].audio)


@pytest.mark.skipif(shutil.which("aplay") is None, reason="not installed: alsa-utils")
@pytest.mark.parametrize(("kind", "flags"), [("pcm", ("-r", "16000", "-f", "S16_LE")), ("wav", ())])
def test_aplay_plays_what_curl_gets(kind, flags, server):
    """On the device null. The header of a stream's WAV, whose length is not known, is one that it takes."""
    url, data = f"{server.url}/v1/audio/speech", json.dumps(body(response_format=kind))
    ask = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", data]
    with subprocess.Popen(ask, stdout=subprocess.PIPE) as curl:
        played = subprocess.run(
            ["aplay", "-D", "null", *flags], stdin=curl.stdout, capture_output=True, text=True, timeout=60
        )
    assert (curl.returncode, played.returncode) == (0, 0), played.stderr
    assert "Signed 16 bit Little Endian, Rate 16000 Hz, Mono" in played.stderr


def test_two_ranks_under_torchrun_serve_the_same_sound(folder, expected):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one = Server(folder, "--tp", "2", launcher=launcher)
    try:
        reply = one.http.post("/v1/audio/speech", json=body(response_format="pcm"))
        assert reply.content == pcm16(expected[TEXTS[0]].audio)
        assert [voice["id"] for voice in one.http.get("/v1/audio/voices").json()["data"]] == ["anna"]
    finally:
        one.end()


def test_a_decoder_that_is_killed_is_started_again_and_loses_nothing(server, expected):
    (pid,) = processes(server.process.pid, b"audio_decoder")
    os.kill(pid, signal.SIGKILL)
    reply = server.http.post("/v1/audio/speech", json=body(response_format="pcm"))
    assert TONES.encoder.encode(sound_of(reply.content)) == list(expected[TEXTS[0]].tokens)
    assert processes(server.process.pid, b"audio_decoder") not in ([], [pid])


def test_an_engine_that_is_killed_in_mid_sentence_is_started_again_and_the_sound_goes_on(server, expected):
    (pid,) = processes(server.process.pid, b"engine")
    pieces = []
    with server.http.stream("POST", "/v1/audio/speech", json=body(response_format="pcm", chunk_size=[2])) as reply:
        for piece in reply.iter_raw():
            pieces.append(piece)
            if len(pieces) == 3:
                os.kill(pid, signal.SIGKILL)
    assert TONES.encoder.encode(sound_of(b"".join(pieces))) == list(expected[TEXTS[0]].tokens)
    assert processes(server.process.pid, b"engine") != [pid]


def test_voices_that_cannot_be_and_models_that_do_not_speak_are_refused_at_start(folder, tmp_path, monkeypatch):
    (tmp_path / "none.wav").write_bytes(b"no sound")
    from megatron_infer.cli.main import main

    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    assert main(["serve", str(folder), "--port", "0", "--voice", f"x={tmp_path / 'none.wav'}"]) == 1
    assert main(["serve", str(folder), "--port", "0", "--voice", "x"]) == 2
    assert main(["serve", str(folder), "--port", "0", "--voice", "x=y", "--coordinator", "ipc:///none"]) == 2
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), "--port", "0", "--speech-prompt-tokens", "twice"])
    assert ended.value.code == 2
    (folder / "none").mkdir()
    assert main(["serve", str(folder / "none"), "--port", "0", "--voice", "x=y.wav"]) == 2
    assert main(["serve", str(folder / "none"), "--port", "0", "--audio-decoder", "audio_case:open_own"]) == 2
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_model_whose_vocabulary_lacks_the_speech_tokens_is_refused_at_start(folder, tmp_path, capfd):
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    (tmp_path / FILE).write_text(json.dumps(SPEECH | {"first_token": 300, "end_token": 290, "voices": {}}))
    from megatron_infer.cli.main import main

    assert main(["serve", str(tmp_path), "--port", "0", "--threads", "1", "--buffer-size-gb", "0.02"]) == 1
    assert "the model has 336 tokens and no speech tokens 300 to 363" in capfd.readouterr().err


def test_weights_of_something_else_end_the_server_at_its_start(folder, tmp_path, capfd):
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    (tmp_path / "codec.safetensors").write_bytes(b"no weights")
    codec = {"decoder": "codec", "decoder_weights": "codec.safetensors", "decoder_config": {}, "voices": {}}
    (tmp_path / FILE).write_text(json.dumps(SPEECH | codec))
    from megatron_infer.cli.main import main

    assert main(["serve", str(tmp_path), "--port", "0", "--threads", "1", "--buffer-size-gb", "0.02"]) == 1
    assert "codec.safetensors is no safetensors file" in capfd.readouterr().err
