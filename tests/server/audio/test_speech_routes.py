"""/v1/audio/speech before a tiny engine: each form of the reply, voices, figures, and bad calls."""

from __future__ import annotations

import base64
import json
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from audio_case import (
    NUM_SPEECH,
    TEXTS,
    decoding,
    make_engine,
    make_pipeline,
    speech_model,
    text_tokenizer,
    write_voice,
)
from browser_case import browser, missing, wait_until
from server_case import serving

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.pipelines import AudioGenerationRequest
from megatron_infer.server.audio.blocks import BlockSchedule
from megatron_infer.server.audio.codec import Codec, CodecConfig, CodecDecoder
from megatron_infer.server.audio.decoder import OpenedDecoder
from megatron_infer.server.audio.registry import open_decoder
from megatron_infer.server.audio.wav import pcm16
from megatron_infer.server.speech import SpeechRoutes

TONES = open_decoder("tones", config={"vocab_size": NUM_SPEECH})
SAMPLING = {"seed": 4, "max_tokens": 60}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voices")
    anna, ben = write_voice(folder / "anna.wav"), write_voice(folder / "ben.wav", tokens=(7, 8, 9) * 12)
    return {"anna": str(anna), "ben": str(ben)}


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    path, engine = str(tmp_path_factory.mktemp("s") / "audio"), make_engine()
    voices = tuple(f"{name}={file}" for name, file in files.items())
    routes = SpeechRoutes(speech_model(), path)
    settings = {"voice": voices, "speech_chunk_size": "5,10", "served_model_name": ("voice",), "control": True}
    with decoding(path, files, TONES), serving(engine, modules=(routes,), encoder=text_tokenizer(), **settings) as one:
        yield SimpleNamespace(url=one.url, engine=engine, http=httpx.Client(base_url=one.url, timeout=60))


@pytest.fixture(scope="module")
def expected(files):
    pipeline = make_pipeline(schedule=BlockSchedule(), voices=files)
    params = SamplingParams(**SAMPLING)
    return {
        text: pipeline.generate(AudioGenerationRequest(input=text, voice="anna", sampling_params=params))[0]
        for text in TEXTS
    }


def body(text: str = TEXTS[0], **more) -> dict:
    return {"model": "voice", "voice": "anna", "input": text, **SAMPLING, **more}


def test_every_form_of_the_reply_holds_the_same_samples(server, expected):
    text = TEXTS[0]
    wanted = expected[text]
    plain = server.http.post("/v1/audio/speech", json=body(response_format="pcm"))
    assert plain.headers["content-type"].startswith("audio/pcm")
    at_once = server.http.post("/v1/audio/speech", json=body(stream_format="audio", chunk_size=[1000]))
    assert at_once.content[44:] == plain.content and at_once.headers["content-type"] == "audio/wav"
    events = server.http.post("/v1/audio/speech", json=body(response_format="pcm", stream_format="sse")).text
    parsed = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in parsed[:-1]] == ["speech.audio.delta"] * (len(parsed) - 1)
    assert b"".join(base64.b64decode(event["audio"]) for event in parsed[:-1]) == plain.content
    usage = parsed[-1]["usage"]
    assert parsed[-1]["type"] == "speech.audio.done" and usage["output_tokens"] >= len(wanted.tokens)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    found = server.http.post("/v1/audio/speech", json=body(stream_format="json")).json()
    samples = np.frombuffer(base64.b64decode(found["audio_data"]), dtype="<f4")
    assert np.array_equal(samples, wanted.audio) and found["metadata"]["sample_rate"] == 16_000
    assert found["metadata"]["duration"] == wanted.seconds


def test_voices_are_listed_and_their_prefix_is_found_again(server):
    names = [one["id"] for one in server.http.get("/v1/audio/voices").json()["data"]]
    assert names == ["anna", "ben"]
    assert server.http.get("/v1/models").json()["data"][0]["voices"] == names
    first = server.http.post("/v1/audio/speech", json=body(voice="ben", response_format="pcm"))
    assert first.status_code == 200
    before = server.engine.figures().prefix_hit_tokens
    server.http.post("/v1/audio/speech", json=body(TEXTS[1], voice="ben"))
    assert server.engine.figures().prefix_hit_tokens - before == 32  # two blocks of the voice's 36 tokens
    metrics = server.http.get("/metrics").text
    seconds = next(line for line in metrics.splitlines() if line.startswith("megatron_infer_speech_seconds_total"))
    assert float(seconds.split()[-1]) > 0 and "megatron_infer_speech_windows_total" in metrics
    assert "/v1/audio/speech" in server.http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": ""}, "input is empty"),
        ({"input": "x" * 4097}, "4,097 characters, the limit is 4,096"),
        ({"input": 3}, "Expected `str`"),
        ({"voice": "ana"}, "did you mean 'anna'"),
        ({"voice": "alloy"}, "there is anna, ben"),
        ({"response_format": "mp3"}, "must be wav or pcm"),
        ({"stream_format": "x"}, "must be audio, sse or json"),
        ({"speed": 1.5}, "speed is 1.5, it must be 1"),
        ({"instructions": "slowly"}, "the model knows none"),
        ({"chunk_size": [0]}, "chunk_size"),
        ({"chunk_size": []}, "chunk_size"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"volume": 3}, "unknown field"),
        ({"input": "word " * 120, "max_tokens": 500}, "maximum context length"),
    ],
)
def test_bad_call_is_a_400_that_names_it(fields, message, server):
    reply = server.http.post("/v1/audio/speech", json=body() | fields)
    assert reply.status_code == 400 and message in reply.text


def test_one_token_and_a_model_that_never_ends(server):
    one = server.http.post("/v1/audio/speech", json=body(max_tokens=1))
    assert one.content[:4] == b"RIFF" and len(one.content) in (44, 44 + 2 * 320)
    assert server.http.post("/v1/audio/speech", json=body() | {"model": "other"}).status_code == 404
    endless = body(max_tokens=None, response_format="pcm", temperature=5.0)
    reply = server.http.post("/v1/audio/speech", json=endless)
    assert reply.status_code == 200 and len(reply.content) <= 2 * 320 * 240


def test_sound_goes_out_before_the_answer_has_ended(server):
    pieces = []
    with server.http.stream("POST", "/v1/audio/speech", json=body(max_tokens=150, chunk_size=[5])) as reply:
        pieces = [(len(piece), server.engine.has_unfinished()) for piece in reply.iter_raw()]
    assert len(pieces) > 5 and pieces[0][1]


@pytest.mark.parametrize(("stop", "go_on"), [("/pause?mode=keep", "/resume"), ("/sleep?level=1&mode=keep", "/wake_up")])
def test_a_pause_and_a_suspend_in_mid_sentence_change_no_sample(stop, go_on, server, expected):
    ask = body(response_format="pcm", chunk_size=[2])
    pieces = []
    with server.http.stream("POST", "/v1/audio/speech", json=ask) as reply:
        for piece in reply.iter_raw():
            pieces.append(piece)
            if len(pieces) == 2:
                assert server.http.post(stop).status_code == 200
                stood = server.engine.num_steps
                time.sleep(0.05)
                assert server.engine.num_steps == stood and server.engine.has_unfinished()
                assert server.http.post(go_on).status_code == 200
    assert b"".join(pieces) == pcm16(expected[TEXTS[0]].audio)


def test_blocks_of_a_server_are_whole_frames_of_the_codec(tmp_path):
    small = CodecConfig(
        codebooks=2, codebook_size=NUM_SPEECH, code_size=4, channels=(4, 4, 4), dilations=((1,), (1,), (1,))
    )
    opened = OpenedDecoder(decoder=CodecDecoder(Codec(small)), format=small.format)
    speech, path = speech_model(codebooks=2), str(tmp_path / "audio")
    settings = {"speech_chunk_size": "5,7", "speech_buffer": 3}
    ask = {"input": TEXTS[0], "seed": 4, "max_tokens": 40, "response_format": "pcm"}
    with (
        decoding(path, {}, opened),
        serving(make_engine(), modules=(SpeechRoutes(speech, path),), encoder=text_tokenizer(), **settings) as one,
    ):
        reply = one.http.post("/v1/audio/speech", json=ask)
        assert reply.status_code == 200 and len(reply.content) % (2 * small.hop) == 0 and reply.content


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")
def test_the_page_plays_a_sentence(server, expected, tmp_path):
    sound = "const sound = document.getElementById('sound'); return "
    with browser(tmp_path) as page:
        page.open(server.url)
        wait_until(lambda: page.shown("#speech"))
        names = "return [...document.getElementById('voice').options].map((one) => one.value)"
        assert page.run(names) == ["", "anna", "ben"]
        page.type("#speech-text", TEXTS[0])
        page.click("#speak")
        wait_until(lambda: page.run(f"{sound}sound.ended"))
        played, length = page.run(f"{sound}[sound.played.end(0), sound.duration]")
        assert played == length > 0 and page.shown("#sound") and "Made in" in page.text("#speech-note")
        page.run("document.getElementById('speech-text').value = ' '")
        page.click("#speak")
        wait_until(lambda: "input is empty" in page.text("#speech-note"))
        refused = page.complaints()
        assert len(refused) <= 1 and all("400" in one for one in refused)  # the browser's own note of the reply
