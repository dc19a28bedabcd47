"""An audio decoder that fails, gives wrong sound, does not answer or does not come: clear errors, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest
import torch
from audio_case import (
    NUM_SPEECH,
    TEXTS,
    decoding,
    equal,
    make_engine,
    make_pipeline,
    requests,
    speech_model,
    text_tokenizer,
    write_voice,
)
from server_case import serving

from megatron_infer.distributed.wire import frame, receive_frame
from megatron_infer.errors import ModelError
from megatron_infer.pipelines import AudioGeneratorPipeline, GenerationStatus, TextTokenizer
from megatron_infer.server import audio_decoder
from megatron_infer.server.audio.blocks import BlockSchedule, Window
from megatron_infer.server.audio.decoder import OpenedDecoder, decode_windows
from megatron_infer.server.audio.registry import open_decoder
from megatron_infer.server.audio.voices import encode_voice
from megatron_infer.server.audio_decoder import AudioDecoderClient, DecoderServer, Failed, Hello, Sound, WaitingWindow
from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.speech import SpeechRoutes

TONES = open_decoder("tones", config={"vocab_size": NUM_SPEECH})
BAD = 63
"""The token that a `Faulty` decoder cannot decode."""
SAMPLING = {"seed": 4, "max_tokens": 60}


class Faulty:
    """`tones`, whose `fault` befalls every batch with the token `bad`, or with `always` every batch."""

    def __init__(self, fault: str = "", *, bad: int = BAD, always: bool = False) -> None:
        self.fault, self.bad, self.always, self.go_on = fault, bad, always, threading.Event()

    def __getattr__(self, name: str):
        return getattr(TONES.decoder, name)

    def decode(self, tokens_BT, lengths_B, mask_BTT):
        sound_BS = TONES.decoder.decode(tokens_BT, lengths_B, mask_BTT)
        if not (self.always or (tokens_BT == self.bad).any()):
            return sound_BS
        if self.fault == "error":
            raise ArithmeticError("secret of a library")
        if self.fault == "stuck":
            assert self.go_on.wait(60)
        if self.fault == "short":
            return sound_BS[:, 1:]
        return sound_BS * torch.nan if self.fault == "nan" else sound_BS

    def opened(self) -> OpenedDecoder:
        return OpenedDecoder(decoder=self, format=TONES.format, encoder=TONES.encoder)


def window(*tokens: int) -> Window:
    return Window(tokens=tokens, num_prompt=0, num_left=0, num_new=len(tokens), block=0, is_last=True)


async def decoded(server: DecoderServer, windows: list[Window]) -> list[Sound | Failed]:
    """The answers to the windows of one batch."""
    batch = [WaitingWindow(one, asyncio.get_running_loop().create_future()) for one in windows]
    await server._decode(batch)
    return [await one.sound for one in batch]


REASONS = [
    ("error", "the server's log has the reason"),
    ("short", "gave 1 x 319 samples for 1 x 1 tokens, it must be 1 x 320"),
    ("nan", "samples that are no numbers"),
]


@pytest.mark.parametrize(("fault", "reason"), REASONS)
def test_a_window_that_cannot_be_decoded_fails_alone_among_those_of_its_batch(fault, reason):
    server = DecoderServer(Faulty(fault).opened(), {})
    answers = asyncio.run(decoded(server, [window(1, 2), window(BAD), window(3), window(4, 5)]))
    assert [type(one) for one in answers] == [Sound, Failed, Sound, Sound]
    assert reason in answers[1].message and "secret" not in answers[1].message
    (alone,) = decode_windows(TONES.decoder, [window(4, 5)])
    assert answers[3].samples == alone.astype("<f4").tobytes() and server.call_s == 0


def test_a_batch_that_is_halved_hangs_only_where_one_call_of_the_decoder_does(monkeypatch):
    clock, seen = [0.0], []
    monkeypatch.setattr(audio_decoder, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    faulty = Faulty("error")
    server, decode = DecoderServer(faulty.opened(), {}), faulty.decode

    def slow(*arguments):
        clock[0] += audio_decoder.MAX_CALL_S / 2
        seen.append(server.call_s)
        return decode(*arguments)

    faulty.decode = slow
    asyncio.run(decoded(server, [window(token) for token in (1, 2, BAD, 3)]))
    assert seen == [audio_decoder.MAX_CALL_S / 2] * 5 and server.call_s == 0


@pytest.mark.parametrize(("fault", "reason"), [("error", "secret of a library"), *REASONS[1:]])
def test_a_request_of_a_pipeline_fails_alone_and_what_was_heard_stands(fault, reason):
    asked = requests()
    whole = make_pipeline().generate(asked)
    heard = [set(one.tokens) for one in whole]
    bad = next(
        token for token in whole[1].tokens[6:] if token not in (*whole[1].tokens[:5], *heard[0], *heard[2], *heard[3])
    )
    engine, tokenizer = make_engine(), TextTokenizer(text_tokenizer())
    opened, schedule = Faulty(fault, bad=bad).opened(), BlockSchedule(chunk_size=(5, 10), buffer=4)
    pipeline = AudioGeneratorPipeline.of_engine(engine, tokenizer, speech_model(), opened, schedule=schedule)
    outputs = pipeline.generate(asked)
    assert equal([outputs[0], *outputs[2:]], [whole[0], *whole[2:]]) and all(one.error is None for one in outputs[2:])
    failed = outputs[1]
    assert failed.final_status is GenerationStatus.FAILED and failed.is_last
    assert isinstance(failed.error, ModelError) and reason.partition("1 x")[0] in str(failed.error)
    assert failed.tokens == whole[1].tokens[: len(failed.tokens)] and len(failed.tokens) >= 5
    assert np.array_equal(failed.audio, whole[1].audio[: len(failed.audio)])
    assert not engine.has_unfinished() and not pipeline._contexts


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, faulty = tmp_path_factory.mktemp("s"), Faulty(always=True)
    files = {"anna": str(write_voice(folder / "anna.wav"))}
    path, settings = str(folder / "audio"), {"voice": (f"anna={files['anna']}",), "speech_chunk_size": "5,10"}
    routes = SpeechRoutes(speech_model(), path)
    with (
        decoding(path, files, faulty.opened()),
        serving(make_engine(), modules=(routes,), encoder=text_tokenizer(), **settings) as one,
    ):
        yield SimpleNamespace(url=one.url, http=httpx.Client(base_url=one.url, timeout=60), faulty=faulty)


def body(**more) -> dict:
    return {"voice": "anna", "input": TEXTS[0], **SAMPLING, "response_format": "pcm", **more}


def num_waiting(server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(one for one in lines if one.startswith("megatron_infer_speech_decoder_queue")).split()[-1])


@pytest.mark.few
@pytest.mark.parametrize(("fault", "reason"), [(fault, reason.partition(" x ")[0]) for fault, reason in REASONS])
def test_a_faulty_decoder_is_a_500_without_a_librarys_words_and_leaves_nothing_behind(fault, reason, server):
    whole = server.http.post("/v1/audio/speech", json=body()).content
    server.faulty.fault = fault
    try:
        reply = server.http.post("/v1/audio/speech", json=body(stream_format="json"))
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "decoder_error"
        assert reason in reply.text and "secret" not in reply.text
        with pytest.raises(httpx.RemoteProtocolError):  # a stream that is cut off, and not the end of the sound
            server.http.post("/v1/audio/speech", json=body())
        events = server.http.post("/v1/audio/speech", json=body(stream_format="sse")).text
        assert reason in events and "secret" not in events and "speech.audio.done" not in events
    finally:
        server.faulty.fault = ""
    assert num_waiting(server) == 0
    assert server.http.post("/v1/audio/speech", json=body()).content == whole


def test_a_client_that_leaves_while_the_decoder_is_stuck_leaves_nothing_behind(server):
    server.faulty.fault = "stuck"
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/audio/speech", json=body(stream_format="json"), timeout=1)
        deadline = time.monotonic() + 20
        while num_waiting(server):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        server.faulty.fault = ""
        server.faulty.go_on.set()
    assert server.http.post("/v1/audio/speech", json=body()).status_code == 200


def test_a_decoder_at_work_for_too_long_says_so_and_its_process_counts_as_hanging(tmp_path, monkeypatch):
    """Without its beats the supervisor kills it; the windows then go to the next process."""
    from megatron_infer.server import subprocess_main

    beats, faulty = SimpleNamespace(is_alive=lambda: True), Faulty("stuck")
    monkeypatch.setattr(subprocess_main, "ParentHeartbeat", lambda: beats)
    monkeypatch.setattr(subprocess_main, "report", lambda **_: None)
    monkeypatch.setattr(subprocess_main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(audio_decoder, "MAX_CALL_S", 0.1)
    path, found = str(tmp_path / "audio"), []
    with decoding(path, {}, faulty.opened()) as running:
        monkeypatch.setattr(audio_decoder, "run_decoder", lambda *arguments: arguments[-1](running))
        subprocess_main.audio_decoder(model="", path=path, voices={}, own="")

        async def ask() -> None:
            client = AudioDecoderClient(path)
            await client.hello()
            found.append(beats.is_alive())
            asking = asyncio.create_task(client.decode(window(BAD)))
            while beats.is_alive():
                await asyncio.sleep(0.02)
            faulty.go_on.set()
            await asking
            found.append(beats.is_alive())

        asyncio.run(asyncio.wait_for(ask(), 20))
    assert found == [True, True]


# ------------------------------------------------------------------ processes that stay away


@contextlib.asynccontextmanager
async def listening(path: str, answer):
    """A process that `answer`s each connection, in the place of a decoder's."""
    server = await asyncio.start_unix_server(answer, path)
    async with server:
        yield


async def greets(reader, writer) -> bool:
    """Whether the question was what the decoder is, which is answered; else it is a window."""
    if msgspec.msgpack.decode(await receive_frame(reader)) is not None:
        return False
    writer.write(frame(msgspec.msgpack.encode(Hello(16_000, (320, 1), 0, 0, {}))))
    return True


def refusal(path: str, answer, *, decodes: bool) -> ApiError:
    """What a call gets of a decoder whose process does `answer`; None: there is none."""

    async def ask() -> ApiError:
        client, is_greeted = AudioDecoderClient(path), False
        async with listening(path, answer) if answer is not None else contextlib.nullcontext():
            with pytest.raises(ApiError) as found:
                await client.hello()
                is_greeted = True
                await client.decode(window(1))
            assert client.num_waiting == 0 and is_greeted == decodes
        return found.value

    return asyncio.run(asyncio.wait_for(ask(), 20))


async def silent(reader, writer) -> None:
    await reader.read()


async def garbled(reader, writer) -> None:
    writer.write(frame(b"hm"))
    await reader.read()


async def gone_for_good(reader, writer) -> None:
    """It greets, takes a window, ends, and is never seen again."""
    if not await greets(reader, writer):
        os.unlink(writer.get_extra_info("sockname"))
    writer.close()


async def deadly(reader, writer) -> None:
    """It dies of every window."""
    await greets(reader, writer)
    writer.close()


@pytest.mark.parametrize(
    ("answer", "decodes", "message"),
    [
        (None, False, "the audio decoder does not answer"),
        (silent, False, "the audio decoder does not answer"),
        (garbled, False, "the audio decoder does not answer"),
        (gone_for_good, True, "the audio decoder does not answer"),
        (deadly, True, "the audio decoder ended 3 times with this sound"),
    ],
)
def test_a_process_that_stays_away_or_says_nothing_is_a_503(answer, decodes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(audio_decoder, "AWAY_TIMEOUT_S", 0.6)
    error = refusal(str(tmp_path / "audio"), answer, decodes=decodes)
    assert error.status == 503 and message in error.message and "Retry-After" in error.headers


# ------------------------------------------------------------------ what cannot be opened


def boom(weights) -> OpenedDecoder:
    raise KeyError("layers.0.weight")


def nothing() -> None:
    return None


def test_weights_and_functions_that_cannot_be_opened_are_named(tmp_path):
    file = tmp_path / "codec.safetensors"
    file.write_bytes(b"\xff" * 40)
    for name in ("codec", "mimi"):
        with pytest.raises(ModelError, match=r"codec\.safetensors"):
            open_decoder(name, str(file))
    with pytest.raises(ModelError, match=r"audio_decoder_weights .* cannot be opened: KeyError: 'layers.0.weight'"):
        open_decoder("own", str(file), own={"own": boom})
    with pytest.raises(ModelError, match="audio_decoder own: its function returns a NoneType, it must be an OpenedDec"):
        open_decoder("own", own={"own": nothing})


def test_an_encoder_that_fails_or_gives_other_tokens_is_named(tmp_path):
    file = str(write_voice(tmp_path / "anna.wav"))

    def encoding(encode) -> OpenedDecoder:
        encoder = SimpleNamespace(encode=encode)
        return OpenedDecoder(decoder=TONES.decoder, format=TONES.format, encoder=encoder)

    with pytest.raises(ModelError, match=r"anna\.wav cannot be encoded: ZeroDivisionError"):
        encode_voice(file, encoding(lambda sound: 1 // 0))
    with pytest.raises(ModelError, match=r"the encoder gives token 64; it must be frames of 1 tokens from 0 to 63"):
        encode_voice(file, encoding(lambda sound: [1, 64]))
