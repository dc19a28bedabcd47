"""Per-token outputs: what a sequence returns for each token beside its id, text and `logprobs`.

    sampler --TokenDetailsBatch--> host copy, stages, TP ranks --> TokenDetails --> CompletionOutput --> RolloutSample
            values by TokenOutput.key                                          pack: files and messages

Code between the sampler and the public fields handles all of TOKEN_OUTPUTS alike and names none. To add one:

    config/sampling_params.py           the parameter that asks for it, also in _SWITCHES and `carries`
    sampling/row_params.py              a bit of RowFlags, set where the parameter is
    sampling/returned_details.py        its key in `returned_columns`, its values in `collect_token_details`
    outputs/token_outputs.py            its entry at the end of TOKEN_OUTPUTS
    outputs/request_output.py           its field of CompletionOutput; in rl/samples.py, of RolloutSample

tests/contract/test_token_outputs.py adds two in this way and follows them through every file and message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class Kind(Enum):
    """What an output's value is in CompletionOutput, and in a step's TokenDetailsBatch."""

    NUMBER = "one number per token"
    """list[float]; a step has fp32 [A]."""
    IDS = "a set of token ids per token"
    """Ragged: a TokenSupport; a step has bits and the place of each token's bits."""
    POSITION = "one array per computed position of prompt and output"
    """np.ndarray [positions, ...], once the sequence has ended; a step has it for all of its tokens."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    name: str
    """Field of CompletionOutput and RolloutSample."""
    key: str
    """Its short name, in a step's TokenDetailsBatch and in files."""
    asked_by: str
    """Field of SamplingParams."""
    kind: Kind
    dtypes: tuple[str, ...]
    """What the content of a `Packed` may be; a list of numbers becomes the first."""


TOKEN_OUTPUTS = (
    TokenOutput("raw_logprobs", "raw", "return_sampled_logprobs", Kind.NUMBER, ("float32",)),
    TokenOutput("processed_logprobs", "processed", "return_sampled_logprobs", Kind.NUMBER, ("float32",)),
    TokenOutput("support", "support", "return_support", Kind.IDS, ("int32",)),
    TokenOutput("routing", "routing", "return_routing", Kind.POSITION, ("uint8", "uint16")),
)
"""Their order is that of saved files."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The values of one output for consecutive tokens, as arrays."""

    content: np.ndarray
    """[tokens] or [positions, ...], or the concatenated words of IDS."""
    offsets: np.ndarray | None = None
    """int32 [tokens + 1], of IDS: where the words of each token begin."""
    vocab_size: int = 0
    """IDS only: ids are below it; 0: no token has been drawn."""

    @property
    def counts(self) -> np.ndarray:
        """int32 [tokens]: words of each token."""
        assert self.offsets is not None
        counts: np.ndarray = self.offsets[1:] - self.offsets[:-1]
        return counts


def pack(output: TokenOutput, value: Any, first: int = 0) -> Packed:
    """A value as arrays, from token `first` on (a POSITION output always whole)."""
    if output.kind is Kind.NUMBER:
        import numpy as np  # imported here: clients of a coordinator that return no arrays do without

        return Packed(np.array(value[first:], dtype=output.dtypes[0]))
    if output.kind is Kind.POSITION:
        return Packed(value)
    start = value.offsets[first]
    return Packed(value.ids[start:], value.offsets[first:] - start, value.vocab_size)


def unpack(output: TokenOutput, packed: Packed) -> Any:
    """The value that `pack` was given."""
    if output.kind is Kind.NUMBER:
        return packed.content.tolist()
    if output.kind is Kind.POSITION:
        return packed.content
    from megatron_infer.outputs.token_support import TokenSupport

    assert packed.offsets is not None
    return TokenSupport(packed.vocab_size, packed.offsets, packed.content)


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """`Packed.offsets` from `Packed.counts`."""
    import numpy as np

    offsets: np.ndarray = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def extended(output: TokenOutput, before: Any, new: Any) -> Any:
    """The value of a sequence, None at its beginning, with that of its next tokens."""
    if before is None or output.kind is Kind.POSITION:
        return new
    if output.kind is Kind.NUMBER:
        return [*before, *new]
    return type(new).of_rows(new.vocab_size or before.vocab_size, [*before.rows(), *new.rows()])


def values_in(record: Any) -> Iterator[tuple[TokenOutput, Any]]:
    """The outputs that a CompletionOutput or another record with fields of these names has."""
    for output in TOKEN_OUTPUTS:
        value = getattr(record, output.name)
        if value is not None:
            yield output, value


def plain(output: TokenOutput, value: Any) -> list[Any]:
    """A value as JSON has it; an entry of IDS is None where it is the whole vocabulary."""
    if output.kind is Kind.NUMBER:
        return list(value)
    if output.kind is Kind.POSITION:
        return list(value.tolist())
    return [None if value.is_whole(i) else value.ids_at(i).tolist() for i in range(len(value))]
