"""WAV files as arrays and back, another sample rate, and raw 16-bit PCM. Without torch."""

from __future__ import annotations

import struct
from math import gcd

import numpy as np

from megatron_infer.errors import RequestError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
"""Formats of a WAV file."""
UNKNOWN_BYTES = 0xFFFFFFFF
"""The length in the header of a stream, whose end is not known."""
TAPS = 16
"""Half the length of the resampling filter, in samples of the slower rate."""


def pcm16(sound: np.ndarray) -> bytes:
    """float32 samples -> 16-bit little-endian PCM."""
    data: bytes = np.round(np.clip(sound, -1.0, 1.0) * 32767).astype("<i2").tobytes()
    return data


def wav_header(sample_rate: int, num_samples: int | None = None) -> bytes:
    """The header of 16-bit mono. num_samples: None for a stream, whose end is not known."""
    num_bytes = UNKNOWN_BYTES if num_samples is None else 2 * num_samples
    riff = UNKNOWN_BYTES if num_samples is None else 36 + num_bytes
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, PCM, 1, sample_rate, 2 * sample_rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff, b"WAVE") + fmt + struct.pack("<4sI", b"data", num_bytes)


def read_wav(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """(float32 mono samples, sample rate). name: for errors. Raises RequestError for what is no WAV of PCM or float."""
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise RequestError(f"{name} is no WAV file; convert it (ffmpeg -i IN OUT.wav)")
    at, found = 12, None
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        body = data[at + 8 : at + 8 + size]
        if kind == b"fmt " and len(body) >= 16:
            found = struct.unpack_from("<HHIIHH", body)
            if found[0] == EXTENSIBLE and len(body) >= 26:
                found = (struct.unpack_from("<H", body, 24)[0], *found[1:])
        elif kind == b"data" and found is not None:
            return _samples(body, found, name), found[2]
        at += 8 + size + size % 2
    raise RequestError(f"{name} is a WAV file without {'samples' if found else 'a format'}; is it cut off?")


def _samples(body: bytes, fmt: tuple[int, ...], name: str) -> np.ndarray:
    kind, channels, rate, _, _, bits = fmt
    kinds = {
        (PCM, 8): "u1",
        (PCM, 16): "<i2",
        (PCM, 24): "u1",
        (PCM, 32): "<i4",
        (FLOAT, 32): "<f4",
        (FLOAT, 64): "<f8",
    }
    if (kind, bits) not in kinds or channels < 1 or not 1000 <= rate <= 768_000:
        raise RequestError(
            f"{name} has format {kind} with {bits} bits, {channels} channels at {rate:,} Hz; "
            "give PCM of 8 to 32 bits, or float"
        )
    width = channels * bits // 8
    raw = np.frombuffer(body[: len(body) // width * width], dtype=kinds[kind, bits])
    if (kind, bits) == (PCM, 24):
        parts = raw.reshape(-1, 3).astype(np.int32)
        values = (parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24) / 2**31
    elif kind == PCM:
        values = (raw.astype(np.float64) - 128) / 128 if bits == 8 else raw / 2.0 ** (bits - 1)
    else:
        values = np.nan_to_num(raw.astype(np.float64))
    mono: np.ndarray = values.reshape(-1, channels).mean(-1).clip(-1, 1).astype(np.float32)
    return mono


def resample(sound: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Band-limited: a sine within both bands keeps its shape, what is above the new band is removed."""
    if rate == wanted or not len(sound):
        return sound
    common = gcd(rate, wanted)
    up, down = wanted // common, rate // common
    scale = min(1.0, wanted / rate)
    reach = int(np.ceil(TAPS / scale))
    count = len(sound) * up // down
    padded = np.pad(sound.astype(np.float64), (reach, reach + 1))
    offsets = np.arange(-reach + 1, reach + 1)
    out = np.empty(count)
    for begin in range(0, count, 1 << 14):
        places = np.arange(begin, min(count, begin + (1 << 14))) * (down / up)
        whole = places.astype(np.int64)
        distance = (whole[:, None] + offsets) - places[:, None]
        window = np.cos(np.pi / 2 * np.clip(distance / reach, -1, 1)) ** 2
        weights = scale * np.sinc(distance * scale) * window
        out[begin : begin + len(places)] = (padded[whole[:, None] + offsets + reach] * weights).sum(-1)
    return out.astype(np.float32)
