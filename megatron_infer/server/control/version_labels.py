"""Weight versions under the names that loops give them: a whole number is itself, any other text is given a number.

The numbers order the versions: engines, `version_spans` and the prefix cache know these only.
"""

from __future__ import annotations

from collections import OrderedDict

from megatron_infer.server.http_errors import bad_request

MAX_LABEL_CHARS = 256
MAX_KEPT = 1024
"""Most labels that are kept; of older versions the number is shown."""

Version = int | str


class VersionLabels:
    """The labels of this server's weight versions. They are lost when the HTTP process ends; the numbers are not."""

    def __init__(self) -> None:
        self._labels: OrderedDict[int, str] = OrderedDict()

    def shown(self, number: int) -> Version:
        """The label of a version; its number, if it has none."""
        return self._labels.get(number, number)

    def number_of(self, version: Version | None, current: int, *, is_new: bool) -> int:
        """The number of a version that is given now. None: the one after `current`.

        is_new: there are new weights, so that a label that `current` has is given a number of its own.
        """
        if isinstance(version, int):
            return version
        if version is not None and not is_new and self._labels.get(current) == version:
            return current
        return current + 1

    def keep(self, version: Version | None, number: int) -> None:
        """The engines have version `number`, which the caller names `version`."""
        self._labels.pop(number, None)
        if isinstance(version, str):
            self._labels[number] = version
            while len(self._labels) > MAX_KEPT:
                self._labels.popitem(last=False)


def checked_version(value: Version | None) -> Version | None:
    """A version as a caller gives it; digits become a number. Raises ApiError 400."""
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= MAX_LABEL_CHARS:
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 18 else value
    if isinstance(value, int) and 0 <= value < 10**18:
        return value
    text = f"weight_version is {value!r}"[:80] + f"; a text of 1 to {MAX_LABEL_CHARS} characters, or a whole number"
    raise bad_request(text, "weight_version", "invalid_value")
