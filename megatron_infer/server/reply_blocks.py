"""Replies of one sequence as blocks: reasoning, text, tool calls, in the order of the output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.server.reply_format import Delta, ReplyFormat

if TYPE_CHECKING:
    from megatron_infer.server.generation import PreparedCall


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """What clients of /v1/responses and /v1/messages get as one item."""

    index: int
    kind: BlockKind
    id: str = ""
    """Id of a call."""
    name: str = ""
    """Name of the called function."""
    text: str = ""
    """Reasoning, text, or the arguments of a call as JSON, so far."""
    is_last: bool = False
    """Whether the sequence ended within it, or right behind it."""


class Change(Enum):
    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


class BlockReader:
    """Blocks of a sequence; one is open at a time."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def read(self, deltas: Iterable[dict[str, Any]], *, finished: bool) -> Iterator[tuple[Change, Block, str]]:
        """What each delta changes: (change, block, new text)."""
        for delta in deltas:
            if delta.get("reasoning"):
                yield from self._grow(BlockKind.REASONING, delta["reasoning"])
            if delta.get("content"):
                yield from self._grow(BlockKind.TEXT, delta["content"])
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    yield from self._start(BlockKind.CALL, call["id"], function["name"])
                yield from self._grow(BlockKind.CALL, function["arguments"])
        if finished and self._open is not None:
            self._open.is_last = True
            yield from self._close()

    def _grow(self, kind: BlockKind, text: str) -> Iterator[tuple[Change, Block, str]]:
        if self._open is None or self._open.kind is not kind:
            yield from self._start(kind)
        assert self._open is not None
        if text:
            self._open.text += text
            yield Change.GREW, self._open, text

    def _start(self, kind: BlockKind, id: str = "", name: str = "") -> Iterator[tuple[Change, Block, str]]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, id, name)
        self.blocks.append(self._open)
        yield Change.OPENED, self._open, ""

    def _close(self) -> Iterator[tuple[Change, Block, str]]:
        if self._open is not None:
            yield Change.CLOSED, self._open, ""
            self._open = None


class BlockReply(ReplyFormat):
    """A dialect overrides `block_events`, and `reply` with what a whole reply is."""

    def __init__(self, prepared: PreparedCall, id: str) -> None:
        super().__init__(prepared, id)
        (self.splitter,) = prepared.splitters
        self._reader = BlockReader()

    @property
    def blocks(self) -> list[Block]:
        return self._reader.blocks

    @property
    def output(self) -> RequestOutput | None:
        """The newest output."""
        return self.latest.get(0)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        for _ in self.events(0, outputs[0]):
            pass
        return self.reply()

    def chunks(self, index: int, output: RequestOutput, one: CompletionOutput, delta: Delta) -> Iterator[Any]:
        finished = delta.finish_reason is not None
        deltas = self.splitter.feed(delta.text, finished=finished)
        for change, block, text in self._reader.read(deltas, finished=finished):
            yield from self.block_events(change, block, text)

    @abstractmethod
    def block_events(self, change: Change, block: Block, text: str) -> Iterator[Any]:
        """Events for a change of a block. text: what is new in it."""

    @abstractmethod
    def reply(self) -> dict[str, Any]:
        """The whole reply, once all blocks are closed."""
