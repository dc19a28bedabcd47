"""Shapes that steps are padded to, so that one captured CUDA graph serves many steps. Pure: needs no torch.

    a step:   d decode rows, p prefill rows with x tokens   --find-->   the smallest shape that covers it
    a shape:  |<------- D decode tokens ------->|<--- X = T - D tokens of P prefill rows --->|

Megatron pads the same three numbers. The differences save memory or find a graph for more steps:
* Megatron's exponential list takes every size times every power of two of prefill rows. A prefill row without tokens
  costs next to nothing, so one number of rows (cuda_graph_mixed_prefill_count) is enough; a decode row costs a token,
  so the list varies those instead.
* Megatron captures everything at start. Here all shapes are captured at start within CAPTURE_S, or each when a step
  first needs it (`cuda_graph_capture`).
* A decode step of one request has its own shape (Megatron's smallest is 2): it sets the latency of a single user.
* Megatron matches by a linear scan. `ShapeIndex.find` reads three tables and one dict.
* A decode row never takes a prefill row's place (Megatron: "strict", for hybrid models only): the kernels have a path
  of their own for decode rows, in every model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_infer.errors import ConfigError

if TYPE_CHECKING:
    from megatron_infer.config.inference import InferenceConfig

CAPTURE_S = 60.0
"""Seconds that capturing all shapes may take at start, and again at a resume: shapes whose turn comes later run
eagerly."""
SMALLEST_PREFILL = 16
"""Tokens of the smallest prefill shape: a smaller step costs the same."""
LINEAR_PREFILL_STEP = 64
DECODE_STEP_IN_MIXED = 4
"""Factor between two numbers of decode rows in mixed shapes."""


@dataclass(frozen=True, order=True, slots=True)
class GraphShape:
    """A padded step: all tokens, rows that prefill, rows that decode (one token each, first in the step)."""

    num_tokens: int
    num_prefill: int
    num_decode: int
    has_adapters: bool = False
    """Its layers add the products of adapters: for steps in which a token has one."""

    @property
    def num_rows(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def is_decode_only(self) -> bool:
        return self.num_prefill == 0

    @property
    def prefill_tokens(self) -> int:
        """Tokens behind those of the decode rows."""
        return self.num_tokens - self.num_decode

    def as_tuple(self) -> tuple[int, int, int]:
        return self.num_tokens, self.num_prefill, self.num_decode

    def covers(self, num_tokens: int, num_prefill: int, num_decode: int) -> bool:
        """Whether such a step can be padded to this shape; a step that only decodes needs a shape that only decodes."""
        return (
            num_decode <= self.num_decode
            and num_prefill <= self.num_prefill
            and num_tokens - num_decode <= self.prefill_tokens
            and (num_prefill > 0 or self.is_decode_only)
        )


def make_shapes(
    config: InferenceConfig, *, max_requests: int, max_tokens: int, tensor_parallel_size: int = 1
) -> tuple[GraphShape, ...]:
    """All shapes worth a graph, ascending, at most num_cuda_graphs of them.

    The largest decode shape holds max_requests rows, so that every step that only decodes finds a shape. Sizes are
    multiples of the tensor parallel size. Rows never exceed max_requests, tokens never max_tokens.
    Example, exponential: 8 requests, 64 tokens, -1 -> decode 1, 2, 4, 8; prefill tokens 16, 32, 64 next to 0, 4 or 7
    decode rows.
    Raises ConfigError where num_cuda_graphs is too small for cuda_graph_all_prefills.
    """
    count, align = config.num_cuda_graphs, tensor_parallel_size
    if not count:
        return ()
    mixed = config.use_cuda_graphs_for_non_decode_steps and config.cuda_graph_mixed_prefill_count != 0
    mixed = mixed and max_tokens > align
    if config.cuda_graph_all_prefills and (not mixed or count == 1):
        raise ConfigError(
            "cuda_graph_all_prefills=True needs shapes that prefill: num_cuda_graphs of 2 or more, "
            "use_cuda_graphs_for_non_decode_steps=True and cuda_graph_mixed_prefill_count above 0"
        )
    auto = count < 0
    num_decode = None if auto else max(1, count if not mixed else (count + 1) // 2)
    decode = _decode_sizes(max_requests, config, num_decode, align)
    shapes = {GraphShape(size, 0, size) for size in decode}
    if mixed:
        shapes |= _mixed(config, max_requests, max_tokens, align, None if auto else count - len(shapes))
    return tuple(sorted(shapes))


def _mixed(
    config: InferenceConfig, max_requests: int, max_tokens: int, align: int, count: int | None
) -> set[GraphShape]:
    """Shapes that prefill, at most `count` of them (None: any number)."""
    budget = max_tokens
    if not config.cuda_graph_all_prefills:
        budget = min(max(config.cuda_graph_max_tokens, max_requests), max_tokens)
    most_rows = config.cuda_graph_mixed_prefill_count or max_requests
    decode = _decode_beside_prefill(max_requests, min(most_rows, max_requests), budget, align)
    prefill = _prefill_sizes(budget, config, None, align)
    if count is not None:
        if count < 1:
            return set()
        if len(decode) > 2 and not config.cuda_graph_all_prefills:
            decode = decode[:-1]  # with few shapes, leave room for several prompts rather than for a last decode row
        num_decode = min(len(decode), max(1, math.isqrt(count)))
        # The largest number of decode rows covers all others; 0 is the step of a prompt alone.
        decode = _spread(decode, num_decode)
        prefill = _prefill_sizes(budget, config, max(1, count // num_decode), align)
    shapes: set[GraphShape] = set()
    for rows in decode:
        room = (budget - rows) // align * align
        for tokens in {min(size, room) for size in prefill}:
            num_prefill = min(most_rows, max_requests - rows, tokens)
            if num_prefill > 0:
                shapes.add(GraphShape(tokens + rows, num_prefill, rows))
    return shapes


def _decode_beside_prefill(max_requests: int, prefill_rows: int, budget: int, align: int) -> list[int]:
    """Numbers of decode rows in mixed shapes, ascending: 0, then by powers, then the numbers that leave `prefill_rows`
    and one row to prefill."""
    found = {0}
    size = DECODE_STEP_IN_MIXED
    while size < max_requests - prefill_rows:
        found.add(size)
        size *= DECODE_STEP_IN_MIXED
    found |= {max_requests - prefill_rows, max_requests - 1}
    aligned = {rows // align * align for rows in found}
    return sorted(rows for rows in aligned if 0 <= rows <= budget - align)


def _prefill_sizes(budget: int, config: InferenceConfig, count: int | None, align: int) -> list[int]:
    """Tokens of prefill rows, ascending; the largest is the budget."""
    budget = budget // align * align
    smallest = min(-(-SMALLEST_PREFILL // align) * align, budget)
    if config.cuda_graph_sizing_distribution == "linear":
        step = -(-LINEAR_PREFILL_STEP // align) * align
        sizes = sorted({smallest, *range(step, budget, step), budget})
    else:
        sizes = _halvings(budget, smallest, align)
    return sizes if count is None else _spread(sizes, count)


def _decode_sizes(largest: int, config: InferenceConfig, count: int | None, align: int) -> list[int]:
    """At most `count` numbers of decode rows, ascending; `largest` is always one of them."""
    if config.cuda_graph_sizing_distribution == "linear":
        series = itertools.chain((1, 2, 4), range(8, min(largest, 256), 8), range(256, largest, 16))
        sizes = sorted({min(-(-size // align) * align, largest) for size in (*series, largest)})
    else:
        sizes = _halvings(largest, min(align, largest), align)
    return sizes if count is None else _spread(sizes, count)


def _halvings(largest: int, smallest: int, align: int) -> list[int]:
    """largest, half of it, ... down to smallest, each rounded up to a multiple of align; ascending."""
    sizes, size = {largest, smallest}, largest
    while size > smallest:
        size //= 2
        sizes.add(min(max(smallest, -(-size // align) * align), largest))
    return sorted(sizes)


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    """`count` of the sizes, evenly spread: the largest always, the smallest from count 2 on."""
    if count >= len(sizes):
        return list(sizes)
    if count == 1:
        return [sizes[-1]]
    last = len(sizes) - 1
    return [sizes[round(place * last / (count - 1))] for place in range(count)]


class ShapeIndex:
    """Finds the shape of a step in constant time.

    Tables map each number of tokens or rows to the smallest number in a shape that holds it; the smallest shape for
    each combination of the three is searched once.
    """

    def __init__(self, shapes: Iterable[GraphShape]) -> None:
        self.shapes = tuple(sorted(shapes))
        """Ascending: the first that covers a step is the smallest."""
        self._tokens = _classes(shape.prefill_tokens for shape in self.shapes)
        self._prefill = _classes(shape.num_prefill for shape in self.shapes)
        self._decode = _classes(shape.num_decode for shape in self.shapes)
        self._found: dict[tuple[int, int, int, bool], GraphShape | None] = {}

    def __len__(self) -> int:
        return len(self.shapes)

    def find(
        self, num_tokens: int, num_prefill: int, num_decode: int, *, has_adapters: bool = False
    ) -> GraphShape | None:
        """The smallest shape that covers a step (`GraphShape.covers`); None: it runs eagerly. has_adapters: one with
        adapters, or else one without."""
        tokens = num_tokens - num_decode
        if tokens >= len(self._tokens) or num_prefill >= len(self._prefill) or num_decode >= len(self._decode):
            return None
        sizes = self._tokens[tokens], self._prefill[num_prefill] if num_prefill else 0, self._decode[num_decode]
        key = *sizes, has_adapters
        if key not in self._found:
            shapes = (shape for shape in self.shapes if shape.has_adapters == has_adapters)
            covers = (shape for shape in shapes if shape.covers(num_decode + tokens, num_prefill, num_decode))
            self._found[key] = next(covers, None)
        return self._found[key]

    def prefill_room(self, num_decode: int) -> tuple[int, int]:
        """(tokens, rows) that may prefill beside so many decode rows such that the step finds a shape; (0, 0): none
        may.

        They are those of the shape that holds the decode rows and has the most tokens, then the most rows.
        """
        fitting = [
            (shape.prefill_tokens, shape.num_prefill)
            for shape in self.shapes
            if shape.num_prefill and shape.num_decode >= num_decode
        ]
        return max(fitting, default=(0, 0))


def _classes(values: Iterable[int]) -> list[int]:
    """Table: n -> the smallest of the values that is at least n, for n from 0 to the largest of them."""
    table: list[int] = []
    for value in sorted(set(values)):
        table += [value] * (value + 1 - len(table))
    return table


def counted_shapes(shapes: Sequence[GraphShape]) -> str:
    """How many shapes only decode and how many are mixed, for a column of a table."""
    return ", ".join(f"{len(group)} {noun}" for noun, group in _kinds(shapes)) or "none"


def ends_of_shapes(shapes: Sequence[GraphShape]) -> str:
    """The smallest and the largest decode shape and mixed shape, as (tokens, prefill, decode)."""
    ends = [dict.fromkeys((min(group), max(group))) for _, group in _kinds(shapes)]
    return ", ".join(" .. ".join(f"({s.num_tokens}, {s.num_prefill}, {s.num_decode})" for s in pair) for pair in ends)


def _kinds(shapes: Sequence[GraphShape]) -> list[tuple[str, list[GraphShape]]]:
    decode = [shape for shape in shapes if shape.is_decode_only]
    mixed = [shape for shape in shapes if not shape.is_decode_only]
    return [(noun, group) for noun, group in (("decode", decode), ("mixed", mixed)) if group]
