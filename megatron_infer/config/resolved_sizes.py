"""The sizes of an engine, as a value: `ResolvedSizes`. `config.sizing` derives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from megatron_infer.config.capacity import blocks_for
from megatron_infer.config.graph_shapes import GraphShape, counted_shapes

TOKEN_ID_BYTES = BLOCK_ID_BYTES = 4


class SizeRow(NamedTuple):
    """One line of `ResolvedSizes.table()`."""

    name: str
    value: int | str
    unit: str
    how: str


def _in(unit: str, how: str = "") -> Any:
    """how: the derivation, where it is always the same."""
    return field(metadata={"unit": unit, "how": how})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSizes:
    """Every size that follows from (config, model, memory), derived once; `table()` says how."""

    block_size: int = _in("tokens", "block_size_tokens")
    block_bytes: int = _in("bytes")
    draft_block_bytes: int = _in("bytes", "no model drafts")
    """The part of block_bytes that the draft model's keys and values take."""
    num_blocks: int = _in("blocks")
    num_usable_blocks: int = _in("blocks")
    paused_block_limit: int = _in("blocks")
    max_sequence_length: int = _in("tokens")
    max_blocks_per_row: int = _in("blocks", "ceil(max_sequence_length / block_size)")
    max_requests: int = _in("requests")
    state_slot_bytes: int = _in("bytes")
    """This and the next four are 0 for a model without recurrent state."""
    num_cached_states: int = _in("slots")
    num_draft_states: int = _in("slots/request", "num_speculative_tokens: states behind drafts, on top of the buffer")
    num_state_slots: int = _in("slots")
    """Slot r < max_requests belongs to row r, slot max_requests is the dummy, the cached states follow, then
    num_draft_states for each row."""
    state_bytes: int = _in("bytes")
    max_tokens: int = _in("tokens/step")
    max_decode_requests: int = _in("requests/step", "max_requests: one token each")
    max_prefill_tokens: int = _in("tokens/step", "max_tokens, less one per request that decodes in the same step")
    max_prompt_tokens: int = _in("tokens")
    full_length_requests: int = _in("requests", "min(num_usable_blocks // max_blocks_per_row, max_requests)")
    """How many requests of max_sequence_length fit at once."""
    kv_bytes: int = _in("bytes", "num_blocks x block_bytes")
    token_pool_bytes: int = _in("bytes", f"(max_requests + 1) x max_sequence_length x {TOKEN_ID_BYTES} B")
    block_table_bytes: int = _in("bytes", f"(max_requests + 1) x max_blocks_per_row x {BLOCK_ID_BYTES} B")
    graph_shapes: tuple[GraphShape, ...] = _in("shapes", "no CUDA graphs: every step runs eagerly")
    """Steps that CUDA graphs are captured for, ascending."""
    graph_bytes: int = _in("bytes", "no graphs")
    """Estimate of the memory of all graphs together, outputs included."""
    how: Mapping[str, str] = field(repr=False, compare=False)
    """Field name -> how its value was derived."""

    def table(self) -> list[SizeRow]:
        """(name, value, unit, how it was derived) of every size, in order of derivation."""
        rows = []
        for item in fields(self):
            if item.name == "how":
                continue
            value = getattr(self, item.name)
            if item.name == "graph_shapes":
                value = counted_shapes(value)
            rows.append(SizeRow(item.name, value, item.metadata["unit"], self.how[item.name]))
        return rows


CONSTANT_HOW = {item.name: item.metadata["how"] for item in fields(ResolvedSizes) if item.metadata.get("how")}
"""Entries of `ResolvedSizes.how` that are always the same (those of graphs and of a draft model: without any)."""


def dependent_sizes(
    *,
    block_size: int,
    block_bytes: int,
    num_blocks: int | None,
    max_sequence_length: int,
    max_requests: int,
    num_cached_states: int,
    num_draft_states: int,
    state_slot_bytes: int,
    max_prompt_tokens: int | None,
) -> dict[str, int]:
    """Fields of ResolvedSizes that follow from the others.

    num_blocks: None where blocks take no memory; then there are as many as the longest sequences need.
    max_prompt_tokens: a limit beside those of the sequence and the pool; None: there is none.
    """
    width = blocks_for(max_sequence_length, block_size)
    if num_blocks is None:
        num_blocks = (max_requests + num_cached_states) * width + 1
    usable = num_blocks - 1
    num_draft_states = num_draft_states if state_slot_bytes else 0
    num_state_slots = max_requests * (1 + num_draft_states) + 1 + num_cached_states if state_slot_bytes else 0
    prompt_limits = [max_sequence_length - 1, usable * block_size]
    return {
        "num_blocks": num_blocks,
        "num_usable_blocks": usable,
        "max_sequence_length": max_sequence_length,
        "max_blocks_per_row": width,
        "max_requests": max_requests,
        "num_cached_states": num_cached_states,
        "num_draft_states": num_draft_states,
        "num_state_slots": num_state_slots,
        "state_bytes": num_state_slots * state_slot_bytes,
        "max_decode_requests": max_requests,
        "max_prompt_tokens": min(prompt_limits + ([] if max_prompt_tokens is None else [max_prompt_tokens])),
        "full_length_requests": min(usable // width, max_requests),
        "kv_bytes": num_blocks * block_bytes,
        "token_pool_bytes": (max_requests + 1) * max_sequence_length * TOKEN_ID_BYTES,
        "block_table_bytes": (max_requests + 1) * width * BLOCK_ID_BYTES,
    }
