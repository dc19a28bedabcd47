"""Audio decoders: speech tokens in, sound out; and windows of several requests decoded together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_infer.errors import ModelError
from megatron_infer.server.audio.blocks import Window
from megatron_infer.server.audio.layout import SpeechFormat

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


class FrameCodec(ABC):
    """An `AudioDecoder` and `AudioEncoder` whose frames have one code of each codebook and `hop` samples each."""

    takes_mask = False

    def __init__(
        self, *, sample_rate: int, codebooks: int, hop: int, left_frames: int | None, right_frames: int
    ) -> None:
        """left_frames, right_frames: that the sound of a frame depends on; None: all before it."""
        self.sample_rate = sample_rate
        self.codebooks = codebooks
        self.hop = hop
        self.samples_per_token = Fraction(hop, codebooks)
        self.left_context = None if left_frames is None else left_frames * codebooks
        self.right_context = right_frames * codebooks

    def decode(self, tokens_BT: Tensor, lengths_B: Tensor, mask_BTT: Tensor | None) -> Tensor:
        """See `AudioDecoder`."""
        sound_BS = self._sound(tokens_BT.reshape(tokens_BT.shape[0], -1, self.codebooks))
        is_there_BS = torch.arange(sound_BS.shape[1]) < (lengths_B // self.codebooks * self.hop)[:, None]
        return sound_BS * is_there_BS

    def encode(self, sound: Sound) -> list[int]:
        """See `AudioEncoder`."""
        count = len(sound) // self.hop
        if count == 0:
            return []
        with torch.inference_mode():
            codes_TQ = self._codes(sound[: count * self.hop])[:count]
        tokens: list[int] = codes_TQ.flatten().tolist()
        return tokens

    @abstractmethod
    def _sound(self, codes_BTQ: Tensor) -> Tensor:
        """float32 [B, T * hop]."""

    @abstractmethod
    def _codes(self, sound: Sound) -> Tensor:
        """[T or more, codebooks] of T whole frames."""


def decode_windows(
    decoder: AudioDecoder, windows: Sequence[Window], *, before_call: Callable[[], None] = lambda: None
) -> list[Sound]:
    """What is heard of each window, in order; windows that can be are decoded in one call, after a `before_call`.

    Those of one length always can. Shorter ones are padded where padding cannot be heard: behind the tokens of a
    decoder that does not look ahead, or where a mask hides it. Raises ModelError for sound of another length than the
    tokens', and for samples that are no numbers.
    """
    can_pad = decoder.takes_mask or decoder.right_context == 0
    groups: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        groups.setdefault(0 if can_pad else len(window.tokens), []).append(index)
    sounds: dict[int, Sound] = {}
    for group in groups.values():
        before_call()
        for index, sound in zip(group, _decode_together(decoder, [windows[one] for one in group]), strict=True):
            sounds[index] = sound
    return [sounds[index] for index in range(len(windows))]


def decode_each(
    decoder: AudioDecoder, windows: Sequence[Window], *, before_call: Callable[[], None] = lambda: None
) -> list[Sound | Exception]:
    """`decode_windows`, of which a window that cannot be decoded is an error alone: where a call fails, its halves are
    decoded by themselves."""
    try:
        return [*decode_windows(decoder, windows, before_call=before_call)]
    except Exception as error:  # whatever a library's decoder raises
        if len(windows) == 1:
            return [error]
    half = len(windows) // 2
    halves = windows[:half], windows[half:]
    return [sound for part in halves for sound in decode_each(decoder, part, before_call=before_call)]


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
    wanted = (len(windows), int(longest * per_token))
    if sound_BS.shape != wanted:
        got = " x ".join(map(str, sound_BS.shape))
        raise ModelError(
            f"the audio decoder gave {got} samples for {len(windows)} x {longest} tokens, it must be "
            f"{wanted[0]} x {wanted[1]}: samples_per_token is {per_token}"
        )
    heard = []
    for row, window in enumerate(windows):
        begin, end = window.num_before * per_token, (window.num_before + window.num_new) * per_token
        heard.append(np.ascontiguousarray(sound_BS[row, int(begin) : int(end)]))
        if not np.isfinite(heard[-1]).all():
            raise ModelError("the audio decoder gave samples that are no numbers (NaN or infinite)")
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
