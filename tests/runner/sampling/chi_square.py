"""Whether two samples are of one distribution."""

from __future__ import annotations

import numpy as np
import torch


def homogeneity(first: np.ndarray, second: np.ndarray) -> float:
    """The probability of a difference as large as between two samples of one distribution (chi-square)."""
    counts = np.stack([first, second])[:, (first + second) > 0].astype(float)
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((counts.shape[1] - 1) / 2), torch.tensor(statistic / 2)))
