"""How far the sound of blocks is from the sound of all tokens at once, for a decoder whose context is longer."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from megatron_infer.server.audio.blocks import BlockSchedule, SpeechBlocks
from megatron_infer.server.audio.decoder import OpenedDecoder, Sound, decode_windows

BLOCKS = 3
"""Blocks that are compared."""


def in_blocks(opened: OpenedDecoder, tokens: list[int], schedule: BlockSchedule) -> Sound:
    """The sound of an answer, block after block."""
    blocks = SpeechBlocks(schedule)
    sounds: list[Sound] = [np.zeros(0, dtype=np.float32)]
    blocks.add(tokens)
    blocks.end()
    while (window := blocks.next_window()) is not None:
        sounds += decode_windows(opened.decoder, [window])
        blocks.advance(window)
    whole: Sound = np.concatenate(sounds)
    return whole


def snr_db(wanted: Sound, found: Sound) -> float:
    """Energy of the sound over that of the difference; inf where there is none."""
    noise = float(np.square(wanted.astype(np.float64) - found).sum())
    return float("inf") if noise == 0.0 else float(10 * np.log10(np.square(wanted.astype(np.float64)).sum() / noise))


def block_snr_db(opened: OpenedDecoder, schedule: BlockSchedule) -> float:
    """The ratio for random tokens in BLOCKS blocks of the schedule's last size; inf where blocks are exact."""
    if schedule.chunk_size is None:
        return float("inf")
    count = BLOCKS * schedule.chunk_size[-1] + schedule.buffer
    count += -count % opened.format.codebooks
    rng = random.Random(0)
    tokens = [rng.randrange(opened.format.vocab_size) for _ in range(count)]
    plain = dataclasses.replace(schedule, chunk_size=schedule.chunk_size[-1:])
    return snr_db(
        in_blocks(opened, tokens, dataclasses.replace(plain, chunk_size=None)), in_blocks(opened, tokens, plain)
    )
