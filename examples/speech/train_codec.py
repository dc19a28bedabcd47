"""Train the codec: sound of the teacher in, one token of 20 ms, the same sound out.

    python examples/speech/train_codec.py --out-dir voice --minutes 14          voice/codec.safetensors
    python examples/speech/train_codec.py --out-dir voice --quick               seconds, for tests: it says noise

The loss compares short-time spectra at several resolutions, so a phase that no token could hold costs nothing. Codes
follow the frames that chose them by a moving average; codes that no frame chooses move to a frame of the batch.
Sources: residual codebooks after SoundStream arXiv:2107.03312, spectra after Parallel WaveGAN arXiv:1910.11480,
the moving average after VQ-VAE arXiv:1711.00937.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import text
import torch
import torch.nn.functional as F
from teacher import RATE, VOICES, Teacher
from torch import Tensor

from megatron_infer.server.audio.codec import Codec, CodecConfig

SIZES: dict[str, Any] = {
    "strides": (80, 2, 2),
    "channels": (128, 144, 160),
    "dilations": ((1, 2), (1,), (1,)),
}
"""The codec's configuration. Its highest rate is 200 steps a second, which trains four times as fast as 800 with the
same loss."""
WINDOWS = ((128, 512), (256, 1024))
"""Samples of each resolution's window; its step is a quarter. Training steps take these pairs in turn."""
LR, PIECE = 1.5e-3, RATE // 2
"""PIECE: samples of each row of a batch, before they are cut to whole frames."""
COMMITMENT = 0.25
LARGEST_CODE = 4.0
"""Half of what a codec may hold: see `WEIGHT_LIMIT` of megatron_infer/server/audio/codec.py."""
DECAY, LEAST_USE = 0.98, 0.3
"""Decay of the codes' moving averages, and the mean number of frames in a batch below which a code is replaced."""


def corpus(count: int, *, seed: int) -> list[np.ndarray]:
    """Sound of `count` training sentences in random voices, words balanced."""
    teacher, rng = Teacher(), random.Random(seed)
    drawn = text.balanced(one.split() for one in text.training(seed=seed))
    return [teacher.speak(" ".join(words), rng.choice(list(VOICES))) for words in itertools.islice(drawn, count)]


def batch(sounds: Sequence[np.ndarray], rng: np.random.Generator, *, rows: int, samples: int) -> Tensor:
    """float32 [rows, samples]: pieces of random sounds."""
    out = np.zeros((rows, samples), np.float32)
    for row in range(rows):
        sound = sounds[rng.integers(len(sounds))]
        begin = rng.integers(-samples // 4, max(1, len(sound) - samples // 2))
        piece = sound[max(begin, 0) : begin + samples]
        out[row, max(-begin, 0) : max(-begin, 0) + len(piece)] = piece
    return torch.from_numpy(out)


def spectral_loss(out_BS: Tensor, sound_BS: Tensor, *, windows: Sequence[int]) -> Tensor:
    """Distance of magnitudes and of their logarithms, the mean over the resolutions."""
    total = torch.zeros(())
    for size in windows:
        window = torch.hann_window(size)
        ours, theirs = (
            torch.stft(x, size, size // 4, window=window, return_complex=True).abs().clamp_min(1e-4) / size**0.5
            for x in (out_BS, sound_BS)
        )
        shape = torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)
        total = total + shape + F.l1_loss((ours + 1e-3).log(), (theirs + 1e-3).log())
    return total / len(windows)


class Codebooks:
    """Moves a codec's codes towards the frames that choose them."""

    def __init__(self, codec: Codec, *, is_new: bool) -> None:
        """is_new: the codes begin at frames of the first batch."""
        self._codec, self._is_new = codec, is_new
        self._uses, self._sums = torch.ones(codec.codes.shape[:2]), codec.codes.detach().clone()

    @torch.no_grad()
    def learn(self, frames_BTC: Tensor, tokens_BTQ: Tensor) -> None:
        codes = self._codec.codes
        left_NC = frames_BTC.reshape(-1, codes.shape[-1]).clone()
        for book, chosen_N in enumerate(tokens_BTQ.flatten(0, 1).T):
            if self._is_new:
                codes[book] = _drawn(left_NC, len(codes[book]))
                self._sums[book] = codes[book]
            else:
                uses = torch.bincount(chosen_N, minlength=len(codes[book])).float()
                sums = torch.zeros_like(self._sums[book]).index_add_(0, chosen_N, left_NC)
                self._uses[book].mul_(DECAY).add_(uses, alpha=1 - DECAY)
                self._sums[book].mul_(DECAY).add_(sums, alpha=1 - DECAY)
                codes[book] = self._sums[book] / self._uses[book][:, None].clamp_min(1e-3)
                dead = self._uses[book] < LEAST_USE * min(1.0, len(left_NC) / 4 / len(codes[book]))
                codes[book, dead] = _drawn(left_NC, int(dead.sum()))
                self._sums[book, dead], self._uses[book, dead] = codes[book, dead], 1.0
            left_NC -= codes[book][chosen_N]
        self._is_new = False


def _drawn(rows_NC: Tensor, count: int) -> Tensor:
    return rows_NC[torch.randint(len(rows_NC), (count,))]


def train(codec: Codec, sounds: Sequence[np.ndarray], *, seconds: float, rows: int, seed: int, is_new: bool) -> float:
    """Returns the mean loss of the last tenth of the steps. is_new: the codec has learnt nothing yet."""
    torch.manual_seed(seed)
    rng, books = np.random.default_rng(seed), Codebooks(codec, is_new=is_new)
    learned = [one for name, one in codec.named_parameters() if name != "codes"]
    optimizer = torch.optim.AdamW(learned, lr=LR, betas=(0.8, 0.99), weight_decay=0.0)
    begin, losses = time.perf_counter(), list[float]()
    hop, warm = codec.config.hop, 40
    for step in itertools.count():
        done = (time.perf_counter() - begin) / seconds
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / warm) * min(1.0, 4 * (1 - done) + 0.02)
        sound_BS = batch(sounds, rng, rows=rows, samples=PIECE // hop * hop)
        frames_BTC, windows = codec.frames(sound_BS), WINDOWS[step % len(WINDOWS)]
        if is_new and step < warm:  # the codes are not asked before frames mean something
            loss = spectral_loss(codec.sound(frames_BTC), sound_BS, windows=windows)
        else:
            tokens_BTQ, codes_BTC = codec.quantise(frames_BTC.detach())
            through_BTC = frames_BTC + (codes_BTC - frames_BTC).detach()
            loss = spectral_loss(codec.sound(through_BTC), sound_BS, windows=windows)
            loss = loss + COMMITMENT * F.mse_loss(frames_BTC, codes_BTC.detach())
            books.learn(frames_BTC, tokens_BTQ)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 100 == 0:
            recent = losses[-100:]
            print(f"codec: step {step:,}  {100 * done:.0f} %  loss {sum(recent) / len(recent):.3f}", flush=True)
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


@torch.no_grad()
def bound_codes(codec: Codec) -> None:
    """Scale the frames by a power of two, so that no code is beyond `LARGEST_CODE`; the sound stays the same."""
    largest = float(codec.codes.abs().max())
    scale = 2.0 ** min(0, math.floor(math.log2(LARGEST_CODE / largest)))
    last, first = codec.encoder[-1].linear, codec.decoder[0].linear
    for one in (codec.codes, last.weight, last.bias):
        one.mul_(scale)
    first.weight.div_(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-dir", type=Path, default=Path("voice"))
    parser.add_argument("--minutes", type=float, default=14.0, help="of training (%(default)s)")
    parser.add_argument("--sentences", type=int, default=600, help="spoken by the teacher (%(default)s)")
    parser.add_argument("--codebooks", type=int, choices=(1, 2), default=1, help="tokens of 20 ms (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on with the codec in --out-dir")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    options = parser.parse_args()
    file = options.out_dir / "codec.safetensors"
    if options.resume and not file.is_file():
        parser.error(f"--resume: there is no {file}; leave --resume out to begin")
    torch.manual_seed(options.seed)
    codec = Codec.load(file) if options.resume else Codec(CodecConfig(codebooks=options.codebooks, **SIZES))
    sounds = corpus(24 if options.quick else options.sentences, seed=options.seed)
    seconds = 10.0 if options.quick else 60 * options.minutes
    rows, is_new = 4 if options.quick else 8, not options.resume
    loss = train(codec, sounds, seconds=seconds, rows=rows, seed=options.seed, is_new=is_new)
    bound_codes(codec)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    codec.save(file)
    print(f"codec: {sum(map(len, sounds)) / RATE / 60:.0f} minutes of sound, loss {loss:.3f}")


if __name__ == "__main__":
    main()
