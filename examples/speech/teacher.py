"""The teacher's voices: espeak-ng, from the package espeakng-loader (GPL, used by this example alone).

python examples/speech/teacher.py "seventeen ships left the harbor" --voice ben --output ben.wav
"""

from __future__ import annotations

import argparse
import ctypes
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RATE = 16_000
"""Samples of a second, of all sound here."""
FRAME = 320
"""Samples of the codec's frame."""
GAP = 2
"""Frames of silence behind a word."""
HEARD = 3e-3
"""Loudest sample of silence."""
SYNCHRONOUS, CHARACTERS_UTF8 = 2, 1
SPEED, PITCH, RANGE = 1, 3, 4


@dataclass(frozen=True, slots=True)
class Voice:
    """One of espeak-ng's. speed: words a minute. pitch, range: 0 to 99."""

    name: str
    speed: int
    pitch: int
    range: int


VOICES = {"anna": Voice("en-us+f3", 150, 50, 30), "ben": Voice("en-us", 150, 40, 30)}


class Teacher:
    """Speaks. One of it can be in a process."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        path = espeakng_loader.get_data_path().encode()
        self._rate = self._library.espeak_Initialize(SYNCHRONOUS, 0, path, 0)
        if self._rate <= 0:
            raise RuntimeError("espeak-ng does not start")
        self._parts: list[np.ndarray] = []
        self._words: dict[tuple[str, str], np.ndarray] = {}
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._take)  # kept: the library holds its address only
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _events: int | None) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, shape=(count,)).copy())
        return 0

    def speak(self, text: str, voice: str = "anna") -> np.ndarray:
        """float32 [samples] at `RATE`, between -1 and 1, word after word, 60 ms of silence at the end.

        A word is whole frames and sounds alike in every sentence, so that a small model learns words in minutes; the
        melody of a sentence is lost.
        """
        end = np.zeros(3 * FRAME, np.float32)
        return np.concatenate([*(self._word(one, voice) for one in text.split()), end])

    def num_frames(self, word: str, voice: str = "anna") -> int:
        """Length of a word in every sentence."""
        return len(self._word(word, voice)) // FRAME

    def _word(self, word: str, voice: str) -> np.ndarray:
        """float32 [whole frames * FRAME], from where it is heard to `GAP` frames behind where it ends."""
        if (word, voice) not in self._words:
            sound = self._synthesise(word, VOICES[voice])
            heard = np.flatnonzero(np.abs(sound) > HEARD)
            sound = sound[heard[0] : heard[-1] + 1] if len(heard) else sound
            self._words[word, voice] = np.pad(sound, (0, -len(sound) % FRAME + GAP * FRAME))
        return self._words[word, voice]

    def _synthesise(self, text: str, voice: Voice) -> np.ndarray:
        if self._library.espeak_SetVoiceByName(voice.name.encode()):
            raise RuntimeError(f"espeak-ng has no voice {voice.name}")
        for parameter, value in ((SPEED, voice.speed), (PITCH, voice.pitch), (RANGE, voice.range)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._parts.clear()
        data = text.encode()
        self._library.espeak_Synth(data, len(data) + 1, 0, 0, 0, CHARACTERS_UTF8, None, None)
        sound = np.concatenate(self._parts).astype(np.float32) / 32768 if self._parts else np.zeros(0, np.float32)
        return resample(sound, self._rate)


def resample(sound: np.ndarray, rate: int) -> np.ndarray:
    """From `rate` to `RATE`, by its spectrum."""
    count = round(len(sound) * RATE / rate)
    spectrum = np.fft.rfft(sound)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / max(len(sound), 1))).astype(np.float32)


def write_wav(path: Path, sound: np.ndarray) -> None:
    """16-bit, mono."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--voice", choices=VOICES, default="anna")
    parser.add_argument("--output", type=Path, default=Path("out.wav"))
    options = parser.parse_args()
    write_wav(options.output, Teacher().speak(options.text, options.voice))


if __name__ == "__main__":
    main()
