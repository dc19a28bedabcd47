"""Figures of speech: seconds of sound, windows, the time of first blocks, and what waits for the decoder."""

from __future__ import annotations

from typing import Any

from megatron_infer.engine.metrics.definitions import PREFIX, SPEECH
from megatron_infer.engine.metrics.registry import Registry


class SpeechMeter:
    """The metrics SPEECH, in a registry: an engine's, where they are in its figures, or a server's."""

    def __init__(self, registry: Registry) -> None:
        kinds: dict[str, Any] = {"counter": registry.counter, "gauge": registry.gauge}
        self._metrics: dict[str, Any] = {
            name: kinds[spec.kind](PREFIX + name, spec.help) for name, spec in SPEECH.items()
        }

    def block(self, *, number: int, sound_s: float, elapsed_s: float) -> None:
        """A block was decoded. elapsed_s: since its request began."""
        self._metrics["speech_windows_total"].inc()
        self._metrics["speech_seconds_total"].inc(sound_s)
        if number == 0:
            self._metrics["speech_first_chunks_total"].inc()
            self._metrics["speech_first_chunk_seconds_total"].inc(elapsed_s)

    def ended(self, *, elapsed_s: float) -> None:
        """A request was spoken to its end."""
        self._metrics["speech_processing_seconds_total"].inc(elapsed_s)

    def waiting(self, windows: int) -> None:
        """Windows that wait for the decoder now."""
        self._metrics["speech_decoder_queue"].set(windows)
