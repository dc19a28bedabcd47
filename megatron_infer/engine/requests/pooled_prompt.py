"""The pooled hidden states of one prompt, put together from the chunks that it is computed in."""

from __future__ import annotations

import numpy as np


class PooledPrompt:
    """Takes the chunks of `runner.pooling`. A prompt that is computed again after its last chunk is counted once."""

    __slots__ = ("_pooling", "num_positions", "num_prompt", "values_D")

    def __init__(self, pooling: str, num_prompt: int) -> None:
        self._pooling, self.num_prompt = pooling, num_prompt
        self.num_positions = 0
        """Positions that have come."""
        self.values_D: np.ndarray | None = None
        """Their sum, the last one, or of "all" each of them [num_positions, D]."""

    def take(self, start: int, end: int, values_D: np.ndarray) -> None:
        if self.num_positions == self.num_prompt:
            return
        if self._pooling != "last" and start:
            assert start == self.num_positions, f"position {start} came, {self.num_positions} was next"
            assert self.values_D is not None
            is_sum = self._pooling == "mean"
            values_D = self.values_D + values_D if is_sum else np.concatenate([self.values_D, values_D])
        self.values_D, self.num_positions = values_D, end

    def result(self) -> np.ndarray | None:
        """fp32 [D], of "all" [num_prompt, D]; None while positions are missing."""
        if self.values_D is None or self.num_positions < self.num_prompt:
            return None
        return self.values_D / np.float32(self.num_prompt) if self._pooling == "mean" else self.values_D
