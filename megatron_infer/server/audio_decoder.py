"""The audio decoder of a server: a process of its own, and its client in an HTTP process, over a Unix socket.

HTTP process ── Decode, Cancel ──▶ decoder process: windows of all calls that wait, decoded together
             ◀── Hello, Sound, Failed ──

A window is complete in itself: where the process dies, the supervisor starts another one, which the client hands the
windows that have no sound yet. Where none comes, they fail after AWAY_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_infer.audio.blocks import Window
from megatron_infer.comm.wire import LinkClosed, frame, listen_at, receive_frame
from megatron_infer.errors import InferenceError
from megatron_infer.server.http_errors import ApiError, unavailable

if TYPE_CHECKING:
    from megatron_infer.audio.decoder import OpenedDecoder

log = logging.getLogger("megatron_infer")

MAX_BATCH = 64
"""Windows of one call of the decoder, at most."""
MAX_TRIES = 3
"""Decoder processes that a window is handed to: one that ends three of them is not handed to a fourth."""
RECONNECT_S = 0.1
AWAY_TIMEOUT_S = 30.0
"""How long calls wait for a decoder process to come, or to come back."""
MAX_CALL_S = 60.0
"""Seconds in one call of the decoder after which its process counts as hanging."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a connection."""

    sample_rate: int
    samples_per_token: tuple[int, int]
    """As a fraction."""
    left_context: int | None
    right_context: int
    voices: dict[str, tuple[int, ...]]


class Decode(msgspec.Struct, tag=True, frozen=True):
    id: int
    window: Window


class Cancel(msgspec.Struct, tag=True, frozen=True):
    id: int


class Sound(msgspec.Struct, tag=True, frozen=True):
    id: int
    samples: bytes
    """float32, little-endian."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    id: int
    message: str


Message = Hello | Decode | Cancel | Sound | Failed
_decoder = msgspec.msgpack.Decoder(Message)


def _frame(message: Message) -> bytes:
    return frame(msgspec.msgpack.encode(message))


async def _read(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises LinkClosed at the end."""
    return _decoder.decode(await receive_frame(reader))


# ------------------------------------------------------------------ the process


class DecoderServer:
    """Decodes the windows of its connections, all that wait at once."""

    def __init__(self, opened: OpenedDecoder, voices: dict[str, tuple[int, ...]]) -> None:
        decoder = opened.decoder
        per_token = decoder.samples_per_token
        self._opened = opened
        self._hello = Hello(
            decoder.sample_rate,
            (per_token.numerator, per_token.denominator),
            decoder.left_context,
            decoder.right_context,
            voices,
        )
        self._waiting: dict[tuple[int, int], tuple[asyncio.StreamWriter, Decode]] = {}
        """By connection and id, in order of arrival."""
        self._news = asyncio.Event()
        self._num_connections = 0
        self._call_began: float | None = None

    @property
    def call_s(self) -> float:
        """How long the decoder has been at work in the present call, one of several for a batch that fails; from any
        thread."""
        began = self._call_began
        return 0.0 if began is None else time.monotonic() - began

    def _begin_call(self) -> None:
        self._call_began = time.monotonic()

    async def serve(self, path: str, on_ready: Callable[[], None]) -> None:
        """Until cancelled."""
        server = await listen_at(path, self._connected)
        on_ready()
        async with server:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._waiting:
                    keys = list(self._waiting)[:MAX_BATCH]
                    await self._decode([self._waiting.pop(key) for key in keys])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        number = self._num_connections
        writer.write(_frame(self._hello))
        try:
            while True:
                message = await _read(reader)
                if isinstance(message, Cancel):
                    self._waiting.pop((number, message.id), None)
                elif isinstance(message, Decode):
                    self._waiting[number, message.id] = (writer, message)
                    self._news.set()
        except (LinkClosed, ConnectionError):
            for key in [key for key in self._waiting if key[0] == number]:
                del self._waiting[key]
        finally:
            writer.close()

    async def _decode(self, batch: list[tuple[asyncio.StreamWriter, Decode]]) -> None:
        from megatron_infer.audio.decoder import decode_each

        windows = [one.window for _, one in batch]
        sounds = await asyncio.to_thread(decode_each, self._opened.decoder, windows, before_call=self._begin_call)
        self._call_began = None
        for (writer, one), sound in zip(batch, sounds, strict=True):
            if writer.is_closing():
                continue
            if not isinstance(sound, Exception):
                writer.write(_frame(Sound(one.id, sound.astype("<f4").tobytes())))
                continue
            log.error("a window of %d tokens cannot be decoded", len(one.window.tokens), exc_info=sound)
            reason = str(sound) if isinstance(sound, InferenceError) else "the server's log has the reason"
            writer.write(_frame(Failed(one.id, reason)))


# ------------------------------------------------------------------ the client


@dataclass(slots=True)
class _Waiting:
    frame: bytes
    sound: asyncio.Future[bytes]
    tries: int = 0


class AudioDecoderClient:
    """Windows of the calls of one HTTP process; on its event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: dict[int, _Waiting] = {}
        self._next_id = 0
        self._hello: Hello | None = None
        self._is_ready = asyncio.Event()
        """Whether a decoder process is there."""
        self._away_since = 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def hello(self) -> Hello:
        """What the decoder is. Raises ApiError 503 while its process does not serve."""
        if self._running is None:
            self._away_since = time.monotonic()
            self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(AWAY_TIMEOUT_S):
                await self._is_ready.wait()
        except TimeoutError:
            raise _away() from None
        assert self._hello is not None
        return self._hello

    async def decode(self, window: Window) -> bytes:
        """float32 samples of what is heard of a window. Cancelled, the window goes.

        Raises ApiError 500 where the decoder fails, 503 where its process ended MAX_TRIES times with the window or
        stays away.
        """
        self._next_id += 1
        message = Decode(self._next_id, window)
        one = _Waiting(_frame(message), asyncio.get_running_loop().create_future())
        self._waiting[message.id] = one
        self._send(message.id, one)
        try:
            return await one.sound
        finally:
            if self._waiting.pop(message.id, None) is not None and self._writer is not None:
                self._writer.write(_frame(Cancel(message.id)))

    def _send(self, id: int, one: _Waiting) -> None:
        if self._writer is None:
            return
        one.tries += 1
        if one.tries > MAX_TRIES:
            self._fail(id, unavailable(f"the audio decoder ended {MAX_TRIES} times with this sound", "decoder_failed"))
            return
        self._writer.write(one.frame)

    def _fail(self, id: int, error: ApiError) -> None:
        one = self._waiting.pop(id)
        if not one.sound.done():
            one.sound.set_exception(error)

    async def _run(self) -> None:
        while True:
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(AWAY_TIMEOUT_S):
                    reader, writer = await asyncio.open_unix_connection(self._path)
                    self._hello = await _read(reader)
                self._writer = writer  # only now: what is sent before would be sent again below
                self._is_ready.set()
                for id, one in list(self._waiting.items()):
                    self._send(id, one)
                while True:
                    self._take(await _read(reader))
            except (OSError, LinkClosed, msgspec.MsgspecError):
                if self._writer is not None:
                    self._away_since = time.monotonic()
                self._writer = None
                self._is_ready.clear()
                if writer is not None:
                    writer.close()
                if time.monotonic() - self._away_since > AWAY_TIMEOUT_S:
                    for id in list(self._waiting):
                        self._fail(id, _away())
                await asyncio.sleep(RECONNECT_S)

    def _take(self, message: Sound | Failed) -> None:
        one = self._waiting.pop(message.id, None)
        if one is None or one.sound.done():
            return
        if isinstance(message, Sound):
            one.sound.set_result(message.samples)
        else:
            one.sound.set_exception(ApiError(500, f"the audio decoder failed: {message.message}", code="decoder_error"))


def _away() -> ApiError:
    return unavailable("the audio decoder does not answer: it is loading, or starts again; ask again later", "loading")


def run_decoder(
    model: str, path: str, voices: dict[str, str], own: str, on_ready: Callable[[DecoderServer], None]
) -> None:
    """The process: open the model's decoder, encode the voices, serve. Raises InferenceError for what cannot be.

    own: as `ServerConfig.audio_decoder`.
    """
    from pathlib import Path

    from megatron_infer.audio.checks import check_decoder_of
    from megatron_infer.audio.registry import open_decoder
    from megatron_infer.audio.speech_model import SpeechModel
    from megatron_infer.audio.voices import encode_voices
    from megatron_infer.utils.named_class import named_object

    speech = SpeechModel.read(Path(model).expanduser())
    openers = (
        {speech.decoder: named_object(own, variable="audio_decoder", remedy="give MODULE:FUNCTION")} if own else {}
    )
    opened = open_decoder(speech.decoder, speech.decoder_weights, speech.decoder_config, own=openers)
    check_decoder_of(speech, opened, speech.decoder)
    encoded = encode_voices({**speech.voices, **voices}, opened)

    async def serve() -> None:
        server = DecoderServer(opened, encoded)
        await server.serve(path, lambda: on_ready(server))

    try:
        asyncio.run(serve())
    except OSError as error:
        raise InferenceError(f"the audio decoder cannot listen at {path}: {error}") from None
