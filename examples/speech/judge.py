"""How well a voice is understood: held-out sentences, heard by pocketsphinx under the example's grammar.

    python examples/speech/judge.py voice/                                    table, voice/sounds, voice/spectra.png
    python examples/speech/judge.py voice/ --sentences 20 --systems teacher,codec

Word error: inserted, deleted and replaced words over the words of the sentence. Systems: the teacher; the codec alone,
on the teacher's sound; the model; hibari, a speech model with weights of 8 MB in its wheel (hibari-tts and onnxruntime,
left out where they are not installed). All sound is heard at the same loudness.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import text
from teacher import RATE, VOICES, Teacher, resample, write_wav

SYSTEMS = ("teacher", "codec", "model", "hibari")
LOUDNESS = 0.6
"""Largest sample of what is heard."""
PAUSE, NOISE = RATE // 4, 3e-4
"""Samples before and behind a sentence, and the deviation of the noise of the room."""
KEPT = 10
"""Sounds of each system and voice that are written."""
MAX_SPEECH_TOKENS = 600
Speaker = Callable[[str, str], np.ndarray]
"""(sentence, voice) -> float32 [samples] at `RATE`."""


class Ears:
    """A recogniser that expects a sentence of the grammar."""

    def __init__(self) -> None:
        from pocketsphinx import Decoder, get_model_path

        with tempfile.NamedTemporaryFile("w", suffix=".gram") as file:
            file.write(text.jsgf())
            file.flush()
            self._decoder = Decoder(
                hmm=get_model_path("en-us/en-us"),
                dict=get_model_path("en-us/cmudict-en-us.dict"),
                jsgf=file.name,
                samprate=float(RATE),
                cmn="batch",
                loglevel="FATAL",
            )

    def hear(self, sound: np.ndarray) -> str:
        """The words; "" where nothing of the grammar is heard."""
        loudest = float(np.abs(sound).max(initial=0.0))
        if loudest == 0:
            return ""
        room = np.random.default_rng(0).normal(0, NOISE, len(sound) + 2 * PAUSE)
        room[PAUSE : PAUSE + len(sound)] += sound * (LOUDNESS / loudest)
        pcm = (room * 32767).astype("<i2").tobytes()
        self._decoder.start_utt()
        self._decoder.process_raw(pcm, full_utt=True)
        self._decoder.end_utt()
        heard = self._decoder.hyp()
        return heard.hypstr if heard else ""


def word_errors(said: str, heard: str) -> int:
    """Fewest words to insert, delete and replace between them."""
    ours = heard.split()
    row = list(range(len(ours) + 1))
    for count, word in enumerate(said.split(), 1):
        corner, row[0] = row[0], count
        for place, other in enumerate(ours, 1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (word != other))
    return row[-1]


def speaker_of(system: str, folder: Path, teacher: Teacher) -> Speaker | None:
    """None where the system's packages are not installed."""
    if system == "teacher":
        return teacher.speak
    if system == "hibari":
        return _hibari()
    return _codec(folder, teacher) if system == "codec" else _model(folder)


def _codec(folder: Path, teacher: Teacher) -> Speaker:
    import torch

    from megatron_infer.server.audio.codec import open_codec

    opened = open_codec(folder / "codec.safetensors")

    def speak(sentence: str, voice: str) -> np.ndarray:
        assert opened.encoder is not None
        tokens = opened.encoder.encode(teacher.speak(sentence, voice))
        return opened.decoder.decode(torch.tensor([tokens]), torch.tensor([len(tokens)]), None)[0].numpy()

    return speak


def _model(folder: Path) -> Speaker:
    from train_lm import TEMPERATURE, TOP_K

    from megatron_infer import SamplingParams
    from megatron_infer.pipelines import AudioGenerationConfig, AudioGenerationRequest, AudioGeneratorPipeline

    config = AudioGenerationConfig(
        audio_decoder="codec",
        audio_decoder_weights=str(folder / "codec.safetensors"),
        model_path=str(folder),
        quantization_encoding="float32",
    )
    pipeline = AudioGeneratorPipeline(config)
    params = SamplingParams(max_tokens=MAX_SPEECH_TOKENS, temperature=TEMPERATURE, top_k=TOP_K, seed=0)

    def speak(sentence: str, voice: str) -> np.ndarray:
        request = AudioGenerationRequest(input=sentence, voice=voice, sampling_params=params, streaming=False)
        (whole,) = pipeline.generate([request])
        return whole.audio

    return speak


def _hibari() -> Speaker | None:
    if find_spec("hibari") is None or find_spec("onnxruntime") is None:
        print("hibari is left out: pip install hibari-tts onnxruntime", file=sys.stderr)
        return None
    from hibari import SAMPLE_RATE, Hibari

    peer = Hibari()
    return lambda sentence, _voice: resample(np.asarray(peer(sentence, seed=0), np.float32).ravel(), SAMPLE_RATE)


def judge(speak: Speaker, ears: Ears, sentences: Sequence[str], voice: str, keep: str) -> dict[str, Any]:
    """Figures of one system in one voice. keep: path of the WAV files of the first sounds, before their number."""
    wrong, words, seconds, took, heard = 0, 0, 0.0, 0.0, list[str]()
    for number, sentence in enumerate(sentences):
        began = time.perf_counter()
        sound = speak(sentence, voice)
        took += time.perf_counter() - began
        seconds += len(sound) / RATE
        if number < KEPT:
            write_wav(Path(f"{keep}{number}.wav"), sound)
        heard.append(ears.hear(sound))
        wrong, words = wrong + word_errors(sentence, heard[-1]), words + len(sentence.split())
    error = wrong / words
    return {"word_error": error, "wrong": wrong, "words": words, "sound_s": seconds, "took_s": took, "heard": heard}


def draw(sounds: dict[str, np.ndarray], path: Path) -> None:
    """Spectrograms, one above the other."""
    if find_spec("matplotlib") is None:
        print(f"{path} is not drawn: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(sounds), 1, figsize=(9, 2 * len(sounds)), constrained_layout=True, squeeze=False)
    for axis, (name, sound) in zip(axes[:, 0], sounds.items(), strict=True):
        hiss = np.random.default_rng(0).normal(0, 1e-5, len(sound))  # silence has no logarithm
        axis.specgram(sound + hiss, NFFT=512, Fs=RATE, noverlap=384, vmin=-140)
        axis.set(title=name, ylabel="Hz")
    axes[-1, 0].set_xlabel("s")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what train_codec.py and train_lm.py wrote")
    parser.add_argument("--sentences", type=int, default=100, help="held-out ones to hear (%(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="of %(default)s")
    parser.add_argument("--voices", default=",".join(VOICES), help="of %(default)s")
    options = parser.parse_args()
    systems, voices = options.systems.split(","), options.voices.split(",")
    for given, known in ((systems, SYSTEMS), (voices, tuple(VOICES))):
        if unknown := [one for one in given if one not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    sentences, ears, teacher = text.held_out()[: options.sentences], Ears(), Teacher()
    found, drawn = dict[str, dict[str, Any]](), dict[str, np.ndarray]()
    sounds = options.folder / "sounds"
    sounds.mkdir(exist_ok=True)
    print(f"{len(sentences)} sentences\n")
    print("| system | voice | word error | words | s a second of sound |\n|---|---|---|---|---|")
    for system in systems:
        speak = speaker_of(system, options.folder, teacher)
        if speak is None:
            continue
        for voice in voices if system != "hibari" else ["own"]:
            row = found[f"{system} {voice}"] = judge(speak, ears, sentences, voice, f"{sounds / system}-{voice}-")
            share, speed = 100 * row["word_error"], row["took_s"] / max(row["sound_s"], 1e-9)
            print(f"| {system} | {voice} | {share:.1f} % | {row['words']} | {speed:.3f} |", flush=True)
        drawn[system] = speak(sentences[0], voices[0])
    (options.folder / "judge.json").write_text(json.dumps({"sentences": sentences, "systems": found}, indent=2) + "\n")
    draw(drawn, options.folder / "spectra.png")


if __name__ == "__main__":
    main()
