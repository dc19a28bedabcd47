"""The audio decoder of a server: a process of its own, and its client in an HTTP process, over a Unix socket.

HTTP process ── a Window, or None ──▶ decoder process: windows of all calls that wait, decoded together
             ◀── Sound, Failed, or Hello ──

A window is complete in itself: where the process dies, the supervisor starts another one, which is asked for the
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

from megatron_infer.distributed.wire import LinkClosed, answer, ask
from megatron_infer.errors import InferenceError
from megatron_infer.server.audio.blocks import Window
from megatron_infer.server.http_errors import ApiError, unavailable

if TYPE_CHECKING:
    from megatron_infer.server.audio.decoder import OpenedDecoder

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
    """What the decoder is: the answer to None."""

    sample_rate: int
    samples_per_token: tuple[int, int]
    """As a fraction."""
    left_context: int | None
    right_context: int
    voices: dict[str, tuple[int, ...]]


class Sound(msgspec.Struct, tag=True, frozen=True):
    """What is heard of a window."""

    samples: bytes
    """float32, little-endian."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Why a window cannot be decoded."""

    message: str


_question = msgspec.msgpack.Decoder(Window | None)
_answer = msgspec.msgpack.Decoder(Hello | Sound | Failed)
_encode = msgspec.msgpack.encode


# ------------------------------------------------------------------ the process


@dataclass(eq=False, slots=True)
class WaitingWindow:
    window: Window
    sound: asyncio.Future[Sound | Failed]


class DecoderServer:
    """Decodes the windows that HTTP processes ask for, all that wait at once."""

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
        self._waiting: list[WaitingWindow] = []
        """In order of arrival."""
        self._news = asyncio.Event()
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
        async with await answer(path, self._reply):
            on_ready()
            while True:
                await self._news.wait()
                self._news.clear()
                while batch := self._waiting[:MAX_BATCH]:
                    del self._waiting[:MAX_BATCH]
                    await self._decode(batch)

    async def _reply(self, question: bytes) -> bytes:
        window = _question.decode(question)
        if window is None:
            return _encode(self._hello)
        one = WaitingWindow(window, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._news.set()
        try:
            return _encode(await one.sound)
        finally:
            if one in self._waiting:  # the asker has left
                self._waiting.remove(one)

    async def _decode(self, batch: list[WaitingWindow]) -> None:
        from megatron_infer.server.audio.decoder import decode_each

        windows = [one.window for one in batch]
        sounds = await asyncio.to_thread(decode_each, self._opened.decoder, windows, before_call=self._begin_call)
        self._call_began = None
        for one, sound in zip(batch, sounds, strict=True):
            if one.sound.done():
                continue
            if not isinstance(sound, Exception):
                one.sound.set_result(Sound(sound.astype("<f4").tobytes()))
                continue
            log.error("a window of %d tokens cannot be decoded", len(one.window.tokens), exc_info=sound)
            reason = str(sound) if isinstance(sound, InferenceError) else "the server's log has the reason"
            one.sound.set_result(Failed(reason))


# ------------------------------------------------------------------ the client


class AudioDecoderClient:
    """Asks the decoder process for the windows of the calls of one HTTP process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.num_waiting = 0
        """Windows that are asked for."""

    async def hello(self) -> Hello:
        """What the decoder is. Raises ApiError 503 while its process does not serve."""
        try:
            async with asyncio.timeout(AWAY_TIMEOUT_S):
                found: Hello = await self._ask_again(None)
                return found
        except TimeoutError:
            raise _away() from None

    async def decode(self, window: Window) -> bytes:
        """float32 samples of what is heard of a window. Cancelled, the window goes.

        Raises ApiError 500 where the decoder fails, 503 where its process ended MAX_TRIES times with the window or
        stays away.
        """
        self.num_waiting += 1
        try:
            reply: Sound | Failed = await self._ask_again(window)
        finally:
            self.num_waiting -= 1
        if isinstance(reply, Failed):
            raise ApiError(500, f"the audio decoder failed: {reply.message}", code="decoder_error")
        return reply.samples

    async def _ask_again(self, question: Window | None) -> Any:
        """The answer, of a later process where one ends before it answers. Raises ApiError 503, see `decode`."""
        tries, away_since = 0, time.monotonic()
        while True:
            try:
                return _answer.decode(await ask(self._path, _encode(question)))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() - away_since > AWAY_TIMEOUT_S:
                    raise _away() from None
            except (OSError, LinkClosed, msgspec.MsgspecError):
                tries, away_since = tries + 1, time.monotonic()
                if question is not None and tries == MAX_TRIES:
                    text = f"the audio decoder ended {MAX_TRIES} times with this sound"
                    raise unavailable(text, "decoder_failed") from None
            await asyncio.sleep(RECONNECT_S)


def _away() -> ApiError:
    return unavailable("the audio decoder does not answer: it is loading, or starts again; ask again later", "loading")


def run_decoder(
    model: str, path: str, voices: dict[str, str], own: str, on_ready: Callable[[DecoderServer], None]
) -> None:
    """The process: open the model's decoder, encode the voices, serve. Raises InferenceError for what cannot be.

    own: as `ServerConfig.audio_decoder`.
    """
    from pathlib import Path

    from megatron_infer.server.audio.checks import check_decoder_of
    from megatron_infer.server.audio.registry import open_decoder
    from megatron_infer.server.audio.speech_model import SpeechModel
    from megatron_infer.server.audio.voices import encode_voices
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
