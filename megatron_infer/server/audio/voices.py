"""Voices: a recording as speech tokens, the beginning of every prompt that uses it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_infer.errors import ConfigError, ModelError, RequestError, brief
from megatron_infer.server.audio.wav import read_wav, resample
from megatron_infer.utils.files import regular

if TYPE_CHECKING:
    from megatron_infer.server.audio.decoder import OpenedDecoder

log = logging.getLogger("megatron_infer")

MAX_VOICE_S = 30.0
MIN_VOICE_S = 0.1
"""More than a frame of any decoder."""
SILENCE = 1e-3
"""Loudest sample below which a recording is silent."""
MAX_VOICE_BYTES = 64 << 20


def read_voice(path: str) -> tuple[np.ndarray, int]:
    """(samples, sample rate) of a WAV file. Raises RequestError for what is no voice. Without torch."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > MAX_VOICE_BYTES:
            raise _too_long(path, f"{file.stat().st_size / 2**20:,.0f} MiB")
        data = regular(file).read_bytes()
    except OSError as error:
        raise RequestError(f"voice {path} cannot be read: {error.strerror}") from None
    sound, rate = read_wav(data, f"voice {path}")
    if len(sound) / rate > MAX_VOICE_S:
        raise _too_long(path, f"{len(sound) / rate:,.0f} s")
    if len(sound) < rate * MIN_VOICE_S:
        raise RequestError(f"voice {path} has {len(sound):,} samples, less than a frame; give a few seconds")
    if float(np.abs(sound).max()) < SILENCE:
        raise RequestError(f"voice {path} is silent; give a recording of somebody who speaks")
    return sound, rate


def encode_voice(path: str, opened: OpenedDecoder) -> tuple[int, ...]:
    """A WAV file -> speech tokens, frame after frame. Another sample rate is resampled, and the log says so.

    Raises RequestError for what is no voice, ConfigError for a decoder that cannot encode, ModelError for an encoder
    that fails or gives no tokens of the decoder's.
    """
    if opened.encoder is None:
        raise ConfigError(f"voice {path}: this audio decoder has no encoder; give the voice's tokens instead")
    sound, rate = read_voice(path)
    wanted = opened.decoder.sample_rate
    if rate != wanted:
        log.warning("voice %s has %s Hz and is resampled to %s", path, f"{rate:,}", f"{wanted:,}")
        sound = resample(sound, rate, wanted)
    try:
        tokens = tuple(int(token) for token in opened.encoder.encode(sound))
    except Exception as error:  # whatever a library's encoder raises
        raise ModelError(f"voice {path} cannot be encoded: {brief(error)}") from error
    wrong = [token for token in tokens if not 0 <= token < opened.format.vocab_size]
    if wrong or len(tokens) % opened.format.codebooks:
        got = f"token {wrong[0]}" if wrong else f"{len(tokens)} tokens"
        limits = f"frames of {opened.format.codebooks} tokens from 0 to {opened.format.vocab_size - 1:,}"
        raise ModelError(f"voice {path}: the encoder gives {got}; it must be {limits}")
    return tokens


def _too_long(path: str, got: str) -> RequestError:
    return RequestError(f"voice {path} has {got}, the limit is {MAX_VOICE_S:g} s; cut it (sox IN OUT trim 0 5)")


def encode_voices(files: Mapping[str, str], opened: OpenedDecoder) -> dict[str, tuple[int, ...]]:
    """`encode_voice` of each file, by name."""
    return {name: encode_voice(path, opened) for name, path in files.items()}
