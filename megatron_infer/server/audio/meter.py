"""Figures of speech: seconds of sound, windows, the time of first blocks, and what waits for the decoder."""

from __future__ import annotations

from megatron_infer.engine.metrics.definitions import PREFIX, SPEECH
from megatron_infer.engine.metrics.registry import Counter, Gauge, Registry


class SpeechMeter:
    """The metrics SPEECH, in a registry: an engine's, where they are in its figures, or a server's."""

    def __init__(self, registry: Registry) -> None:
        self._counters: dict[str, Counter] = {}
        self._queue: Gauge | None = None
        for name, spec in SPEECH.items():
            if spec.kind == "counter":
                self._counters[name] = registry.counter(PREFIX + name, spec.help)
            else:
                self._queue = registry.gauge(PREFIX + name, spec.help)

    def block(self, *, number: int, sound_s: float, elapsed_s: float) -> None:
        """A block was decoded. elapsed_s: since its request began."""
        self._add("speech_windows_total", 1)
        self._add("speech_seconds_total", sound_s)
        if number == 0:
            self._add("speech_first_chunks_total", 1)
            self._add("speech_first_chunk_seconds_total", elapsed_s)

    def ended(self, *, elapsed_s: float) -> None:
        """A request was spoken to its end."""
        self._add("speech_processing_seconds_total", elapsed_s)

    def waiting(self, windows: int) -> None:
        """Windows that wait for the decoder now."""
        assert self._queue is not None
        self._queue.set(windows)

    def _add(self, name: str, amount: float) -> None:
        self._counters[name].inc(amount)
