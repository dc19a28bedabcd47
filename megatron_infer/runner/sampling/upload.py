"""How host arrays reach the device that holds the logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

Upload = Callable[[np.ndarray], Tensor]
"""stage(array) -> a tensor of its own on the device, of the array's dtype and shape.

The copy is ordered on the current stream and the host does not wait for it: an array that is not in pinned memory is
copied into some first. The caller must not change the array afterwards: on a CPU the tensor shares its memory.
"""
