"""Per-token outputs: the table of what a sequence returns for each token next to its id, text and `logprobs`.

    sampler --TokenDetailsBatch--> host copy, stages, TP ranks --> TokenDetails --> CompletionOutput --> RolloutSample
            values by TokenOutput.key                                          TokenValues: files and messages

Code between the sampler and the public fields handles all rows of TOKEN_OUTPUTS alike and names none. To add one:

    config/sampling_params.py           the parameter that asks for it
    runner/sampling/returned_details.py its key in `returned_columns`, its values in `collect_token_details`
    outputs/token_outputs.py            its row at the end of TOKEN_OUTPUTS, and its field of SampleOutputs

tests/contract/test_token_outputs.py adds two in this way and follows them through every file and message.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

if TYPE_CHECKING:
    import numpy as np

    from megatron_infer.outputs.token_support import TokenSupport


@dataclass(slots=True, kw_only=True)
class SampleOutputs:
    """The fields of a CompletionOutput and of a RolloutSample that TOKEN_OUTPUTS describes; None: not asked for."""

    raw_logprobs: list[float] | None = None
    """With return_sampled_logprobs: the log probability of each of token_ids under softmax of the model's logits,
    before temperature, penalties and filters."""
    support: TokenSupport | None = None
    """With return_support: the ids that each of token_ids was drawn among; of tokens that were given, all ids."""
    routing: np.ndarray | None = None
    """With return_routing, once the sequence has ended: the experts of each computed position in each
    mixture-of-experts layer, ascending: uint8 (uint16 beyond 256 experts) [prompt + output - 1, layers, top-k]. Those
    of position p are from the forward that computed it first; the last token was never an input."""
    index_choices: np.ndarray | None = None
    """With return_index_choices, of the same positions as `routing`: the positions of the keys that the indexer of each
    layer chose, ascending, and behind them -1: int32 [prompt + output - 1, layers with an indexer, top-k]. top-k is at
    most the engine's max_sequence_length."""


class TokenValues(msgspec.Struct, array_like=True, gc=False):
    """The value of one output for consecutive tokens, in files and messages."""

    dtype: str
    shape: list[int]
    """Dimensions of one entry."""
    content: bytes
    """The entries, little endian."""
    counts: bytes = b""
    """int32, entries per token; b"": one each."""
    vocab_size: int = 0
    """The vocabulary size of sets of ids; 0: no token has been drawn."""

    def joined(self, new: TokenValues) -> TokenValues:
        counts, vocab_size = self.counts + new.counts, new.vocab_size or self.vocab_size
        return TokenValues(new.dtype, new.shape, self.content + new.content, counts, vocab_size)


class Columns(NamedTuple):
    """The value of one output for consecutive tokens, as arrays."""

    entries: np.ndarray
    """[tokens], of positions [positions, layers, k], of sets of ids the words of all of them."""
    counts: Any = b""
    """int32 [tokens]: the words of each set of ids; b"": no sets of ids."""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class TokenOutput(ABC):
    """A row of the table. Its class says how values are held, cut, joined and packed."""

    name: str
    """Field of CompletionOutput."""
    key: str
    """Its short name, in a step's TokenDetailsBatch and in sample files."""
    asked_by: str
    """Field of SamplingParams."""
    dtypes: tuple[str, ...]
    """The dtypes that the content of its TokenValues may have."""

    per_position: ClassVar[bool] = False
    """Whether a value has an entry for each computed position, and not for each drawn token."""
    given: ClassVar[Any] = None
    """The entry of a token that was given, not drawn."""
    drawn_elsewhere: ClassVar[Any] = None
    """The entry of a token that another replica drew and handed out."""
    num_dims: ClassVar[int] = 1
    """Dimensions of the column of entries in a sample file."""

    @property
    def column(self) -> str:
        """Name of the column of entries in a sample file."""
        return self.key

    @property
    def counts_column(self) -> str:
        """Name of the column that counts the entries, of each token or of each sample's positions; "": none does."""
        return ""

    @abstractmethod
    def columns(self, value: Any) -> Columns:
        """A value as arrays."""

    @abstractmethod
    def of_columns(self, columns: Columns) -> Any:
        """The value that `columns` was given."""

    def pack(self, value: Any) -> TokenValues:
        """`columns` as bytes."""
        entries, counts, vocab_size = self.columns(value)
        return TokenValues(entries.dtype.name, list(entries.shape[1:]), entries.tobytes(), bytes(counts), vocab_size)

    def unpack(self, values: TokenValues) -> Any:
        """The value that `pack` was given. Raises ValueError or TypeError for values of another form."""
        import numpy as np  # imported here: clients of a coordinator that return no arrays do without

        if len(values.shape) != self.num_dims - 1 or min(values.shape, default=0) < 0:
            raise ValueError(f"{self.name} has entries of shape {values.shape}")
        entries: np.ndarray = np.frombuffer(bytearray(self._content(values)), values.dtype)
        entries = entries.reshape(len(entries) // max(1, math.prod(values.shape)), *values.shape)
        return self.of_columns(Columns(entries, np.frombuffer(values.counts, np.int32), values.vocab_size))

    @abstractmethod
    def extended(self, before: Any, new: Any) -> Any:
        """A sequence's value with that of its next tokens."""

    @abstractmethod
    def plain(self, value: Any) -> list[Any]:
        """A value as JSON has it."""

    def entries(self, value: Any) -> list[Any]:
        """The entry of each token; not of positions."""
        raise NotImplementedError

    def of_entries(self, entries: Sequence[Any], vocab_size: int) -> Any:
        """The value with these entries."""
        raise NotImplementedError

    def vocab_size_of(self, value: Any) -> int:
        """The vocabulary size of a value with sets of ids; 0: the value has none."""
        return 0

    def fault(self, value: Any) -> str:
        """Why `value` cannot be one of this output; "": it can."""
        return ""

    def _content(self, values: TokenValues) -> bytes:
        if values.dtype not in self.dtypes:
            raise ValueError(f"{self.name} is {values.dtype}, not {' or '.join(self.dtypes)}")
        return values.content


@dataclass(frozen=True, slots=True)
class NumberOutput(TokenOutput):
    """One number per token: list[float]. A step has fp32 [A]."""

    given: ClassVar[Any] = 0.0
    drawn_elsewhere: ClassVar[Any] = math.nan

    def columns(self, value: Any) -> Columns:
        import numpy as np

        return Columns(np.array(value, dtype=self.dtypes[0]))

    def of_columns(self, columns: Columns) -> list[float]:
        numbers: list[float] = columns.entries.tolist()
        return numbers

    def pack(self, value: Any) -> TokenValues:
        return TokenValues(self.dtypes[0], [], array("f", value).tobytes())

    def unpack(self, values: TokenValues) -> list[float]:
        numbers = array("f")
        numbers.frombytes(self._content(values))
        return numbers.tolist()

    def extended(self, before: Any, new: Any) -> list[float]:
        return [*before, *new]

    def plain(self, value: Any) -> list[float]:
        return list(value)

    def entries(self, value: Any) -> list[float]:
        return list(value)

    def of_entries(self, entries: Sequence[Any], vocab_size: int) -> list[float]:
        return list(entries)


@dataclass(frozen=True, slots=True)
class IdSetOutput(TokenOutput):
    """A set of token ids per token: TokenSupport. A step has bits and the place of each token's bits."""

    given: ClassVar[Any] = array("i")
    drawn_elsewhere: ClassVar[Any] = array("i")

    @property
    def column(self) -> str:
        return f"{self.key}_words"

    @property
    def counts_column(self) -> str:
        return f"{self.key}_counts"

    def columns(self, value: Any) -> Columns:
        offsets = value.offsets
        words = value.ids[offsets[0] :].astype("int32", copy=False)
        counts = (offsets[1:] - offsets[:-1]).astype("int32", copy=False)
        return Columns(words, counts, value.vocab_size)

    def of_columns(self, columns: Columns) -> TokenSupport:
        import numpy as np

        from megatron_infer.outputs.token_support import TokenSupport

        offsets: np.ndarray = np.zeros(len(columns.counts) + 1, dtype=np.int32)
        np.cumsum(columns.counts, out=offsets[1:])
        return TokenSupport(columns.vocab_size, offsets, columns.entries)

    def extended(self, before: Any, new: Any) -> TokenSupport:
        joined: TokenSupport = before.joined(new)
        return joined

    def plain(self, value: Any) -> list[Any]:
        """An entry is None where it is the whole vocabulary."""
        return [None if value.is_whole(i) else value.ids_at(i).tolist() for i in range(len(value))]

    def entries(self, value: Any) -> list[Any]:
        """The words of each token."""
        rows: list[Any] = value.rows()
        return rows

    def of_entries(self, entries: Sequence[Any], vocab_size: int) -> TokenSupport:
        from megatron_infer.outputs.token_support import TokenSupport

        return TokenSupport.of_rows(vocab_size, entries)

    def vocab_size_of(self, value: Any) -> int:
        return int(value.vocab_size)

    def fault(self, value: Any) -> str:
        reason = value.fault()
        return f"{self.name}: {reason}" if reason else ""


@dataclass(frozen=True, slots=True)
class PositionOutput(TokenOutput):
    """One array per computed position of prompt and output: np.ndarray [positions, layers, k], once the sequence has
    ended. A step has it for all of its tokens."""

    per_position: ClassVar[bool] = True
    num_dims: ClassVar[int] = 3

    @property
    def counts_column(self) -> str:
        return f"{self.key}_counts"

    def columns(self, value: Any) -> Columns:
        return Columns(value)

    def of_columns(self, columns: Columns) -> np.ndarray:
        return columns.entries

    def extended(self, before: Any, new: Any) -> Any:
        return new

    def plain(self, value: Any) -> list[Any]:
        return list(value.tolist())

    def fault(self, value: Any) -> str:
        if value.ndim == self.num_dims and value.dtype.name in self.dtypes:
            return ""
        return (
            f"{self.name} is {value.dtype} {list(value.shape)}, not {' or '.join(self.dtypes)} [positions, layers, k]"
        )


TOKEN_OUTPUTS: tuple[TokenOutput, ...] = (
    NumberOutput("raw_logprobs", "raw", "return_sampled_logprobs", ("float32",)),
    NumberOutput("processed_logprobs", "processed", "return_sampled_logprobs", ("float32",)),
    IdSetOutput("support", "support", "return_support", ("int32",)),
    PositionOutput("routing", "routing", "return_routing", ("uint8", "uint16")),
    PositionOutput("index_choices", "choices", "return_index_choices", ("int32",)),
)
"""Their order is that of saved files."""
PARAMETERS = tuple(dict.fromkeys(output.asked_by for output in TOKEN_OUTPUTS))
"""The parameters that ask for them."""


def values_in(record: Any, outputs: Iterable[TokenOutput] = TOKEN_OUTPUTS) -> Iterator[tuple[TokenOutput, Any]]:
    """Those of `outputs` that a record with fields of their names has, and their values."""
    for output in outputs:
        value = getattr(record, output.name)
        if value is not None:
            yield output, value
