"""The model's vocabulary: a token for each word of the grammar, marks, the end, the codec's speech tokens.

prompt   voice's tokens <voice> <0> she <1> sold <2> two <3> windows <text>
answer   <0> she, its speech tokens, <1> sold, its speech tokens, ... <end>

The marks number the words. An answer says each mark and word again before the word's sound: so the model need only find
the mark in the prompt to know what comes next, and the sound follows from the word just before it.
"""

from __future__ import annotations

import json
from pathlib import Path

import text
import tokenizers
from teacher import VOICES
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from megatron_infer.server.audio.layout import SpeechFormat
from megatron_infer.server.audio.speech_model import FILE, SpeechModel
from megatron_infer.text.tokenizer import Tokenizer

WORDS = text.vocabulary()
MARKS = range(len(WORDS), len(WORDS) + 16)
"""Before the words of a text, one after the other and again from the first."""
VOICE_MARK, TEXT_MARK, END, FIRST_SPEECH = range(MARKS.stop, MARKS.stop + 4)
"""VOICE_MARK follows the voice's tokens, TEXT_MARK the text, END the speech. FIRST_SPEECH is speech token 0."""
VOICE_FRAMES = 32
"""Frames of a voice, at the beginning of a prompt."""
PUNCTUATION = '[.,;:!?"()]'


def tokenizer() -> Tokenizer:
    """Words in any case, with punctuation between them. It has no token for other words and refuses them."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}))
    british = normalizers.Replace("harbour", "harbor")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(PUNCTUATION), " "), british]
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([f"<|{place}|>" for place in range(len(MARKS))])
    backend.add_special_tokens(["<|voice|>", "<|text|>", "<|end|>"])
    return Tokenizer(backend, name="speech")


def write_description(folder: Path, speech: SpeechFormat) -> SpeechModel:
    """Write speech.json, which makes a speech model of the directory."""
    described = {
        "first_token": FIRST_SPEECH,
        "vocab_size": speech.vocab_size,
        "codebooks": speech.codebooks,
        "frame_rate": str(speech.frame_rate),
        "end_token": END,
        "prompt": ["voice", VOICE_MARK, "text", TEXT_MARK],
        "text_marks": [MARKS.start, len(MARKS)],
        "interleaved_text": [0, MARKS.stop],
        "decoder": "codec",
        "decoder_weights": "codec.safetensors",
        "voices": {name: f"{name}.wav" for name in VOICES},
    }
    (folder / FILE).write_text(json.dumps(described, indent=2) + "\n")
    return SpeechModel.read(folder)
