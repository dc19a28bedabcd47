"""How arrays of the host reach the device that logits are on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

Upload = Callable[[np.ndarray], Tensor]
"""stage(array) -> a tensor of its own on the device, of the array's dtype and shape.

The copy is ordered on the current stream and never waited for: an array that is not in pinned memory goes through some
first. The caller leaves the array as it is: on a CPU the tensor is the array.
"""
