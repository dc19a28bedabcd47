"""Find the tiles of rows of different lengths without a table."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(cu_q, tile, num_rows, LENGTH: tl.constexpr):
    """(row, its first tile): the last row whose tiles begin at `tile` or before; num_rows: the padding tokens.

    cu_q: first token of each row; row 0 may begin at any token. Row r has the tiles from (cu_q[r] - cu_q[0]) // LENGTH
    + r on: at least as many as it has runs of LENGTH tokens, and found by bisection.
    """
    base = tl.load(cu_q)
    low = tile * 0
    high = low + num_rows
    while low < high:
        middle = (low + high + 1) // 2
        first = (tl.load(cu_q + middle) - base) // LENGTH + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle - 1)
    return low, (tl.load(cu_q + low) - base) // LENGTH + low
