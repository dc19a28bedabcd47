"""The scratch memory of `kernels.triton` by the shape of a step, and the sizes of its splits. Pure: needs no torch.

The kernels divide their work by these numbers and allocate by these formulas, and `config.graph_memory` estimates with
the same. Grids and scratch follow from upper bounds of a step's lengths; for a graph they follow from its shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FP32_BYTES = 4

DECODE_CHUNK = 256
"""Keys per split of a decode row, unless it is short or very long; a row that sees no more of them is not split."""
DECODE_SHORT, DECODE_SHORT_PARTS = 8, 4
"""A decode row that sees up to 8 chunks of keys is split every quarter of one, so that 512 keys of 8 kv heads occupy
half of a large GPU. Partial sums of 4 query heads to a kv head are then 6 % of the keys' bytes instead of 1.6 %."""
DECODE_PROGRAMS = 256
"""Most useful splits of one row, times kv heads: two programs for each multiprocessor of a large GPU."""
LARGE_SHARED_KIB = 160
"""Least shared memory of a block for attention's large tiles; consumer cards have 99."""
INDEX_ENTRIES = 1 << 24
"""Scores of sparse attention in memory at once, of 8 bytes each."""
SCAN_SEGMENT = 256
"""Tokens that one program of a slice scans; each such segment needs a state of fp32 scratch."""

LORA_PART, LORA_PARTS = 512, 8
"""Least inputs of a linear that one program multiplies by an adapter's A, and most parts that they are cut into."""

DRAW_CHUNK, DRAW_GROUP = 4096, 64
"""Logits that a program of a draw reads, and logits per maximum that it keeps."""
DRAW_HELD = 2048
"""Candidates that a filtered row first holds in registers; twice as many where these are not enough."""


def power_of_2(number: int) -> int:
    """The least power of two >= number."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up. Triton's own function takes 4 us on the host, a quarter of a launch."""
    return -(-number // divisor)


MIN_DOT = 16
"""Least length of each axis of a `tl.dot`."""


def padded(head_dim: int) -> int:
    """Dims of a tile for one head: a power of two that `tl.dot` accepts."""
    return max(MIN_DOT, power_of_2(head_dim))


# ---------------------------------------------------------------------- attention


def max_decode_splits(num_kv: int) -> int:
    """Most splits of a decode row."""
    return min(128, max(16, power_of_2(max(1, DECODE_PROGRAMS // num_kv))))


def decode_splits(
    max_keys: int,
    max_splits: int,
    chunk: int = DECODE_CHUNK,
    window: int | None = None,
    short: int = DECODE_CHUNK // DECODE_SHORT_PARTS,
) -> int:
    """Most splits of a decode row with up to `max_keys` keys, of which it sees `window`; 1: no partial sums.

    short: keys per split of a row that sees up to 8 chunks.
    """
    seen = max_keys if window is None else min(max_keys, window)
    if seen <= chunk:
        return 1
    parts = cdiv(min(seen, DECODE_SHORT * chunk), short)
    begun = 0 if seen == max_keys else 1  # what is seen may begin within a chunk
    return min(max(parts, cdiv(seen, chunk)) + begun, max_splits)


def partial_bytes(num_parts: int, head_dim: int) -> int:
    """Bytes of `num_parts` lines of fp32 partial sums: H weighted values, greatest score, sum of weights."""
    return FP32_BYTES * num_parts * (head_dim + 2)


def decode_bytes(
    num_rows: int, *, num_kv: int, group: int, head_dim: int, max_keys: int, is_latent: bool = False
) -> int:
    """Partial sums of decode rows. Example: 64 rows, 8 x 4 heads of 128, 4096 keys -> 32 splits, 32.5 MiB.

    head_dim: of values. is_latent: keys are latents, and short rows are cut no finer than others.
    """
    short = DECODE_CHUNK if is_latent else DECODE_CHUNK // DECODE_SHORT_PARTS
    splits = decode_splits(max_keys, max_decode_splits(num_kv), short=short)
    return 0 if splits == 1 else partial_bytes(num_rows * num_kv * group * splits, head_dim)


def index_queries(max_keys: int) -> int:
    """Queries whose scores by an indexer are in memory at once, of up to max_keys keys each."""
    return max(1, INDEX_ENTRIES // max_keys)


def index_bytes(num_tokens: int, max_keys: int) -> int:
    """The scores of one layer of sparse attention. Example: 64 rows that may see 131,072 keys -> 64 MiB."""
    return 8 * min(num_tokens, index_queries(max_keys)) * max_keys


# ---------------------------------------------------------------------- scan


def scan_chunk(element_bytes: int) -> int:
    """Tokens of a chunk, whose products with each other are one matrix."""
    return 64 if element_bytes == 2 else 16


def scan_shapes(
    num_tokens: int,
    slice_tokens: int,
    max_queries: int,
    *,
    ssm_shape: Sequence[int],
    num_groups: int,
    chunk: int,
    segment: int = SCAN_SEGMENT,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes, all fp32, of sums of steps, decays of segments, C . B, and states of segments (0 segments where no slice
    is as long as one).

    slice_tokens: most tokens of the step's slices. ssm_shape: [heads, head dim, state dim].
    """
    whole, num_heads = slice_tokens // segment, ssm_shape[0]
    sums, decay = (3, num_heads, num_tokens), (whole + 1, num_heads)
    return sums, decay, (num_groups, num_tokens, chunk), (whole if max_queries >= segment else 0, *ssm_shape)


def scan_bytes(
    num_tokens: int, slice_tokens: int, *, ssm_shape: Sequence[int], num_groups: int, element_bytes: int
) -> int:
    """Scratch of one layer's scan of slices. Example: 16384 tokens, 128 heads of 64 x 128 in 8 groups -> 312 MiB."""
    if not slice_tokens:
        return 0
    chunk = scan_chunk(element_bytes)
    shapes = scan_shapes(
        num_tokens, slice_tokens, slice_tokens, ssm_shape=ssm_shape, num_groups=num_groups, chunk=chunk
    )
    return FP32_BYTES * sum(math.prod(shape) for shape in shapes)


def delta_shapes(num_tokens: int, *, num_heads: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a delta net's sums of log decays (fp32) and of products of tokens in a chunk (the inputs' dtype)."""
    return (2, num_heads, num_tokens), (2, num_heads, num_tokens, chunk)


def delta_bytes(num_tokens: int, slice_tokens: int, *, num_heads: int, element_bytes: int) -> int:
    """Scratch of one delta net's slices. Example: 16384 tokens, 32 heads, 16 bit -> 132 MiB."""
    if not slice_tokens:
        return 0
    sums, products = delta_shapes(num_tokens, num_heads=num_heads, chunk=scan_chunk(element_bytes))
    return FP32_BYTES * math.prod(sums) + element_bytes * math.prod(products)


# ---------------------------------------------------------------------- experts


def expert_bytes(
    num_tokens: int, *, top_k: int, fc1_width: int, fc2_width: int, hidden: int, element_bytes: int
) -> int:
    """For each pair (token, chosen expert): fc1's output and its activation, or the activation and fc2's product.

    And six numbers of 4 bytes per pair: its token, its weight, its place, and three of a tile; there are no more tiles
    than pairs.
    """
    pairs = num_tokens * top_k
    return pairs * (element_bytes * (fc2_width + max(fc1_width, hidden)) + 6 * 4)


# ---------------------------------------------------------------------- adapters


def lora_parts(width: int) -> tuple[int, int]:
    """(parts of a linear's inputs that are summed apart, inputs of one). Example: 4096 -> 8 parts of 512."""
    parts = min(LORA_PARTS, cdiv(width, LORA_PART))
    part_width = cdiv(cdiv(width, parts), 64) * 64
    return cdiv(width, part_width), part_width


def lora_bytes(num_tokens: int, max_rank: int) -> int:
    """Most memory for A x of one linear, whose adapters have a rank up to `max_rank`."""
    return FP32_BYTES * LORA_PARTS * num_tokens * max_rank


# ---------------------------------------------------------------------- draws


def draw_chunks(vocab: int) -> tuple[int, int]:
    """(chunks of a row of logits, groups whose maximum is kept, in a power of two of chunks)."""
    chunks = cdiv(vocab, DRAW_CHUNK)
    return chunks, power_of_2(chunks) * (DRAW_CHUNK // DRAW_GROUP)


def draw_bytes(num_rows: int, vocab: int) -> int:
    """Memory of a captured draw of `num_rows` rows.

    A chunk has its best logit, its id, a sum of weights, another one at temperature 1, and the maxima of its groups. A
    row has a list of groups, and candidates of four numbers each.
    """
    chunks, groups = draw_chunks(vocab)
    a_chunk = 4 + 4 + 8 + 8 + 4 * (DRAW_CHUNK // DRAW_GROUP)
    return num_rows * (chunks * a_chunk + 4 * groups + 4 * 4 * DRAW_HELD)
