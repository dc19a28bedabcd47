"""A restore under way: what steps may use already, and what has to be kept until all of it is there.

bus      layer 0 | layer 1 | layer 2 | layer 3 |
scatter           layer 0 | layer 1 | layer 2 | layer 3 |
steps                      [0 . . . .][1 . . . ]   [2 . . . .][3 . . . .]      a layer waits for its own mark alone
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_infer.memory.copy_pipeline import DeviceStreams, Stream
from megatron_infer.memory.store_layout import StateTensors

Layer = tuple[str, int]
"""("blocks" or "states", number of the layer among those that have them)."""


class LayerwiseRestore:
    """Marks of layers on their way to the device. Nothing here makes the host wait but `finish`."""

    def __init__(self, lane: DeviceStreams, kv_cache: Tensor, states: StateTensors | None) -> None:
        """Copies may begin: they come behind what the steps' stream has by now."""
        self._lane = lane
        self.kv_cache, self.states = kv_cache, states
        """For who awaits each layer."""
        for on in (Stream.BUS, Stream.SCATTER):
            lane.hold(lane.mark(Stream.STEPS), on)
        self._first = self._last = lane.mark(Stream.BUS)
        self._marks: dict[Layer, Any] = {}

    @property
    def is_awaited(self) -> bool:
        """Whatever the steps' stream gets from now on finds every layer there."""
        return not self._marks

    def landed(self, layer: Layer) -> None:
        """All copies of this layer have been enqueued."""
        self._last = self._marks[layer] = self._lane.mark(Stream.SCATTER)

    def await_layer(self, layer: Layer) -> None:
        """What the steps' stream gets from now on comes behind this layer's arrival."""
        mark = self._marks.get(layer)
        if mark is not None:
            self._lane.hold(mark, Stream.STEPS)
            del self._marks[layer]  # not before: an interrupt in between would lose the wait

    def await_all(self) -> None:
        """The same for all layers."""
        if self._marks:
            self._lane.hold(self._last, Stream.STEPS)
            self._marks.clear()

    def is_done(self) -> bool:
        """Whether the device has all layers."""
        return self._lane.is_done(self._last)

    def finish(self) -> float:
        """Wait for all layers -> seconds that their copies took, by the device's clock."""
        return self._lane.seconds(self._first, self._last)
