"""`speech.json` in a model's directory: which of its tokens are speech, and how a prompt is written. Without torch.

{"first_token": 260, "vocab_size": 512, "codebooks": 1, "frame_rate": 50, "delay": false, "end_token": 772,
 "prompt": ["voice", 258, "text", 259], "decoder": "codec", "decoder_weights": "codec.safetensors",
 "decoder_config": {}, "voices": {"anna": "anna.wav"},
 "text_marks": [240, 16], "interleaved_text": [0, 256]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron_infer.errors import ConfigError, InvalidPrompt, ModelError, RequestError, check_known
from megatron_infer.server.audio.layout import Layout, SpeechFormat
from megatron_infer.utils.json_file import read_json

FILE = "speech.json"
MAX_CHARS = 4096
"""Limit of a text to speak, in characters."""
TEXT_PARTS = ("transcription", "instructions", "text")
"""Parts of a prompt that are texts; "voice" is the tokens of the voice."""
REQUIRED = ("first_token", "vocab_size", "end_token", "prompt")
OPTIONAL = (
    "codebooks",
    "frame_rate",
    "delay",
    "decoder",
    "decoder_weights",
    "decoder_config",
    "voices",
    "text_marks",
    "interleaved_text",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """A model that draws speech tokens, as its speech.json describes it."""

    first_token: int
    """Token id of speech token 0; the others follow it."""
    end_token: int
    """Token id that ends an answer."""
    format: SpeechFormat
    layout: Layout
    prompt: tuple[str | int, ...]
    """Parts of a prompt in order: "voice", texts, and token ids."""
    decoder: str = ""
    """The audio decoder that it was trained for, by name; "": it is not said."""
    decoder_weights: str = ""
    """Its weights, in the model's directory; "": it has none."""
    decoder_config: Mapping[str, Any] = field(default_factory=dict)
    voices: Mapping[str, str] = field(default_factory=dict)
    """Name -> WAV file of a voice that comes with the model."""
    text_marks: range = range(0)
    """Ids that stand in a prompt before the tokens of its text, one after the other and again from the first, by which
    a model finds the token to speak next."""
    interleaved_text: range = range(0)
    """Ids of text tokens that an answer may hold between its speech tokens, a word before its sound; they are
    silent."""

    @classmethod
    def read(cls, folder: Path) -> SpeechModel:
        """Raises ModelError for a directory without a speech.json, or with a wrong one."""
        path = folder / FILE
        if not path.is_file():
            raise ModelError(f"{folder} has no {FILE}: it is no speech model, or its vocabulary has no speech tokens")
        values = read_json(path)
        known = (*REQUIRED, *OPTIONAL)
        check_known("key", values, known, error=ModelError, where=f"{path}: ")
        missing = [name for name in REQUIRED if name not in values]
        if missing:
            raise ModelError(f"{path}: {missing[0]} is missing")
        try:
            speech = SpeechFormat(
                vocab_size=int(values["vocab_size"]),
                codebooks=int(values.get("codebooks", 1)),
                frame_rate=Fraction(str(values.get("frame_rate", 50))),
            )
            model = cls(
                first_token=int(values["first_token"]),
                end_token=int(values["end_token"]),
                format=speech,
                layout=Layout(codebooks=speech.codebooks, delay=bool(values.get("delay", False))),
                prompt=tuple(values["prompt"]),
                decoder=str(values.get("decoder", "")),
                decoder_weights=str(folder / values["decoder_weights"]) if values.get("decoder_weights") else "",
                decoder_config=dict(values.get("decoder_config", {})),
                voices={str(name): str(folder / file) for name, file in dict(values.get("voices", {})).items()},
                text_marks=_ids(values, "text_marks"),
                interleaved_text=_ids(values, "interleaved_text"),
            )
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"{path}: {error}") from None
        model.check_prompt(str(path))
        return model

    def check_prompt(self, where: str) -> None:
        """Raises ModelError for parts that cannot be a prompt."""
        for part in self.prompt:
            if isinstance(part, int) and not isinstance(part, bool) and part >= 0:
                continue
            if part not in ("voice", *TEXT_PARTS):
                raise ModelError(f"{where}: prompt holds {part!r}; parts are voice, {', '.join(TEXT_PARTS)}, token ids")
        if self.prompt.count("text") != 1:
            raise ModelError(f"{where}: prompt must hold text once, it is {list(self.prompt)}")
        if "voice" in self.prompt and self.prompt.index("voice") > self.prompt.index("text"):
            raise ModelError(f"{where}: voice must come before text, so that its prefix is found in the cache")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ModelError where a model of vocab_size tokens lacks some of these."""
        last = self.first_token + self.format.vocab_size - 1
        highest = max(last, self.end_token, *(part for part in self.prompt if isinstance(part, int)), 0)
        if self.first_token < 0 or self.end_token < 0 or highest >= vocab_size:
            raise ModelError(
                f"the model has {vocab_size:,} tokens and no speech tokens {self.first_token:,} to {last:,} with the "
                f"end token {self.end_token:,}; is {FILE} that of another model?"
            )
        if self.first_token <= self.end_token <= last:
            raise ModelError(f"end_token {self.end_token} is one of the speech tokens {self.first_token} to {last}")
        heard = {*range(self.first_token, last + 1), self.end_token}
        for name in ("text_marks", "interleaved_text"):
            ids = getattr(self, name)
            if ids.stop > vocab_size or not heard.isdisjoint(ids):
                raise ModelError(
                    f"{name} is the tokens {ids.start} to {ids.stop - 1}; they must be text tokens of the model's "
                    f"{vocab_size:,}, neither speech tokens nor the end token"
                )

    def drawable(self) -> list[int]:
        """Token ids that an answer consists of."""
        first = self.first_token
        return [*self.interleaved_text, *range(first, first + self.format.vocab_size), self.end_token]

    def speech_of(self, ids: Iterable[int]) -> list[int]:
        """Drawn token ids -> speech tokens; interleaved text and the end token are none."""
        first, size = self.first_token, self.format.vocab_size
        return [token - first for token in ids if first <= token < first + size]

    def prompt_ids(self, texts: Mapping[str, Sequence[int]], voice: Sequence[int] = ()) -> list[int]:
        """texts: part -> its token ids. voice: speech tokens, frame after frame.

        Raises RequestError for a part that the model's prompt has no place for.
        """
        for name in texts:
            if name not in self.prompt:
                raise RequestError(f"{name} is given, but the model knows none; leave it out")
        if voice and "voice" not in self.prompt:
            raise RequestError("voice is given, but the model knows no voices; leave it out")
        ids: list[int] = []
        for part in self.prompt:
            if isinstance(part, int):
                ids.append(part)
            elif part == "voice":
                ids += [self.first_token + token for token in self.layout.drawn(voice)]
            elif part == "text" and self.text_marks:
                for place, token in enumerate(texts.get(part, ())):
                    ids += (self.text_marks[place % len(self.text_marks)], token)
            else:
                ids += texts.get(part, ())
        return ids


def _ids(values: Mapping[str, Any], name: str) -> range:
    """[first, count] as ids; none where the key is missing."""
    first, count = map(int, values.get(name, (0, 0)))
    if first < 0 or count < 0:
        raise ValueError(f"{name} is {values[name]}, it must be [first token id, count]")
    return range(first, first + count)


def check_text(text: object) -> None:
    """Raises InvalidPrompt for a text that cannot be spoken."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidPrompt("input is empty; give the text to speak")
    if len(text) > MAX_CHARS:
        raise InvalidPrompt(f"input has {len(text):,} characters, the limit is {MAX_CHARS:,}; send it in parts")


def check_vocabulary(model: str, vocab_size: int) -> None:
    """Raises ModelError where a model that speaks lacks tokens of its speech.json; others pass."""
    folder = Path(model).expanduser()
    if (folder / FILE).is_file():
        SpeechModel.read(folder).check_vocabulary(vocab_size)


def voice_files(entries: Iterable[str]) -> dict[str, str]:
    """NAME=FILE entries -> file by name. Raises ConfigError."""
    files: dict[str, str] = {}
    for entry in entries:
        name, equals, file = entry.partition("=")
        if not equals or not name or not file:
            raise ConfigError(f"voice is {entry!r}, it must be NAME=FILE")
        if name in files:
            raise ConfigError(f"voice {name!r} is given twice; give each its own name")
        files[name] = file
    return files
