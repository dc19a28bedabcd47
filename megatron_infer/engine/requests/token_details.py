"""Values that a sequence collects per token beside text and logprobs; they are in `CompletionOutput` in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS, TokenOutput
from megatron_infer.outputs.token_support import lone_row, support_row


class PositionLog:
    """Values of consecutive positions; a position that is computed again keeps its first entry."""

    def __init__(self, first: int, limit: int) -> None:
        """For positions first .. limit - 1."""
        self.first, self.limit = first, limit
        self.count = 0
        self._rows: np.ndarray | None = None

    @property
    def is_full(self) -> bool:
        return self.first + self.count >= self.limit

    def take(self, start: int, rows: np.ndarray) -> None:
        """Add rows [positions, layers, k] from position `start` on; known or out-of-range positions are skipped."""
        known = self.first + self.count
        assert start <= known or start >= self.limit, f"values of position {start} came, {known} was next"
        rows = rows[known - start : max(0, self.limit - start)]
        if not len(rows):
            return
        end = self.count + len(rows)
        if self._rows is None or end > len(self._rows):
            grown = np.empty((min(2 * end, self.limit - self.first), *rows.shape[1:]), dtype=rows.dtype)
            if self._rows is not None:
                grown[: self.count] = self.rows
            self._rows = grown
        self._rows[self.count : end] = rows
        self.count = end

    @property
    def rows(self) -> np.ndarray:
        """A view of the known positions."""
        return np.empty((0, 0, 0), dtype=np.uint8) if self._rows is None else self._rows[: self.count]


class TokenDetails:
    """One sequence's entries, one for each token it drew. All sequences of a request share the values of the prompt's
    positions."""

    __slots__ = ("entries", "logs", "vocab_size")

    def __init__(self, params: SamplingParams, prompt_len: int, limit: int, first: TokenDetails | None) -> None:
        """limit: tokens of prompt and output at most. first: of the request's first sequence; None for the first
        itself."""
        asked = [one for one in TOKEN_OUTPUTS if getattr(params, one.asked_by)]
        self.entries: dict[str, list[Any]] = {one.key: [] for one in asked if not one.per_position}
        """By key, the entry of each token: numbers, or rows of a TokenSupport."""
        self.vocab_size = 0
        """0 until the first set of ids."""
        self.logs: dict[str, tuple[PositionLog, PositionLog]] = {
            one.key: (
                PositionLog(0, prompt_len) if first is None else first.logs[one.key][0],
                PositionLog(prompt_len, limit),
            )
            for one in asked
            if one.per_position
        }
        """By key, the values of the prompt's positions and of the output's."""

    def add_numbers(self, numbers: Mapping[str, Sequence[float]], entry: int) -> None:
        """numbers: of the step, by key; entry: this sequence's."""
        for key, values in numbers.items():
            if key in self.entries:
                self.entries[key].append(values[entry])

    def add_ids(self, key: str, bits: np.ndarray | None, alone: int | None, vocab_size: int) -> None:
        """bits: the ids of the set; None: only `alone`, or all ids where `alone` is None too."""
        self.vocab_size = vocab_size
        if bits is not None:
            row = support_row(bits, vocab_size)
        else:
            row = lone_row(alone, vocab_size) if alone is not None else np.empty(0, dtype=np.int32)
        self.entries[key].append(row)

    def add_positions(self, key: str, start: int, rows: np.ndarray) -> None:
        """Add rows of positions from `start` on, prompt or output."""
        of_prompt, of_output = self.logs[key]
        if not of_prompt.is_full:
            of_prompt.take(start, rows)
        if start + len(rows) > of_output.first:
            skipped = max(0, of_output.first - start)
            of_output.take(start + skipped, rows[skipped:])

    def fill_up(self, num_tokens: int) -> None:
        """Add empty entries for tokens that another replica drew, which handed out their entries."""
        for output in TOKEN_OUTPUTS:
            if output.key in self.entries:
                self.entries[output.key] += [output.drawn_elsewhere] * num_tokens

    def positions(self, key: str, num_positions: int) -> np.ndarray | None:
        """[positions, layers, k] of prompt and output, as far as they are computed."""
        if key not in self.logs:
            return None
        parts = [log.rows for log in self.logs[key] if log.count]
        return np.concatenate(parts)[:num_positions] if parts else self.logs[key][0].rows

    def value(self, output: TokenOutput, first: int = 0, end: int | None = None) -> Any:
        """The entries of tokens first .. end - 1; None where they were not asked for, or are of positions."""
        if output.key not in self.entries:
            return None
        return output.of_entries(self.entries[output.key][first:end], self.vocab_size)

    def set_value(self, output: TokenOutput, value: Any) -> None:
        """What `value` returned for all tokens."""
        self.entries[output.key] = output.entries(value)
        self.vocab_size = output.vocab_size_of(value) or self.vocab_size

    def fill(self, completion: CompletionOutput, first: int, end: int, *, num_positions: int | None) -> None:
        """Put the entries of tokens first .. end - 1 into `completion`, and values of positions once it has ended.

        num_positions: positions that have values; None while the sequence goes on.
        """
        for output in TOKEN_OUTPUTS:
            if not output.per_position:
                setattr(completion, output.name, self.value(output, first, end))
            elif num_positions is not None:
                setattr(completion, output.name, self.positions(output.key, num_positions))


def token_details_of(
    params: SamplingParams, prompt_len: int, limit: int, first: TokenDetails | None
) -> TokenDetails | None:
    """For a new sequence; None: it collects nothing. first: that of its request's first sequence."""
    if not params.carries:
        return None
    return TokenDetails(params, prompt_len, limit, first)
