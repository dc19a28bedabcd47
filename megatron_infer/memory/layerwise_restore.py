"""A restore whose copies still run: layers that steps may use already, and layers they have to wait for.

copy     layer 0 | layer 1 | layer 2 | layer 3 |                               host -> staging buffer on the device
scatter           layer 0 | layer 1 | layer 2 | layer 3 |                      staging buffer -> pool
steps                      [0 . . . .][1 . . . ]   [2 . . . .][3 . . . .]      a layer waits only for its own event
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_infer.memory.copy_pipeline import DeviceStreams, Stream
from megatron_infer.memory.store_layout import Layer, StateTensors


class LayerwiseRestore:
    """An event for each layer that is on its way to the device. Only `finish` makes the host wait."""

    def __init__(self, streams: DeviceStreams, kv_cache: Tensor, states: StateTensors | None) -> None:
        """Copies may be enqueued from now on: they run behind what the steps' stream has by now."""
        self._streams = streams
        self.kv_cache, self.states = kv_cache, states
        """The restored pools, for a caller that waits for each layer before it uses that layer."""
        for on in (Stream.COPY, Stream.SCATTER):
            streams.wait_event(streams.record_event(Stream.STEPS), on)
        self._first = self._last = streams.record_event(Stream.COPY)
        self._events: dict[Layer, Any] = {}

    @property
    def needs_no_wait(self) -> bool:
        """The steps' stream already waits for every layer: work enqueued there from now on finds all of them."""
        return not self._events

    def record_layer(self, layer: Layer) -> None:
        """Call when all copies of this layer have been enqueued."""
        self._last = self._events[layer] = self._streams.record_event(Stream.SCATTER)

    def wait_for_layer(self, layer: Layer) -> None:
        """Work enqueued on the steps' stream from now on runs behind the copies of this layer."""
        event = self._events.get(layer)
        if event is not None:
            self._streams.wait_event(event, Stream.STEPS)
            del self._events[layer]  # only now: an interrupt in between would lose the wait

    def wait_for_all(self) -> None:
        """Work enqueued on the steps' stream from now on runs behind the copies of all layers."""
        if self._events:
            self._streams.wait_event(self._last, Stream.STEPS)
            self._events.clear()

    def is_done(self) -> bool:
        """Whether the device has all layers."""
        return self._streams.is_done(self._last)

    def finish(self) -> float:
        """Wait for all layers -> seconds that their copies took, by the device's clock."""
        return self._streams.seconds(self._first, self._last)
