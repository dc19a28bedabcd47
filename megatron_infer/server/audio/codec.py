"""The decoder `codec`: a small causal convolutional codec, trained by examples/speech/train_codec.py.

    sound ── strides 20, 4, 4 ──▶ frames ── nearest code, residual of the next codebook ──▶ tokens
    tokens ── sum of the codes ──▶ frames ── 4, 4, 20 ──▶ sound

Decoding is exact: weights and activations are whole multiples of powers of two, small enough that every product and
sum is a float64 without rounding. So no order of summation, and with it no batch, window or number of threads, changes
a sample; training computes the same in float32.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.conv_stack import ConvSpec, ConvStack
from megatron_infer.kernels.native import native_build
from megatron_infer.server.audio.decoder import FrameCodec, OpenedDecoder, Sound
from megatron_infer.server.audio.layout import SpeechFormat
from megatron_infer.utils.files import regular, save_tensors

log = logging.getLogger("megatron_infer")

METADATA = "codec"
"""Key of the safetensors' metadata that holds `CodecConfig` as JSON."""
KERNEL = 3
SLOPE = 0.125
"""Slope of the leaky ReLU below 0; a power of two."""
ACTIVATION_STEP, ACTIVATION_LIMIT = 2.0**-16, 32.0
WEIGHT_STEP, WEIGHT_LIMIT = 2.0**-14, 8.0
MAX_SUMMANDS = 1 << 11
"""Limit of the summands of a matrix product. Behind the leaky ReLU an activation has at most 32 / 2^-19 = 2^24 steps, a
weight 8 / 2^-14 = 2^17. So 2^11 products sum to at most 2^52 steps, which float64 holds without rounding."""
MAX_PARAMETERS = 1_000_000
CACHED_FRAMES = 64
"""Frames that are decoded in one call: what lies between two layers then stays in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """Sizes of a codec. Rates fall from sound to frames by `strides`."""

    sample_rate: int = 16_000
    codebooks: int = 1
    codebook_size: int = 512
    code_size: int = 32
    strides: tuple[int, ...] = (20, 4, 4)
    channels: tuple[int, ...] = (64, 128, 192)
    """Channels at the rate behind each stride."""
    dilations: tuple[tuple[int, ...], ...] = ((1, 3, 9), (1, 3), (1,))
    """Dilations of the residual units at each of these rates."""

    def __post_init__(self) -> None:
        sizes = {len(self.strides), len(self.channels), len(self.dilations)}
        if len(sizes) > 1 or sizes == {0}:
            raise ConfigError("strides, channels and dilations must have as many entries each, at least one")
        if max(self.channels) * KERNEL > MAX_SUMMANDS:
            raise ConfigError(f"channels are {max(self.channels):,}, the limit is {MAX_SUMMANDS // KERNEL:,}")
        if not 25 <= self.sample_rate / self.hop <= 50:
            raise ConfigError(f"{self.sample_rate / self.hop:g} frames a second, it must be 25 to 50; change strides")
        if self.codebooks not in (1, 2):
            raise ConfigError(f"codebooks is {self.codebooks}, it must be 1 or 2")

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        return math.prod(self.strides)

    @property
    def format(self) -> SpeechFormat:
        rate = Fraction(self.sample_rate, self.hop)
        return SpeechFormat(vocab_size=self.codebook_size, codebooks=self.codebooks, frame_rate=rate)

    @property
    def left_frames(self) -> int:
        """Frames before a frame that its sound depends on."""
        reach, samples = 0, self.hop  # both in samples; of a step at the rate reached
        for stride, dilations in zip(self.strides[::-1], self.dilations[::-1], strict=True):
            reach += (KERNEL - 1) * sum(dilations) * samples
            samples //= stride
        reach += (KERNEL - 1) * self.hop + (KERNEL - 1) * self.strides[0]  # the first convolution, and the last
        return -(-reach // self.hop)


def _round(x: Tensor) -> Tensor:
    """To the steps of activations. float32 tensors are those of training, and are only bounded."""
    x = F.hardtanh(x, -ACTIVATION_LIMIT, ACTIVATION_LIMIT)  # its backward pass is a third of clamp's
    return x if x.dtype is torch.float32 else torch.round(x / ACTIVATION_STEP) * ACTIVATION_STEP


class CausalConv(nn.Module):
    """[B, T, in] -> [B, T, out]: step t sees the steps t, t - dilation, ... of `kernel`."""

    def __init__(self, inner: int, outer: int, *, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.kernel, self.dilation = kernel, dilation
        self.linear = nn.Linear(inner * kernel, outer)

    def spec(self, *, activates: bool = False, adds: bool = False) -> ConvSpec:
        weight, bias = self.linear.weight, self.linear.bias
        kernel, dilation = self.kernel, self.dilation
        return ConvSpec(weight=weight, bias=bias, kernel=kernel, dilation=dilation, activates=activates, adds=adds)

    def forward(self, x_BTC: Tensor) -> Tensor:
        total, reach = x_BTC.shape[1], (self.kernel - 1) * self.dilation
        padded = F.pad(x_BTC, (0, 0, reach, 0))
        parts = [padded[:, k * self.dilation : k * self.dilation + total] for k in range(self.kernel)]
        out: Tensor = self.linear(torch.cat(parts, -1))
        return _round(out)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, *, dilation: int) -> None:
        super().__init__()
        self.mix = CausalConv(channels, channels, kernel=KERNEL, dilation=dilation)
        self.back = CausalConv(channels, channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        inner = self.mix(F.leaky_relu(x_BTC, SLOPE))
        return _round(x_BTC + self.back(F.leaky_relu(inner, SLOPE)))


class Codec(nn.Module):
    """Encoder, codebooks and decoder. In float32 it trains; `exact` makes the copy that decodes."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        widths, strides = config.channels, config.strides
        units = [
            [[ResidualUnit(width, dilation=one) for one in dilations] for _ in range(2)]
            for width, dilations in zip(widths, config.dilations, strict=True)
        ]
        down: list[nn.Module] = [CausalConv(strides[0], widths[0], kernel=KERNEL), *units[0][0]]
        for rate, (before, after) in enumerate(pairwise(widths), 1):
            down += [_Fold(strides[rate]), CausalConv(before * strides[rate], after), *units[rate][0]]
        self.encoder = nn.Sequential(*down, CausalConv(widths[-1], config.code_size))
        self.codes = nn.Parameter(torch.randn(config.codebooks, config.codebook_size, config.code_size))
        """[codebooks, codes, code_size]."""
        up: list[nn.Module] = [CausalConv(config.code_size, widths[-1], kernel=KERNEL)]
        for rate in range(len(widths) - 1, 0, -1):
            stride = strides[rate]
            up += [*units[rate][1], CausalConv(widths[rate], widths[rate - 1] * stride), _Unfold(stride)]
        up += [*units[0][1], CausalConv(widths[0], strides[0], kernel=KERNEL)]
        self.decoder = nn.Sequential(*up)
        count = sum(one.numel() for one in self.parameters())
        if count > MAX_PARAMETERS:
            raise ConfigError(f"the codec has {count:,} parameters, the limit is {MAX_PARAMETERS:,}; narrow channels")

    def frames(self, sound_BS: Tensor) -> Tensor:
        """Sound of whole frames -> [B, frames, code_size]."""
        rows = sound_BS.shape[0]
        out: Tensor = self.encoder(sound_BS.reshape(rows, -1, self.config.strides[0]))
        return out

    def quantise(self, frames_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [B, T, codebooks], the sum of their codes [B, T, code_size])."""
        left, total, tokens = frames_BTC, torch.zeros_like(frames_BTC), []
        for codes in self.codes.to(frames_BTC.dtype):
            found = torch.cdist(left, codes[None], compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
            left, total = left - codes[found], total + codes[found]
            tokens.append(found)
        return torch.stack(tokens, -1), total

    def sound(self, frames_BTC: Tensor) -> Tensor:
        """[B, frames, code_size] -> [B, samples]."""
        out: Tensor = self.decoder(frames_BTC)
        return out.flatten(1)

    def exact(self) -> Codec:
        """A copy in float64 whose weights are whole steps. Raises ModelError for a weight beyond the limit."""
        copy: Codec = Codec(self.config).to(torch.float64)
        for name, weight in self.state_dict().items():
            if not torch.isfinite(weight).all() or weight.abs().max() > WEIGHT_LIMIT:
                raise ModelError(f"{name} of the codec has a weight beyond {WEIGHT_LIMIT:g}, or none that is finite")
        steps = {name: torch.round(one.double() / WEIGHT_STEP) * WEIGHT_STEP for name, one in self.state_dict().items()}
        copy.load_state_dict(steps)
        copy.eval().requires_grad_(False)
        return copy

    def save(self, path: Path) -> None:
        """Write the file that `open_codec` reads."""
        save_tensors(path, self.state_dict(), {METADATA: json.dumps(asdict(self.config))})

    @classmethod
    def load(cls, path: Path) -> Codec:
        """Raises ModelError for a file of something else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(regular(path), framework="pt") as file:
                described = (file.metadata() or {}).get(METADATA)
                if described is None:
                    raise ModelError(f"{path} is no codec: its metadata has no key {METADATA!r}")
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except SafetensorError as error:
            raise ModelError(f"{path} is no safetensors file: {error}") from None
        values = {name: _tuples(value) for name, value in json.loads(described).items()}
        codec: Codec = cls(CodecConfig(**values))
        codec.load_state_dict(state)
        return codec


def _tuples(value: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class _Fold(nn.Module):
    """[B, T * stride, C] -> [B, T, stride * C]."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x_BTC: Tensor) -> Tensor:
        rows, total, channels = x_BTC.shape
        return x_BTC.reshape(rows, total // self.stride, self.stride * channels)


class _Unfold(_Fold):
    """The inverse."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        rows, total, channels = x_BTC.shape
        return x_BTC.reshape(rows, total * self.stride, channels // self.stride)


def _native_stack(decoder: nn.Sequential) -> ConvStack | None:
    """An exact codec's decoder in C++, whose samples are those of `Codec.sound`; None where that cannot be built."""
    try:
        library = native_build.load()
    except native_build.NativeUnavailable as error:
        log.warning("the audio decoder codec runs in torch, several times slower: %s", error)
        return None
    specs: list[ConvSpec] = []
    for layer in decoder:
        if isinstance(layer, CausalConv):
            specs.append(layer.spec())
        elif isinstance(layer, ResidualUnit):
            specs += [layer.mix.spec(activates=True), layer.back.spec(activates=True, adds=True)]
    return ConvStack(library, specs, step=ACTIVATION_STEP, limit=ACTIVATION_LIMIT, slope=SLOPE)


class CodecDecoder(FrameCodec):
    """A trained `Codec` as an `AudioDecoder` and `AudioEncoder`."""

    def __init__(self, codec: Codec) -> None:
        config = codec.config
        super().__init__(
            sample_rate=config.sample_rate,
            codebooks=config.codebooks,
            hop=config.hop,
            left_frames=config.left_frames,
            right_frames=0,
        )
        self._codec = codec.exact()
        self._stack = _native_stack(self._codec.decoder)

    def _sound(self, codes_BTQ: Tensor) -> Tensor:
        frames_BTC = sum(self._codec.codes[q][codes_BTQ[:, :, q]] for q in range(self.codebooks))
        assert isinstance(frames_BTC, Tensor)
        if self._stack is not None:
            return self._stack.run(frames_BTC).clamp(-1.0, 1.0)
        together = max(1, CACHED_FRAMES // frames_BTC.shape[1])
        parts = [self._codec.sound(part) for part in frames_BTC.split(together)]
        return torch.cat(parts).clamp(-1.0, 1.0).to(torch.float32)

    def _codes(self, sound: Sound) -> Tensor:
        whole = torch.from_numpy(np.ascontiguousarray(sound, dtype=np.float64))[None]
        return self._codec.quantise(self._codec.frames(_round(whole)))[0][0]


def open_codec(weights: Path) -> OpenedDecoder:
    """weights: a safetensors file that `Codec.save` wrote."""
    codec = Codec.load(weights)
    decoder = CodecDecoder(codec)
    return OpenedDecoder(decoder=decoder, format=codec.config.format, encoder=decoder)
