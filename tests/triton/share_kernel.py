"""A kernel that writes down what attention's programs would do; imported where kernels can run."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_infer.kernels.triton.attention_decode import share_of_program


@triton.jit
def share_kernel(kv_len, num_rows, out, CHUNK: tl.constexpr, SHORT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    count, row, split = share_of_program(kv_len, num_rows, CHUNK, SHORT, MAX_SPLITS, 0)
    at = out + 3 * tl.program_id(1)
    tl.store(at, count)
    tl.store(at + 1, row)
    tl.store(at + 2, split)
