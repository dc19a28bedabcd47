"""Audio decoders: speech tokens in, sound out. Which there are, how one is opened, and windows decoded together.

A decoder of one's own is an `Architecture` with `open_audio_decoder`, in a module of `custom_architectures`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.audio.blocks import Window
from megatron_infer.audio.layout import SpeechFormat
from megatron_infer.errors import ConfigError, ModelError, unknown_name

Sound = np.ndarray
"""float32 [samples], mono, between -1 and 1."""


class AudioDecoder(Protocol):
    """Turns speech tokens, frame after frame, into sound."""

    @property
    def sample_rate(self) -> int:
        """Samples of a second."""

    @property
    def samples_per_token(self) -> Fraction:
        """A whole number of samples for each frame."""

    @property
    def left_context(self) -> int | None:
        """Tokens before a token that its sound depends on; None: all of them."""

    @property
    def right_context(self) -> int:
        """Tokens behind a token that its sound depends on."""

    @property
    def takes_mask(self) -> bool:
        """Whether `decode` takes a mask; else tokens see behind them if right_context is not 0."""

    def decode(self, tokens_BT: Tensor, lengths_B: Tensor, mask_BTT: Tensor | None) -> Tensor:
        """int64 tokens of whole frames -> float32 [B, T * samples_per_token]; 0 behind the length of a row.

        mask_BTT: bool, whether query t sees key t; None: no token is hidden.
        """


class AudioEncoder(Protocol):
    """The other direction, for voices."""

    def encode(self, sound: Sound) -> list[int]:
        """Sound at the decoder's sample rate -> tokens of whole frames; what is left of a frame is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDecoder:
    """A decoder, what its tokens are, and its encoder. None: it cannot encode voices."""

    decoder: AudioDecoder
    format: SpeechFormat
    encoder: AudioEncoder | None = None


Opener = Callable[..., OpenedDecoder]
"""(weights: Path, **audio_decoder_config) -> OpenedDecoder; without `weights` if it has none."""

DECODERS: Mapping[str, tuple[str, str]] = {
    "tones": ("tones", "open_tones"),
    "codec": ("codec", "open_codec"),
    "mimi": ("library_codecs", "open_mimi"),
    "encodec": ("library_codecs", "open_encodec"),
    "dac": ("library_codecs", "open_dac"),
}
"""Name -> module and function that opens it."""


def find_opener(name: str, own: Mapping[str, Opener] | None = None) -> Opener:
    """own: decoders of one's own, which go first. Raises ConfigError with the list for an unknown name."""
    own = own or {}
    if name in own:
        return own[name]
    known = [*own, *DECODERS]
    if not name:
        raise ConfigError(f"audio_decoder is empty; give one of {', '.join(known)}")
    if name not in DECODERS:
        raise ConfigError(f"{unknown_name('audio_decoder', name, known)}; one of {', '.join(known)}")
    module, function = DECODERS[name]
    opener: Opener = getattr(importlib.import_module(f"megatron_infer.audio.{module}"), function)
    return opener


def open_decoder(
    name: str,
    weights: str = "",
    config: Mapping[str, Any] | None = None,
    *,
    own: Mapping[str, Opener] | None = None,
) -> OpenedDecoder:
    """weights: a file or directory. config: arguments of the decoder's opener. own: see `find_opener`.

    Raises ConfigError for an unknown decoder or key, and for weights that are missing, or given where there are none.
    """
    opener, config = find_opener(name, own), dict(config or {})
    parameters = inspect.signature(opener).parameters
    has_weights = "weights" in parameters
    known = [one for one in parameters if one != "weights"]
    for key in config:
        if key not in known:
            raise ConfigError(f"audio_decoder_config: {unknown_name(f'option of {name}', key, known)}")
    if not has_weights:
        if weights:
            raise ConfigError(f"audio_decoder_weights is {weights!r}, but {name} has no weights; leave it empty")
        return opener(**config)
    if not weights:
        raise ConfigError(f"audio_decoder_weights is empty, but {name} has weights; give their file or directory")
    path = Path(weights).expanduser()
    if not path.exists():
        raise ConfigError(f"audio_decoder_weights: there is no {weights}")
    try:
        return opener(weights=path, **config)
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ModelError(f"audio_decoder_weights {weights}: {error}") from error


def decode_windows(decoder: AudioDecoder, windows: Sequence[Window]) -> list[Sound]:
    """What is heard of each window, in order; windows that can be are decoded in one call.

    Those of one length always can. Shorter ones are padded where padding cannot be heard: behind the tokens of a
    decoder that does not look ahead, or where a mask hides it.
    """
    can_pad = decoder.takes_mask or decoder.right_context == 0
    groups: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        groups.setdefault(0 if can_pad else len(window.tokens), []).append(index)
    sounds: dict[int, Sound] = {}
    for group in groups.values():
        for index, sound in zip(group, _decode_together(decoder, [windows[one] for one in group]), strict=True):
            sounds[index] = sound
    return [sounds[index] for index in range(len(windows))]


def _decode_together(decoder: AudioDecoder, windows: Sequence[Window]) -> list[Sound]:
    longest = max(len(window.tokens) for window in windows)
    tokens_BT = torch.zeros(len(windows), longest, dtype=torch.int64)
    lengths_B = torch.tensor([len(window.tokens) for window in windows])
    for row, window in enumerate(windows):
        tokens_BT[row, : len(window.tokens)] = torch.tensor(window.tokens)
    mask_BTT = _mask(windows, longest) if decoder.takes_mask else None
    with torch.inference_mode():
        sound_BS = decoder.decode(tokens_BT, lengths_B, mask_BTT).numpy()
    per_token = decoder.samples_per_token
    heard = []
    for row, window in enumerate(windows):
        begin, end = window.num_before * per_token, (window.num_before + window.num_new) * per_token
        heard.append(np.ascontiguousarray(sound_BS[row, int(begin) : int(end)]))
    return heard


def _mask(windows: Sequence[Window], longest: int) -> Tensor:
    """bool [B, T, T]: `Window.sees`, and nothing sees the padding."""
    mask = torch.zeros(len(windows), longest, longest, dtype=torch.bool)
    for row, window in enumerate(windows):
        total, prompt, before = len(window.tokens), window.num_prompt, window.num_before
        mask[row, :total, :total] = True
        mask[row, :prompt, before:total] &= window.prompt_causal
        mask[row, prompt:before, before:total] &= window.block_causal
    return mask
