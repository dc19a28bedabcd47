"""The decoders `mimi`, `encodec` and `dac`: models of transformers, from a directory with config.json and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.errors import ConfigError
from megatron_infer.server.audio.decoder import FrameCodec, OpenedDecoder, Sound
from megatron_infer.server.audio.layout import SpeechFormat
from megatron_infer.utils.files import regular

DAC_KERNEL, DAC_DILATIONS = 7, (1, 3, 9)
"""Sizes of its decoder's convolutions; they are constants of the model's code."""


class LibraryCodec(FrameCodec):
    """A model of transformers as an `AudioDecoder` and `AudioEncoder`."""

    def __init__(self, model: Any, *, codebooks: int, hop: int, left_frames: int | None, right_frames: int) -> None:
        contexts: dict[str, Any] = {"left_frames": left_frames, "right_frames": right_frames}
        super().__init__(sample_rate=model.config.sampling_rate, codebooks=codebooks, hop=hop, **contexts)
        self.model = model.eval()

    def _sound(self, codes_BTQ: Tensor) -> Tensor:
        rows, num_samples = codes_BTQ.shape[0], codes_BTQ.shape[1] * self.hop
        sound_BS = self._decoded(codes_BTQ.transpose(1, 2)).reshape(rows, -1).to(torch.float32)
        # each odd ratio of DAC's upsampling takes a sample from the end
        return F.pad(sound_BS, (0, max(0, num_samples - sound_BS.shape[1])))

    def _codes(self, sound: Sound) -> Tensor:
        return self._encoded(torch.from_numpy(sound).float()[None, None])[: self.codebooks].T

    def _decoded(self, codes_BQT: Tensor) -> Tensor:
        out: Tensor = self.model.decode(audio_codes=codes_BQT).audio_values
        return out

    def _encoded(self, sound_11S: Tensor) -> Tensor:
        """[codebooks, frames]."""
        codes: Tensor = self.model.encode(sound_11S).audio_codes[0]
        return codes


class EncodecCodec(LibraryCodec):
    """EnCodec's calls have an axis of parts, of which there is one."""

    def _decoded(self, codes_BQT: Tensor) -> Tensor:
        out: Tensor = self.model.decode(codes_BQT[None], [None]).audio_values
        return out

    def _encoded(self, sound_11S: Tensor) -> Tensor:
        codes: Tensor = self.model.encode(sound_11S, bandwidth=self.model.config.target_bandwidths[-1]).audio_codes
        return codes[0, 0]


def open_mimi(weights: Path, *, codebooks: int = 8) -> OpenedDecoder:
    """Its transformer looks back further than any answer is long."""
    config, model = _load("MimiModel", weights, codebooks, "num_quantizers")
    hop = round(config.sampling_rate / config.frame_rate)
    decoder = LibraryCodec(model, codebooks=codebooks, hop=hop, left_frames=None, right_frames=0)
    return _opened(decoder, config)


def open_encodec(weights: Path, *, codebooks: int = 8) -> OpenedDecoder:
    """Its LSTM remembers all of an answer."""
    config, model = _load("EncodecModel", weights, codebooks, "num_quantizers")
    if not config.use_causal_conv or config.normalize or config.chunk_length_s is not None:
        raise ConfigError("encodec: only the causal model without normalisation is decoded here (encodec_24khz)")
    hop = math.prod(config.upsampling_ratios)
    decoder = EncodecCodec(model, codebooks=codebooks, hop=hop, left_frames=None, right_frames=0)
    return _opened(decoder, config)


def open_dac(weights: Path, *, codebooks: int = 9) -> OpenedDecoder:
    """Its convolutions look both ways."""
    config, model = _load("DacModel", weights, codebooks, "n_codebooks")
    hop = math.prod(config.upsampling_ratios)
    frames = _dac_reach(config.upsampling_ratios)
    decoder = LibraryCodec(model, codebooks=codebooks, hop=hop, left_frames=frames, right_frames=frames)
    return _opened(decoder, config)


def _dac_reach(ratios: Sequence[int]) -> int:
    """Frames to each side that a frame's sound depends on, at most."""
    half = DAC_KERNEL // 2
    reach, steps = Fraction(half), 1  # steps of a frame at the rate reached
    for ratio in ratios:
        reach += Fraction(1, steps)  # the transposed convolution reaches one step to each side
        steps *= ratio
        reach += Fraction(half * sum(DAC_DILATIONS), steps)
    reach += Fraction(half, steps)
    return -(-reach.numerator // reach.denominator)


def _load(kind: str, weights: Path, codebooks: int, limit_name: str) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{kind} is a model of transformers: pip install transformers") from None
    try:
        for path in weights.iterdir() if weights.is_dir() else (weights,):  # transformers opens what it finds there
            if not path.is_dir():
                regular(path)
    except OSError as error:
        raise ConfigError(f"{weights}: {error.filename} cannot be read: {error.strerror}") from None
    model = getattr(transformers, kind).from_pretrained(str(weights), local_files_only=True)
    if getattr(model.config, "audio_channels", 1) != 1:
        raise ConfigError(f"{weights} has {model.config.audio_channels} channels; speech here has one")
    most = getattr(model.config, limit_name)
    if not isinstance(codebooks, int) or not 1 <= codebooks <= most:
        raise ConfigError(f"audio_decoder_config: codebooks is {codebooks!r}, it must be 1 to {most}")
    return model.config, model


def _opened(decoder: LibraryCodec, config: Any) -> OpenedDecoder:
    rate = Fraction(decoder.sample_rate, decoder.hop)
    speech = SpeechFormat(vocab_size=config.codebook_size, codebooks=decoder.codebooks, frame_rate=rate)
    return OpenedDecoder(decoder=decoder, format=speech, encoder=decoder)
