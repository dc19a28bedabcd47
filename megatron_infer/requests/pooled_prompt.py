"""The pooled hidden state of one prompt, summed up over the chunks that it is computed in."""

from __future__ import annotations

import numpy as np


class PooledPrompt:
    """Takes the chunks of `runner.pooling`. A prompt that is computed again after its last chunk is counted once."""

    __slots__ = ("_is_mean", "num_positions", "num_prompt", "values_D")

    def __init__(self, pooling: str, num_prompt: int) -> None:
        self._is_mean, self.num_prompt = pooling == "mean", num_prompt
        self.num_positions = 0
        """Positions summed up so far."""
        self.values_D: np.ndarray | None = None

    def take(self, start: int, end: int, values_D: np.ndarray) -> None:
        if self.num_positions == self.num_prompt:
            return
        if self._is_mean and start:
            assert start == self.num_positions, f"position {start} came, {self.num_positions} was next"
            assert self.values_D is not None
            values_D = self.values_D + values_D
        self.values_D, self.num_positions = values_D, end

    def result(self) -> np.ndarray | None:
        """fp32 [D]; None while positions are missing."""
        if self.values_D is None or self.num_positions < self.num_prompt:
            return None
        return self.values_D / np.float32(self.num_prompt) if self._is_mean else self.values_D
