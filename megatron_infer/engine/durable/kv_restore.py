"""Keys, values and states in files of saved requests, and how they come back into a cache of other blocks and rows.

    blocks        [blocks, layers, 2, B, K, H]    where the model has attention layers
    draft blocks  the same of the draft model      where one drafts tokens
    states        uint8 [sequences, slot_bytes]   where it keeps recurrent states: each as its slot had it

A file holds every block once, in the block size of the engine that wrote it; a sequence names its blocks, so shared
prompts are stored once. Tokens 0 .. num_tokens-1 of a sequence are those blocks laid end to end. A state is behind
exactly those tokens, and a sequence's own.

With several ranks each writes such tensors of its own part, under the same numbers; a pipeline stage without attention
or Mamba layers has no `blocks` or `states`, but counts their numbers.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_infer.config.model_shape import ModelShape
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.durable.file_format import add_tensor
from megatron_infer.engine.durable.rank_files import layout_differs, layout_of, read_part
from megatron_infer.engine.durable.request_codec import SavedKV
from megatron_infer.kernels.freed_weights import unpacked
from megatron_infer.memory.store import CacheStore
from megatron_infer.memory.store_layout import BLOCKS, DRAFT_BLOCKS, STATES
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.attached_lora import attached_tensors
from megatron_infer.models.weights.change_guard import guarded_tensors
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.scheduler.policy import blocks_needed
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.scheduler import Scheduler

_SHAPE = ("num_layers", "num_attention_layers", "num_query_heads", "num_kv_heads", "head_dim", "hidden_size", "dtype")
"""Fields of ModelShape that keys and values of one rank depend on."""
_ROTARY_POSITIONS = 64
_ASIDE = re.compile(
    "parallel|pipeline|offload|recompute|graph|comm|dropout|init|loss|grad|overlap|sync|timers|microbatch|^_|dispatcher"
)
"""Settings by whose names training, ranks and memory are meant, not what the model computes."""
OF_MODEL = "auto"
"""The weight_dtype that is not in a file."""


def describe(
    shape: ModelShape,
    *,
    kv_dtype: str | None = None,
    weight_dtype: str = OF_MODEL,
    draft: ModelShape | None = None,
) -> dict[str, Any]:
    """What the saved memory of one rank depends on, as JSON values, with the recurrent state's where there is one.

    kv_dtype: the cache's, weight_dtype: the option; included where they are not the model's. draft: the draft model's
    shape.
    """
    fields = asdict(shape)
    named = {name: fields[name] for name in _SHAPE}
    if kv_dtype not in (None, shape.dtype) and shape.num_attention_layers:
        named["kv_dtype"] = kv_dtype
    if weight_dtype != OF_MODEL:
        named["weight_dtype"] = weight_dtype
    for part in ("state", "latent"):
        if fields[part] is not None:
            plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields[part].items()}
            named |= {f"{part}.{name}": value for name, value in plain.items()}
    if draft is not None:
        named |= {f"draft.{name}": value for name, value in describe(draft).items()}
    return named


def difference(here: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """How an engine differs from the one that wrote a file, both as `describe` has them; None when it does not."""
    weights = [one.get("weight_dtype", OF_MODEL) for one in (here, saved)]
    kept = [one.get("kv_dtype", one.get("dtype")) for one in (here, saved)]
    if weights[0] != weights[1]:
        return f"weight_dtype is {weights[0]}, it was {weights[1]}"
    if kept[0] != kept[1] and here["dtype"] == saved.get("dtype"):
        return f"keys and values are kept in {kept[0]}, they were in {kept[1]}"
    for name in [*here, *(name for name in saved if name not in here)]:
        if here.get(name) != saved.get(name):
            return f"the model's {name} is {here.get(name)}, it was {saved.get(name)}"
    return None


def num_places(kv: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many blocks and states a file numbers, by its own description; kv: None without saved memory.

    Raises ValueError when a tensor holds another count.
    """
    counts = {}
    kinds = {BLOCKS: (BLOCKS, "num_attention_layers"), STATES: (STATES, "state.num_layers")}
    for name, (numbers, layers) in (kinds | {DRAFT_BLOCKS: (BLOCKS, "draft.num_attention_layers")}).items():
        held = len(tensors[name]) if name in tensors else 0
        counts[name] = held if kv is None else int(kv.get(f"num_{numbers}", held))
        kept_here = kv is not None and kv["shape"].get(layers)
        if held != counts[name] and (held or kept_here):
            raise ValueError(f"{held} {name}, {counts[name]} are named")
    return counts


def check_places(kv: SavedKV, counts: Mapping[str, int], *, num_known: int, block_size: int | None) -> None:
    """Raise ValueError when a sequence names a block or state that its file does not have, or too few blocks.

    num_known: tokens of the sequence. block_size: of the file; None: it has no blocks.
    """
    start, end = kv.num_left_out, kv.num_tokens
    if not 0 <= start <= end < num_known or not end:
        raise ValueError(f"{end} tokens computed of {num_known}, {start} left out")
    if block_size and (start % block_size or len(kv.blocks) != blocks_needed(end - start, block_size)):
        raise ValueError(f"{len(kv.blocks)} blocks of {block_size} for tokens {start} to {end}")
    for name, places in (("blocks", kv.blocks), ("states", [] if kv.state is None else [kv.state])):
        wrong = [place for place in places if not 0 <= place < counts[name]]
        if wrong:
            raise ValueError(f"{name} {wrong[:8]} of {counts[name]}")


def content_digest(adopted: AdoptedModel) -> str:
    """A digest of the model's content: name, dtype, shape and bytes of each parameter and saved buffer (the bias of
    experts), and how positions enter keys.

    Two engines with equal digests, shapes and settings compute the same keys and values. Reads all weights.
    """
    digest = hashlib.blake2b(digest_size=32)
    with unpacked(adopted.live):
        saved = {id(tensor) for tensor in guarded_tensors(adopted.live)}  # FSDP's state_dict() puts the shards back
        buffers = {name: tensor for name, tensor in adopted.live.named_buffers() if id(tensor) in saved}
        tensors = buffers | dict(adopted.live.named_parameters()) | attached_tensors(adopted.live)
        for name in sorted(tensors):
            add_tensor(digest, name, tensors[name])
    rotary = adopted.rotary_table(_ROTARY_POSITIONS)
    if rotary is not None:
        add_tensor(digest, "cos", rotary.cos_PR)
        add_tensor(digest, "sin", rotary.sin_PR)
    return digest.hexdigest()


def settings_of(model: Any) -> dict[str, Any]:
    """What a model's forward may depend on of its config, as JSON values; settings that are off are not among them.

    All plain values count but those that concern training, ranks and memory alone. One that counts without need makes
    saved keys be computed again; one that is missed would have them served to a model that computes others.
    """
    config = getattr(getattr(model, "config", None), "__dict__", {})
    found = {name: _plain(value) for name, value in sorted(config.items())}
    return {name: value for name, value in found.items() if value not in (None, False) and not _ASIDE.search(name)}


def _plain(value: Any) -> Any:
    """A value of a config as JSON has it; None: it has no such form."""
    if isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum):
        return value if value == value and value not in (math.inf, -math.inf) else str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(one) for name, one in asdict(value).items()}
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), [[name, _plain(one)] for name, one in value.keywords.items()]]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Keys, values and states that one rank holds of requests."""

    saved: dict[str, SavedKV]
    """By request, the same on every rank."""
    tensors: dict[str, Tensor]
    """`blocks`, `draft blocks` and `states`, as far as this rank has layers that keep them."""
    num_blocks: int = 0
    num_states: int = 0


class KVReturn:
    """Puts saved memory back: leases a request blocks and a row, shared with requests put back before, and writes.

    Whole blocks of this engine are shared among the leading blocks that two sequences have in common in the file.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], scheduler: Scheduler, store: CacheStore, *, block_size: int | None
    ) -> None:
        """tensors: of `Memory`, in blocks of `block_size`; None: the file holds no blocks on any rank."""
        self._contents = {name: tensors[name] for name in (BLOCKS, DRAFT_BLOCKS) if name in tensors}
        self._states = tensors.get(STATES)
        self._file_block_size = block_size
        self._scheduler, self._store = scheduler, store
        self._owner: dict[int, tuple[Request, SavedKV]] = {}

    def readmit(self, request: Request, kv: SavedKV) -> bool:
        """Let `request` go on where it was; False, with nothing changed, when there is no room."""
        like, num_shared = self._shares_with(kv)
        how = {"least": kv.num_left_out, "publishes": kv.publishes}
        found = self._scheduler.readmit(request, kv.num_tokens, like=like, num_shared=num_shared, **how)
        if found is None:
            return False
        lease = request.lease
        assert lease is not None
        for block in kv.blocks:
            self._owner.setdefault(block, (request, kv))
        self._write(request, kv, found)
        if kv.state is not None and self._states is not None:
            self._store.write_states([lease.row], self._states[kv.state : kv.state + 1])
        self._scheduler.context.publish_computed(lease, request.tokens, kv.num_tokens)
        return True

    def _shares_with(self, kv: SavedKV) -> tuple[Request | None, int]:
        """The request that has most of this sequence's leading blocks, and how many tokens to share with it."""
        best: Request | None = None
        run = 0
        for column, block in enumerate(kv.blocks):
            owner = self._owner.get(block)
            alike = owner is not None and owner[1].num_left_out == kv.num_left_out
            if not alike or owner[1].blocks[: column + 1] != kv.blocks[: column + 1]:
                break
            best, run = owner[0], column + 1
            most = owner[1].num_tokens
        if best is None or self._file_block_size is None:
            return None, 0
        size = self._store.layout.block_size
        num_shared = min(kv.num_left_out + run * self._file_block_size, kv.num_tokens, most) // size * size
        return (best, num_shared) if num_shared else (None, 0)

    def _write(self, request: Request, kv: SavedKV, start: int) -> None:
        """Cut tokens start .. num_tokens-1 into this engine's blocks and store them."""
        size, lease = self._store.layout.block_size, request.lease
        assert lease is not None and start % size == 0
        if start >= kv.num_tokens or not self._contents:
            return
        first, count = start // size, blocks_needed(kv.num_tokens - start, size)
        start, end = start - kv.num_left_out, kv.num_tokens - kv.num_left_out
        if self._file_block_size == size:
            cut = {name: content[kv.blocks[start // size :]] for name, content in self._contents.items()}
        else:
            cut = {name: _cut(content[kv.blocks], start, end, size) for name, content in self._contents.items()}
        self._store.write_blocks(lease.blocks[first : first + count], cut)


def _cut(chosen: Tensor, start: int, end: int, size: int) -> Tensor:
    """Tokens start .. end-1 of blocks laid end to end, [blocks, layers, 2, B, K, H], in blocks of `size` tokens."""
    num_blocks, layers, planes, file_size, heads, dim = chosen.shape
    tokens_L2TKH = chosen.permute(1, 2, 0, 3, 4, 5).reshape(layers, planes, num_blocks * file_size, heads, dim)
    wanted = tokens_L2TKH[:, :, start:end]
    count = blocks_needed(end - start, size)
    padded = torch.zeros((layers, planes, count * size, heads, dim), dtype=wanted.dtype)
    padded[:, :, : end - start] = wanted
    return padded.reshape(layers, planes, count, size, heads, dim).permute(2, 0, 1, 3, 4, 5).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMemory:
    """One rank's memory in a file that was read."""

    kv: Mapping[str, Any] | None
    """What it depends on; None: there is none."""
    tensors: Mapping[str, Tensor]
    unusable: str | None
    """Why it cannot be used on this rank, whatever the weights; None: it may be used."""


class KVArchive:
    """Saves and restores what one engine's cache holds of requests; with several ranks each does its own part."""

    def __init__(
        self,
        adopted: AdoptedModel,
        store: CacheStore,
        scheduler: Scheduler,
        weights: WeightManager,
        rank_group: RankGroup,
        *,
        kv_dtype: str,
        weight_dtype: str = OF_MODEL,
        draft: AdoptedModel | None = None,
        draft_shape: ModelShape | None = None,
    ) -> None:
        """kv_dtype, weight_dtype: see `describe`. draft: the model that drafts, which may be `adopted`; None: none.
        draft_shape: of what drafts."""
        self._adopted, self._store, self._scheduler, self._draft = adopted, store, scheduler, draft
        self._weights = weights
        self._groups = rank_group.groups
        self._rank = rank_group.sharing.rank
        self._shape = describe(adopted.shape, kv_dtype=kv_dtype, weight_dtype=weight_dtype, draft=draft_shape)
        self._attends = rank_group.any_rank(store.layout.block_bytes + store.layout.draft_block_bytes > 0)
        """Some rank keeps keys and values."""
        self._digest: tuple[int, str] | None = None

    def collect(self, requests: Iterable[Request]) -> Memory:
        """This rank's memory of those requests of which something is computed.

        Nothing may be in flight: what was scheduled of a request is computed then, and its row's state is behind
        exactly those tokens.
        """
        store, recurrent = self._store, self._scheduler.context.states is not None
        place: dict[int, int] = {}
        rows: list[int] = []
        saved: dict[str, SavedKV] = {}
        for request in requests:
            lease = request.lease
            if lease is None or not request.scheduled:
                continue
            assert not request.in_flight, f"{request.id} has a step in flight"
            count = blocks_needed(request.scheduled, store.layout.block_size) if self._attends else 0
            blocks, state = [place.setdefault(block, len(place)) for block in lease.blocks[:count]], None
            if recurrent:
                state = len(rows)
                rows.append(lease.row)
            saved[request.id] = SavedKV(
                num_tokens=request.scheduled, blocks=blocks, state=state, publishes=lease.publishes
            )
        tensors = store.read_blocks(list(place)) if place else {}
        if rows and store.layout.state is not None:
            tensors[STATES] = store.read_states(rows)
        return Memory(saved=saved, tensors=tensors, num_blocks=len(place), num_states=len(rows))

    def describe(self, memory: Memory) -> dict[str, Any]:
        """What saved memory of this rank depends on, and how much of it there is."""
        return {
            "shape": self._shape,
            "content": self._content(),
            "settings": self._settings(),
            "block_size": self._store.layout.block_size if memory.num_blocks else None,
            "num_blocks": memory.num_blocks,
            "num_states": memory.num_states,
        }

    def read(self, path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> FileMemory:
        """This rank's memory in the file at `path` with that content."""
        groups, kv = self._groups, manifest["kv"]
        own_rank = manifest.get("rank", 0)
        if kv is None:
            return FileMemory(kv=None, tensors={}, unusable="saved without keys and values")
        if (differs := layout_differs(layout_of(groups), manifest.get("layout", {"ranks": 1}))) is not None:
            return FileMemory(kv=None, tensors={}, unusable=differs)
        if self._rank != own_rank:
            try:
                kv, tensors = read_part(path, manifest, self._rank)
            except FileNotFoundError as error:
                missing = f"the part of rank {self._rank} is missing: {error.filename or error}"
                return FileMemory(kv=None, tensors={}, unusable=missing)
        own = {name: tensors[name] for name in (BLOCKS, DRAFT_BLOCKS, STATES) if name in tensors}
        memory = FileMemory(kv=kv, tensors=own, unusable=None)
        if difference(self._shape, kv["shape"]) is None:
            self._check_tensors(own, kv.get("block_size"))
        return memory

    def _check_tensors(self, tensors: Mapping[str, Tensor], block_size: int | None) -> None:
        """Raise ValueError for a tensor of another shape or dtype than this rank's places have."""
        expected = {STATES: ((self._store.layout.state_bytes,), torch.uint8)}
        for name, like in self._store.read_blocks(()).items():
            expected[name] = (*like.shape[1:3], block_size or like.shape[3], *like.shape[4:]), like.dtype
        for name, held in tensors.items():
            found = (tuple(held.shape[1:]), held.dtype)
            if found != expected.get(name):
                raise ValueError(f"places of {name} are {found}, expected {expected.get(name)}")

    def why_unusable(self, memory: FileMemory) -> str | None:
        """Why a file's memory cannot be used with the weights as they are; None when it can."""
        if memory.kv is None:
            return memory.unusable
        if (differs := difference(self._shape, memory.kv["shape"])) is not None:
            return differs
        here, saved = self._settings(), memory.kv.get("settings")
        if saved is None:
            return "it does not say with which settings of the model it was computed: an earlier release wrote it"
        for name in sorted(here.keys() | saved.keys()):
            if here.get(name) != saved.get(name):
                return f"the model's {name} is {here.get(name)}, it was {saved.get(name)}"
        if memory.kv["content"] != self._content():
            return "the weights differ from those it was computed with"
        return None

    def returning(self, memory: FileMemory) -> KVReturn:
        """Puts a file's memory back."""
        assert memory.kv is not None
        held = next((memory.tensors[name] for name in (BLOCKS, DRAFT_BLOCKS) if name in memory.tensors), None)
        in_blocks = None if held is None else int(held.shape[3])
        block_size = memory.kv.get("block_size") or in_blocks
        return KVReturn(memory.tensors, self._scheduler, self._store, block_size=block_size)

    def _settings(self) -> dict[str, Any]:
        """Settings of the model as they are now, and of the one that drafts."""
        draft = {} if self._draft in (None, self._adopted) else settings_of(self._draft.live)
        return settings_of(self._adopted.live) | {f"draft.{name}": value for name, value in draft.items()}

    def _content(self) -> str:
        """The digest of all weights, computed once per update of them (versions may repeat)."""
        update = self._weights.num_updates
        if self._digest is None or self._digest[0] != update:
            draft = "" if self._draft in (None, self._adopted) else content_digest(self._draft)
            self._digest = (update, content_digest(self._adopted) + draft)
        return self._digest[1]
