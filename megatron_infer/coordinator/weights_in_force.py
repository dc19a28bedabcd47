"""Which weights an engine has, or all engines are to have: the update that brought them, and whether they can be read
again.

    begin_weights, load_weights, write_weights ...  the update is open
    finish_weights                                  its weights are in force, and can be taken back
    settle_weights | cancel_weights                 they stay | those before are in force again

A replica and its coordinator both record the commands that were carried out. A replica whose stamp is another one than
the coordinator's has other weights, whatever its version is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AS_BYTES = ("write_weights", "receive_weights")
"""Commands whose tensors cannot be read again."""
Source = tuple[str, str]
"""A path, and the fingerprint of its files when they were read (`weight_paths.fingerprint`)."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one update. stamp: of its `finish_weights`; 0: of the model as it was loaded."""

    stamp: float = 0.0
    sources: tuple[Source, ...] = ()
    """All that they were read from, in order; (): they cannot be read again."""


class WeightsInForce:
    """The weights in force, and the update that is under way."""

    def __init__(self) -> None:
        self.now = Weights()
        self.before: Weights | None = None
        """Those that `cancel_weights` brings back; None: nothing was finished that is not settled."""
        self.is_open = False
        """Tensors are being written: an update has begun that is not finished. An adapter's is open until its end."""
        self._is_of_adapter = False
        self.is_known = False
        """Whether an update was finished here."""
        self.last_end = ""
        """The last of settle_weights and cancel_weights."""
        self._sources: tuple[Source, ...] | None = ()
        """What the open update has been read from; None: it has tensors that came as bytes."""

    @property
    def is_settled(self) -> bool:
        """Whether no update is under way that can still be taken back."""
        return not self.is_open and self.before is None

    @property
    def if_cancelled(self) -> Weights:
        return self.now if self.before is None else self.before

    def record(self, command: str, args: Mapping[str, Any], value: Any, stamp: float) -> None:
        """A weight command was carried out. value: of a replica that did."""
        if command in ("begin_weights", "load_weights", *AS_BYTES) and not self.is_open:
            self.is_open = True
            self._is_of_adapter = args.get("adapter") is not None
            self._sources = ()
        if command == "load_weights" and self._sources is not None:
            files = value.get("files") if isinstance(value, dict) else None
            self._sources = None if not isinstance(files, str) else (*self._sources, (str(args["path"]), files))
        elif command in AS_BYTES:
            self._sources = None
        elif command == "finish_weights" and not self._is_of_adapter:
            self.before = self.if_cancelled
            self.now = Weights(stamp, self._sources or ())
            self.is_open = False
            self.is_known = True
        elif command == "cancel_weights":
            self.now = self.if_cancelled
            self.before = None
            self.is_open = False
            self.last_end = command
        elif command == "settle_weights":
            self.before = None
            self.is_open = False
            self.last_end = command
        elif command == "restore_weights":
            self.now, self.before, self.is_open = Weights(stamp, _sources_of(args["sources"])), None, False

    def forget_sources(self) -> None:
        """Another version was set without files: what the weights are now cannot be read again."""
        self.now = Weights(self.now.stamp)

    def adopt(self, other: WeightsInForce) -> None:
        """Take over what a replica has of an earlier coordinator's updates, unless something is known here.

        An update that was finished there is taken over, too, unless it has been cancelled here meanwhile.
        """
        found = other.if_cancelled if self.last_end == "cancel_weights" else other.now
        if not self.is_known and found.stamp > self.now.stamp:
            self.now, self.before = found, None if self.last_end else other.before

    def to_dict(self) -> dict[str, Any]:
        """For `protocol.Register`."""
        before = None if self.before is None else [self.before.stamp, self.before.sources]
        return {"now": [self.now.stamp, self.now.sources], "before": before, "is_open": self.is_open}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> WeightsInForce:
        """Raises TypeError, ValueError or KeyError for what is none."""
        made = cls()
        if saved:
            made.now = _weights_of(saved["now"])
            made.before = None if saved["before"] is None else _weights_of(saved["before"])
            made.is_open = bool(saved["is_open"])
        return made


def are_sources(given: Any) -> bool:
    try:
        _sources_of(given)
    except (TypeError, ValueError):
        return False
    return True


def _weights_of(saved: Any) -> Weights:
    stamp, sources = saved
    if not math.isfinite(stamp):
        raise ValueError(f"a stamp of {stamp}")
    return Weights(float(stamp), _sources_of(sources))


def _sources_of(saved: Any) -> tuple[Source, ...]:
    return tuple((str(path), str(files)) for path, files in saved)
