"""Whether a speech model, an audio decoder and a schedule of blocks go together."""

from __future__ import annotations

import warnings

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError
from megatron_infer.server.audio.blocks import BlockSchedule, PrependPromptSpeechTokens
from megatron_infer.server.audio.decoder import OpenedDecoder
from megatron_infer.server.audio.measure import block_snr_db
from megatron_infer.server.audio.speech_model import SpeechModel, difference


def check_decoder_of(model: SpeechModel, opened: OpenedDecoder, name: str) -> None:
    """Raises ConfigError for a decoder that reads other tokens than the model draws."""
    found = difference(model.format, opened.format)
    if found:
        raise ConfigError(f"audio_decoder {name} is not that of this model: {found}")


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
    snr = block_snr_db(opened, schedule)
    if snr == float("inf"):
        return
    reach = "all tokens before it" if needed is None else f"{needed} tokens before it"
    warnings.warn(
        f"buffer is {schedule.buffer}, but a token's sound with {name} depends on {reach}: blocks differ from the "
        f"whole with a signal-to-noise ratio of {snr:.1f} dB (measured with random tokens); raise buffer",
        ConfigWarning,
        stacklevel=3,
    )
