"""The decoder `tones`: a sine for each token. Its sound can be turned back into tokens, so that tests can hear them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.server.audio.decoder import OpenedDecoder, Sound
from megatron_infer.server.audio.layout import SpeechFormat

LOUDNESS = 64
"""Amplitudes there are."""


class Tones:
    """Token k sounds as a sine of k + 1 whole periods.

    With behind or ahead its amplitude says what the token saw: a sum over those tokens in its reach that are not
    hidden, of the sums that these make in the same way; so it depends on twice the reach, as two layers do.
    """

    takes_mask = True

    def __init__(
        self, *, vocab_size: int, sample_rate: int, samples_per_token: int, codebooks: int, behind: int, ahead: int
    ) -> None:
        self.sample_rate, self.samples_per_token = sample_rate, Fraction(samples_per_token)
        self.left_context, self.right_context = 2 * behind, 2 * ahead
        self._behind, self._ahead = behind, ahead
        periods_V = torch.arange(1, vocab_size + 1, dtype=torch.float64)
        phase_S = torch.arange(samples_per_token, dtype=torch.float64) / samples_per_token
        self._waves_VS = torch.sin(2 * math.pi * periods_V[:, None] * phase_S).to(torch.float32)
        self._frame = codebooks

    def decode(self, tokens_BT: Tensor, lengths_B: Tensor, mask_BTT: Tensor | None) -> Tensor:
        """See `AudioDecoder`."""
        rows, total = tokens_BT.shape
        is_there_BT = torch.arange(total) < lengths_B[:, None]
        seen_BT = self._sums(self._sums(tokens_BT + 1, mask_BTT, is_there_BT), mask_BTT, is_there_BT)
        loud_BT = (LOUDNESS - seen_BT % (LOUDNESS // 2)) / LOUDNESS * is_there_BT
        return (self._waves_VS[tokens_BT] * loud_BT[:, :, None].to(torch.float32)).reshape(rows, -1)

    def _sums(self, values_BT: Tensor, mask_BTT: Tensor | None, is_there_BT: Tensor) -> Tensor:
        """int64 [B, T]: the sum over the tokens in reach that are not hidden, each times one more than its distance."""
        if not (self._behind or self._ahead):
            return torch.zeros_like(values_BT)
        places = torch.arange(values_BT.shape[1])
        distance_TT = places[None] - places[:, None]
        reach_TT = (distance_TT >= -self._behind) & (distance_TT <= self._ahead)
        weight_BTT = (distance_TT.abs() + 1) * (reach_TT & is_there_BT[:, None, :])
        if mask_BTT is not None:
            weight_BTT = weight_BTT * mask_BTT
        return (weight_BTT * (values_BT * is_there_BT)[:, None, :]).sum(-1) % 65_521

    def encode(self, sound: Sound) -> list[int]:
        """See `AudioEncoder`: the loudest of the sines."""
        size = int(self.samples_per_token)
        count = len(sound) // (size * self._frame) * self._frame
        if count == 0:
            return []
        spectrum = np.abs(np.fft.rfft(sound[: count * size].reshape(count, size)))
        tokens: list[int] = spectrum[:, 1 : len(self._waves_VS) + 1].argmax(-1).tolist()
        return tokens


def open_tones(
    *,
    vocab_size: int = 128,
    codebooks: int = 1,
    sample_rate: int = 16_000,
    samples_per_token: int = 320,
    behind: int = 0,
    ahead: int = 0,
) -> OpenedDecoder:
    """behind, ahead: tokens that a token's loudness depends on, in each of two layers. No weights."""
    given = {"vocab_size": vocab_size, "codebooks": codebooks, "sample_rate": sample_rate}
    for name, value in {**given, "samples_per_token": samples_per_token}.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"audio_decoder_config: {name} is {value!r}, it must be an integer of at least 1")
    if samples_per_token < 2 * (vocab_size + 1):
        raise ConfigError(
            f"audio_decoder_config: {vocab_size:,} tones need {2 * (vocab_size + 1):,} samples_per_token, "
            f"it is {samples_per_token:,}; raise it"
        )
    decoder = Tones(
        vocab_size=vocab_size,
        sample_rate=sample_rate,
        samples_per_token=samples_per_token,
        codebooks=codebooks,
        behind=behind,
        ahead=ahead,
    )
    rate = Fraction(sample_rate, samples_per_token * codebooks)
    speech = SpeechFormat(vocab_size=vocab_size, codebooks=codebooks, frame_rate=rate)
    return OpenedDecoder(decoder=decoder, format=speech, encoder=decoder)
