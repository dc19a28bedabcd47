"""What a sample carries beyond tokens, text and logprobs, while it grows: see `outputs.CompletionOutput`."""

from __future__ import annotations

import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.outputs.token_support import TokenSupport, lone_row, support_row


class RoutingLog:
    """Experts of a run of positions, in order; a position that is computed again keeps what it has."""

    def __init__(self, first: int, limit: int) -> None:
        """Of positions first .. limit - 1."""
        self.first, self.limit = first, limit
        self.count = 0
        self._rows: np.ndarray | None = None

    @property
    def is_full(self) -> bool:
        return self.first + self.count >= self.limit

    def take(self, start: int, rows: np.ndarray) -> None:
        """rows [positions, layers, top-k] of positions from `start` on; what is known or out of range is left out."""
        known = self.first + self.count
        assert start <= known or start >= self.limit, f"routing of position {start} came, {known} was next"
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
        """A view: what is known."""
        return np.empty((0, 0, 0), dtype=np.uint8) if self._rows is None else self._rows[: self.count]


class TokenDetails:
    """Of one sample: an entry for every token it drew. The prompt's routing is one for all samples of a request."""

    __slots__ = ("of_output", "of_prompt", "processed", "raw", "support", "vocab_size")

    def __init__(self, params: SamplingParams, prompt_len: int, limit: int, of_prompt: RoutingLog | None) -> None:
        """limit: tokens of prompt and output at most. of_prompt: of the request's first sample; None for itself."""
        scored, routed = params.return_sampled_logprobs, params.return_routing
        self.raw: list[float] | None = [] if scored else None
        self.processed: list[float] | None = [] if scored else None
        self.support: list[np.ndarray] | None = [] if params.return_support else None
        self.vocab_size = 0
        """Known with the first row of `support`."""
        self.of_prompt = (of_prompt or RoutingLog(0, prompt_len)) if routed else None
        self.of_output = RoutingLog(prompt_len, limit) if routed else None

    def take_logprobs(self, raw: float, processed: float) -> None:
        if self.raw is not None and self.processed is not None:
            self.raw.append(raw)
            self.processed.append(processed)

    def take_support(self, bits: np.ndarray | None, alone: int | None, vocab_size: int) -> None:
        """bits: of the ids that could be drawn; None: `alone`, or all of them."""
        assert self.support is not None
        self.vocab_size = vocab_size
        if bits is not None:
            self.support.append(support_row(bits, vocab_size))
        else:
            self.support.append(lone_row(alone, vocab_size) if alone is not None else np.empty(0, dtype=np.int32))

    def take_routing(self, start: int, rows: np.ndarray) -> None:
        """Of positions from `start` on, prompt or output."""
        assert self.of_prompt is not None and self.of_output is not None
        if not self.of_prompt.is_full:
            self.of_prompt.take(start, rows)
        if start + len(rows) > self.of_output.first:
            skipped = max(0, self.of_output.first - start)
            self.of_output.take(start + skipped, rows[skipped:])

    def stand_in(self, num_tokens: int) -> None:
        """Entries for tokens that were drawn elsewhere, and whose own entries went out there."""
        for values in (self.raw, self.processed):
            if values is not None:
                values += [float("nan")] * num_tokens
        if self.support is not None:
            self.support += [np.empty(0, dtype=np.int32)] * num_tokens

    def routing(self, num_positions: int) -> np.ndarray | None:
        """[positions, layers, top-k] of prompt and output, as far as they were computed."""
        if self.of_prompt is None or self.of_output is None:
            return None
        parts = [log.rows for log in (self.of_prompt, self.of_output) if log.count]
        return np.concatenate(parts)[:num_positions] if parts else self.of_prompt.rows

    def fill(self, output: CompletionOutput, first: int, end: int, *, num_positions: int | None) -> None:
        """Give `output` what belongs to tokens first .. end - 1, and the routing once the sample has ended.

        num_positions: how many positions that is; None while it goes on.
        """
        if self.raw is not None and self.processed is not None:
            output.raw_logprobs, output.processed_logprobs = self.raw[first:end], self.processed[first:end]
        if self.support is not None:
            output.support = TokenSupport.of_rows(self.vocab_size, self.support[first:end])
        if num_positions is not None:
            output.routing = self.routing(num_positions)


def token_details_of(
    params: SamplingParams, prompt_len: int, limit: int, first: TokenDetails | None
) -> TokenDetails | None:
    """What a new sample will carry; None: nothing. first: that of its request's first sample."""
    if not params.carries:
        return None
    return TokenDetails(params, prompt_len, limit, None if first is None else first.of_prompt)
