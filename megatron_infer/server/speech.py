"""POST /v1/audio/speech: a text as sound, sent block by block while it is made; GET /v1/audio/voices.

body ──▶ prompt (voice, text) ──▶ engine: speech tokens ──▶ SpeechBlocks ──▶ AudioDecoderClient ──▶ PCM, WAV, events
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import shutil
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from starlette.responses import Response

from megatron_infer.errors import ConfigError, unknown_name
from megatron_infer.server.audio.blocks import BlockSchedule, PrependPromptSpeechTokens, SpeechBlocks
from megatron_infer.server.audio.layout import FrameReader
from megatron_infer.server.audio.meter import SpeechMeter
from megatron_infer.server.audio.registry import check_decoder
from megatron_infer.server.audio.speech_model import FILE, SpeechModel, check_text, voice_files
from megatron_infer.server.audio.voices import read_voice
from megatron_infer.server.audio.wav import pcm16, wav_header
from megatron_infer.server.audio_decoder import AudioDecoderClient, Hello
from megatron_infer.server.body_types import Body, NumTokens, Seed, Temperature, TopK
from megatron_infer.server.endpoint import Call, Events, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.field_tables import LABELS
from megatron_infer.server.generation_request import params_from, sampling_of
from megatron_infer.server.http_errors import api_error_of, bad_request, unavailable
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused
from megatron_infer.server.inflight import EngineRequest
from megatron_infer.server.reply_format import as_base64
from megatron_infer.server.routes import GENERATION_STATUSES, Routes
from megatron_infer.server.served_models import check_model
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.supervisor import ProcessSpec

SOCKET = "audio"
"""Name of the decoder process's socket in the server's folder."""
FORMATS = {"wav": "audio/wav", "pcm": "audio/pcm"}
STREAM_FORMATS = ("audio", "sse", "json")
SAMPLE_BYTES = 16 / 3
"""Most bytes of a reply for one sample: float32 as base64."""
FIELDS = FieldTable(
    LABELS
    | {
        "stream": no_effect("sound is sent as it is made; see stream_format", True, False),
        "top_p": refused("give top_k", 1.0),
        "language": refused("the model's text decides", ""),
    }
)


class SpeechBody(Body, kw_only=True):
    model: str | None = None
    input: str
    """The text to speak, at most 4,096 characters."""
    voice: str | None = None
    response_format: str | None = None
    """wav or pcm (16 bit, mono); wav where it is left out."""
    stream_format: str | None = None
    """audio: the sound as it is made; sse: the same as events; json: all of it as float32, base64."""
    speed: float | None = None
    instructions: str | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    max_tokens: NumTokens | None = None
    chunk_size: Annotated[list[NumTokens], Meta(min_length=1, max_length=64)] | None = None
    """New speech tokens of each block; the last entry repeats."""


@dataclass(slots=True)
class _Spoken:
    """What was made for one call so far."""

    num_prompt: int
    began: float
    num_tokens: int = 0
    num_samples: int = 0
    num_blocks: int = 0

    @property
    def usage(self) -> dict[str, int]:
        return {
            "input_tokens": self.num_prompt,
            "output_tokens": self.num_tokens,
            "total_tokens": self.num_prompt + self.num_tokens,
        }


class SpeechRoutes:
    """The module of a server whose model speaks."""

    def __init__(self, speech: SpeechModel, path: str) -> None:
        """path: of the decoder process's socket."""
        self._speech, self._path = speech, path

    def register(self, routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
        self._client, self._settings = client, settings
        self._decoder = AudioDecoderClient(self._path)
        self._meter = SpeechMeter(client.meter.registry)
        self._names = tuple(voice_files(settings.voice))
        media = (*FORMATS.values(), "text/event-stream", "application/json")
        options = {"body": SpeechBody, "fields": FIELDS, "statuses": GENERATION_STATUSES, "media_types": media}
        routes.add("POST", "/v1/audio/speech", self._speak, "A text as sound", **options)
        routes.add("GET", "/v1/audio/voices", self._voices, "The voices that texts can be spoken with")

    async def _voices(self, call: Call) -> Reply:
        return Reply({"object": "list", "data": [{"id": name, "object": "voice"} for name in self._names]})

    async def _speak(self, call: Call) -> Any:
        body: SpeechBody = call.body
        kind, how = self._checked(body)
        hello = await self._decoder.hello()
        voice = () if body.voice is None else hello.voices[body.voice]
        request = await self._request(body, voice)
        schedule = self._schedule(body, hello)
        samples, tokens = hello.samples_per_token
        request = dataclasses.replace(request, token_bytes=SAMPLE_BYTES * samples / tokens)
        (checked,) = self._client.checked([request], call, field="input")
        spoken = _Spoken(len(checked.prompt_ids), time.monotonic())
        blocks = self._blocks(call, checked, SpeechBlocks(schedule, prompt=voice), spoken, hello)
        await anext(blocks)  # a refusal still gets a status of its own
        if how == "sse":
            return Events(self._events(blocks, spoken, kind, hello.sample_rate), named=True)
        if how == "json" or schedule.chunk_size is None:
            return await _whole(blocks, spoken, kind if how == "audio" else None, hello.sample_rate)
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        return SoundReply(_encoded(blocks, kind, hello.sample_rate), FORMATS[kind], deadline)

    def _checked(self, body: SpeechBody) -> tuple[str, str]:
        """(response format, stream format). Raises ApiError 400, RequestError."""
        check_model(self._client, body.model)
        check_text(body.input)
        kind, how = body.response_format or "wav", body.stream_format or "audio"
        if kind not in FORMATS:
            raise bad_request(f"response_format is {kind[:50]!r}, it must be wav or pcm", "response_format")
        if how not in STREAM_FORMATS:
            raise bad_request(f"stream_format is {how[:50]!r}, it must be audio, sse or json", "stream_format")
        if body.speed not in (None, 1.0):
            raise bad_request(f"speed is {body.speed:g}, it must be 1: sound is not stretched here", "speed")
        if body.instructions and "instructions" not in self._speech.prompt:
            raise bad_request("instructions are given, but the model knows none; leave them out", "instructions")
        if body.voice is not None and body.voice not in self._names:
            shown = ", ".join(self._names) or "none"
            message = f"{unknown_name('voice', body.voice[:200], self._names)}; there is {shown}"
            raise bad_request(message, "voice", "voice_not_found")
        size = self._speech.format.codebooks
        for one in body.chunk_size or ():
            if one % size:
                raise bad_request(f"chunk_size has {one}, it must be multiples of {size}, a frame", "chunk_size")
        return kind, how

    async def _request(self, body: SpeechBody, voice: Sequence[int]) -> EngineRequest:
        client, speech = self._client, self._speech
        texts = {"text": await client.encode(body.input, field="input", add_special=False)}
        if body.instructions:
            texts["instructions"] = await client.encode(body.instructions, field="instructions", add_special=False)
        speaking = {"allowed_token_ids": speech.drawable(), "stop_token_ids": [speech.end_token], "detokenize": False}
        params = params_from(sampling_of(body) | speaking | {"max_tokens": body.max_tokens})
        return EngineRequest(prompt_ids=speech.prompt_ids(texts, voice), params=params)

    def _schedule(self, body: SpeechBody, hello: Hello) -> BlockSchedule:
        settings, looks_ahead, size = self._settings, hello.right_context > 0, self._speech.format.codebooks
        chunks = tuple(body.chunk_size or ()) or chunk_sizes(settings.speech_chunk_size, frame=size)
        buffer = _whole_frames(settings.speech_buffer, size)
        if settings.speech_buffer < 0:
            buffer = 32 * size if hello.left_context is None else hello.left_context
        return BlockSchedule(
            chunk_size=chunks,
            buffer=buffer,
            prepend=PrependPromptSpeechTokens(settings.speech_prompt_tokens),
            block_causal=looks_ahead,
            prompt_causal=looks_ahead,
            right_context=hello.right_context,
        )

    async def _blocks(
        self, call: Call, request: EngineRequest, blocks: SpeechBlocks, spoken: _Spoken, hello: Hello
    ) -> AsyncGenerator[np.ndarray]:
        """An empty sound once the request is accepted, then the sound of each block."""
        frames, num_seen = FrameReader(self._speech.layout), 0
        async with self._client.submit([request], stream=True, abort_ids=(call.id,)) as inflight:
            updates = inflight.updates(self._settings.keep_alive_s)
            await anext(updates)
            yield np.zeros(0, dtype=np.float32)
            async for outputs in updates:
                for output in outputs.values():
                    ids = output.outputs[0].token_ids
                    blocks.add(frames.add(self._speech.speech_of(ids[num_seen:])))
                    num_seen = spoken.num_tokens = len(ids)
                    if output.finished:
                        blocks.end()
                        if output.outputs[0].finish_reason == "abort":
                            raise unavailable("the request was aborted; ask again", "aborted")
                while (window := blocks.next_window()) is not None:
                    self._meter.waiting(self._decoder.num_waiting + 1)
                    try:
                        samples = await self._decoder.decode(window)
                    finally:
                        self._meter.waiting(self._decoder.num_waiting)
                    blocks.advance(window)
                    sound = np.frombuffer(samples, dtype="<f4")
                    elapsed, seconds = time.monotonic() - spoken.began, len(sound) / hello.sample_rate
                    self._meter.block(number=spoken.num_blocks, sound_s=seconds, elapsed_s=elapsed)
                    spoken.num_blocks += 1
                    spoken.num_samples += len(sound)
                    yield sound
        self._meter.ended(elapsed_s=time.monotonic() - spoken.began)

    async def _events(
        self, blocks: AsyncGenerator[np.ndarray], spoken: _Spoken, kind: str, rate: int
    ) -> AsyncGenerator[Any]:
        """The pieces of the body, whose concatenation it is, then the usage."""
        async for piece in _encoded(blocks, kind, rate):
            if piece:
                yield {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
        yield {"type": "speech.audio.done", "usage": spoken.usage}


async def _encoded(blocks: AsyncGenerator[np.ndarray], kind: str, rate: int) -> AsyncGenerator[bytes]:
    """The body of a stream. Closed early, the request is aborted."""
    try:
        if kind == "wav":
            yield wav_header(rate)
        async for sound in blocks:
            yield pcm16(sound)
    finally:
        await blocks.aclose()


async def _whole(blocks: AsyncGenerator[np.ndarray], spoken: _Spoken, kind: str | None, rate: int) -> Reply | Response:
    """All of it in one reply. kind: None for MAX's JSON."""
    try:
        sound = np.concatenate([np.zeros(0, dtype=np.float32), *[one async for one in blocks]])
    finally:
        await blocks.aclose()
    if kind is None:
        metadata = {
            "sample_rate": rate,
            "duration": len(sound) / rate,
            "tokens_generated": spoken.num_tokens,
            "processing_time": time.monotonic() - spoken.began,
            "final_chunk": True,
        }
        return Reply({"audio_data": as_base64(sound, "<f4"), "metadata": metadata, "usage": spoken.usage})
    header = wav_header(rate, len(sound)) if kind == "wav" else b""
    return Response(header + pcm16(sound), media_type=_media_type(FORMATS[kind], rate))


def _media_type(kind: str, rate: int) -> str:
    return f"{kind};rate={rate};channels=1" if kind == "audio/pcm" else kind


class SoundReply:
    """A reply whose body is sent as it is made. One that fails in its middle ends without its last chunk, by which
    clients know."""

    def __init__(self, pieces: AsyncGenerator[bytes], media_type: str, deadline: float) -> None:
        """deadline: on the event loop's clock."""
        self._pieces, self._media_type, self._deadline = pieces, media_type, deadline

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", self._media_type.encode()), (b"x-accel-buffering", b"no")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with asyncio.timeout_at(self._deadline):
                async for piece in self._pieces:
                    if piece:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:  # as EventSender: what is unexpected is told as it is, and ends the stream
            reply = api_error_of(error)
            scope["state"]["error"], scope["state"]["failed_status"] = reply.message, reply.status
            return
        finally:
            await self._pieces.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _whole_frames(num_tokens: int, frame: int) -> int:
    """Raised to a multiple of the tokens of a frame."""
    return -(-num_tokens // frame) * frame


def chunk_sizes(text: str, *, frame: int) -> tuple[int, ...] | None:
    """The schedule of speech_chunk_size, in whole frames; None for "none". Raises ConfigError."""
    if text.lower() == "none":
        return None
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f'speech_chunk_size is {text!r}, it must be numbers with commas between them, or "none"')
    return tuple(_whole_frames(one, frame) for one in sizes)


# ------------------------------------------------------------------ processes


def with_voices(model: str, settings: ServerConfig) -> ServerConfig:
    """The settings with the voices that come with a model that speaks, checked before anything starts.

    Raises ConfigError for settings of speech for a model that does not speak and for a model without an audio decoder,
    RequestError for files that are no voices.
    """
    folder, voices = Path(model).expanduser(), voice_files(settings.voice)
    if not (folder / FILE).is_file():
        for name in ("voice", "audio_decoder"):
            if getattr(settings, name):
                raise ConfigError(f"{name} is given, but {model} has no {FILE}: it does not speak; leave it out")
        return settings
    speech = SpeechModel.read(folder)
    if not settings.audio_decoder:
        check_decoder(speech.decoder, speech.decoder_weights)
    voices = {**speech.voices, **voices}
    for path in voices.values():
        read_voice(path)
    chunk_sizes(settings.speech_chunk_size, frame=speech.format.codebooks)
    return dataclasses.replace(settings, voice=tuple(f"{name}={path}" for name, path in voices.items()))


def speech_processes(model: str, folder: str, settings: ServerConfig) -> list[ProcessSpec]:
    """The decoder process of a model that speaks; none for others. `speech_modules(folder)` finds it.

    settings: `with_voices`.
    """
    described = Path(model).expanduser() / FILE
    if not described.is_file():
        return []
    shutil.copy(described, folder)
    options = {
        "model": model,
        "path": str(Path(folder) / SOCKET),
        "voices": voice_files(settings.voice),
        "own": settings.audio_decoder,
    }
    return [ProcessSpec(name="audio_decoder", role="audio_decoder", options=options, hang_timeout_s=60.0)]


def speech_modules(folder: str) -> tuple[SpeechRoutes, ...]:
    """The routes of a server whose model speaks."""
    if not (Path(folder) / FILE).is_file():
        return ()
    return (SpeechRoutes(SpeechModel.read(Path(folder)), str(Path(folder) / SOCKET)),)
