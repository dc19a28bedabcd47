"""Whether a speech model, an audio decoder and a schedule of blocks go together."""

from __future__ import annotations

import dataclasses
import random
import warnings

import numpy as np

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError
from megatron_infer.server.audio.blocks import BlockSchedule, PrependPromptSpeechTokens, SpeechBlocks
from megatron_infer.server.audio.decoder import OpenedDecoder, Sound, decode_windows
from megatron_infer.server.audio.speech_model import SpeechModel

MEASURED_BLOCKS = 3
"""Blocks whose sound is compared with that of all tokens at once."""


def check_decoder_of(model: SpeechModel, opened: OpenedDecoder, name: str) -> None:
    """Raises ConfigError for a decoder that reads other tokens than the model draws."""
    names = ("vocab_size", "codebooks", "frame_rate")
    pairs = [(one, getattr(model.format, one), getattr(opened.format, one)) for one in names]
    found = [f"{one} is {own} in the model and {other} in the decoder" for one, own, other in pairs if own != other]
    if found:
        raise ConfigError(f"audio_decoder {name} is not that of this model: {'; '.join(found)}")


def check_chunks(chunks: tuple[int, ...] | None, opened: OpenedDecoder) -> None:
    """Raises ConfigError for blocks that are no whole frames."""
    size = opened.format.codebooks
    for one in chunks or ():
        if one % size:
            raise ConfigError(f"chunk_size has {one}, which is no multiple of the {size} tokens of a frame")


def check_schedule(schedule: BlockSchedule, opened: OpenedDecoder, name: str) -> None:
    """Raises ConfigError for a schedule that the decoder cannot follow; warns where blocks are not exact."""
    decoder, size = opened.decoder, opened.format.codebooks
    check_chunks(schedule.chunk_size, opened)
    if schedule.buffer % size:
        raise ConfigError(f"buffer is {schedule.buffer}, which is no multiple of the {size} tokens of a frame")
    if not decoder.takes_mask:
        native, way = decoder.right_context > 0, "both ways" if decoder.right_context else "back only"
        flags = {
            "block_causal": (schedule.block_causal, schedule.buffer > 0 and schedule.chunk_size is not None),
            "prepend_prompt_speech_tokens_causal": (
                schedule.prompt_causal,
                schedule.prepend is not PrependPromptSpeechTokens.NEVER,
            ),
        }
        for flag, (value, acts) in flags.items():
            if acts and value != native:
                raise ConfigError(f"{flag}={value}: {name} takes no mask and looks {way}; give {flag}={native}")
    needed = decoder.left_context
    if schedule.chunk_size is None or (needed is not None and schedule.buffer >= needed):
        return
    snr = _block_snr_db(opened, schedule)
    if snr == float("inf"):
        return
    reach = "all tokens before it" if needed is None else f"{needed} tokens before it"
    warnings.warn(
        f"buffer is {schedule.buffer}, but a token's sound with {name} depends on {reach}: blocks differ from the "
        f"whole with a signal-to-noise ratio of {snr:.1f} dB (measured with random tokens); raise buffer",
        ConfigWarning,
        stacklevel=3,
    )


def _in_blocks(opened: OpenedDecoder, tokens: list[int], schedule: BlockSchedule) -> Sound:
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


def _block_snr_db(opened: OpenedDecoder, schedule: BlockSchedule) -> float:
    """The ratio for random tokens in a few blocks of the schedule's last size; inf where they are exact."""
    assert schedule.chunk_size is not None
    count = MEASURED_BLOCKS * schedule.chunk_size[-1] + schedule.buffer
    count += -count % opened.format.codebooks
    rng = random.Random(0)
    tokens = [rng.randrange(opened.format.vocab_size) for _ in range(count)]
    plain = dataclasses.replace(schedule, chunk_size=schedule.chunk_size[-1:])
    return snr_db(
        _in_blocks(opened, tokens, dataclasses.replace(plain, chunk_size=None)), _in_blocks(opened, tokens, plain)
    )
